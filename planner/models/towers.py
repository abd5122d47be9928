"""What makes tokens of pictures: the vision tower of a model as a `ModelSpec` of its own, its projector, and how many
patches and tokens a picture of a given size becomes.

Text-only plans need none of it: there a tower is weights alone (`ModelSpec.idle_layers`). Facts by `model_type`, read
in transformers 5.23's modeling, configuration and image processing files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, sqrt
from typing import Any

from planner.choices.images import Images
from planner.errors import SetupError
from planner.models.adapters.parts import linear
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormKind, NormSpec, Role

FP32_BYTES = 4
OF_CONFIG = ("vision_config", "mm_tokens_per_image", "vision_feature_select_strategy", "vision_feature_layer")
"""What of a model's configuration a tower is made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """One network between the tower and the text, kept whole: no class checkpoints it.

    Attributes:
        layer: its matrices and norms as a layer.
        num: how many such stand side by side (Qwen3-VL's deepstack).
        tokens: rows that pass through it, of one picture.
    """

    layer: LayerSpec
    tokens: int
    num: int = 1


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A tower and what one picture becomes in it.

    Attributes:
        model: its layers as a model without embeddings and head.
        grid: patches along height and width.
        patches: rows of one picture in the layers (a class token included).
        tokens: of one picture in the text; `marks`: what its conversation puts around them.
        pixels: numbers of one picture as the processor hands them over, in fp32.
        projectors: between the layers and the text; `pooled`: rows are averaged before them.
        window_patches: rows that attend to each other in the layers of kind "vision-window".
        named_embeddings: whether its class names its patches' embeddings, so that checkpointing beside adapters makes
            them ask for a gradient (`PreTrainedModel.enable_input_require_grads`).
        keeps_states: whether the output of every layer lives until the forward ends (its class asks for all of them).
    """

    model: ModelSpec
    grid: tuple[int, int]
    patches: int
    tokens: int
    marks: int
    pixels: int
    projectors: tuple[Projector, ...]
    window_patches: int = 0
    keeps_states: bool = False
    named_embeddings: bool = True
    pooled: bool = False

    @property
    def text_tokens(self) -> int:
        """Tokens of a sequence that one picture takes."""
        return self.tokens + self.marks


def tower_of(model: ModelSpec, images: Images) -> Tower:
    """The tower of a model for pictures of this size.

    Raises:
        SetupError: a model without eyes, or whose eyes are not known here.
    """
    said = {name: model.config.get(name) for name in OF_CONFIG}
    return _tower(model, json.dumps(said, sort_keys=True), images.width, images.height)


@lru_cache(maxsize=256)
def _tower(model: ModelSpec, said: str, width: int, height: int) -> Tower:
    """`said` is part of the key alone: two models of one shape are equal whatever their configs."""
    make = _MAKERS.get(model.model_type)
    vision = model.config.get("vision_config")
    if make is None:
        known = f"what {model.model_type} makes of a picture is not known here ({', '.join(_MAKERS)} are)"
        raise SetupError(
            f"images are not planned for {model.model_id}: {known if vision else 'it has no eyes'}",
            hint="leave --images-per-sample and --image-size out: text alone is planned",
        )
    return make(model, vision or {}, width, height)


def image_tokens(model: ModelSpec, images: Images) -> int:
    """Tokens of a sequence that the pictures of one sample take."""
    return images.num * tower_of(model, images).text_tokens


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


def _qwen(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """Qwen2-VL, Qwen2.5-VL (windows, RMSNorm, gated) and Qwen3-VL (further projectors of inner layers)."""
    family = model.model_type
    third = family.startswith("qwen3")
    defaults = _QWEN[family.removesuffix("_moe")]
    field = {**defaults, **given}
    merge, patch = field["spatial_merge_size"], field["patch_size"]
    least, most = (256 * 256, 4096 * 4096) if third else (56 * 56, 16384 * 28 * 28)
    tall, wide = smart_resize(height, width, patch * merge, least, most)
    grid = (tall // patch, wide // patch)
    patches = grid[0] * grid[1]
    hidden = field["embed_dim"] if family == "qwen2_vl" else field["hidden_size"]
    inner = int(hidden * field["mlp_ratio"]) if family == "qwen2_vl" else field["intermediate_size"]
    gated = family == "qwen2_5_vl"
    kind: NormKind = "rms" if gated else "layer"
    names = (
        ("gate_proj", "up_proj", "down_proj") if gated else (("linear_fc1", "linear_fc2") if third else ("fc1", "fc2"))
    )
    roles: tuple[Role, ...] = ("gate", "up", "down") if gated else ("up", "down")
    layer = LayerSpec(
        kind="vision",
        linears=(
            linear("attn.qkv", "qkv", hidden, 3 * hidden, True),
            linear("attn.proj", "o", hidden, hidden, True),
            *_mlp(tuple(f"mlp.{name}" for name in names), roles, hidden, inner),
        ),
        norms=tuple(NormSpec(name=name, kind=kind, size=hidden, bias=not gated) for name in ("norm1", "norm2")),
        attention=_attention(field["num_heads"], hidden, rotary=True),
        mlp=MlpSpec(kind="gated" if gated else "plain", intermediate_size=inner, activation=field["hidden_act"]),
        path="model.visual.blocks",
    )
    whole = tuple(field.get("fullatt_block_indexes", ())) if gated else range(field["depth"])
    order = tuple(int(index not in whole) for index in range(field["depth"]))
    layers = (layer, replace(layer, kind="vision-window")) if gated else (layer,)
    window = (field["window_size"] // merge // patch) * merge if gated else 0
    out = field["hidden_size"] if family == "qwen2_vl" else field["out_hidden_size"]
    merged = patches // merge**2
    inner_names = ("linear_fc1", "linear_fc2") if third else ("mlp.0", "mlp.2")
    norm = NormSpec(name="ln_q", kind=kind, size=hidden, bias=not gated, rows_per_token=merge**2)
    projectors = [
        Projector(layer=_projector("model.visual.merger", inner_names, norm, hidden * merge**2, out), tokens=merged)
    ]
    if third and (deep := len(field["deepstack_visual_indexes"])):
        after = NormSpec(name="norm", kind="layer", size=hidden * merge**2, bias=True)
        deepstack = _projector("model.visual.deepstack_merger_list", inner_names, after, hidden * merge**2, out)
        projectors.append(Projector(layer=deepstack, tokens=merged, num=deep))
    return Tower(
        model=_model(model, hidden, layers, order),
        grid=grid,
        patches=patches,
        tokens=merged,
        marks=2,
        pixels=patches * 3 * field["temporal_patch_size"] * patch**2,
        projectors=tuple(projectors),
        window_patches=window**2,
        named_embeddings=not third,
    )


_QWEN: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4,
        "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen3_vl": {
        "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}  # fmt: skip
"""The classes' defaults, for what a `config.json` leaves out."""


def _llava(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """LLaVA 1.5: CLIP at one fixed size, every patch a token."""
    field = {**_CLIP, **given}
    grid = (field["image_size"] // field["patch_size"],) * 2
    patches, hidden = grid[0] * grid[1], field["hidden_size"]
    text = model.hidden_size
    strategy = model.config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise SetupError(f"vision_feature_select_strategy {strategy!r} of {model.model_id} is not known here")
    tokens = patches + int(strategy == "full")
    selected = model.config.get("vision_feature_layer", -2)
    if not isinstance(selected, int):
        raise SetupError(f"{model.model_id} joins several layers of its tower: images are planned with one")
    names = ("linear_1", "linear_2")
    projector = replace(
        _projector("model.multi_modal_projector", names, None, hidden, text),
        linears=(linear("linear_1", "up", hidden, text, True), linear("linear_2", "down", text, text, True)),
        mlp=MlpSpec(kind="plain", intermediate_size=text, activation="gelu"),
    )
    layer = _clip_layer(field, "model.vision_tower.encoder.layers")
    return Tower(
        model=_model(model, hidden, (layer,), (0,) * field["num_hidden_layers"]),
        grid=grid,
        patches=patches + 1,
        tokens=tokens,
        marks=1,
        pixels=3 * field["image_size"] ** 2,
        projectors=(Projector(layer=projector, tokens=tokens),),
        keeps_states=True,
    )


_CLIP = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu",
}  # fmt: skip
"""`LlavaConfig`'s own defaults of its tower."""


def _gemma3(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """Gemma 3: SigLIP at one fixed size, its patches averaged to 256 tokens (pan and scan off)."""
    field = {**_SIGLIP, **given}
    grid = (field["image_size"] // field["patch_size"],) * 2
    hidden = field["hidden_size"]
    tokens = int(model.config.get("mm_tokens_per_image", 256))
    projector = LayerSpec(
        kind="projector",
        linears=(linear("mm_input_projection_weight", "other", hidden, model.hidden_size, module="parameter"),),
        norms=(NormSpec(name="mm_soft_emb_norm", kind="rms", size=hidden),),
        attention=None,
        mlp=None,
        path="model.multi_modal_projector",
    )
    layer = _clip_layer(field, "model.vision_tower.encoder.layers")
    trunk = _model(model, hidden, (layer,), (0,) * field["num_hidden_layers"])
    last = NormSpec(name="post_layernorm", kind="layer", size=hidden, bias=True)
    return Tower(
        model=replace(trunk, outer_norms=(last,)),
        pooled=True,
        grid=grid,
        patches=grid[0] * grid[1],
        tokens=tokens,
        marks=4,
        pixels=3 * field["image_size"] ** 2,
        projectors=(Projector(layer=projector, tokens=tokens),),
    )


_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""`SiglipVisionConfig`'s defaults."""


def _clip_layer(field: Mapping[str, Any], path: str) -> LayerSpec:
    """A layer of CLIP or SigLIP."""
    hidden, inner = field["hidden_size"], field["intermediate_size"]
    roles: tuple[tuple[str, Role], ...] = (("k", "k"), ("v", "v"), ("q", "q"), ("out", "o"))
    return LayerSpec(
        kind="vision",
        linears=(
            *(linear(f"self_attn.{name}_proj", role, hidden, hidden, True) for name, role in roles),
            *_mlp(("mlp.fc1", "mlp.fc2"), ("up", "down"), hidden, inner),
        ),
        norms=tuple(
            NormSpec(name=name, kind="layer", size=hidden, bias=True) for name in ("layer_norm1", "layer_norm2")
        ),
        attention=_attention(field["num_attention_heads"], hidden, rotary=False),
        mlp=MlpSpec(kind="plain", intermediate_size=inner, activation=field["hidden_act"]),
        path=path,
    )


def _mlp(names: tuple[str, ...], roles: tuple[Role, ...], hidden: int, inner: int) -> tuple[LinearSpec, ...]:
    ways = {"down": (inner, hidden)}
    return tuple(
        linear(name, role, *ways.get(role, (hidden, inner)), True) for name, role in zip(names, roles, strict=True)
    )


def _attention(heads: int, hidden: int, *, rotary: bool) -> AttentionSpec:
    size = hidden // heads
    return AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=size, value_head_dim=size, rotary=rotary)


def _projector(path: str, names: tuple[str, str], norm: NormSpec | None, width: int, out: int) -> LayerSpec:
    """Two matrices around a GELU, as wide as what comes in."""
    return LayerSpec(
        kind="projector",
        linears=(linear(names[0], "up", width, width, True), linear(names[1], "down", width, out, True)),
        norms=() if norm is None else (norm,),
        attention=None,
        mlp=MlpSpec(kind="plain", intermediate_size=width, activation="gelu"),
        path=path,
    )


def _model(trunk: ModelSpec, hidden: int, layers: tuple[LayerSpec, ...], order: tuple[int, ...]) -> ModelSpec:
    return ModelSpec(
        model_id=f"{trunk.model_id} (tower)",
        model_type=f"{trunk.model_type}_vision",
        built_class=trunk.built_class,
        hidden_size=hidden,
        vocab_size=0,
        max_position_embeddings=None,
        layer_kinds=layers,
        layer_order=order,
        embeddings=(),
        head=None,
        tied=False,
        attentions=trunk.attentions,
    )


_MAKERS: Mapping[str, Callable[[ModelSpec, Mapping[str, Any], int, int], Tower]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "llava": _llava,
    "gemma3": _gemma3,
}
SEEING = tuple(_MAKERS)
"""Model types whose pictures are planned."""
