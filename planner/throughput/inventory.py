"""What one token passes through, counted once per model: matrices, norms, attention, elementwise widths."""

from dataclasses import replace

from planner.memory.traits import traits_of
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec
from planner.records import dataclass

# Roles that read the layer's normed input, where autocast casts a fp32 stream once per matrix.
_STREAM_ROLES = frozenset({"q", "k", "v", "qkv", "gate", "up", "gate_up", "router", "mixer"})
COMPOSED = frozenset({"gelu_new", "gelu_fast"})
"""Activations that transformers computes as eight or nine kernels. Source: transformers 5.23 `activations.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulGroup:
    """Equal matrices of all layers: `count` modules of [out, in], each `num` copies with `num_active` per token."""

    linear: LinearSpec
    count: int
    reads_stream: bool

    @property
    def weights(self) -> int:
        """Elements of all of them."""
        return self.count * self.linear.num_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All that the speed model needs of a ModelSpec. Widths are elements per token, summed over all layers.

    Attributes:
        groups: the layers' matrices; head and outer matrices apart.
        rms_width, layer_norm_width: normalised elements; `num_norms` modules.
        rotary_width: elements that rotary embeddings touch.
        residual_width: elements of residual additions.
        gated_width, plain_width: elements between the MLP's matrices (active experts only).
        routed_width: elements gathered and scattered around experts.
        mixer_width: elements of linear attention, in `num_mixers` layers (`planner.throughput.mixers`).
        composed_width: elements of activations that are single operations in Python, `num_composed` modules.
        dropout_width: elements that the model's own dropouts mask while training, `num_dropouts` of them.
        num_apart: layers of a length of their own, which nothing here counts but `num_params` and `num_tensors`.
        num_experts_run: expert modules in all layers (loops over experts launch kernels for each).
        num_tensors: parameter tensors of the whole model.
    """

    groups: tuple[MatmulGroup, ...]
    outer: tuple[LinearSpec, ...]
    head: LinearSpec | None
    attentions: tuple[tuple[AttentionSpec, int], ...]
    num_layers: int
    num_apart: int
    hidden_size: int
    num_params: int
    num_tensors: int
    rms_width: int
    layer_norm_width: int
    num_rms: int
    num_layer_norms: int
    rotary_width: int
    num_rotary: int
    residual_width: int
    gated_width: int
    plain_width: int
    routed_width: int
    mixer_width: int
    num_mixers: int
    composed_width: int
    num_composed: int
    dropout_width: int
    num_dropouts: int
    num_experts_run: int
    num_expert_layers: int
    softcap: bool


def inventory(model: ModelSpec) -> Inventory:
    """The inventory of a model."""
    return model.once("inventory", _count)


class _Tally:
    """Widths, numbers and matrices, added up layer by layer."""

    def __init__(self) -> None:
        self.merged: dict[LinearSpec, int] = {}
        self.attentions: dict[AttentionSpec, int] = {}
        self.width = dict.fromkeys(("rms", "layer", "rotary", "gated", "plain", "routed", "mixer", "composed"), 0)
        names = (
            *("rms", "layer", "rotary", "experts", "expert_layers"),
            *("tensors", "composed", "crossed", "apart", "mixers"),
        )
        self.num = dict.fromkeys(names, 0)

    def add_layer(self, layer: LayerSpec, repeats: int, hidden_size: int) -> None:
        """So many equal layers."""
        self.num["tensors"] += repeats * sum(_tensors(one) for one in layer.linears)
        if layer.fixed_tokens:  # `planner.throughput.encoder`
            self.num["apart"] += repeats
            self.num["tensors"] += 2 * repeats * len(layer.norms)
            return
        cross = layer.cross_attention
        for linear in layer.linears:
            if linear.of_encoder and cross is not None and cross.key_tokens:
                continue
            self.merged[linear] = self.merged.get(linear, 0) + repeats
        for norm in layer.norms:
            self.width[norm.kind] += repeats * norm.size * norm.rows_per_token
            self.num[norm.kind] += repeats
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                self._add_attention(attention, repeats)
        if layer.mlp is not None:
            self._add_mlp(layer.mlp, repeats, hidden_size)
        self.num["crossed"] += repeats * (layer.cross_attention is not None)

    def _add_attention(self, attention: AttentionSpec, repeats: int) -> None:
        if attention.kind == "linear":
            self.width["mixer"] += repeats * attention.num_heads * attention.head_dim
            self.num["mixers"] += repeats
            return
        self.attentions[attention] = self.attentions.get(attention, 0) + repeats
        if attention.rotary:
            heads = attention.num_heads + attention.num_kv_heads
            self.width["rotary"] += repeats * heads * attention.head_dim
            self.num["rotary"] += repeats

    def _add_mlp(self, mlp: MlpSpec, repeats: int, hidden_size: int) -> None:
        if mlp.kind == "moe":
            inner = mlp.num_active_experts * mlp.intermediate_size + mlp.shared_intermediate_size
            self.width["gated" if mlp.gated_experts else "plain"] += repeats * inner
            self.width["routed"] += repeats * mlp.num_active_experts * hidden_size
            self.num["experts"] += repeats * mlp.num_experts
            self.num["expert_layers"] += repeats
            return
        self.width[mlp.kind] += repeats * mlp.intermediate_size
        if mlp.activation in COMPOSED:
            self.width["composed"] += repeats * mlp.intermediate_size
            self.num["composed"] += repeats

    def groups(self) -> tuple[MatmulGroup, ...]:
        """The layers' matrices, equal ones together."""
        return tuple(
            MatmulGroup(linear=linear, count=count, reads_stream=linear.role in _STREAM_ROLES)
            for linear, count in self.merged.items()
        )


def _tensors(linear: LinearSpec) -> int:
    """Parameter tensors of a matrix and its copies."""
    return (1 if linear.module == "parameter" else linear.num) * (2 if linear.bias else 1)


def _through_all(layer: LayerSpec) -> LayerSpec:
    """A layer whose every token passes through every expert."""
    mlp = layer.mlp and replace(layer.mlp, num_active_experts=layer.mlp.num_experts)
    return replace(layer, linears=tuple(replace(one, num_active=one.num) for one in layer.linears), mlp=mlp)


def _count(model: ModelSpec) -> Inventory:
    tally, traits = _Tally(), traits_of(model)
    for layer, repeats in model.layer_counts:
        tally.add_layer(_through_all(layer) if traits.dense_experts else layer, repeats, model.hidden_size)
    width, num = tally.width, tally.num
    for norm in model.outer_norms:
        width[norm.kind] += norm.size * norm.rows_per_token
        num[norm.kind] += 1
    num_layers = model.num_layers - num["apart"]
    # after attention, cross-attention and MLP, and of the embeddings
    dropouts = 2 * num_layers + num["crossed"] + 1 if traits.residual_dropout else 0
    return Inventory(
        groups=tally.groups(),
        outer=model.outer_linears,
        head=model.head,
        attentions=tuple(tally.attentions.items()),
        num_layers=num_layers,
        num_apart=num["apart"],
        hidden_size=model.hidden_size,
        num_params=model.num_params,
        num_tensors=num["tensors"] + num["rms"] + 2 * num["layer"] + len(model.embeddings) + 1,
        layer_norm_width=width.pop("layer"),
        **{f"{name}_width": total for name, total in width.items()},
        num_rms=num["rms"],
        num_mixers=num["mixers"],
        num_layer_norms=num["layer"],
        num_rotary=num["rotary"],
        residual_width=2 * model.hidden_size * num_layers,
        num_composed=num["composed"],
        dropout_width=dropouts * model.hidden_size,
        num_dropouts=dropouts,
        num_experts_run=num["experts"],
        num_expert_layers=num["expert_layers"],
        softcap=model.logit_softcap,
    )
