"""Llama 3.2 Vision's encoder: four tiles of a picture in one sequence, at which layers of the text look."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.models.families.parts import layer_norm, linear, plain
from planner.models.spec import LayerSpec, ModelSpec, Role
from planner.models.vision_encoders.encoder import Encoder, Projector, attention, encoder_model, mlp, one_matrix

CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
"""`MllamaTextConfig`'s default."""
ROWS = 8
"""Of a tile's patches the number becomes a multiple of this."""


def encoder(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Llama 3.2 Vision: always so many tiles, those that a picture does not fill hidden behind a mask."""
    side, hidden, tiles = field["image_size"] // field["patch_size"], field["hidden_size"], field["max_num_tiles"]
    patches = side**2 + 1
    rows = -(-patches // ROWS) * ROWS
    local, whole = field["num_hidden_layers"], field["num_global_layers"]
    layer = _layer(field, "model.vision_model.transformer.layers")
    gated = replace(layer, num_other_params=2, path="model.vision_model.global_transformer.layers")
    wide = field["vision_output_dim"]
    joint = one_matrix("model", "multi_modal_projector", wide, model.hidden_size, bias=True)
    aspects = sum(tiles // columns for columns in range(1, tiles + 1)) + 1
    tables = aspects * tiles * hidden
    norms = (layer_norm("layernorm_post", hidden),)
    return Encoder(
        model=encoder_model(model, hidden, (layer, gated), (0,) * local + (1,) * whole, norms),
        grid=(side, side),
        patches=tiles * rows,
        tokens=1,
        marks=0,
        shape=(tiles, 3, field["image_size"], field["image_size"]),
        projectors=(Projector(layer=joint, tokens=tiles * patches),),
        looked_at=True,
        checkpoints=False,
        num_other_params=hidden * (3 * field["patch_size"] ** 2 + 1 + patches)
        + tables * (patches + 2)
        + 3
        + 4 * hidden,
    )


def with_cross_attention(model: ModelSpec) -> ModelSpec:
    """The text with the layers that look at pictures, which text alone leaves out.

    Source: transformers 5.23 `MllamaCrossAttentionDecoderLayer`, `_prepare_cross_attention_mask`.
    """
    first = model.layer_kinds[0]
    assert first.attention is not None
    at = replace(first.attention, rotary=False, cross=True, padded=True, adds_mask=True)
    unseen = [layer for layer, _ in model.idle_layers if layer.path == first.path]
    kinds = [replace(layer, kind="looking", attention=at, mlp=first.mlp) for layer in unseen]
    text = model.config.get("text_config", {})
    places = text.get("cross_attention_layers") or CROSS_LAYERS
    order = tuple(int(place in places) for place in range(len(model.layer_order) + len(places)))
    return replace(model, layer_kinds=(first, *kinds), layer_order=order)


def _layer(field: Mapping[str, Any], path: str) -> LayerSpec:
    hidden, inner = field["hidden_size"], field["intermediate_size"]
    roles: tuple[Role, ...] = ("q", "k", "v", "o")
    return LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"self_attn.{role}_proj", role, hidden, hidden) for role in roles),
            *mlp(("mlp.fc1", "mlp.fc2"), hidden, inner),
        ),
        norms=tuple(layer_norm(name, hidden) for name in ("input_layernorm", "post_attention_layernorm")),
        attention=replace(attention(field["attention_heads"], hidden), padded=True, adds_mask=True),
        mlp=plain(inner, field["hidden_act"]),
        path=path,
    )
