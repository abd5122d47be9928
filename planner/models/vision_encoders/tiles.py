"""Encoders that see a picture in tiles of one size and as a whole: Idefics 3 and SmolVLM, InternVL."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from planner.models.families.parts import layer_norm, linear, norm, plain
from planner.models.spec import LayerSpec, ModelSpec, Role
from planner.models.vision_encoders.encoder import Encoder, attention, encoder_model, mlp, one_matrix, projector
from planner.models.vision_encoders.siglip import LAST_NORM, of_one_size, siglip_model

LONGEST_TILES, LARGEST_SIDE = 4, 4096
"""Idefics 3's processor makes the longer side as long as four tiles, in every published preprocessor_config.json."""
MOST_TILES = 12
"""Of InternVL's processor (`GotOcr2ImageProcessor.max_patches`, `crop_to_patches` in `InternVLProcessor`)."""


def idefics3(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Idefics 3 and SmolVLM: every picture is made larger than four tiles can hold, cut, and seen whole once more."""
    side, scale = field["image_size"] // field["patch_size"], int(model.config.get("scale_factor", 2))
    rows, columns = idefics_tiles(width, height, field["image_size"])
    wide = field["hidden_size"] * scale**2
    joint = one_matrix("model.connector", "modality_projection.proj", wide, model.hidden_size)
    return of_one_size(
        field,
        siglip_model(model, field, "model.vision_model.encoder.layers", LAST_NORM),
        joint,
        side**2 // scale**2,
        2 * rows * columns + rows + 3,
        frames=rows * columns + 1,
        masked_pixels=True,
    )


def idefics_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """(rows, columns) of tiles that a picture is cut into, beside the whole one.

    Source: transformers 5.23 `models/idefics3/image_processing_pil_idefics3.py` resize, resize_for_vision_encoder,
    split_images.
    """
    longest = min(LONGEST_TILES * tile, LARGEST_SIDE)
    shorter = int(longest * min(width, height) / max(width, height))
    along, across = ceil(longest / tile), max(1, ceil((shorter + shorter % 2) / tile))
    return (across, along) if width >= height else (along, across)


def internvl(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """InternVL: up to twelve tiles in the picture's shape and the whole one, four patches to a token."""
    field = {**field}
    for name in ("image_size", "patch_size"):  # sides that a configuration may give twice
        field[name] = int(field[name][0] if isinstance(field[name], (list, tuple)) else field[name])
    side, hidden = field["image_size"] // field["patch_size"], field["hidden_size"]
    tiles = intern_tiles(width, height, field["image_size"])
    scale = round(1 / float(model.config.get("downsample_ratio", 0.5)))
    wide, text = hidden * scale**2, model.hidden_size
    first, names = layer_norm("layer_norm", wide), ("linear_1", "linear_2")
    joint = projector("model.multi_modal_projector", names, first, wide, text, inner=text)
    layers = encoder_model(model, hidden, (_intern_layer(field),), (0,) * field["num_hidden_layers"])
    seen = {"frames": tiles + (tiles > 1), "patches": side**2 + 1}
    return of_one_size(field, layers, joint, side**2 // scale**2, 2, **seen)


def _intern_layer(field: Mapping[str, Any]) -> LayerSpec:
    hidden, inner, bias = field["hidden_size"], field["intermediate_size"], field["attention_bias"]
    roles: tuple[Role, ...] = ("q", "k", "v")
    rms = field["norm_type"] == "rms_norm"
    norms = [(norm if rms else layer_norm)(name, hidden) for name in ("layernorm_before", "layernorm_after")]
    if field["use_qk_norm"]:
        norms += [norm(f"attention.{name}_norm", hidden) for name in ("q", "k")]
    return LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"attention.{role}_proj", role, hidden, hidden, bias) for role in roles),
            linear("attention.projection_layer", "o", hidden, hidden, True),
            *mlp(("mlp.fc1", "mlp.fc2"), hidden, inner),
        ),
        norms=tuple(norms),
        attention=attention(field["num_attention_heads"], hidden),
        mlp=plain(inner, field["hidden_act"]),
        num_other_params=2 * hidden,
        path="model.vision_tower.encoder.layer",
    )


def intern_tiles(width: int, height: int, tile: int) -> int:
    """Tiles of the canvas whose shape is nearest to the picture's; of two as near the larger, where the picture fills
    half of it.

    Source: transformers 5.23 `models/got_ocr2/image_processing_pil_got_ocr2.py` get_optimal_tiled_canvas.
    """
    side = range(1, MOST_TILES + 1)
    canvases = sorted(
        ((x, y) for x in side for y in side if x * y <= MOST_TILES), key=lambda canvas: canvas[0] * canvas[1]
    )
    best, least = (1, 1), float("inf")
    for columns, rows in canvases:
        away = abs(width / height - columns / rows)
        if away < least or (away == least and width * height > 0.5 * tile * tile * columns * rows):
            best, least = (columns, rows), away
    return best[0] * best[1]
