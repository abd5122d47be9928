"""Towers of CLIP's and SigLIP's layers, which see frames of one size: LLaVA, Gemma 3, PaliGemma."""

from collections.abc import Mapping
from typing import Any

from planner.errors import SetupError
from planner.models.adapters.parts import linear
from planner.models.eyes.tower import Projector, Tower, attention, mlp, projector, tower_model
from planner.models.spec import LayerSpec, MlpSpec, ModelSpec, NormSpec, Role

LAST_NORM = "post_layernorm"
CLIP = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu",
}  # fmt: skip
"""`LlavaConfig`'s own defaults of its tower."""
SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""`SiglipVisionConfig`'s defaults."""


def llava(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """LLaVA 1.5: CLIP at one fixed size, every patch a token."""
    if (kind := given.get("model_type", "clip_vision_model")) != "clip_vision_model":
        raise SetupError(f"images are not planned for {model.model_id}: LLaVA's class around {kind} is not known here")
    field = {**CLIP, **given}
    side = field["image_size"] // field["patch_size"]
    strategy = model.config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise SetupError(f"vision_feature_select_strategy {strategy!r} of {model.model_id} is not known here")
    tokens = side**2 + int(strategy == "full")
    if not isinstance(model.config.get("vision_feature_layer", -2), int):
        raise SetupError(f"{model.model_id} joins several layers of its tower: images are planned with one")
    text = model.hidden_size
    names = ("linear_1", "linear_2")
    joint = projector("model.multi_modal_projector", names, None, field["hidden_size"], text, inner=text)
    return Tower(
        model=siglip_model(model, field, "model.vision_tower.encoder.layers"),
        grid=(side, side),
        patches=side**2 + 1,
        tokens=tokens,
        marks=1,
        shape=frame_shape(field),
        projectors=(Projector(layer=joint, tokens=tokens),),
        norm_first=True,
        keeps_states=True,
    )


def gemma3(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """Gemma 3: SigLIP at one fixed size, its patches averaged to 256 tokens (pan and scan off)."""
    field = {**SIGLIP, **given}
    side, hidden = field["image_size"] // field["patch_size"], field["hidden_size"]
    tokens = int(model.config.get("mm_tokens_per_image", 256))
    joint = one_matrix(
        "model.multi_modal_projector",
        "mm_input_projection_weight",
        hidden,
        model.hidden_size,
        norm=NormSpec(name="mm_soft_emb_norm", kind="rms", size=hidden),
        parameter=True,
    )
    return Tower(
        model=siglip_model(model, field, "model.vision_tower.encoder.layers", LAST_NORM),
        pooled=True,
        grid=(side, side),
        patches=side**2,
        tokens=tokens,
        marks=4,
        shape=frame_shape(field),
        projectors=(Projector(layer=joint, tokens=tokens),),
    )


def paligemma(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """PaliGemma: SigLIP at one fixed size, every patch a token."""
    field = {**SIGLIP, **given}
    side, hidden = field["image_size"] // field["patch_size"], field["hidden_size"]
    out = int(field.get("projection_dim") or model.hidden_size)
    joint = one_matrix("model.multi_modal_projector", "linear", hidden, out, bias=True)
    return Tower(
        model=siglip_model(model, field, "model.vision_tower.encoder.layers", LAST_NORM),
        grid=(side, side),
        patches=side**2,
        tokens=side**2,
        marks=0,
        shape=frame_shape(field),
        projectors=(Projector(layer=joint, tokens=side**2),),
    )


def frame_shape(field: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a frame of the tower's own size: colours, height, width."""
    return (3, field["image_size"], field["image_size"])


def one_matrix(
    path: str,
    name: str,
    width: int,
    out: int,
    *,
    norm: NormSpec | None = None,
    bias: bool = False,
    parameter: bool = False,
) -> LayerSpec:
    """A projector of one matrix; `parameter`: a bare one, which PEFT does not adapt."""
    return LayerSpec(
        kind="projector",
        linears=(linear(name, "other", width, out, bias, "parameter" if parameter else "linear"),),
        norms=() if norm is None else (norm,),
        attention=None,
        mlp=None,
        path=path,
    )


def siglip_model(trunk: ModelSpec, field: Mapping[str, Any], path: str, last_norm: str = "") -> ModelSpec:
    """A tower of layers of CLIP or SigLIP, with a LayerNorm behind them where it has one that is used."""
    hidden, inner = field["hidden_size"], field["intermediate_size"]
    roles: tuple[tuple[str, Role], ...] = (("k", "k"), ("v", "v"), ("q", "q"), ("out", "o"))
    layer = LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"self_attn.{name}_proj", role, hidden, hidden, True) for name, role in roles),
            *mlp(("mlp.fc1", "mlp.fc2"), hidden, inner),
        ),
        norms=tuple(layer_norm(name, hidden) for name in ("layer_norm1", "layer_norm2")),
        attention=attention(field["num_attention_heads"], hidden),
        mlp=MlpSpec(kind="plain", intermediate_size=inner, activation=field["hidden_act"]),
        path=path,
    )
    outer = (layer_norm(last_norm, hidden),) if last_norm else ()
    return tower_model(trunk, hidden, (layer,), (0,) * field["num_hidden_layers"], outer)


def layer_norm(name: str, size: int) -> NormSpec:
    """A LayerNorm with its bias."""
    return NormSpec(name=name, kind="layer", size=size, bias=True)
