"""Mixture-of-experts decoders with softmax attention: Mixtral, Qwen MoE, OLMoE, Phi-3.5-MoE, gpt-oss, GLM-4.5, Llama 4.

transformers 5 stacks the experts of a layer into bare parameters (`gate_up_proj`, `down_proj`) and most routers hold a
bare weight too: neither PEFT's "all-linear" nor bitsandbytes touches them.
"""

from planner.errors import ConfigError
from planner.models.adapters.fields import Fields
from planner.models.adapters.llama_like import (
    layer_kind,
    window_by_layer_types,
    window_everywhere,
    window_qwen,
)
from planner.models.adapters.parts import (
    assemble,
    expert_stack,
    gated,
    gated_mlp,
    linear,
    norm,
    softmax_attention,
    split_attention,
)
from planner.models.spec import EmbeddingSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormKind, NormSpec


class Decoder:
    """What every MoE decoder of this module reads first."""

    __slots__ = ("activation", "fields", "head_dim", "hidden", "num_heads", "num_kv", "num_layers", "vocab")

    def __init__(self, fields: Fields, *, head_dim: int | None = None) -> None:
        self.fields = fields
        self.hidden = fields.count("hidden_size")
        self.vocab = fields.count("vocab_size", kind="vocab")
        self.num_layers = fields.count("num_hidden_layers", kind="layers")
        self.num_heads = fields.count("num_attention_heads", kind="heads")
        self.num_kv = fields.count("num_key_value_heads", kind="heads", default=self.num_heads)
        fields.divides("num_key_value_heads", self.num_kv, "num_attention_heads", self.num_heads)
        if head_dim is None and fields.raw.get("head_dim") is None:
            fields.divides("num_attention_heads", self.num_heads, "hidden_size", self.hidden)
            head_dim = self.hidden // self.num_heads
        self.head_dim = fields.count("head_dim", default=head_dim)
        self.activation = fields.text("hidden_act", default="silu")

    def attention(self, bias: bool = False, o_bias: bool = False) -> tuple[LinearSpec, ...]:
        """q, k, v, o."""
        return split_attention(self.hidden, self.num_heads, self.num_kv, self.head_dim, bias=bias, o_bias=o_bias)

    def qk_norms(self) -> tuple[NormSpec, ...]:
        """One norm per head size for q and for k."""
        return (
            norm("self_attn.q_norm", self.head_dim, rows=self.num_heads),
            norm("self_attn.k_norm", self.head_dim, rows=self.num_kv),
        )

    def norms(self) -> tuple[NormSpec, ...]:
        """The two RMS norms of a layer."""
        return (norm("input_layernorm", self.hidden), norm("post_attention_layernorm", self.hidden))

    def embeddings(self) -> tuple[EmbeddingSpec, ...]:
        """The token table."""
        return (EmbeddingSpec(name="embed_tokens", num_rows=self.vocab, dim=self.hidden),)

    def experts(self, num: str, active: str, default_active: int | None = None) -> tuple[int, int]:
        """The number of experts and through how many a token passes. transformers 5 saves the number of some types as
        `num_local_experts`."""
        fields = self.fields
        num_experts = fields.count(num, "num_local_experts", kind="expert")
        num_active = (
            fields.count(active, kind="expert")
            if default_active is None
            else fields.count(active, kind="expert", default=default_active)
        )
        if num_active > num_experts:
            raise ConfigError(
                f"{fields.where}: {active} {num_active} must not exceed {num} {num_experts}",
                hint="correct the field in config.json",
            )
        return num_experts, num_active

    def router(self, name: str, num_experts: int, *, is_linear: bool = False, bias: bool = False) -> LinearSpec:
        """The gate."""
        return linear(name, "router", self.hidden, num_experts, bias, "linear" if is_linear else "parameter")


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Qwen: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step = fields.count("decoder_sparse_step", kind="layers", default=1)
    dense = fields.indices("mlp_only_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def mixtral(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """Mixtral; Phi-3.5-MoE is the same with layer norms and biases."""
    base = Decoder(fields)
    phimoe = fields.text("model_type") == "phimoe"
    num_experts, num_active = base.experts("num_local_experts", "num_experts_per_tok", 2)
    intermediate = fields.count("intermediate_size", kind="intermediate")
    bias = fields.flag("attention_bias", False) if phimoe else False
    linears = (
        *base.attention(bias, bias),
        base.router("mlp.router" if phimoe else "mlp.gate", num_experts, is_linear=phimoe),
        *expert_stack(base.hidden, intermediate, num_experts, num_active),
    )
    kind: NormKind = "layer" if phimoe else "rms"
    norms = tuple(
        NormSpec(name=name, kind=kind, size=base.hidden, bias=phimoe)
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    mlp = MlpSpec(
        kind="moe",
        intermediate_size=intermediate,
        activation=base.activation,
        num_experts=num_experts,
        num_active_experts=num_active,
    )

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            kind=f"{layer_kind(window)}+moe",
            linears=linears,
            norms=norms,
            attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim, window),
            mlp=mlp,
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="PhimoeForCausalLM" if phimoe else "MixtralForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=window_everywhere(fields, base.num_layers),
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(NormSpec(name="norm", kind=kind, size=base.hidden, bias=phimoe),),
        head_bias=fields.flag("lm_head_bias", False) if phimoe else False,
    )


def qwen_moe(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """Qwen 1.5 / 2 MoE (a gated shared expert, biases on q, k, v) and Qwen 3 MoE (norms on q and k)."""
    base = Decoder(fields)
    qwen2 = fields.text("model_type") == "qwen2_moe"
    num_experts, num_active = base.experts("num_experts", "num_experts_per_tok", 4 if qwen2 else 8)
    intermediate = fields.count("moe_intermediate_size", kind="intermediate")
    shared = fields.count("shared_expert_intermediate_size", kind="intermediate", default=5632) if qwen2 else 0
    if qwen2:
        attention = base.attention(fields.flag("qkv_bias", True))
    else:
        bias = fields.flag("attention_bias", False)
        attention = base.attention(bias, bias)
    norms = base.norms() + (() if qwen2 else base.qk_norms())
    sparse = _sparse_layers(fields, base.num_layers)
    dense = 0 if all(sparse) else fields.count("intermediate_size", kind="intermediate")
    if qwen2 and fields.flag("use_sliding_window", False):
        first = fields.count("max_window_layers", kind="layers", default=28, at_least=0)
        windows = window_by_layer_types(
            fields, base.num_layers, lambda index: not ((index + 1) % 2 and index < first), 4096
        )
    elif qwen2:
        windows = window_qwen(fields, base.num_layers)
    else:
        in_use = fields.flag("use_sliding_window", False)
        windows = window_everywhere(fields, base.num_layers, 4096) if in_use else (None,) * base.num_layers

    def layer(key: tuple[bool, int | None]) -> LayerSpec:
        moe, window = key
        return LayerSpec(
            kind=layer_kind(window) + ("+moe" if moe else ""),
            linears=attention
            + (
                sparse_mlp(base, num_experts, num_active, intermediate, shared)
                if moe
                else gated_mlp(base.hidden, dense)
            ),
            norms=norms,
            attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim, window),
            mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, shared)
            if moe
            else gated(dense, base.activation),
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="Qwen2MoeForCausalLM" if qwen2 else "Qwen3MoeForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=tuple(zip(sparse, windows, strict=True)),
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
    )


def sparse_mlp(
    base: Decoder, num_experts: int, num_active: int, intermediate: int, shared: int
) -> tuple[LinearSpec, ...]:
    """Qwen's sparse block: router, experts, and a shared expert behind its own gate."""
    linears = (
        base.router("mlp.gate", num_experts),
        *expert_stack(base.hidden, intermediate, num_experts, num_active),
    )
    if shared:
        linears += (
            *gated_mlp(base.hidden, shared, prefix="mlp.shared_expert"),
            linear("mlp.shared_expert_gate", "router", base.hidden, 1),
        )
    return linears


def moe_mlp(activation: str, num_experts: int, num_active: int, intermediate: int, shared: int) -> MlpSpec:
    """The channel mixer of a sparse layer."""
    return MlpSpec(
        kind="moe",
        intermediate_size=intermediate,
        activation=activation,
        num_experts=num_experts,
        num_active_experts=num_active,
        shared_intermediate_size=shared,
    )


def olmoe(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """OLMoE: q and k are normalised over all heads at once."""
    base = Decoder(fields)
    num_experts, num_active = base.experts("num_experts", "num_experts_per_tok", 8)
    intermediate = fields.count("intermediate_size", kind="intermediate")
    bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        kind="full+moe",
        linears=(
            *base.attention(bias, bias),
            base.router("mlp.gate", num_experts),
            *expert_stack(base.hidden, intermediate, num_experts, num_active),
        ),
        norms=(
            *base.norms(),
            norm("self_attn.q_norm", base.hidden),
            norm("self_attn.k_norm", base.num_kv * base.head_dim),
        ),
        attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim),
        mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, 0),
    )
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="OlmoeForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=(0,) * base.num_layers,
        make_layer=lambda _: layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
    )


def gpt_oss(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """gpt-oss: attention sinks, biases everywhere, a window of 128 in every second layer."""
    base = Decoder(fields, head_dim=64)
    active = "num_experts_per_tok" if fields.has("num_experts_per_tok") else "experts_per_token"
    num_experts, num_active = base.experts("num_local_experts", active, 4)
    intermediate = fields.count("intermediate_size", kind="intermediate")
    bias = fields.flag("attention_bias", True)
    linears = (
        *base.attention(bias, bias),
        base.router("mlp.router", num_experts, bias=True),
        *expert_stack(base.hidden, intermediate, num_experts, num_active, bias=True),
    )

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            kind=f"{layer_kind(window)}+moe",
            linears=linears,
            norms=base.norms(),
            attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim, window, sinks=True),
            mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, 0),
            num_other_params=base.num_heads,  # the sinks
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="GptOssForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=window_by_layer_types(fields, base.num_layers, lambda index: index % 2 == 1, 128),
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
        attentions=("eager", "flash-attention-2"),  # SDPA has no sinks
    )


def glm4_moe(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """GLM-4.5: the first layers are dense, then routed experts with shared ones."""
    base = Decoder(fields)
    num_experts, num_active = base.experts("n_routed_experts", "num_experts_per_tok", 8)
    intermediate = fields.count("moe_intermediate_size", kind="intermediate")
    shared = intermediate * fields.count("n_shared_experts", kind="expert", default=1)
    num_dense = fields.count("first_k_dense_replace", kind="layers", default=1, at_least=0)
    dense = fields.count("intermediate_size", kind="intermediate")
    fraction = fields.rotary_fraction(0.5)
    attention = base.attention(fields.flag("attention_bias", False))
    norms = base.norms() + (base.qk_norms() if fields.flag("use_qk_norm", False) else ())

    def layer(moe: bool) -> LayerSpec:
        if moe:
            mlp = (
                *expert_stack(base.hidden, intermediate, num_experts, num_active),
                base.router("mlp.gate", num_experts),
                *gated_mlp(base.hidden, shared, prefix="mlp.shared_experts"),
            )
        else:
            mlp = gated_mlp(base.hidden, dense)
        return LayerSpec(
            kind="full+moe" if moe else "full",
            linears=attention + mlp,
            norms=norms,
            attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim, rotary_fraction=fraction),
            mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, shared)
            if moe
            else gated(dense, base.activation),
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="Glm4MoeForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=tuple(index >= num_dense for index in range(base.num_layers)),
        make_layer=layer,
        tied=fields.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
    )


LLAMA4_TEXT = {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "num_local_experts": 16,
    "vocab_size": 202048,
}
"""Class defaults of transformers 5.23's Llama4TextConfig."""


def llama4(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """Llama 4's text trunk, which `AutoModelForCausalLM` builds alone: chunked attention but for every fourth layer
    (which has no rotary embeddings), a router that is an nn.Linear, one shared expert."""
    text = fields if fields.text("model_type") == "llama4_text" else fields.sub("text_config", LLAMA4_TEXT)
    base = Decoder(text, head_dim=None)
    num_layers = base.num_layers
    num_experts, num_active = base.experts("num_local_experts", "num_experts_per_tok", 1)
    intermediate = text.count("intermediate_size", kind="intermediate")
    step = text.count("interleave_moe_layer_step", kind="layers", default=1)
    moe_layers = text.indices("moe_layers") or frozenset(range(step - 1, num_layers, step))
    dense = text.count("intermediate_size_mlp", kind="intermediate", default=16384)
    interval = text.count("no_rope_layer_interval", kind="layers", default=4)
    types = text.texts("layer_types", num_layers, ("chunked_attention", "full_attention"))
    rope = text.bits("no_rope_layers", num_layers)  # 1 where rotary embeddings are applied
    chunked = list(rope) if rope else [(index + 1) % interval != 0 for index in range(num_layers)]
    if types is not None:
        chunked = [one == "chunked_attention" for one in types]
    chunk = text.optional_count("attention_chunk_size", kind="window")
    if chunk is None and not text.has("attention_chunk_size"):
        chunk = 8192
    bias = text.flag("attention_bias", False)
    attention = base.attention(bias, bias)

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        moe, window = key
        if moe:
            mlp = (
                *expert_stack(base.hidden, intermediate, num_experts, num_active, prefix="feed_forward.experts"),
                base.router("feed_forward.router", num_experts, is_linear=True),
                *gated_mlp(base.hidden, intermediate, prefix="feed_forward.shared_expert"),
            )
        else:
            mlp = gated_mlp(base.hidden, dense, prefix="feed_forward")
        return LayerSpec(
            kind=(f"chunked-{chunk}" if window else "full") + ("+moe" if moe else ""),
            linears=attention + mlp,
            norms=base.norms(),
            attention=softmax_attention(
                base.num_heads, base.num_kv, base.head_dim, chunk if window else None, rotary=window
            ),
            mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, intermediate)
            if moe
            else gated(dense, base.activation),
        )

    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class="Llama4ForCausalLM",
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=tuple((index in moe_layers, chunked[index]) for index in range(num_layers)),
        make_layer=layer,
        tied=text.flag("tie_word_embeddings", False),
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
        max_positions=text.optional_count("max_position_embeddings", kind="position"),
        attentions=("eager", "sdpa"),
    )
