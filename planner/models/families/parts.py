"""Building blocks that families share: matrices, norms, MLPs, expert stacks, and putting layers together."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from planner.models.families.fields import Fields
from planner.models.spec import (
    ATTENTION_DROPOUTS,
    RESIDUAL_DROPOUTS,
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    ModuleKind,
    NormKind,
    NormSpec,
    NormStyle,
    Role,
    Traits,
)

PRE = ("input_layernorm", "post_attention_layernorm")
SANDWICH = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names of a layer's norms: in front of attention and MLP, or on both sides of each."""


def linear(
    name: str,
    role: Role,
    in_features: int,
    out_features: int,
    bias: bool = False,
    module: ModuleKind = "linear",
    num: int = 1,
    num_active: int = 1,
) -> LinearSpec:
    """A `LinearSpec` by position, as adapters read like the modelling code."""
    return LinearSpec(
        name=name,
        role=role,
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        module=module,
        num=num,
        num_active=num_active,
    )


def norm(
    name: str, size: int, kind: NormKind = "rms", bias: bool = False, rows: int = 1, *, weight: bool = True
) -> NormSpec:
    return NormSpec(name=name, kind=kind, size=size, bias=bias, weight=weight, rows_per_token=rows)


def layer_norm(name: str, size: int) -> NormSpec:
    """A LayerNorm with weight and bias."""
    return norm(name, size, "layer", bias=True)


def gated_mlp(hidden: int, intermediate: int, *, bias: bool = False, prefix: str = "mlp") -> tuple[LinearSpec, ...]:
    return (
        linear(f"{prefix}.gate_proj", "gate", hidden, intermediate, bias),
        linear(f"{prefix}.up_proj", "up", hidden, intermediate, bias),
        linear(f"{prefix}.down_proj", "down", intermediate, hidden, bias),
    )


class Decoder:
    """What the configuration of any decoder says first, and the model around its layers.

    Attributes:
        hidden, head_dim: widths; `num_kv`: heads of keys and values.
        max_positions: tokens that positions are learned or scaled for, None where the configuration names none.
    """

    def __init__(self, fields: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> None:
        """`kv_heads` and `head_dim` are the class's defaults of absent keys; None: as many as heads, hidden / heads."""
        self.fields = fields
        self.hidden = fields.count("hidden_size")
        self.vocab = fields.count("vocab_size", kind="vocab")
        self.num_layers = fields.count("num_hidden_layers", kind="layers")
        self.num_heads = fields.count("num_attention_heads", kind="heads")
        self.num_kv = self._kv_heads(kv_heads)
        if head_dim is None and fields.raw.get("head_dim") is None:
            fields.divides("num_attention_heads", self.num_heads, "hidden_size", self.hidden)
            head_dim = self.hidden // self.num_heads
        self.head_dim = fields.count("head_dim", default=head_dim)
        self.max_positions = fields.optional_count("max_position_embeddings", "n_positions", kind="position")

    def _kv_heads(self, default: int | None) -> int:
        """Key/value heads; null means as many as heads, absent means the class default."""
        if default is None or (
            self.fields.has("num_key_value_heads") and self.fields.raw["num_key_value_heads"] is None
        ):
            default = self.num_heads
        num_kv = self.fields.count("num_key_value_heads", kind="heads", default=default)
        self.fields.divides("num_key_value_heads", num_kv, "num_attention_heads", self.num_heads)
        return num_kv

    def attention(self, bias: bool, o_bias: bool) -> tuple[LinearSpec, ...]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv * self.head_dim
        return (
            linear("self_attn.q_proj", "q", self.hidden, queries, bias),
            linear("self_attn.k_proj", "k", self.hidden, keys, bias),
            linear("self_attn.v_proj", "v", self.hidden, keys, bias),
            linear("self_attn.o_proj", "o", queries, self.hidden, o_bias),
        )

    def softmax(self, window: int | None = None, **more: Any) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            window_tokens=window,
            **more,
        )

    def spec(
        self,
        built_class: str,
        layer_keys: Sequence[Hashable],
        make_layer: Callable[[Any], LayerSpec],
        *,
        tied: bool = False,
        norm_style: NormStyle = "rms",
        joins_rotated: bool = False,
        scales_logits: bool = False,
        **more: Any,
    ) -> ModelSpec:
        """The whole model: one `LayerSpec` per distinct key, in order of first appearance.

        `layer_keys` has one entry per layer; `tied` is the class's default; `more` goes to `ModelSpec`. Who the model
        is, `spec_from_config` writes into it.
        """
        kinds: dict[Hashable, int] = {}
        order = tuple(kinds.setdefault(key, len(kinds)) for key in layer_keys)
        return ModelSpec(
            model_id="",
            model_type="",
            built_class=built_class,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_position_embeddings=self.max_positions,
            layer_kinds=tuple(make_layer(key) for key in kinds),
            layer_order=order,
            embeddings=(EmbeddingSpec(name="embed_tokens", num_rows=self.vocab, dim=self.hidden),),
            head=linear("lm_head", "other", self.hidden, self.vocab),
            tied=self.fields.flag("tie_word_embeddings", tied),
            outer_norms=(norm("norm", self.hidden),),
            traits=Traits(
                norm=norm_style,
                joins_rotated=joins_rotated,
                scales_logits=scales_logits,
                attention_dropout=self._drops(ATTENTION_DROPOUTS),
                residual_dropout=self._drops(RESIDUAL_DROPOUTS),
            ),
            **more,
        )

    def _drops(self, names: Sequence[str]) -> bool:
        rates = [rate for rate in map(self.fields.raw.get, names) if isinstance(rate, int | float)]
        return bool(rates) and rates[0] > 0


def gated(intermediate: int, activation: str) -> MlpSpec:
    """A gated MLP."""
    return MlpSpec(kind="gated", intermediate_size=intermediate, activation=activation)


def plain(intermediate: int, activation: str) -> MlpSpec:
    """A plain MLP."""
    return MlpSpec(kind="plain", intermediate_size=intermediate, activation=activation)
