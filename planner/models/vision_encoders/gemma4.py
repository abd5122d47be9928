"""Gemma 4's encoder: every picture padded to one number of patches, averaged over squares of them."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from planner.core.errors import SetupError
from planner.models.families.parts import SANDWICH, gated, linear, norm
from planner.models.spec import LayerSpec, ModelSpec, Role
from planner.models.vision_encoders.encoder import Encoder, Projector, attention, encoder_model, mlp, one_matrix

TOKENS = 280
"""Most of a picture: the processor's `max_soft_tokens`, which published configurations say too."""


def encoder(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Gemma 4: as many squares of patches as the budget of tokens holds in the picture's shape."""
    square, hidden = field["pooling_kernel_size"], field["hidden_size"]
    patches = field.get("default_output_length", TOKENS) * square**2
    rows, columns = squares(width, height, field["patch_size"], square, patches)
    tokens = rows * columns
    before = norm("embedding_pre_projection_norm", hidden, weight=False)
    joint = one_matrix("model.embed_vision", "embedding_projection", hidden, model.hidden_size, norm=before)
    layer = _layer(field, padded=tokens * square**2 < patches)
    return Encoder(
        model=encoder_model(model, hidden, (layer,), (0,) * field["num_hidden_layers"]),
        grid=(rows * square, columns * square),
        patches=patches,
        tokens=tokens,
        marks=2,
        shape=(patches, 3 * field["patch_size"] ** 2),
        positions=2 * patches,
        projectors=(Projector(layer=joint, tokens=tokens),),
        named_embeddings=False,
        clipped=bool(field["use_clipped_linears"]),
    )


def squares(width: int, height: int, patch: int, square: int, patches: int) -> tuple[int, int]:
    """(rows, columns) of squares of patches that a picture is resized to.

    Source: transformers 5.23 `models/gemma4/image_processing_pil_gemma4.py` get_aspect_ratio_preserving_size.
    """
    factor, unit = sqrt(patches * patch**2 / (height * width)), square * patch
    rows, columns = int(factor * height / unit), int(factor * width / unit)
    if not rows and not columns:
        raise SetupError(f"an image of {width} x {height} pixels is too small for Gemma 4's processor")
    longest = patches // square**2
    if not rows:
        return 1, min(width // height, longest)
    return (rows, columns) if columns else (min(height // width, longest), 1)


def _layer(field: Mapping[str, Any], *, padded: bool) -> LayerSpec:
    """One layer: every matrix lies in a wrapper that clips."""
    hidden, inner, head = field["hidden_size"], field["intermediate_size"], field["head_dim"]
    heads, kv_heads = field["num_attention_heads"], field["num_key_value_heads"]
    roles: tuple[tuple[Role, int], ...] = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    return LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"self_attn.{role}_proj.linear", role, hidden, num * head) for role, num in roles),
            linear("self_attn.o_proj.linear", "o", heads * head, hidden),
            *mlp(tuple(f"mlp.{name}_proj.linear" for name in ("gate", "up", "down")), hidden, inner, bias=False),
        ),
        norms=(
            *(norm(name, hidden) for name in SANDWICH),
            norm("self_attn.q_norm", head, rows=heads),
            norm("self_attn.k_norm", head, rows=kv_heads),
            norm("self_attn.v_norm", head, rows=kv_heads, weight=False),
        ),
        attention=replace(attention(heads, hidden, rotary=True), num_kv_heads=kv_heads, padded=padded),
        mlp=gated(inner, field["hidden_activation"]),
        path="model.vision_tower.encoder.layers",
    )
