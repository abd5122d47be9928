"""Building blocks that adapters share: matrices, norms, MLPs, expert stacks, and putting layers together."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner.models.adapters.fields import Fields
from planner.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    ModuleKind,
    NormKind,
    NormSpec,
    Role,
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
    """One normalisation module."""
    return NormSpec(name=name, kind=kind, size=size, bias=bias, weight=weight, rows_per_token=rows)


def layer_norm(name: str, size: int, *, affine: bool = True) -> NormSpec:
    """A LayerNorm with weight and bias, or with neither."""
    return norm(name, size, "layer", affine, weight=affine)


def seeing_ahead(layer: LayerSpec) -> LayerSpec:
    """The layer where tokens of one picture attend to each other both ways."""
    return layer if layer.attention is None else replace(layer, attention=replace(layer.attention, sees_ahead=True))


def gated_mlp(hidden: int, intermediate: int, *, bias: bool = False, prefix: str = "mlp") -> tuple[LinearSpec, ...]:
    """gate, up and down."""
    return (
        linear(f"{prefix}.gate_proj", "gate", hidden, intermediate, bias),
        linear(f"{prefix}.up_proj", "up", hidden, intermediate, bias),
        linear(f"{prefix}.down_proj", "down", intermediate, hidden, bias),
    )


def plain_mlp(hidden: int, intermediate: int, names: tuple[str, str], bias: bool) -> tuple[LinearSpec, ...]:
    """up and down."""
    return (linear(names[0], "up", hidden, intermediate, bias), linear(names[1], "down", intermediate, hidden, bias))


class Experts(NamedTuple):
    """The routed experts of a layer: how many, through how many a token passes, the width of each."""

    num: int
    active: int
    inner: int


def expert_stack(hidden: int, experts: Experts, *, prefix: str = "mlp.experts") -> tuple[LinearSpec, ...]:
    """Stacked experts: transformers 5 holds them as two bare parameters, gate_up_proj and down_proj."""
    num, active, inner = experts
    return (
        linear(f"{prefix}.gate_up_proj", "gate_up", hidden, 2 * inner, False, "parameter", num, active),
        linear(f"{prefix}.down_proj", "down", inner, hidden, False, "parameter", num, active),
    )


class Decoder:
    """What the configuration of any decoder says first, and the model around its layers.

    Attributes:
        HIDDEN, LAYERS, HEADS: the names of these fields in the configuration, as KV_HEADS and HEAD_DIM are, which are
            empty where a family has no such field.
        hidden, head_dim: widths; `num_kv`: heads of keys and values.
        token_table: name of the token embedding; final_norm: what stands after the layers.
        max_positions: tokens that positions are learned or scaled for, None where the configuration names none.
    """

    HIDDEN: tuple[str, ...] = ("hidden_size",)
    LAYERS: tuple[str, ...] = ("num_hidden_layers",)
    HEADS: tuple[str, ...] = ("num_attention_heads",)
    KV_HEADS = "num_key_value_heads"
    HEAD_DIM = "head_dim"
    token_table = "embed_tokens"

    def __init__(self, fields: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> None:
        """`kv_heads` and `head_dim` are the class's defaults of absent keys; None: as many as heads, hidden / heads."""
        self.fields = fields
        self.hidden = fields.count(*self.HIDDEN)
        self.vocab = fields.count("vocab_size", kind="vocab")
        self.num_layers = fields.count(*self.LAYERS, kind="layers")
        self.num_heads = fields.count(*self.HEADS, kind="heads")
        self.num_kv = self._kv_heads(kv_heads)
        if head_dim is None and fields.raw.get(self.HEAD_DIM) is None:
            fields.divides(self.HEADS[0], self.num_heads, self.HIDDEN[0], self.hidden)
            head_dim = self.hidden // self.num_heads
        self.head_dim = fields.count(self.HEAD_DIM, default=head_dim)
        self.final_norm: tuple[NormSpec, ...] = (norm("norm", self.hidden),)
        self.max_positions = fields.optional_count("max_position_embeddings", "n_positions", kind="position")

    def _kv_heads(self, default: int | None) -> int:
        """Key/value heads; null means as many as heads, absent means the class default."""
        if default is None or (self.fields.has(self.KV_HEADS) and self.fields.raw[self.KV_HEADS] is None):
            default = self.num_heads
        num_kv = self.fields.count(self.KV_HEADS, kind="heads", default=default)
        self.fields.divides(self.KV_HEADS, num_kv, self.HEADS[0], self.num_heads)
        return num_kv

    def first_sharing(self, types: Sequence[object], *, default: int) -> int:
        """The first of the last layers, which take the keys and values of an earlier one of their type.

        Args:
            types: of every layer.
            default: how many share where the configuration does not say.

        Raises:
            ConfigError: no layer of some type is left to make keys and values.
        """
        num = self.fields.count("num_kv_shared_layers", kind="layers", default=default, at_least=0)
        first = self.num_layers - num
        if num and (first < 1 or set(types[:first]) != set(types)):
            problem = "must leave at least one layer of each type that makes its own keys and values"
            raise self.fields.wrong(f"num_kv_shared_layers {num} {problem}")
        return first

    def norms(self) -> tuple[NormSpec, ...]:
        """The two RMS norms of a layer."""
        return tuple(norm(name, self.hidden) for name in PRE)

    def attention(
        self, bias: bool = False, o_bias: bool = False, *, prefix: str = "self_attn", o_name: str = "o_proj"
    ) -> tuple[LinearSpec, ...]:
        """q, k, v, o as four matrices."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv * self.head_dim
        return (
            linear(f"{prefix}.q_proj", "q", self.hidden, queries, bias),
            linear(f"{prefix}.k_proj", "k", self.hidden, keys, bias),
            linear(f"{prefix}.v_proj", "v", self.hidden, keys, bias),
            linear(f"{prefix}.{o_name}", "o", queries, self.hidden, o_bias),
        )

    def softmax(self, window: int | None = None, **more: Any) -> AttentionSpec:
        """Scaled-dot-product attention with queries, keys and values of one width."""
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
        tables: tuple[EmbeddingSpec, ...] = (),
        head_in: int | None = None,
        **more: Any,
    ) -> ModelSpec:
        """The whole model: one `LayerSpec` per distinct key, in order of first appearance.

        `layer_keys` has one entry per layer; `tied` is the class's default; `tables` are lookup tables beside the
        token's; `more` goes to `ModelSpec`. Who the model is, `spec_from_config` writes into it.
        """
        kinds: dict[Hashable, int] = {}
        order = tuple(kinds.setdefault(key, len(kinds)) for key in layer_keys)
        width = head_in or self.hidden
        return ModelSpec(
            model_id="",
            model_type="",
            built_class=built_class,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_position_embeddings=self.max_positions,
            layer_kinds=tuple(make_layer(key) for key in kinds),
            layer_order=order,
            embeddings=(EmbeddingSpec(name=self.token_table, num_rows=self.vocab, dim=width), *tables),
            head=linear("lm_head", "other", width, self.vocab),
            tied=self.fields.flag("tie_word_embeddings", tied),
            outer_norms=self.final_norm,
            **more,
        )


def gated(intermediate: int, activation: str) -> MlpSpec:
    """A gated MLP."""
    return MlpSpec(kind="gated", intermediate_size=intermediate, activation=activation)


def plain(intermediate: int, activation: str) -> MlpSpec:
    """A plain MLP."""
    return MlpSpec(kind="plain", intermediate_size=intermediate, activation=activation)
