"""Building blocks that adapters share: matrices, norms, MLPs, expert stacks, and putting layers together."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

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


def norm(name: str, size: int, kind: NormKind = "rms", bias: bool = False, rows: int = 1) -> NormSpec:
    """One normalisation module."""
    return NormSpec(name=name, kind=kind, size=size, bias=bias, rows_per_token=rows)


def split_attention(
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    o_bias: bool = False,
    prefix: str = "self_attn",
    o_name: str = "o_proj",
) -> tuple[LinearSpec, ...]:
    """q, k, v and o as four matrices."""
    return (
        linear(f"{prefix}.q_proj", "q", hidden, num_heads * head_dim, bias),
        linear(f"{prefix}.k_proj", "k", hidden, num_kv_heads * head_dim, bias),
        linear(f"{prefix}.v_proj", "v", hidden, num_kv_heads * head_dim, bias),
        linear(f"{prefix}.{o_name}", "o", num_heads * head_dim, hidden, o_bias),
    )


def gated_mlp(hidden: int, intermediate: int, *, bias: bool = False, prefix: str = "mlp") -> tuple[LinearSpec, ...]:
    """gate, up and down."""
    return (
        linear(f"{prefix}.gate_proj", "gate", hidden, intermediate, bias),
        linear(f"{prefix}.up_proj", "up", hidden, intermediate, bias),
        linear(f"{prefix}.down_proj", "down", intermediate, hidden, bias),
    )


def fused_mlp(hidden: int, intermediate: int) -> tuple[LinearSpec, ...]:
    """gate and up in one matrix, and down."""
    return (
        linear("mlp.gate_up_proj", "gate_up", hidden, 2 * intermediate),
        linear("mlp.down_proj", "down", intermediate, hidden),
    )


def plain_mlp(hidden: int, intermediate: int, names: tuple[str, str], bias: bool) -> tuple[LinearSpec, ...]:
    """up and down."""
    return (
        linear(names[0], "up", hidden, intermediate, bias),
        linear(names[1], "down", intermediate, hidden, bias),
    )


def expert_stack(
    hidden: int, intermediate: int, num: int, num_active: int, *, bias: bool = False, prefix: str = "mlp.experts"
) -> tuple[LinearSpec, ...]:
    """Stacked experts: transformers 5 holds them as two bare parameters, gate_up_proj and down_proj."""
    return (
        linear(f"{prefix}.gate_up_proj", "gate_up", hidden, 2 * intermediate, bias, "parameter", num, num_active),
        linear(f"{prefix}.down_proj", "down", intermediate, hidden, bias, "parameter", num, num_active),
    )


def assemble(
    fields: Fields,
    *,
    model_id: str,
    source: str,
    built_class: str,
    hidden_size: int,
    vocab_size: int,
    layer_keys: Sequence[Hashable],
    make_layer: Callable[[Any], LayerSpec],
    tied: bool,
    embeddings: tuple[EmbeddingSpec, ...],
    final_norm: tuple[NormSpec, ...],
    head_bias: bool = False,
    head_in: int | None = None,
    max_positions: int | None = None,
    **more: Any,
) -> ModelSpec:
    """Put a model together: one `LayerSpec` per distinct key, in order of first appearance.

    `layer_keys` has one entry per layer; `make_layer(key)` is called once per distinct key. `more` goes to `ModelSpec`.
    """
    kinds: dict[Hashable, int] = {}
    order = tuple(kinds.setdefault(key, len(kinds)) for key in layer_keys)
    if max_positions is None:
        max_positions = fields.optional_count("max_position_embeddings", "n_positions", kind="position")
    return ModelSpec(
        model_id=model_id,
        model_type=fields.text("model_type"),
        built_class=built_class,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        layer_kinds=tuple(make_layer(key) for key in kinds),
        layer_order=order,
        embeddings=embeddings,
        head=linear("lm_head", "other", head_in or hidden_size, vocab_size, head_bias),
        tied=tied,
        outer_norms=final_norm,
        config_source=source,
        **more,
    )


def gated(intermediate: int, activation: str) -> MlpSpec:
    """A gated MLP."""
    return MlpSpec(kind="gated", intermediate_size=intermediate, activation=activation)


def plain(intermediate: int, activation: str) -> MlpSpec:
    """A plain MLP."""
    return MlpSpec(kind="plain", intermediate_size=intermediate, activation=activation)


def softmax_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None, **more: Any
) -> AttentionSpec:
    """Scaled-dot-product attention with queries, keys and values of one width."""
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        window_tokens=window,
        **more,
    )
