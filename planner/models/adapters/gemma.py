"""Gemma 3 with its SigLIP encoder: `AutoModelForCausalLM` builds it whole, text tokens see the trunk alone."""

from dataclasses import replace

from planner.models.adapters import llama_like
from planner.models.adapters.fields import Fields
from planner.models.adapters.parts import layer_norm, linear, seeing_ahead
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.vision_encoders.encoder import idle
from planner.models.vision_encoders.siglip import siglip_layer

_TEXT = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "vocab_size": 262208,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 16,
}  # fmt: skip
"""Class defaults of transformers 5.23."""


def build(fields: Fields) -> ModelSpec:
    """The trunk of `gemma3_text` below `model.language_model`, the encoder and the projector idle."""
    text = fields.sub("text_config", _TEXT)
    trunk = llama_like.build(text, "gemma3_text", "model.language_model.layers")
    vision = fields.sub("vision_config", _SIGLIP)
    layers, other = _siglip(vision)
    width = vision.count("hidden_size")
    # The projector: one bare matrix and one norm.
    other += width * trunk.hidden_size + width
    return replace(
        trunk,
        layer_kinds=tuple(map(seeing_ahead, trunk.layer_kinds)),
        built_class="Gemma3ForConditionalGeneration",
        tied=fields.flag("tie_word_embeddings", True),
        idle_layers=layers,
        num_idle_other_params=other,
    )


def _siglip(vision: Fields) -> tuple[tuple[tuple[LayerSpec, int], ...], int]:
    """The layers of the encoder with their repeats, and its parameters outside linears and norms of layers."""
    width = vision.count("hidden_size")
    inner = vision.count("intermediate_size", kind="intermediate")
    num_layers = vision.count("num_hidden_layers", kind="layers")
    channels = vision.count("num_channels")
    patch = vision.count("patch_size")
    image = vision.count("image_size")
    layer = idle(siglip_layer(width, inner, "model.vision_tower.encoder.layers"))
    patches = (image // patch) ** 2
    other = width * channels * patch * patch + width  # the patch convolution
    other += patches * width  # position table
    other += 2 * width  # last layer norm
    if not vision.flag("vision_use_head", True):
        return ((layer, num_layers),), other
    # The pooling head: a probe, torch's multi-head attention (bare in_proj, a linear out_proj), a norm and an MLP.
    head = LayerSpec(
        kind="vision-head",
        linears=(linear("attention.out_proj", "other", width, width, True), *layer.linears[-2:]),
        norms=(layer_norm("layernorm", width),),
        num_other_params=width + 3 * width * width + 3 * width,
        path="model.vision_tower.head",
    )
    return ((layer, num_layers), (head, 1)), other
