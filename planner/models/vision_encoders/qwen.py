"""Qwen's encoders: a picture in its own shape, its patches merged by two networks' matrices."""

from collections.abc import Mapping
from dataclasses import replace
from math import floor, sqrt
from typing import Any

from planner.core.errors import SetupError
from planner.models.families.parts import gated, layer_norm, linear, norm, plain
from planner.models.spec import LayerSpec, ModelSpec, NormSpec
from planner.models.vision_encoders.encoder import Encoder, Projector, attention, encoder_model, mlp, projector

_THIRD = ("linear_fc1", "linear_fc2")
"""Names of the two matrices of an MLP, and of a projector, of Qwen 3's generation."""


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) as Qwen's processors resize a picture: multiples of `factor`, between `least` and `most` pixels.

    Source: transformers 5.23 `models/qwen2_vl/image_processing_qwen2_vl.py` smart_resize.
    """
    if max(height, width) / min(height, width) > 200:
        raise SetupError(f"an image of {width} x {height} pixels is longer than 200 times its other side")
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        beta = sqrt(height * width / most)
        tall = max(factor, floor(height / beta / factor) * factor)
        wide = max(factor, floor(width / beta / factor) * factor)
    elif tall * wide < least:
        beta = sqrt(least / (height * width))
        tall, wide = -(-int(height * beta) // factor) * factor, -(-int(width * beta) // factor) * factor
    return tall, wide


def encoder(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Qwen2-VL, Qwen2.5-VL (windows, RMSNorm, gated), Qwen3-VL (further projectors of inner layers) and Qwen3.5."""
    if "embed_dim" in field:  # its `hidden_size` is the text's
        inner = int(field["embed_dim"] * field["mlp_ratio"])
        field = {
            **field,
            "out_hidden_size": field["hidden_size"],
            "hidden_size": field["embed_dim"],
            "intermediate_size": inner,
        }
    windowed, third = "window_size" in field, "num_position_embeddings" in field
    merge, patch = field["spatial_merge_size"], field["patch_size"]
    least, most = (256 * 256, 4096 * 4096) if third else (56 * 56, 16384 * 28 * 28)
    tall, wide = smart_resize(height, width, patch * merge, least, most)
    grid = (tall // patch, wide // patch)
    patches = grid[0] * grid[1]
    layer = _layer(field)
    whole = field["fullatt_block_indexes"] if windowed else range(field["depth"])
    order = tuple(int(index not in whole) for index in range(field["depth"]))
    layers = (layer, replace(layer, kind="vision-window")) if windowed else (layer,)
    window = (field["window_size"] // merge // patch) * merge if windowed else 0
    return Encoder(
        model=encoder_model(model, field["hidden_size"], layers, order),
        grid=grid,
        patches=patches,
        tokens=patches // merge**2,
        marks=2,
        shape=(patches, 3 * field["temporal_patch_size"] * patch**2),
        projectors=_mergers(field, patches // merge**2),
        window_patches=window**2,
        named_embeddings=not third,
        num_other_params=field["hidden_size"]
        * (3 * field["temporal_patch_size"] * patch**2 + 1 + field.get("num_position_embeddings", 0)),
    )


def _layer(field: Mapping[str, Any]) -> LayerSpec:
    """A layer; where its class has windows the MLP has a gate, and with it every norm is an RMSNorm."""
    hidden, inner, windowed = field["hidden_size"], field["intermediate_size"], "window_size" in field
    names = ("gate_proj", "up_proj", "down_proj") if windowed else ("fc1", "fc2") if "embed_dim" in field else _THIRD
    return LayerSpec(
        kind="vision",
        linears=(
            linear("attn.qkv", "qkv", hidden, 3 * hidden, True),
            linear("attn.proj", "o", hidden, hidden, True),
            *mlp(tuple(f"mlp.{name}" for name in names), hidden, inner),
        ),
        norms=tuple(_norm(name, hidden, rms=windowed) for name in ("norm1", "norm2")),
        attention=attention(field["num_heads"], hidden, rotary=True),
        mlp=(gated if windowed else plain)(inner, field["hidden_act"]),
        path="model.visual.blocks",
    )


def _norm(name: str, size: int, *, rms: bool, rows: int = 1) -> NormSpec:
    return norm(name, size, "rms" if rms else "layer", not rms, rows)


def _mergers(field: Mapping[str, Any], tokens: int) -> tuple[Projector, ...]:
    """What merges neighbouring patches, and of Qwen3-VL such for the features of inner layers."""
    merged = field["spatial_merge_size"] ** 2
    wide, out = field["hidden_size"] * merged, field["out_hidden_size"]
    third = "num_position_embeddings" in field
    names = _THIRD if third else ("mlp.0", "mlp.2")
    first = _norm("norm" if third else "ln_q", field["hidden_size"], rms="window_size" in field, rows=merged)
    projectors = [Projector(layer=projector("model.visual.merger", names, first, wide, out), tokens=tokens)]
    if deep := len(field.get("deepstack_visual_indexes", ())):
        after = layer_norm("norm", wide)
        further = projector("model.visual.deepstack_merger_list", names, after, wide, out)
        projectors.append(Projector(layer=further, tokens=tokens, num=deep))
    return tuple(projectors)
