"""Processors of vision-language models that this machine lacks: transformers' own classes, made from the model's
configuration. A picture becomes as many patches and tokens as their code makes of its size; its colours do not matter.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from probes.phantom.cuda import Refused


class _Kind(NamedTuple):
    """How one family shows pictures.

    Attributes:
        picture: what stands for one in a conversation.
        tokens: its tokens, by the name that the processor reads them under: the text, and where the configuration has
            its number.
        sizes: of its image processor, from the configuration.
        arguments: of its processor, from the configuration.
        videos: it takes videos too, which transformers reads with torchvision.
    """

    picture: str
    tokens: dict[str, tuple[str, str]]
    sizes: Callable[[Any], dict[str, Any]]
    arguments: Callable[[Any], dict[str, Any]] = lambda config: {}
    videos: bool = False


def _square(config: Any) -> dict[str, int]:
    return {"height": config.vision_config.image_size, "width": config.vision_config.image_size}


_QWEN = _Kind(
    picture="<|vision_start|><|image_pad|><|vision_end|>",
    tokens={
        "image_token": ("<|image_pad|>", "image_token_id"),
        "video_token": ("<|video_pad|>", "video_token_id"),
        "vision_start_token": ("<|vision_start|>", "vision_start_token_id"),
        "vision_end_token": ("<|vision_end|>", "vision_end_token_id"),
    },
    sizes=lambda config: {
        "patch_size": config.vision_config.patch_size,
        "merge_size": config.vision_config.spatial_merge_size,
        "temporal_patch_size": config.vision_config.temporal_patch_size,
        "size": {"shortest_edge": 3136, "longest_edge": 12845056},  # pixels; preprocessor_config.json of both families
    },
    videos=True,
)
PICTURE = "PICTURE"
"""In a stand-in's template: where the family's own words for a picture go."""
KINDS = {
    "llava": _Kind(
        picture="<image>\n",
        tokens={"image_token": ("<image>", "image_token_id")},
        sizes=lambda config: {
            "size": {"shortest_edge": config.vision_config.image_size},
            "crop_size": _square(config),
        },
        arguments=lambda config: {
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's own, which stands for the whole picture
        },
    ),
    "gemma3": _Kind(
        picture="<start_of_image>",
        tokens={
            "image_token": ("<image_soft_token>", "image_token_id"),
            "boi_token": ("<start_of_image>", "boi_token_index"),
            "eoi_token": ("<end_of_image>", "eoi_token_index"),
        },
        sizes=lambda config: {"size": _square(config)},
        arguments=lambda config: {"image_seq_length": config.mm_tokens_per_image},
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
}


def processor_for(name: str, config: Any, tokenizer: Callable[[dict[int, str]], Any]) -> Any:
    """The processor of the vision-language model `name`.

    Args:
        tokenizer: makes one that has these tokens beside its own.

    Raises:
        Refused: of a family that is not known here, or one whose processor needs a package that is not installed.
    """
    kind = KINDS.get(config.model_type)
    if kind is None:
        raise Refused(
            f"{name}: its processor is not on this machine, and what {config.model_type} makes of a picture is not "
            f"known here ({', '.join(KINDS)} are)"
        )
    if kind.videos and find_spec("torchvision") is None:
        raise Refused(f"{name}: its processor takes videos too, for which transformers needs torchvision")
    from transformers.models.auto import image_processing_auto, processing_auto

    text = tokenizer({getattr(config, field): token for token, field in kind.tokens.values()})
    for attribute, (token, field) in kind.tokens.items():
        setattr(text, attribute, token)
        setattr(text, f"{attribute}_id", getattr(config, field))
    image_class = image_processing_auto.get_image_processor_class_from_name(
        image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]["pil"]
    )
    parts = {"image_processor": image_class(**kind.sizes(config)), "tokenizer": text}
    if kind.videos:
        from transformers import Qwen2VLVideoProcessor

        parts["video_processor"] = Qwen2VLVideoProcessor()
    text.chat_template = text.chat_template.replace(PICTURE, kind.picture)
    cls = processing_auto.processor_class_from_name(processing_auto.PROCESSOR_MAPPING_NAMES[config.model_type])
    return cls(**parts, **kind.arguments(config), chat_template=text.chat_template)
