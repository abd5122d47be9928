"""Qwen3-Next and Qwen3.5: gated delta-rule layers with one softmax layer in four, dense or sparse MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from planner.models.adapters.fields import Fields
from planner.models.adapters.moe import Mixture
from planner.models.adapters.parts import linear, norm
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, NormSpec

_TYPES = ("linear_attention", "full_attention")
_TEXT = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 248320,
}  # fmt: skip
_MOE_TEXT = {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
    "num_experts": 256, "vocab_size": 248320,
}  # fmt: skip
"""Class defaults of transformers 5.23."""


class _Family(NamedTuple):
    """A type: the class that is built, the defaults of its `text_config` (None: it has none), whether every layer
    routes to experts (None: its fields say which), and how many of them a token passes by default."""

    built: str
    nested: Mapping[str, int] | None = None
    sparse: bool | None = False
    active: int = 8


_NEXT = _Family("Qwen3NextForCausalLM", sparse=None, active=10)
_FAMILIES = {
    "qwen3_next": _NEXT,
    "qwen3_5": _Family("Qwen3_5ForCausalLM", _TEXT),
    "qwen3_5_text": _Family("Qwen3_5ForCausalLM"),
    "qwen3_5_moe": _Family("Qwen3_5MoeForCausalLM", _MOE_TEXT, sparse=True),
    "qwen3_5_moe_text": _Family("Qwen3_5MoeForCausalLM", sparse=True),
}


def build(fields: Fields) -> ModelSpec:
    """The text trunk: `AutoModelForCausalLM` builds no vision tower and no multi-token-prediction layer."""
    family = _FAMILIES[fields.text("model_type")]
    text = fields if family.nested is None else fields.sub("text_config", family.nested)
    base = Mixture(text, head_dim=256)
    moe = base.sparse_layers() if family.sparse is None else (family.sparse,) * base.num_layers
    dense = 0 if all(moe) else text.count("intermediate_size", kind="intermediate")
    if any(moe):
        experts = base.experts("num_experts", default_active=family.active, default_inner=512)
        shared = text.count("shared_expert_intermediate_size", kind="intermediate", default=512)
    delta = _Delta(text)
    fraction = text.rotary_fraction(0.25)

    def layer(key: tuple[bool, bool]) -> LayerSpec:
        softmax, is_moe = key
        mixer = _gated_softmax(base) if softmax else delta.linears(base.hidden, fused=family is _NEXT)
        linears, mlp = base.qwen_routed(experts, shared) if is_moe else base.dense(dense)
        return LayerSpec(
            kind=("full" if softmax else "linear-attention") + ("+moe" if is_moe else ""),
            linears=mixer + linears,
            norms=base.norms() + (base.qk_norms() if softmax else delta.norms()),
            attention=base.softmax(rotary_fraction=fraction) if softmax else delta.attention(),
            mlp=mlp,
            num_other_params=0 if softmax else delta.num_other_params(),
        )

    # A multimodal config ties at its top, as the conditional-generation class would; its text_config decides here.
    return base.spec(family.built, tuple(zip(_full(base), moe, strict=True)), layer)


def _full(base: Mixture) -> list[bool]:
    """Which layers have softmax attention: `layer_types`, else every n-th."""
    interval = base.fields.count("full_attention_interval", kind="layers", default=4)
    return base.fields.layers_of("full_attention", _TYPES, base.num_layers, lambda index: (index + 1) % interval == 0)


def _gated_softmax(base: Mixture) -> tuple[LinearSpec, ...]:
    """q is twice as wide: half of it gates the output."""
    bias = base.fields.flag("attention_bias", False)
    q, *rest = base.attention(bias, bias)
    return (replace(q, out_features=2 * q.out_features), *rest)


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

    def linears(self, hidden: int, *, fused: bool) -> tuple[LinearSpec, ...]:
        """Qwen3-Next fuses q, k, v, z and the two gates; Qwen3.5 splits them. The gates are too narrow to be called
        attention projections (role "other")."""
        if fused:
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
