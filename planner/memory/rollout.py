"""What generating the completions of a step holds, before its first micro-batch: keys and values, one forward's
temporaries, or vLLM's share of the card."""

from functools import lru_cache

from planner.core.shipped import model_types
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import attention_kernel
from planner.memory.dtypes import SIZE_BYTES, dtype_policy_of
from planner.memory.layer_terms import LayerContext
from planner.memory.layers import forward_temporary, mlp_width
from planner.models.spec import AttentionSpec, LayerSpec, ModelSpec
from planner.options.precisions import precision_of
from planner.setup import TrainSetup
from planner.setup.memory_terms import Term

VLLM = "vLLM's share of the card"


def vllm_bytes(gpu: GpuSpec, setup: TrainSetup) -> int:
    """Bytes of the card that a colocated vLLM takes: its weights, keys and values, and workspaces lie within.

    Source: vLLM's `gpu_memory_utilization` is a share of the whole card, whatever else lies there.
    Not counted: CUDA graphs beyond it, and what of it stays when it sleeps.
    """
    if not setup.objective_spec.rolls_out or not setup.rollout_settings.colocated:
        return 0
    return int(setup.rollout_settings.vllm_fraction * gpu.memory_bytes)


def resident_vllm(gpu: GpuSpec, setup: TrainSetup) -> int:
    """Of `vllm_bytes`, what is there while the model trains too: nothing where it sleeps."""
    return vllm_bytes(gpu, setup) if setup.rollout_settings.generator == "vllm" else 0


def generation_terms(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, gradients: int) -> tuple[Term, ...]:
    """The largest moment of generation beside what is resident: the prompts' forward, or the last token's.

    Args:
        gradients: bytes of accumulated gradients, which are there where a step generates between its micro-batches.

    Not counted: masks of prompts of unequal length, under which SDPA also repeats keys and values of grouped queries.
    """
    if not setup.objective_spec.rolls_out or setup.rollout_settings.generator == "vllm-server":
        return ()
    mid_step = setup.rollout_settings.within_a_step(setup.global_batch_seqs)
    gradient_terms: tuple[Term, ...] = (("gradients", "accumulated gradients", gradients),) if mid_step else ()
    if setup.rollout_settings.colocated:
        awake = vllm_bytes(gpu, setup) - resident_vllm(gpu, setup)
        return (*gradient_terms, ("other", VLLM, awake))
    shared = setup.replace_trusted(micro_batch_seqs=1, accumulation_steps=1)
    return (*gradient_terms, *_by_the_model(model, gpu, shared, setup.local_generation_seqs))


@lru_cache(maxsize=256)
def _by_the_model(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, seqs: int) -> tuple[Term, ...]:
    """transformers' `generate` of so many completions at once.

    Source: transformers 5.23 `GenerationMixin._sample`, `DynamicLayer.update` (a longer copy beside the old one);
    accelerate's autocast wraps the forward of the model, which peft's `generate` goes around.
    """
    stream, out = _sizes(setup)
    layers = [model.layer_kinds[kind] for kind in model.layer_order]
    weights = [linear.num_weights for layer in layers for linear in layer.linears]
    head = [model.head.num_weights] if model.head is not None else []
    casts = out * sum(weights + head) if out < stream else 0

    def cache_terms(tokens: int, temporaries: int) -> tuple[Term, ...]:
        return (
            ("activations", f"keys and values of {seqs} completions", cache_bytes(model, setup, seqs, tokens)),
            ("activations", "one forward's temporaries in generation", temporaries),
            ("activations", "autocast copies of the weights in generation", casts),
        )

    prompts, before = seqs * setup.prompt_tokens, 0
    for layer in layers:
        scores, given = _scores(model, gpu, layer, setup, prompts)
        mask = given and stream * prompts * setup.prompt_tokens
        by_the_last = given if model.model_type in model_types("holds_layer_outputs") else 0
        widest = prompts * _widest(model, layer, setup, stream, out)
        scores += given if model.model_type in model_types("keeps_unmasked_scores") else 0
        before = max(before, mask + by_the_last + max(widest + given, scores))
    longest = setup.seq_len_tokens - 1
    grown = seqs * max((_kept(layer.attention, longest, stream, 0) for layer in layers if layer.attention), default=0)
    sampled = seqs * model.vocab_size * (out + 3 * SIZE_BYTES["fp32"])
    return max(
        cache_terms(setup.prompt_tokens, before),
        cache_terms(longest, max(grown, sampled)),
        key=lambda terms: sum(term[2] for term in terms),
    )


def cache_bytes(model: ModelSpec, setup: TrainSetup, seqs: int, tokens: int) -> int:
    """Keys and values of so many sequences in all layers; a rotary embedding widens keys to the stream's type, which
    the cache makes of values too. A window that its class alone knows (GPT-Neo's) cuts nothing.

    Source: transformers 5.23 `DynamicLayer.lazy_initialization` (both empty in the keys' type), `update` (torch.cat),
    `DynamicCache.__init__` (layer_types, sliding_window).
    """
    stream, out = _sizes(setup)
    config = {**model.config, **(model.config.get("text_config") or {})}
    windows = bool(config.get("layer_types") or config.get("sliding_window"))
    layers = [model.layer_kinds[kind].attention for kind in model.layer_order]
    sizes = [(attention, stream if attention.rotary else out) for attention in layers if attention is not None]
    return seqs * sum(_kept(attention, tokens, size, size, windows=windows) for attention, size in sizes)


def _sizes(setup: TrainSetup) -> tuple[int, int]:
    """Bytes of an element of the hidden states, and of a matrix's result, in generation."""
    dtypes = dtype_policy_of(setup)
    return SIZE_BYTES[dtypes.table], SIZE_BYTES[(dtypes.autocast if setup.method == "full" else None) or dtypes.table]


def _scores(model: ModelSpec, gpu: GpuSpec, layer: LayerSpec, setup: TrainSetup, tokens: int) -> tuple[int, int]:
    """Bytes of a layer's forward over the prompts at its attention, where its kernel makes tokens x tokens matrices:
    beside them the embedded prompts, the layer's input and what its norm made of it; and of the weights that eager
    attention hands back, which are there until the layer is done."""
    if layer.attention is None:
        return 0, 0
    if setup.method != "full":  # outside accelerate's autocast
        setup = setup.replace_trusted(precision=precision_of(setup.weight_dtype, None))
    setup = setup.replace_trusted(seq_len_tokens=setup.prompt_tokens)
    dtypes = dtype_policy_of(setup)
    kernel = attention_kernel(model, setup, gpu, layer.attention, dtypes.attention_input)
    context = LayerContext(
        setup=setup,
        dtypes=dtypes,
        adapted=frozenset(),
        kernel=kernel,
        tokens=tokens,
        hidden=model.hidden_size,
        traits=model.traits,
    )
    size = SIZE_BYTES[dtypes.attention_input]
    weights = size * layer.attention.num_heads * tokens * setup.prompt_tokens if kernel == "eager" else 0
    return forward_temporary(layer, context) + 3 * SIZE_BYTES[dtypes.table] * tokens * model.hidden_size, weights


def _kept(attention: AttentionSpec, tokens: int, key: int, value: int, *, windows: bool = True) -> int:
    tokens = min(tokens, attention.window_tokens or tokens) if windows else tokens
    return tokens * attention.num_kv_heads * (key * attention.head_dim + value * attention.value_head_dim)


def _widest(model: ModelSpec, layer: LayerSpec, setup: TrainSetup, stream: int, out: int) -> int:
    """Bytes per token of a layer's forward where its MLP is widest: the residual stream, the activated gate, and the
    next matrix with its adapter's product before and after scaling. Seen in the trainer's trace."""
    gated = layer.mlp is not None and layer.mlp.kind != "plain"
    width = mlp_width(layer)
    token_bytes = 4 * stream * model.hidden_size + (1 + gated) * out * width
    if setup.method == "full" or not setup.kind.adapts_matrices:
        return token_bytes + out * width
    adapter = SIZE_BYTES[dtype_policy_of(setup).adapter]
    cast = adapter * model.hidden_size if adapter != stream else 0
    return token_bytes + 2 * adapter * width + cast
