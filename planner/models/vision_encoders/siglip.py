"""Encoders of CLIP's and SigLIP's layers, which see frames of one size: LLaVA, Gemma 3, PaliGemma."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import SetupError
from planner.models.families.parts import layer_norm, linear, norm, plain
from planner.models.spec import LayerSpec, ModelSpec, Role
from planner.models.vision_encoders.encoder import (
    Encoder,
    Projector,
    attention,
    encoder_model,
    mlp,
    one_matrix,
    projector,
)

LAST_NORM, CLIP = "post_layernorm", "clip_vision_model"


def llava(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """LLaVA 1.5: CLIP at one fixed size, every patch a token."""
    if (kind := field["model_type"]) != CLIP:
        raise SetupError(f"images are not planned for {model.model_id}: LLaVA's class around {kind} is not known here")
    side = field["image_size"] // field["patch_size"]
    strategy = model.config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise SetupError(f"vision_feature_select_strategy {strategy!r} of {model.model_id} is not known here")
    tokens = side**2 + int(strategy == "full")
    if not isinstance(model.config.get("vision_feature_layer", -2), int):
        raise SetupError(f"{model.model_id} joins several layers of its encoder: images are planned with one")
    text = model.hidden_size
    names = ("linear_1", "linear_2")
    joint = projector("model.multi_modal_projector", names, None, field["hidden_size"], text, inner=text)
    layers = siglip_model(model, field, "model.vision_tower.encoder.layers")
    return of_one_size(field, layers, joint, tokens, 1, patches=side**2 + 1)


def gemma3(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Gemma 3: SigLIP at one fixed size, its patches averaged to 256 tokens (pan and scan off)."""
    hidden, first = field["hidden_size"], norm("mm_soft_emb_norm", field["hidden_size"])
    names = ("model.multi_modal_projector", "mm_input_projection_weight")
    joint = one_matrix(*names, hidden, model.hidden_size, norm=first, parameter=True)
    layers = siglip_model(model, field, "model.vision_tower.encoder.layers", LAST_NORM)
    return of_one_size(field, layers, joint, int(model.config.get("mm_tokens_per_image", 256)), 4)


def paligemma(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """PaliGemma: SigLIP at one fixed size, every patch a token."""
    side, hidden = field["image_size"] // field["patch_size"], field["hidden_size"]
    out = int(field.get("projection_dim") or model.hidden_size)
    joint = one_matrix("model.multi_modal_projector", "linear", hidden, out, bias=True)
    layers = siglip_model(model, field, "model.vision_tower.encoder.layers", LAST_NORM)
    return of_one_size(field, layers, joint, side**2, 0)


def of_one_size(
    field: Mapping[str, Any], model: ModelSpec, joint: LayerSpec, tokens: int, marks: int, frames: int = 1, **more: Any
) -> Encoder:
    """An encoder that sees frames of its own size, each as a square of patches that a projector makes `tokens` of."""
    size, side = field["image_size"], field["image_size"] // field["patch_size"]
    return Encoder(
        model=model,
        frames=frames,
        grid=(side, side),
        tokens=tokens * frames,
        marks=marks,
        shape=(3, size, size),
        projectors=(Projector(layer=joint, tokens=tokens),),
        **{"patches": side**2, **more},
    )


def siglip_model(trunk: ModelSpec, field: Mapping[str, Any], path: str, last_norm: str = "") -> ModelSpec:
    """An encoder of layers of CLIP or SigLIP, with a LayerNorm behind them where it has one that is used."""
    hidden, inner = field["hidden_size"], field["intermediate_size"]
    layer = replace(
        siglip_layer(hidden, inner, path),
        attention=attention(field["num_attention_heads"], hidden),
        mlp=plain(inner, field["hidden_act"]),
    )
    outer = (layer_norm(last_norm, hidden),) if last_norm else ()
    return encoder_model(trunk, hidden, (layer,), (0,) * field["num_hidden_layers"], outer)


def siglip_layer(hidden: int, inner: int, path: str) -> LayerSpec:
    roles: tuple[tuple[str, Role], ...] = (("k", "k"), ("v", "v"), ("q", "q"), ("out", "o"))
    return LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"self_attn.{name}_proj", role, hidden, hidden, True) for name, role in roles),
            *mlp(("mlp.fc1", "mlp.fc2"), hidden, inner),
        ),
        norms=tuple(layer_norm(name, hidden) for name in ("layer_norm1", "layer_norm2")),
        path=path,
    )
