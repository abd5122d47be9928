"""What makes tokens of pictures: the vision encoder of a model as a `ModelSpec` of its own, its projector, and how many
patches and tokens a picture of a given size becomes.

Text-only plans need none of it: there an encoder is weights alone (`ModelSpec.idle_layers`). Facts by the class
of the processor, read in transformers 5.23's modeling, configuration and image processing files.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.core.errors import SetupError
from planner.core.shipped import by_model_type
from planner.models.spec import ModelSpec
from planner.options.images import Images

if TYPE_CHECKING:
    from planner.models.vision_encoders.encoder import Encoder  # late: text alone needs none of them

MAKERS: Mapping[str, str] = {
    "Qwen2VLProcessor": "qwen.encoder",
    "Qwen2_5_VLProcessor": "qwen.encoder",
    "Qwen3VLProcessor": "qwen.encoder",
    "LlavaProcessor": "siglip.llava",
    "Gemma3Processor": "siglip.gemma3",
    "Gemma3nProcessor": "mobilenet.encoder",
    "Gemma4Processor": "gemma4.encoder",
    "PaliGemmaProcessor": "siglip.paligemma",
    "PixtralProcessor": "pixtral.encoder",
    "MllamaProcessor": "mllama.encoder",
    "Idefics3Processor": "tiles.idefics3",
    "SmolVLMProcessor": "tiles.idefics3",
    "InternVLProcessor": "tiles.internvl",
}
"""Class that cuts pictures -> module of `planner.models.vision_encoders`, and the function that makes the encoder
behind it: of all types that have its matrices in the same place (`python -m tools.build_types`)."""
_NO_FIELDS = ("default_output_length", "projection_dim", "model_args")
"""What is asked of an encoder's configuration though its class declares no such field."""
SEEING = tuple(by_model_type("processor"))
"""Model types whose pictures are planned."""
MODALITIES = frozenset({"vision_config", "audio_config"})
"""Keys of a configuration that say of a model that it takes more than text."""


def with_vision(model: ModelSpec) -> ModelSpec:
    """The model as the class that sees builds it, where another one is planned for text."""
    built = by_model_type("seeing_class").get(model.model_type, model.built_class)
    if built == model.built_class or "vision_config" not in model.config:
        return model
    return model.once("vision encoder", lambda of: _seeing(of, built))


def _seeing(model: ModelSpec, built: str) -> ModelSpec:
    """With its encoder idle, and the text's layers one name deeper, those that look at pictures among them."""
    from planner.models.vision_encoders import mllama
    from planner.models.vision_encoders.encoder import idle

    encoder = _encoder(model, 32, 32)
    parts = [*encoder.model.layer_counts, *((projector.layer, projector.num) for projector in encoder.projectors)]
    model = mllama.with_cross_attention(model) if encoder.looked_at else model
    return replace(
        model,
        built_class=built,
        tied=bool(model.config.get("tie_word_embeddings", False)),
        layer_kinds=tuple(replace(layer, path="model.language_model.layers") for layer in model.layer_kinds),
        idle_layers=tuple((idle(layer), num) for layer, num in parts),
        num_idle_other_params=encoder.num_other_params,
    )


def encoder_of(model: ModelSpec, images: Images) -> "Encoder":
    """The encoder of a model for pictures of this size.

    Raises:
        SetupError: a text model, or whose vision encoder is not known here.
    """
    width, height = images.width, images.height
    return model.once(("encoder", width, height), lambda of: _encoder(of, width, height))


def _encoder(model: ModelSpec, width: int, height: int) -> "Encoder":
    vision = model.config.get("vision_config") or {}
    if model.model_type not in SEEING:
        reason = f"what {model.model_type} makes of a picture is not known here ({', '.join(SEEING)} are planned)"
        raise SetupError(
            f"images are not planned for {model.model_id}: {reason if vision else 'it takes no images'}",
            hint="leave the images out: text alone is planned",
        )
    fields = by_model_type("vision_config")[model.model_type]
    whole = {} if vision else by_model_type("whole_vision_config").get(model.model_type, {})
    given = {name: value for name, value in vision.items() if name in fields or name in _NO_FIELDS}
    processor = by_model_type("processor")[model.model_type]
    return made(processor, model, {**fields, **whole, **given}, width, height)


def made(processor: str, model: ModelSpec, fields: Mapping[str, Any], width: int, height: int) -> "Encoder":
    """The encoder behind a processor, of its configuration's fields."""
    module, _, name = MAKERS[processor].partition(".")
    encoder: Encoder = getattr(import_module(f"planner.models.vision_encoders.{module}"), name)(
        model, fields, width, height
    )
    return encoder


def image_tokens(model: ModelSpec, images: Images) -> int:
    """Tokens of a sequence that the pictures of one sample take."""
    return images.num * encoder_of(model, images).text_tokens
