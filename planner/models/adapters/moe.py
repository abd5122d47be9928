"""Mixture-of-experts decoders with softmax attention: Mixtral, Qwen MoE, OLMoE, Phi-3.5-MoE, gpt-oss, GLM-4.5, Llama 4.

transformers 5 stacks the experts of a layer into bare parameters (`gate_up_proj`, `down_proj`) and most routers hold a
bare weight too: neither PEFT's "all-linear" nor bitsandbytes touches them.
"""

from planner.models.adapters.fields import Fields
from planner.models.adapters.llama_like import layer_kind, window_by_layer_types, window_everywhere, window_qwen
from planner.models.adapters.parts import PRE, Decoder, Experts, expert_stack, gated, gated_mlp, linear, norm
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormKind, NormSpec


class Mixture(Decoder):
    """What every MoE decoder of this module reads first."""

    def __init__(self, fields: Fields, *, head_dim: int | None = None) -> None:
        super().__init__(fields, head_dim=head_dim)
        self.activation = fields.text("hidden_act", default="silu")

    def qk_norms(self) -> tuple[NormSpec, ...]:
        """One norm per head size for q and for k."""
        return (
            norm("self_attn.q_norm", self.head_dim, rows=self.num_heads),
            norm("self_attn.k_norm", self.head_dim, rows=self.num_kv),
        )

    def experts(
        self, num: str, active: str = "num_experts_per_tok", inner: str = "moe_intermediate_size", **defaults: int
    ) -> Experts:
        """The experts by the names of their fields, `default_num`, `default_active`, `default_inner` where absent.
        transformers 5 saves the number of some types as `num_local_experts`."""

        def count(which: str, *names: str, kind: str = "expert") -> int:
            default = {"default": defaults[which]} if which in defaults else {}
            return self.fields.count(*names, kind=kind, **default)

        made = Experts(
            count("default_num", num, "num_local_experts"),
            count("default_active", active),
            count("default_inner", inner, kind="intermediate"),
        )
        if made.active > made.num:
            raise self.fields.wrong(f"{active} {made.active} must not exceed {num} {made.num}")
        return made

    def router(self, name: str, experts: Experts, *, is_linear: bool = False, bias: bool = False) -> LinearSpec:
        """The gate."""
        return linear(name, "router", self.hidden, experts.num, bias, "linear" if is_linear else "parameter")

    def dense(self, inner: int, *, bias: bool = False, prefix: str = "mlp") -> tuple[tuple[LinearSpec, ...], MlpSpec]:
        """The matrices and the channel mixer of a layer without experts."""
        return gated_mlp(self.hidden, inner, bias=bias, prefix=prefix), gated(inner, self.activation)

    def routed(
        self,
        experts: Experts,
        router: LinearSpec | None = None,
        *,
        shared: int = 0,
        shared_name: str = "shared_experts",
        bias: bool = False,
        expert_bias: bool = False,
        prefix: str = "mlp",
    ) -> tuple[tuple[LinearSpec, ...], MlpSpec]:
        """The matrices and the channel mixer of a layer with experts: the router, their stack, and shared ones of the
        width `shared`, whose matrices have a `bias` or not."""
        linears: tuple[LinearSpec, ...] = (
            router or self.router(f"{prefix}.gate", experts),
            *expert_stack(self.hidden, experts, bias=expert_bias, prefix=f"{prefix}.experts"),
        )
        if shared:
            linears += gated_mlp(self.hidden, shared, bias=bias, prefix=f"{prefix}.{shared_name}")
        return linears, MlpSpec(
            kind="moe",
            intermediate_size=experts.inner,
            activation=self.activation,
            num_experts=experts.num,
            num_active_experts=experts.active,
            shared_intermediate_size=shared,
        )

    def qwen_routed(self, experts: Experts, shared: int) -> tuple[tuple[LinearSpec, ...], MlpSpec]:
        """Qwen's sparse block: a shared expert stands behind a gate of its own."""
        linears, mlp = self.routed(experts, shared=shared, shared_name="shared_expert")
        return linears + ((linear("mlp.shared_expert_gate", "router", self.hidden, 1),) if shared else ()), mlp

    def sparse_layers(self) -> tuple[bool, ...]:
        """Qwen: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
        step = self.fields.count("decoder_sparse_step", kind="layers", default=1)
        dense = self.fields.indices("mlp_only_layers")
        return tuple(index not in dense and (index + 1) % step == 0 for index in range(self.num_layers))


def mixtral(fields: Fields) -> ModelSpec:
    """Mixtral; Phi-3.5-MoE is the same with layer norms and biases."""
    base = Mixture(fields)
    phimoe = fields.text("model_type") == "phimoe"
    experts = base.experts("num_local_experts", inner="intermediate_size", default_active=2)
    bias = phimoe and fields.flag("attention_bias", False)
    kind: NormKind = "layer" if phimoe else "rms"
    router = base.router("mlp.router" if phimoe else "mlp.gate", experts, is_linear=phimoe)
    linears, mlp = base.routed(experts, router)
    base.final_norm = (norm("norm", base.hidden, kind, phimoe),)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            kind=f"{layer_kind(window)}+moe",
            linears=base.attention(bias, bias) + linears,
            norms=tuple(norm(name, base.hidden, kind, phimoe) for name in PRE),
            attention=base.softmax(window),
            mlp=mlp,
        )

    return base.spec(
        "PhimoeForCausalLM" if phimoe else "MixtralForCausalLM",
        window_everywhere(fields, base.num_layers),
        layer,
        head_bias=phimoe and fields.flag("lm_head_bias", False),
    )


def qwen_moe(fields: Fields) -> ModelSpec:
    """Qwen 1.5 / 2 MoE (a gated shared expert, biases on q, k, v) and Qwen 3 MoE (norms on q and k)."""
    base = Mixture(fields)
    qwen2 = fields.text("model_type") == "qwen2_moe"
    experts = base.experts("num_experts", default_active=4 if qwen2 else 8)
    shared = fields.count("shared_expert_intermediate_size", kind="intermediate", default=5632) if qwen2 else 0
    bias = fields.flag("qkv_bias", True) if qwen2 else fields.flag("attention_bias", False)
    sparse = base.sparse_layers()
    dense = 0 if all(sparse) else fields.count("intermediate_size", kind="intermediate")

    def layer(key: tuple[bool, int | None]) -> LayerSpec:
        moe, window = key
        linears, mlp = base.qwen_routed(experts, shared) if moe else base.dense(dense)
        return LayerSpec(
            kind=layer_kind(window) + ("+moe" if moe else ""),
            linears=base.attention(bias, bias and not qwen2) + linears,
            norms=base.norms() + (() if qwen2 else base.qk_norms()),
            attention=base.softmax(window),
            mlp=mlp,
        )

    windows = _qwen_windows(fields, base.num_layers, qwen2)
    built = "Qwen2MoeForCausalLM" if qwen2 else "Qwen3MoeForCausalLM"
    return base.spec(built, tuple(zip(sparse, windows, strict=True)), layer)


def _qwen_windows(fields: Fields, num_layers: int, qwen2: bool) -> tuple[int | None, ...]:
    """The window of every layer; off unless `use_sliding_window`."""
    if not fields.flag("use_sliding_window", False):
        return window_qwen(fields, num_layers) if qwen2 else (None,) * num_layers
    if not qwen2:
        return window_everywhere(fields, num_layers, 4096)
    first = fields.count("max_window_layers", kind="layers", default=28, at_least=0)
    return window_by_layer_types(fields, num_layers, lambda index: not ((index + 1) % 2 and index < first), 4096)


def olmoe(fields: Fields) -> ModelSpec:
    """OLMoE: q and k are normalised over all heads at once."""
    base = Mixture(fields)
    bias = fields.flag("attention_bias", False)
    linears, mlp = base.routed(base.experts("num_experts", inner="intermediate_size", default_active=8))
    qk_norms = (norm("self_attn.q_norm", base.hidden), norm("self_attn.k_norm", base.num_kv * base.head_dim))
    layer = LayerSpec(
        kind="full+moe",
        linears=base.attention(bias, bias) + linears,
        norms=base.norms() + qk_norms,
        attention=base.softmax(),
        mlp=mlp,
    )
    return base.spec("OlmoeForCausalLM", (0,) * base.num_layers, lambda _: layer)


def gpt_oss(fields: Fields) -> ModelSpec:
    """gpt-oss: attention sinks, biases everywhere, a window of 128 in every second layer."""
    base = Mixture(fields, head_dim=64)
    active = "num_experts_per_tok" if fields.has("num_experts_per_tok") else "experts_per_token"
    experts = base.experts("num_local_experts", active, "intermediate_size", default_active=4)
    bias = fields.flag("attention_bias", True)
    linears, mlp = base.routed(experts, base.router("mlp.router", experts, bias=True), expert_bias=True)

    def layer(window: int | None) -> LayerSpec:
        return LayerSpec(
            kind=f"{layer_kind(window)}+moe",
            linears=base.attention(bias, bias) + linears,
            norms=base.norms(),
            attention=base.softmax(window, sinks=True),
            mlp=mlp,
            num_other_params=base.num_heads,  # the sinks
        )

    windows = window_by_layer_types(fields, base.num_layers, lambda index: index % 2 == 1, 128)
    return base.spec("GptOssForCausalLM", windows, layer, attentions=("eager", "flash-attention-2"))  # no SDPA: sinks


def glm4_moe(fields: Fields) -> ModelSpec:
    """GLM-4.5: the first layers are dense, then routed experts with shared ones."""
    base = Mixture(fields)
    experts = base.experts("n_routed_experts", default_active=8)
    shared = experts.inner * fields.count("n_shared_experts", kind="expert", default=1)
    num_dense = fields.count("first_k_dense_replace", kind="layers", default=1, at_least=0)
    dense = fields.count("intermediate_size", kind="intermediate")
    fraction = fields.rotary_fraction(0.5)
    bias = fields.flag("attention_bias", False)
    norms = base.norms() + (base.qk_norms() if fields.flag("use_qk_norm", False) else ())

    def layer(moe: bool) -> LayerSpec:
        linears, mlp = base.routed(experts, shared=shared) if moe else base.dense(dense)
        return LayerSpec(
            kind="full+moe" if moe else "full",
            linears=base.attention(bias) + linears,
            norms=norms,
            attention=base.softmax(rotary_fraction=fraction),
            mlp=mlp,
        )

    return base.spec("Glm4MoeForCausalLM", [index >= num_dense for index in range(base.num_layers)], layer)


LLAMA4_TEXT = {
    "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 8192, "num_local_experts": 16, "vocab_size": 202048,
}  # fmt: skip
"""Class defaults of transformers 5.23's Llama4TextConfig."""


def llama4(fields: Fields) -> ModelSpec:
    """Llama 4's text trunk, which `AutoModelForCausalLM` builds alone: chunked attention but for every fourth layer
    (which has no rotary embeddings), a router that is an nn.Linear, one shared expert."""
    text = fields if fields.text("model_type") == "llama4_text" else fields.sub("text_config", LLAMA4_TEXT)
    base = Mixture(text)
    experts = base.experts("num_local_experts", inner="intermediate_size", default_active=1)
    step = text.count("interleave_moe_layer_step", kind="layers", default=1)
    moe_layers = text.indices("moe_layers") or frozenset(range(step - 1, base.num_layers, step))
    dense = text.count("intermediate_size_mlp", kind="intermediate", default=16384)
    chunk = text.optional_count("attention_chunk_size", kind="window")
    if chunk is None and not text.has("attention_chunk_size"):
        chunk = 8192
    bias = text.flag("attention_bias", False)
    router = base.router("feed_forward.router", experts, is_linear=True)

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        moe, window = key
        linears, mlp = (
            base.routed(experts, router, shared=experts.inner, shared_name="shared_expert", prefix="feed_forward")
            if moe
            else base.dense(dense, prefix="feed_forward")
        )
        return LayerSpec(
            kind=(f"chunked-{chunk}" if window else "full") + ("+moe" if moe else ""),
            linears=base.attention(bias, bias) + linears,
            norms=base.norms(),
            attention=base.softmax(chunk if window else None, rotary=window),
            mlp=mlp,
        )

    chunked = _llama4_chunked(text, base.num_layers)
    keys = tuple((index in moe_layers, chunked[index]) for index in range(base.num_layers))
    return base.spec("Llama4ForCausalLM", keys, layer, attentions=("eager", "sdpa"))


def _llama4_chunked(text: Fields, num_layers: int) -> list[bool]:
    """Whether each layer attends inside chunks: `layer_types`, else `no_rope_layers` (1 where rotary embeddings ARE
    applied), else all but every n-th."""
    interval = text.count("no_rope_layer_interval", kind="layers", default=4)
    rope = text.bits("no_rope_layers", num_layers) or [(index + 1) % interval != 0 for index in range(num_layers)]
    kinds = ("chunked_attention", "full_attention")
    return text.layers_of("chunked_attention", kinds, num_layers, lambda index: rope[index])
