"""Gemma 4's vision and audio encoders: weights that a text token never meets.

Every projection is a `Gemma4ClippableLinear` that holds an nn.Linear called `linear`: PEFT's "all-linear" finds the
inner one, a target named "q_proj" would find the wrapper, which PEFT refuses.
"""

from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import linear, norm
from planner.models.spec import LayerSpec, LinearSpec
from planner.models.vision_encoders.encoder import idle
from planner.models.vision_encoders.gemma4 import vision_layer

_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "position_embedding_size": 10240,
}  # fmt: skip
_AUDIO = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "conv_kernel_size": 5,
    "output_proj_dims": 1536,
}  # fmt: skip
"""Class defaults of transformers 5.23."""

Encoder = tuple[list[tuple[LayerSpec, int]], int]


def _part(path: str, *linears: LinearSpec) -> tuple[LayerSpec, int]:
    """Matrices of an encoder that stand outside its layers."""
    return LayerSpec(kind="idle-part", linears=linears, path=path), 1


def vision_tower(given: Fields, text_width: int) -> Encoder:
    """The vision encoder and its embedder; the second value counts parameters outside its layers and matrices."""
    vision = Fields({**_VISION, **given.raw}, given.where)
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    layer = vision_layer(
        width,
        vision.count("intermediate_size", kind="intermediate"),
        vision.count("head_dim"),
        vision.count("num_attention_heads", kind="heads"),
        vision.count("num_key_value_heads", kind="heads"),
        bias=vision.flag("attention_bias", False),
    )
    positions = 2 * vision.count("position_embedding_size", kind="vocab") * width
    return [
        (idle(layer), vision.count("num_hidden_layers", kind="layers")),
        _part("model.vision_tower.patch_embedder", linear("input_proj", "other", 3 * patch * patch, width)),
        _part("model.embed_vision", linear("embedding_projection", "other", width, text_width)),
    ], positions


def audio_tower(given: Fields, text_width: int) -> Encoder:
    """The audio conformer and its embedder."""
    audio = Fields({**_AUDIO, **given.raw}, given.where)
    width = audio.count("hidden_size")
    num_heads = audio.count("num_attention_heads", kind="heads")
    audio.divides("num_attention_heads", num_heads, "hidden_size", width)
    output = audio.count("output_proj_dims")
    first, second = _channels(audio)
    # a per-dim scale, a depthwise convolution
    layer = _conformer_layer(width, width // num_heads + width * audio.count("conv_kernel_size"))
    convolutions = first * 9 + first + second * first * 9 + second  # two 3 x 3 convolutions with their norms
    return [
        (layer, audio.count("num_hidden_layers", kind="layers")),
        _part(
            "model.audio_tower.subsample_conv_projection",
            linear("input_proj_linear", "other", first // 4 * second, width),
        ),
        _part("model.audio_tower", linear("output_proj", "other", width, output, True)),
        _part("model.embed_audio", linear("embedding_projection", "other", output, text_width)),
    ], convolutions


_CONFORMER_NORMS = (
    "feed_forward1.pre_layer_norm",
    "feed_forward1.post_layer_norm",
    "feed_forward2.pre_layer_norm",
    "feed_forward2.post_layer_norm",
    "lconv1d.pre_layer_norm",
    "lconv1d.conv_norm",
    "norm_pre_attn",
    "norm_post_attn",
    "norm_out",
)


def _conformer_layer(width: int, num_other_params: int) -> LayerSpec:
    """Attention and a convolution between two MLPs."""
    return LayerSpec(
        kind="audio",
        linears=(
            *(
                linear(f"{block}.ffw_layer_{index}.linear", "other", size_in, size_out)
                for block in ("feed_forward1", "feed_forward2")
                for index, size_in, size_out in ((1, width, 4 * width), (2, 4 * width, width))
            ),
            *(
                linear(f"self_attn.{name}.linear", "other", width, width)
                for name in ("q_proj", "k_proj", "v_proj", "post")
            ),
            linear("self_attn.relative_k_proj", "other", width, width),
            linear("lconv1d.linear_start.linear", "other", width, 2 * width),
            linear("lconv1d.linear_end.linear", "other", width, width),
        ),
        norms=tuple(norm(name, width) for name in _CONFORMER_NORMS),
        num_other_params=num_other_params,
        path="model.audio_tower.layers",
    )


def _channels(audio: Fields) -> tuple[int, int]:
    channels = audio.raw.get("subsampling_conv_channels")
    if channels is None:
        return 128, 32
    pair = Fields(
        dict(enumerate(channels)) if isinstance(channels, list | tuple) and len(channels) == 2 else channels,
        f"{audio.where}: subsampling_conv_channels",
    )
    named = Fields({"first": pair.raw.get(0), "second": pair.raw.get(1)}, pair.where)
    return named.count("first"), named.count("second")
