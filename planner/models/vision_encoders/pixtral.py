"""Pixtral's encoder (Mistral 3): pictures in their own shape, all of a micro-batch in one sequence."""

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

from planner.models.families.parts import gated, linear, norm, plain
from planner.models.spec import LayerSpec, ModelSpec, Role
from planner.models.vision_encoders.encoder import Encoder, Projector, attention, encoder_model, mlp


def encoder(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Mistral 3: a token for each square of patches, and one at the end of each row of them."""
    merge, patch, hidden = int(model.config.get("spatial_merge_size", 2)), field["patch_size"], field["hidden_size"]
    rows, columns = rows_and_columns(width, height, merge * patch, field["image_size"])
    patches = rows * columns * merge**2
    first = norm("ln_pre", hidden)
    return Encoder(
        model=encoder_model(model, hidden, (_layer(field),), (0,) * field["num_hidden_layers"], (first,)),
        grid=(rows * merge, columns * merge),
        patches=patches,
        tokens=rows * columns,
        marks=rows,
        shape=(3, rows * merge * patch, columns * merge * patch),
        projectors=(Projector(layer=_projector(model, hidden, merge**2), tokens=rows * columns),),
        joined=True,
    )


def rows_and_columns(width: int, height: int, unit: int, longest: int) -> tuple[int, int]:
    """Of squares of `unit` pixels, of a picture whose longer side is at most `longest`.

    Source: transformers 5.23 `models/pixtral/image_processing_pil_pixtral.py` get_resize_output_image_size.
    """
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = floor(height / ratio), floor(width / ratio)
    return ceil(height / unit), ceil(width / unit)


def _layer(field: Mapping[str, Any]) -> LayerSpec:
    hidden, inner = field["hidden_size"], field["intermediate_size"]
    roles: tuple[Role, ...] = ("k", "v", "q", "o")
    return LayerSpec(
        kind="vision",
        linears=(
            *mlp(tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")), hidden, inner, bias=False),
            *(linear(f"attention.{role}_proj", role, hidden, hidden) for role in roles),
        ),
        norms=tuple(norm(name, hidden) for name in ("attention_norm", "ffn_norm")),
        attention=attention(field["num_attention_heads"], hidden, rotary=True),
        mlp=gated(inner, field["hidden_act"]),
        path="model.vision_tower.transformer.layers",
    )


def _projector(model: ModelSpec, hidden: int, merged: int) -> LayerSpec:
    """The norm of every patch, the matrix that merges a square of them, two around a GELU."""
    bias, text = bool(model.config.get("multimodal_projector_bias", False)), model.hidden_size
    return LayerSpec(
        kind="projector",
        linears=(
            linear("patch_merger.merging_layer", "other", hidden * merged, hidden),
            linear("linear_1", "up", hidden, text, bias),
            linear("linear_2", "down", text, text, bias),
        ),
        norms=(norm("norm", hidden, rows=merged),),
        mlp=plain(text, "gelu"),
        path="model.multi_modal_projector",
    )
