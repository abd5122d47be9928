"""Gemma 3n's encoder, timm's MobileNet-V5: convolutions between norms, and attention in which all heads share their
keys.

Every picture becomes 768 x 768 pixels and 256 tokens. The architecture is fixed (`mobilenetv5_300m_enc`): no field of a
configuration changes it.

Source: timm 1.0.31 models/mobilenetv5.py `_gen_mobilenet_v5`, models/_efficientnet_blocks.py; transformers 5.23
models/gemma3n, models/timm_wrapper.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.core.errors import SetupError
from planner.models.families.parts import linear, norm
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.vision_encoders.encoder import Encoder, Projector, encoder_model

ARCHITECTURE = "mobilenetv5_300m_enc"
SIDE = 768
TOKENS = 256
FUSED = 2048
"""Channels of what joins the last two stages."""
OUT_SIDE = 16


NUM_PARAMS = 294_126_912
FLOPS = 871_482_949_632
"""Of one picture's forward: two for every multiplication of its convolutions and its attention."""


class PictureBytes(NamedTuple):
    """Bytes of one picture: what a trained encoder keeps, its backward's largest moment beyond that, and the largest
    moment of a forward that keeps nothing."""

    kept: int
    backward: int
    idle: int


PICTURE_BYTES = {
    (2, 2): PictureBytes(5_176_763_910, 28_311_552, 188_743_680),
    (2, 4): PictureBytes(8_448_682_886, 28_311_552, 321_495_552),
    (4, 4): PictureBytes(8_707_918_860, 56_623_104, 377_487_360),
}
"""By bytes of a number as a convolution takes it and as a norm gives it (fp32 under autocast).

Measured: timm's own encoder on meta tensors, within 0.1 % (tests/probes/test_gemma3n.py). Its attention gives every
head
the same key without saying so, which no fused kernel of PyTorch takes: the math kernel keeps rows x columns in fp32.
Not counted: what cuDNN's convolutions take while they run, which depends on the algorithm it chooses."""


def encoder(model: ModelSpec, field: Mapping[str, Any], width: int, height: int) -> Encoder:
    """Gemma 3n: an encoder without layers of transformers', and the embedder behind it."""
    architecture = field["architecture"]
    if architecture != ARCHITECTURE or field.get("model_args"):
        raise SetupError(f"images are not planned for {model.model_id}: its encoder {architecture} is not known here")
    return Encoder(
        model=encoder_model(model, FUSED, (), ()),
        grid=(OUT_SIDE, OUT_SIDE),
        patches=TOKENS,
        tokens=int(model.config.get("vision_soft_tokens_per_image", TOKENS)),
        marks=4,
        shape=(3, SIDE, SIDE),
        projectors=(Projector(layer=embedder(FUSED, model.hidden_size), tokens=TOKENS),),
        named_embeddings=False,
        checkpoints=False,
        convolves=True,
        num_other_params=NUM_PARAMS,
    )


def embedder(width: int, text: int) -> LayerSpec:
    """What brings rows of the encoder to the text's width (`Gemma3nMultimodalEmbedder`)."""
    return LayerSpec(
        kind="projector",
        linears=(linear("embedding_projection", "other", width, text),),
        norms=(norm("soft_embedding_norm", width), norm("embedding_post_projection_norm", text, weight=False)),
        path="model.embed_vision",
    )
