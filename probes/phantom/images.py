"""Processors of vision-language models that this machine lacks: transformers' own classes, made from the model's
configuration. A picture becomes as many patches and tokens as their code makes of its size; its colours do not matter.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from planner.models.vision_encoders.mobilenet import SIDE
from planner.models.vision_encoders.tiles import LONGEST_TILES
from probes.phantom.cuda import Refused


class _Kind(NamedTuple):
    """How one class of processors shows pictures.

    Attributes:
        picture: what stands for one in a conversation.
        tokens: its tokens, by the name that the processor reads them under: the text, and where the configuration has
            its number.
        marks: further tokens that the processor puts around or between those, by the name that it reads them under, as
            (name, token): their numbers stand in no configuration.
        sizes: of its image processor, from the configuration.
        arguments: of its processor, from the configuration.
        video_processor: its class, where it takes videos too. transformers reads them with torchvision; without that
            an empty one stands in, which nobody asks as long as there are none.
        has_audio: whether it takes sound too: an empty extractor of its features stands in.
    """

    sizes: Callable[[Any], dict[str, Any]]
    picture: str = "<image>"
    tokens: Mapping[str, tuple[str, str]] = MappingProxyType({"image_token": ("<image>", "image_token_id")})
    arguments: Callable[[Any], dict[str, Any]] = lambda config: {}
    video_processor: str = ""
    marks: tuple[tuple[str, str], ...] = ()
    has_audio: bool = False


def _square(config: Any) -> dict[str, int]:
    return {"height": config.vision_config.image_size, "width": config.vision_config.image_size}


def _qwen(video_processor: str, fewest_pixels: int, most_pixels: int) -> _Kind:
    """A family of Qwen's; the pixels as in its published preprocessor_config.json."""
    return _Kind(
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
            "size": {"shortest_edge": fewest_pixels, "longest_edge": most_pixels},
        },
        video_processor=video_processor,
    )


def _idefics(video_processor: str = "") -> _Kind:
    """Idefics 3 and SmolVLM; the longer side as in their published preprocessor_config.json."""
    return _Kind(
        sizes=lambda config: {
            "size": {"longest_edge": LONGEST_TILES * config.vision_config.image_size},
            "max_image_size": {"longest_edge": config.vision_config.image_size},
        },
        arguments=lambda config: {
            "image_seq_len": (config.vision_config.image_size // config.vision_config.patch_size) ** 2
            // config.scale_factor**2
        },
        video_processor=video_processor,
    )


PICTURE = "PICTURE"
"""In a stand-in's template: where the family's own words for a picture go."""
KINDS = {
    "LlavaProcessor": _Kind(
        picture="<image>\n",
        sizes=lambda config: {"size": {"shortest_edge": config.vision_config.image_size}, "crop_size": _square(config)},
        arguments=lambda config: {
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's own, which stands for the whole picture
        },
    ),
    "Gemma3Processor": _Kind(
        picture="<start_of_image>",
        tokens={
            "image_token": ("<image_soft_token>", "image_token_id"),
            "boi_token": ("<start_of_image>", "boi_token_index"),
            "eoi_token": ("<end_of_image>", "eoi_token_index"),
        },
        sizes=lambda config: {"size": _square(config)},
        arguments=lambda config: {"image_seq_length": config.mm_tokens_per_image},
    ),
    "Gemma3nProcessor": _Kind(
        picture="<image_soft_token>",
        tokens={
            "image_token": ("<image_soft_token>", "image_token_id"),
            "boi_token": ("<start_of_image>", "boi_token_id"),
            "eoi_token": ("<end_of_image>", "eoi_token_id"),
            "audio_token": ("<audio_soft_token>", "audio_token_id"),
            "boa_token": ("<start_of_audio>", "boa_token_id"),
            "eoa_token": ("<end_of_audio>", "eoa_token_id"),
        },
        sizes=lambda config: {"size": {"height": SIDE, "width": SIDE}},
        arguments=lambda config: {"image_seq_length": config.vision_soft_tokens_per_image},
        has_audio=True,
    ),
    "Gemma4Processor": _Kind(
        picture="<|image|>",
        tokens={
            "image_token": ("<|image|>", "image_token_id"),
            "boi_token": ("<|image>", "boi_token_id"),
            "eoi_token": ("<image|>", "eoi_token_id"),
        },
        sizes=lambda config: {
            "patch_size": config.vision_config.patch_size,
            "max_soft_tokens": config.vision_config.default_output_length,
            "pooling_kernel_size": config.vision_config.pooling_kernel_size,
        },
        arguments=lambda config: {"image_seq_length": config.vision_config.default_output_length},
        video_processor="Gemma4VideoProcessor",
        marks=(("audio_token", "<|audio|>"), ("boa_token", "<|audio>"), ("eoa_token", "<audio|>")),
        has_audio=True,
    ),
    "Idefics3Processor": _idefics(),
    "SmolVLMProcessor": _idefics("SmolVLMVideoProcessor"),
    "InternVLProcessor": _Kind(
        picture="<IMG_CONTEXT>\n",
        tokens={"context_image_token": ("<IMG_CONTEXT>", "image_token_id")},
        sizes=lambda config: {
            "size": {"height": config.vision_config.image_size[0], "width": config.vision_config.image_size[1]}
        },
        arguments=lambda config: {"image_seq_length": config.image_seq_length},
        video_processor="InternVLVideoProcessor",
        marks=(("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")),
    ),
    "PixtralProcessor": _Kind(
        picture="[IMG]",
        tokens={"image_token": ("[IMG]", "image_token_id")},
        sizes=lambda config: {
            "size": {"longest_edge": config.vision_config.image_size},
            "patch_size": {"height": config.vision_config.patch_size, "width": config.vision_config.patch_size},
        },
        arguments=lambda config: {
            "patch_size": config.vision_config.patch_size,
            "spatial_merge_size": config.spatial_merge_size,
        },
        marks=(("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")),
    ),
    "MllamaProcessor": _Kind(
        picture="<|image|>",
        tokens={"image_token": ("<|image|>", "image_token_id")},
        sizes=lambda config: {"size": _square(config), "max_image_tiles": config.vision_config.max_num_tiles},
    ),
    **dict.fromkeys(
        ("Qwen2VLProcessor", "Qwen2_5_VLProcessor"), _qwen("Qwen2VLVideoProcessor", 56 * 56, 16384 * 28 * 28)
    ),
    "Qwen3VLProcessor": _qwen("Qwen3VLVideoProcessor", 256 * 256, 4096 * 4096),
    "PaliGemmaProcessor": _Kind(
        sizes=lambda config: {
            "size": _square(config),
            "image_seq_length": (config.vision_config.image_size // config.vision_config.patch_size) ** 2,
        },
    ),
}


def processor_for(name: str, config: Any, tokenizer: Callable[[dict[int, str]], Any]) -> Any:
    """The processor of the vision-language model `name`.

    Args:
        tokenizer: makes one that has these tokens beside its own.

    Raises:
        Refused: of a family that is not known here.
    """
    import transformers
    from transformers.models.auto import image_processing_auto, processing_auto

    processors, by_type = processing_auto.PROCESSOR_MAPPING_NAMES, image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    processor = processors.get(config.model_type, "")
    # a type that has no image processor has that of another with its processor (Qwen3-VL's mixture)
    alike = (other for other in (config.model_type, *processors) if processors.get(other) == processor)
    images = next((name for other in alike if (name := by_type.get(other, {}).get("pil"))), "")
    kind = KINDS.get(processor)
    refused = Refused(
        f"{name}: its processor is not on this machine, and what {config.model_type} makes of a picture is not known "
        f"here ({', '.join(KINDS)} are)"
    )
    if kind is None or not images:
        raise refused
    try:
        sizes, arguments = kind.sizes(config), kind.arguments(config)
        tokens = {getattr(config, field): token for token, field in kind.tokens.values()}
    except AttributeError as error:  # a type that shares the class, whose configuration has other fields
        raise refused from error
    text = tokenizer(tokens)
    text.add_tokens([token for _, token in kind.marks], special_tokens=True)
    for attribute, token in (*((name, token) for name, (token, _) in kind.tokens.items()), *kind.marks):
        setattr(text, attribute, token)
        setattr(text, f"{attribute}_id", text.convert_tokens_to_ids(token))
    text.chat_template = text.chat_template.replace(PICTURE, kind.picture)
    image_class = image_processing_auto.get_image_processor_class_from_name(images)
    parts = {"image_processor": image_class(**sizes), "tokenizer": text}
    cls = _class(processing_auto, processor)
    arguments = {"chat_template": text.chat_template, **arguments}
    if not kind.video_processor and not kind.has_audio:
        return cls(**parts, **arguments)
    nothing = SimpleNamespace(model_input_names=[])
    if kind.video_processor:
        seen = find_spec("torchvision") is not None
        parts["video_processor"] = getattr(transformers, kind.video_processor)() if seen else nothing
    if kind.has_audio:
        parts["feature_extractor"] = nothing
    with mock.patch.object(cls, "check_argument_for_proper_class", return_value=None):
        return cls(**parts, **arguments)


def _class(auto: Any, name: str) -> Any:
    """A class of processors; of a module that reads torchvision (Pixtral's) also where that is not here: nothing of it
    is called as long as the image processor is PIL's."""
    cls = auto.processor_class_from_name(name)
    if find_spec("torchvision") is not None or cls.__module__.startswith("transformers.models."):
        return cls
    parts = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    with mock.patch.dict(sys.modules, {f"torchvision{part}": mock.MagicMock() for part in parts}):
        family = name.removesuffix("Processor").lower()
        return getattr(importlib.import_module(f"transformers.models.{family}.processing_{family}"), name)
