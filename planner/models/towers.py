"""What makes tokens of pictures: the vision tower of a model as a `ModelSpec` of its own, its projector, and how many
patches and tokens a picture of a given size becomes.

Text-only plans need none of it: there a tower is weights alone (`ModelSpec.idle_layers`). Facts by `model_type`, read
in transformers 5.23's modeling, configuration and image processing files.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.choices.images import Images
from planner.errors import SetupError
from planner.models.eyes import gemma4, mllama, mobilenet, pixtral, qwen, siglip, tiles
from planner.models.eyes.tower import Tower, idle
from planner.models.spec import ModelSpec

_MAKERS: Mapping[str, Callable[[ModelSpec, Mapping[str, Any], int, int], Tower]] = {
    "qwen2_vl": qwen.tower,
    "qwen2_5_vl": qwen.tower,
    "qwen3_vl": qwen.tower,
    "qwen3_vl_moe": qwen.tower,
    "qwen3_5": qwen.tower,
    "qwen3_5_moe": qwen.tower,
    "llava": siglip.llava,
    "gemma3": siglip.gemma3,
    "gemma3n": mobilenet.tower,
    "gemma4": gemma4.tower,
    "paligemma": siglip.paligemma,
    "mistral3": pixtral.tower,
    "mllama": mllama.tower,
    "idefics3": tiles.idefics3,
    "smolvlm": tiles.idefics3,
    "internvl": tiles.internvl,
}
SEEING = tuple(_MAKERS)
"""Model types whose pictures are planned."""


_EYES_APART = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "mllama": "MllamaForConditionalGeneration",
}
"""Types whose causal class has no eyes, with the class that has them."""


def with_eyes(model: ModelSpec) -> ModelSpec:
    """The model as the class that sees builds it, where another one is planned for text."""
    built = _EYES_APART.get(model.model_type, model.built_class)
    if built == model.built_class or "vision_config" not in model.config:
        return model
    return model.once("eyes", lambda of: _seeing(of, built))


def _seeing(model: ModelSpec, built: str) -> ModelSpec:
    """With its tower idle, and the text's layers one name deeper, those that look at pictures among them."""
    tower = _tower(model, 32, 32)
    parts = [*tower.model.layer_counts, *((one.layer, one.num) for one in tower.projectors)]
    model = mllama.looking(model) if model.model_type == "mllama" else model
    return replace(
        model,
        built_class=built,
        tied=bool(model.config.get("tie_word_embeddings", False)),
        layer_kinds=tuple(replace(one, path="model.language_model.layers") for one in model.layer_kinds),
        idle_layers=tuple((idle(layer), num) for layer, num in parts),
        num_idle_other_params=tower.num_other_params,
    )


def tower_of(model: ModelSpec, images: Images) -> Tower:
    """The tower of a model for pictures of this size.

    Raises:
        SetupError: a model without eyes, or whose eyes are not known here.
    """
    width, height = images.width, images.height
    return model.once(("tower", width, height), lambda of: _tower(of, width, height))


def _tower(model: ModelSpec, width: int, height: int) -> Tower:
    make = _MAKERS.get(model.model_type)
    vision = model.config.get("vision_config")
    if make is None:
        known = f"what {model.model_type} makes of a picture is not known here ({', '.join(_MAKERS)} are planned)"
        raise SetupError(
            f"images are not planned for {model.model_id}: {known if vision else 'it has no eyes'}",
            hint="leave --images-per-sample and --image-size out: text alone is planned",
        )
    return make(model, vision or {}, width, height)


def image_tokens(model: ModelSpec, images: Images) -> int:
    """Tokens of a sequence that the pictures of one sample take."""
    return images.num * tower_of(model, images).text_tokens
