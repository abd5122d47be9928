"""What torch.compile makes of transformers' layers: what they keep for the backward, and whether they compile at all.

    python -m benchmarks.compiled_layers

*Kept*: one Llama layer by PyTorch's own partitioner (backend aot_eager_decomp_partition), bytes per token beside the
formula's. *Compiled*: the checkpointed layers of a small Qwen3, compiled one by one as prime-rl does (checkpoint
wrapper, then `layer.compile()`), with an attention that asks transformers whether `position_ids` hold packed sequences,
as flash attention's does, and with one that does not. The answer is a tensor that the layer branches on: dynamo leaves
the graph, and since `torch.utils.checkpoint` is closed to it, no layer is compiled. *Whole models* as the Trainer
compiles them (`torch.compile(model)`), a forward and a backward each: the graphs and the products in them, with LoRA,
bitsandbytes' 4 bits, checkpointing, packed positions, and lengths that vary. A minute on a CPU; docs/kernels.md and
docs/stacks.md (transformers 4.57.1) have the figures.
"""

import sys
from typing import Any

import torch

LAYERS, TOKENS, HIDDEN, INNER, HEADS, KV_HEADS = 12, 256, 768, 2048, 12, 4


def kept_bytes(*, lora: bool) -> int:
    """Bytes per token that a bf16 layer's compiled forward keeps beside its parameters and rotary tables."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1}
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, attn_implementation="sdpa", **heads)
    layer: Any = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        layer = inject_adapter_in_model(LoraConfig(r=8, target_modules=["q_proj", "down_proj"]), layer)
        layer = layer.to(torch.bfloat16)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    tables = LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    known = {one.untyped_storage().data_ptr() for one in (*layer.parameters(), *tables)}
    kept: dict[int, int] = {}

    def pack(one: torch.Tensor) -> torch.Tensor:
        storage = one.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return one

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        compiled(x, position_embeddings=tables)
    return sum(kept.values()) // TOKENS


def compiled_graphs(*, asks: bool) -> int:
    """Graphs that dynamo hands to a compiler in a forward and a backward of so many equal layers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.modeling_flash_attention_utils import _is_packed_sequence
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **kwargs: Any) -> Any:
        if asks and _is_packed_sequence(kwargs.get("position_ids"), q.shape[0]):
            q = q + 0
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return found.transpose(1, 2), None

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ALL_ATTENTION_FUNCTIONS["asking"] = attend
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64}
    heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation="asking", use_cache=False))
    torch._dynamo.reset()
    for name, block in list(model.model.layers.named_children()):
        model.model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
        model.model.layers[int(name)].compile(backend=backend)
    out = model(input_ids=torch.zeros(1, 16, dtype=torch.long), position_ids=torch.arange(16)[None])
    out.logits.float().mean().backward()
    return len(graphs)


def small_model(*, lora: bool, four_bit: bool, checkpointing: bool) -> Any:
    """A Llama of three layers as transformers and peft make it for training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 3}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    model = model.to(torch.bfloat16)
    if four_bit:
        from bitsandbytes.nn import Linear4bit, Params4bit

        for name, one in [(name, one) for name, one in model.model.named_modules() if isinstance(one, torch.nn.Linear)]:
            packed = Linear4bit(one.in_features, one.out_features, bias=False, compute_dtype=torch.bfloat16)
            packed.weight = Params4bit(one.weight.data, requires_grad=False, quant_type="nf4")
            parent, _, last = name.rpartition(".")
            setattr(model.model.get_submodule(parent), last, packed)
        model = model.to("cpu")  # packs them
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def whole_graphs(model: Any, lengths: tuple[int, ...], *, packed: bool = False) -> list[int]:
    """How many matrix products each graph has that dynamo hands to a compiler in steps of these lengths."""
    found: list[int] = []

    def products(graph: torch.fx.GraphModule) -> int:
        inner = [getattr(graph, str(node.target), None) for node in graph.graph.nodes if node.op == "get_attr"]
        own = sum("linear" in str(node.target) or "matmul" in str(node.target) for node in graph.graph.nodes)
        return own + sum(products(one) for one in inner if isinstance(one, torch.fx.GraphModule))

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(products(graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for length in lengths:
        ids = torch.zeros(1, 2 * length, dtype=torch.long)
        places = torch.arange(length).repeat(2) if packed else torch.arange(2 * length)
        with torch.autocast("cpu", torch.bfloat16):
            compiled(input_ids=ids, labels=ids, position_ids=places[None]).loss.backward()
    return found


WHOLE: tuple[tuple[str, bool, bool, bool, dict[str, Any]], ...] = (
    ("full", False, False, False, {}),
    ("full, checkpointed", False, False, True, {}),
    ("LoRA", True, False, False, {}),
    ("LoRA, checkpointed", True, False, True, {}),
    ("LoRA, checkpointed, packed", True, False, True, {"packed": True}),
    ("4-bit LoRA, checkpointed", True, True, True, {}),
    ("LoRA, four lengths", True, False, False, {"lengths": (16, 20, 24, 28)}),
)
"""What, LoRA, 4 bits, checkpointing, how it is run."""


def small_mixture(kind: str, targets: str | list[str], *, checkpointing: bool) -> Any:
    """A mixture of three layers as transformers and peft make it for training: "gpt_oss" or "qwen3_moe"."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 128, "head_dim": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    config = AutoConfig.for_model(kind, **sizes, **heads, **experts, attn_implementation=attention)
    model: Any = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")).train()


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXTURES: tuple[tuple[str, str | list[str]], ...] = (
    ("gpt_oss", ATTENTION),
    ("qwen3_moe", ATTENTION),
    ("qwen3_moe", "all-linear"),  # peft's parametrizations of the stacked experts
)
"""Kind, what has adapters."""


def main() -> None:
    """Prints all of it."""
    keys = KV_HEADS * HIDDEN // HEADS
    residue = 4 * HEADS + 8  # flash attention's log-sum, the norms' inverse deviations
    by_hand = {"full": 2 * (3 * INNER + 6 * HIDDEN + 2 * keys), "lora": 2 * (3 * INNER + 5 * HIDDEN + 2 * keys + 2 * 8)}
    for name, kept in by_hand.items():
        found = kept_bytes(lora=name == "lora")
        sys.stdout.write(f"{name}: {found} bytes a token kept, {kept + residue} by the formula\n")
    for asks in (False, True):
        what = "asks for packed sequences" if asks else "does not ask"
        sys.stdout.write(f"{LAYERS} layers whose attention {what}: {compiled_graphs(asks=asks)} graphs compiled\n")
    for what, lora, four_bit, checkpointing, how in WHOLE:
        model = small_model(lora=lora, four_bit=four_bit, checkpointing=checkpointing)
        products = whole_graphs(model, **{"lengths": (16,), **how})
        sys.stdout.write(f"{what}: products by graph {products}\n")
    for kind, targets in MIXTURES:
        for checkpointing in (False, True):
            products = whole_graphs(small_mixture(kind, targets, checkpointing=checkpointing), (16,))
            what = (
                f"{kind}, LoRA on {'all' if targets == 'all-linear' else 'attention'}"
                + ", checkpointed" * checkpointing
            )
            sys.stdout.write(f"{what}: products by graph {products}\n")


if __name__ == "__main__":
    main()
