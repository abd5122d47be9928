"""Qwen3-Next and Qwen3.5: gated delta-rule layers with one softmax layer in four, dense or sparse MLP."""

from planner.models.adapters.fields import Fields
from planner.models.adapters.moe import Decoder, moe_mlp, sparse_mlp
from planner.models.adapters.parts import assemble, gated, gated_mlp, linear, norm, softmax_attention, split_attention
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec

_TYPES = ("linear_attention", "full_attention")
_BUILT = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}

_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}
_MOE_TEXT = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "vocab_size": 248320,
}  # class defaults of transformers 5.23


def build(fields: Fields, model_id: str, source: str) -> ModelSpec:
    """The text trunk: `AutoModelForCausalLM` builds no vision tower and no multi-token-prediction layer."""
    model_type = fields.text("model_type")
    text = (
        fields
        if model_type == "qwen3_next" or model_type.endswith("_text")
        else fields.sub("text_config", _MOE_TEXT if "moe" in model_type else _TEXT)
    )
    base = Decoder(text, head_dim=256)
    num_layers = base.num_layers
    sparse_type = model_type != "qwen3_5" and model_type != "qwen3_5_text"
    moe, dense = _sparse(text, num_layers, model_type, sparse_type)
    num_experts = num_active = intermediate = shared = 0
    if sparse_type:
        num_experts, num_active = base.experts("num_experts", "num_experts_per_tok", 10 if "next" in model_type else 8)
        intermediate = text.count("moe_intermediate_size", kind="intermediate", default=512)
        shared = text.count("shared_expert_intermediate_size", kind="intermediate", default=512)
    interval = text.count("full_attention_interval", kind="layers", default=4)
    types = text.texts("layer_types", num_layers, _TYPES)
    full = [(index + 1) % interval == 0 for index in range(num_layers)]
    if types is not None:
        full = [one == "full_attention" for one in types]
    delta = _Delta(text)
    fraction = text.rotary_fraction(0.25)

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        softmax, is_moe = key
        mixer = _gated_softmax(base) if softmax else delta.linears(base.hidden, model_type)
        mlp = (
            sparse_mlp(base, num_experts, num_active, intermediate, shared) if is_moe else gated_mlp(base.hidden, dense)
        )
        return LayerSpec(
            kind=("full" if softmax else "linear-attention") + ("+moe" if is_moe else ""),
            linears=mixer + mlp,
            norms=base.norms() + (base.qk_norms() if softmax else delta.norms()),
            attention=softmax_attention(base.num_heads, base.num_kv, base.head_dim, rotary_fraction=fraction)
            if softmax
            else delta.attention(),
            mlp=moe_mlp(base.activation, num_experts, num_active, intermediate, shared)
            if is_moe
            else gated(dense, base.activation),
            num_other_params=0 if softmax else delta.num_other_params(),
        )

    # A multimodal config ties at its top, as the conditional-generation class would; its text_config decides here.
    tied = text.flag("tie_word_embeddings", False)
    return assemble(
        fields,
        model_id=model_id,
        source=source,
        built_class=_BUILT[model_type],
        hidden_size=base.hidden,
        vocab_size=base.vocab,
        layer_keys=tuple(zip(full, moe, strict=True)),
        make_layer=layer,
        tied=tied,
        embeddings=base.embeddings(),
        final_norm=(norm("norm", base.hidden),),
        max_positions=text.optional_count("max_position_embeddings", kind="position"),
    )


def _sparse(text: Fields, num_layers: int, model_type: str, sparse_type: bool) -> tuple[tuple[bool, ...], int]:
    """Which layers route to experts, and the width of the dense MLPs (0 where there are none)."""
    if not sparse_type:
        return (False,) * num_layers, text.count("intermediate_size", kind="intermediate")
    if model_type != "qwen3_next":
        return (True,) * num_layers, 0
    step = text.count("decoder_sparse_step", kind="layers", default=1)
    only = text.indices("mlp_only_layers")
    moe = tuple(index not in only and (index + 1) % step == 0 for index in range(num_layers))
    return moe, 0 if all(moe) else text.count("intermediate_size", kind="intermediate")


def _gated_softmax(base: Decoder) -> tuple[LinearSpec, ...]:
    """q is twice as wide: half of it gates the output."""
    bias = base.fields.flag("attention_bias", False)
    q, *rest = split_attention(base.hidden, base.num_heads, base.num_kv, base.head_dim, bias=bias, o_bias=bias)
    return (linear(q.name, "q", base.hidden, 2 * base.num_heads * base.head_dim, bias), *rest)


class _Delta:
    """The gated delta-rule mixer."""

    def __init__(self, text: Fields) -> None:
        self.kernel = text.count("linear_conv_kernel_dim", default=4)
        self.key_heads = text.count("linear_num_key_heads", kind="heads", default=16)
        self.value_heads = text.count("linear_num_value_heads", kind="heads", default=32)
        text.divides("linear_num_key_heads", self.key_heads, "linear_num_value_heads", self.value_heads)
        self.key_head = text.count("linear_key_head_dim", default=128)
        self.value_head = text.count("linear_value_head_dim", default=128)
        self.key_dim = self.key_heads * self.key_head
        self.value_dim = self.value_heads * self.value_head

    def linears(self, hidden: int, model_type: str) -> tuple[LinearSpec, ...]:
        """Qwen3-Next fuses q, k, v, z and the two gates; Qwen3.5 splits them. The gates are too narrow to be called
        attention projections (role "other")."""
        if model_type == "qwen3_next":
            inputs: tuple[LinearSpec, ...] = (
                linear("linear_attn.in_proj_qkvz", "mixer", hidden, 2 * self.key_dim + 2 * self.value_dim),
                linear("linear_attn.in_proj_ba", "other", hidden, 2 * self.value_heads),
            )
        else:
            inputs = (
                linear("linear_attn.in_proj_qkv", "mixer", hidden, 2 * self.key_dim + self.value_dim),
                linear("linear_attn.in_proj_z", "mixer", hidden, self.value_dim),
                linear("linear_attn.in_proj_b", "other", hidden, self.value_heads),
                linear("linear_attn.in_proj_a", "other", hidden, self.value_heads),
            )
        return (*inputs, linear("linear_attn.out_proj", "o", self.value_dim, hidden))

    def norms(self) -> tuple[NormSpec, ...]:
        """The gated norm over each value head."""
        return (norm("linear_attn.norm", self.value_head, rows=self.value_heads),)

    def attention(self) -> AttentionSpec:
        """A linear mixer: no tokens x tokens matrix."""
        return AttentionSpec(
            kind="linear",
            num_heads=self.value_heads,
            num_kv_heads=self.key_heads,
            head_dim=self.key_head,
            value_head_dim=self.value_head,
            rotary=False,
        )

    def num_other_params(self) -> int:
        """The depthwise convolution over q, k, v; dt_bias and A_log."""
        return (2 * self.key_dim + self.value_dim) * self.kernel + 2 * self.value_heads
