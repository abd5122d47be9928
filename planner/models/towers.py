"""What makes tokens of pictures: the vision tower of a model as a `ModelSpec` of its own, its projector, and how many
patches and tokens a picture of a given size becomes.

Text-only plans need none of it: there a tower is weights alone (`ModelSpec.idle_layers`). Facts by `model_type`, read
in transformers 5.23's modeling, configuration and image processing files.
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.choices.images import Images
from planner.errors import SetupError
from planner.models.eyes import pixtral, qwen, siglip, tiles
from planner.models.eyes.tower import Tower
from planner.models.spec import ModelSpec

_MAKERS: Mapping[str, Callable[[ModelSpec, Mapping[str, Any], int, int], Tower]] = {
    "qwen2_vl": qwen.tower,
    "qwen2_5_vl": qwen.tower,
    "qwen3_vl": qwen.tower,
    "qwen3_vl_moe": qwen.tower,
    "llava": siglip.llava,
    "gemma3": siglip.gemma3,
    "mistral3": pixtral.tower,
    "idefics3": tiles.idefics3,
    "smolvlm": tiles.idefics3,
    "internvl": tiles.internvl,
}
SEEING = tuple(_MAKERS)
"""Model types whose pictures are planned."""


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
        known = f"what {model.model_type} makes of a picture is not known here ({', '.join(_MAKERS)} are)"
        raise SetupError(
            f"images are not planned for {model.model_id}: {known if vision else 'it has no eyes'}",
            hint="leave --images-per-sample and --image-size out: text alone is planned",
        )
    return make(model, vision or {}, width, height)


def image_tokens(model: ModelSpec, images: Images) -> int:
    """Tokens of a sequence that the pictures of one sample take."""
    return images.num * tower_of(model, images).text_tokens
