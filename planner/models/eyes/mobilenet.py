"""Gemma 3n's tower, timm's MobileNet-V5: convolutions between norms, and attention in which all heads share their keys.

Every picture becomes 768 x 768 pixels and 256 tokens. The architecture is fixed (`mobilenetv5_300m_enc`): no field of a
configuration changes it.

Source: timm 1.0.31 models/mobilenetv5.py `_gen_mobilenet_v5`, models/_efficientnet_blocks.py; transformers 5.23
models/gemma3n, models/timm_wrapper.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.errors import SetupError
from planner.models.adapters.parts import linear, norm
from planner.models.eyes.tower import Projector, Tower, tower_model
from planner.models.spec import LayerSpec, ModelSpec
from planner.records import dataclass

ARCHITECTURE = "mobilenetv5_300m_enc"
SIDE = 768
TOKENS = 256
STEM = 64
FUSED = 2048
"""Channels of what joins the last two stages."""
OUT_SIDE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Conv:
    """A convolution and the RMS norm behind it, on squares of pixels.

    Attributes:
        inputs, outputs: channels.
        side: of what comes in, in pixels; `stride` divides it.
        depthwise: every channel by itself.
        bias: whether it adds one; active: whether a GELU follows the norm.
    """

    inputs: int
    outputs: int
    side: int
    kernel: int = 1
    stride: int = 1
    depthwise: bool = False
    bias: bool = False
    active: bool = False

    @property
    def out_side(self) -> int:
        """Of what goes out."""
        return self.side // self.stride

    @property
    def out_elements(self) -> int:
        """Numbers that go out."""
        return self.outputs * self.out_side**2

    @property
    def padded(self) -> bool:
        """Whether the input is padded in a copy of its own (`Conv2dSame`): the padding is the same on both sides only
        where nothing is left out."""
        return self.stride > 1

    @property
    def in_elements(self) -> int:
        """Numbers that the convolution takes, padding included."""
        side = (self.out_side - 1) * self.stride + self.kernel if self.padded else self.side
        return self.inputs * side**2

    @property
    def num_params(self) -> int:
        """Weights, the bias and the norm's."""
        weights = self.outputs * self.kernel**2 * (1 if self.depthwise else self.inputs)
        return weights + self.outputs * (self.bias + 1)

    @property
    def flops(self) -> int:
        """Of the forward."""
        return 2 * self.out_elements * self.kernel**2 * (1 if self.depthwise else self.inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Convolutions in a row with what stands around them.

    Attributes:
        convs: in order.
        added: whether the block's input is added to what comes out.
        scaled: whether a vector scales that before (`LayerScale2d`).
    """

    convs: tuple[Conv, ...]
    added: bool
    scaled: bool

    @property
    def num_params(self) -> int:
        """All of them."""
        return sum(one.num_params for one in self.convs) + self.convs[-1].outputs * self.scaled

    @property
    def flops(self) -> int:
        """Of the forward."""
        return sum(one.flops for one in self.convs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """Multi-query attention over pixels, added to its input: a norm, queries of every head, one key and one value of
    every pixel or, with `key_stride`, of every such square.

    Attributes:
        channels, side: of the input and the output.
        heads, head_dim: of the queries.
    """

    channels: int
    side: int
    heads: int
    head_dim: int
    key_stride: int

    @property
    def down(self) -> Conv | None:
        """What keys and values, each with one of its own, are made of; None: the input itself."""
        if self.key_stride == 1:
            return None
        return Conv(
            inputs=self.channels,
            outputs=self.channels,
            side=self.side,
            kernel=3,
            stride=self.key_stride,
            depthwise=True,
        )

    @property
    def num_queries(self) -> int:
        """Rows."""
        return self.side**2

    @property
    def num_keys(self) -> int:
        """Columns."""
        return (self.side // self.key_stride) ** 2

    @property
    def num_params(self) -> int:
        """Both ends' matrices, those of key and value, norms and the vector that scales the output."""
        wide, down = self.channels * self.heads * self.head_dim, self.down
        return 2 * wide + 2 * self.channels * self.head_dim + 2 * self.channels + (2 * down.num_params if down else 0)

    @property
    def flops(self) -> int:
        """Of the forward."""
        matrices = self.num_queries * self.heads * self.head_dim + self.num_keys * self.head_dim
        scores = 2 * self.num_queries * self.num_keys * self.heads * self.head_dim
        return 4 * (matrices * self.channels) + 2 * scores + (2 * self.down.flops if self.down else 0)


def _edge(inputs: int, outputs: int, side: int, stride: int) -> Block:
    """A whole convolution that widens fourfold, and a pointwise one back (`EdgeResidual`)."""
    wide = Conv(inputs=inputs, outputs=4 * inputs, side=side, kernel=3, stride=stride, active=True)
    back = Conv(inputs=4 * inputs, outputs=outputs, side=wide.out_side)
    return Block(convs=(wide, back), added=stride == 1, scaled=False)


def _inverted(inputs: int, outputs: int, side: int, start: int, middle: int, wider: int) -> Block:
    """Depthwise convolutions of kernels `start` and `middle` (0: none) around a pointwise one that widens; the middle
    one halves the side (`UniversalInvertedResidual`)."""
    convs, inner = [], wider * inputs
    if start:
        convs.append(Conv(inputs=inputs, outputs=inputs, side=side, kernel=start, depthwise=True))
    convs.append(Conv(inputs=inputs, outputs=inner, side=side, active=True))
    if middle:
        convs.append(Conv(inputs=inner, outputs=inner, side=side, kernel=middle, stride=2, depthwise=True, active=True))
    convs.append(Conv(inputs=inner, outputs=outputs, side=convs[-1].out_side))
    return Block(convs=tuple(convs), added=not middle, scaled=True)


def blocks() -> Iterator[Block | Queries]:
    """The stages in order, of one picture."""
    side = SIDE // 2
    yield _edge(STEM, 128, side, 2)
    for _ in range(2):
        yield _edge(128, 128, side // 2, 1)
    yield _inverted(128, 256, side // 2, 3, 5, 6)
    for start in (5, 3, 5, 3):
        yield _inverted(256, 256, side // 4, start, 0, 4)
    yield _inverted(256, 640, side // 4, 5, 5, 6)
    for _ in range(7):
        yield _inverted(640, 640, side // 8, 5, 0, 4)
    yield _inverted(640, 640, side // 8, 0, 0, 1)
    for _ in range(14):
        yield Queries(channels=640, side=side // 8, heads=12, head_dim=64, key_stride=2)
        yield _inverted(640, 640, side // 8, 0, 0, 2)
    yield _inverted(640, 1280, side // 8, 5, 5, 6)
    for _ in range(19):
        yield Queries(channels=1280, side=side // 16, heads=16, head_dim=96, key_stride=1)
        yield _inverted(1280, 1280, side // 16, 0, 0, 2)


STEM_CONV = Conv(inputs=3, outputs=STEM, side=SIDE, kernel=3, stride=2, bias=True, active=True)
FUSION = Block(
    convs=(
        Conv(inputs=640 + 1280, outputs=2 * (640 + 1280), side=SIDE // 16, active=True),
        Conv(inputs=2 * (640 + 1280), outputs=FUSED, side=SIDE // 16),
    ),
    added=False,
    scaled=False,
)
"""What joins the outputs of the last two stages, the last one's at the side of the other; behind it they are averaged
over squares and normed (`MobileNetV5MultiScaleFusionAdapter`)."""
NUM_PARAMS = STEM_CONV.num_params + sum(one.num_params for one in blocks()) + FUSION.num_params + FUSED
FLOPS = STEM_CONV.flops + sum(one.flops for one in blocks()) + FUSION.flops
"""Of one picture's forward."""


def tower(model: ModelSpec, given: Mapping[str, Any], width: int, height: int) -> Tower:
    """Gemma 3n: a tower without layers of transformers', and the embedder behind it."""
    architecture = given.get("architecture", ARCHITECTURE)
    if architecture != ARCHITECTURE or given.get("model_args"):
        raise SetupError(f"images are not planned for {model.model_id}: its tower {architecture} is not known here")
    return Tower(
        model=tower_model(model, FUSED, (), ()),
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
    """What brings rows of the tower to the text's width (`Gemma3nMultimodalEmbedder`)."""
    return LayerSpec(
        kind="projector",
        linears=(linear("embedding_projection", "other", width, text),),
        norms=(norm("soft_embedding_norm", width), norm("embedding_post_projection_norm", text, weight=False)),
        path="model.embed_vision",
    )
