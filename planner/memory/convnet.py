"""What a tower of convolutions keeps for its backward, and the largest moments of its forward and backward.

timm's RMS norm over channels is made of plain operations, each of which keeps its operands: under autocast its square
is fp32, and so is everything behind it until the next convolution. Its attention gives every head the same key without
saying so (`enable_gqa`), which no fused kernel of PyTorch takes: the math kernel keeps rows x columns in fp32.
transformers' class around timm never hands it gradient checkpointing, so that all of it stays.

Source: timm 1.0.31 layers/fast_norm.py rms_norm2d, layers/attention2d.py MultiQueryAttention2d, models/mobilenetv5.py;
PyTorch 2.13 derivatives.yaml, attention.cpp `_scaled_dot_product_attention_math`.
Of a single picture it is 164 MiB too much: one key for all heads is then a view.
Not counted: what cuDNN's convolutions take while they run, which depends on the algorithm it chooses.
Measured: within 0.1 % of timm's own tower on meta (tests/probes/test_gemma3n.py).
"""

from functools import cache

from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.models.eyes.mobilenet import FUSED, FUSION, OUT_SIDE, STEM_CONV, Block, Conv, Queries, blocks
from planner.records import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvnetBytes:
    """Bytes of one picture: what is kept, the backward's largest moment beyond that, and `idle`, the largest moment of
    a forward that keeps nothing."""

    kept: int
    backward: int
    idle: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Bytes of a number: as a convolution takes and gives it, as a norm gives it; `casts`: whether those differ."""

    narrow: int
    wide: int

    @property
    def casts(self) -> bool:
        return self.narrow != self.wide


def convnet_bytes(flow: Flow) -> ConvnetBytes:
    """What the tower of one picture takes in these types; autocast's copies of weights are counted elsewhere."""
    narrow = SIZE_BYTES[flow.autocast or flow.table]
    return _convnet_bytes(narrow, FP32_BYTES if flow.autocast else narrow)


@cache
def _convnet_bytes(narrow: int, wide: int) -> ConvnetBytes:
    sizes = _Sizes(narrow=narrow, wide=wide)
    kept = _kept_by_conv(STEM_CONV, sizes)
    idle = _running(STEM_CONV, sizes, 0)
    for one in (*blocks(), FUSION):
        if isinstance(one, Block):
            kept += _kept_by_block(one, sizes)
            shortcut = sizes.wide * one.convs[0].inputs * one.convs[0].side ** 2
            idle = max(idle, *(_running(conv, sizes, shortcut) for conv in one.convs))
        else:
            kept += _kept_by_queries(one, sizes)
            idle = max(idle, _attending(one, sizes))
    fused = FUSION.convs[-1].out_elements
    last = FUSED * OUT_SIDE**2
    kept += wide * fused + wide * 2 * last  # the averages' input, the last norm's and what it made of it
    return ConvnetBytes(kept=kept, backward=3 * sizes.narrow * fused, idle=idle)


def _kept_by_norm(elements: int, sizes: _Sizes, channels: int) -> int:
    """Of so many numbers, as a convolution gave them: themselves, their fp32 copy, what it made of them, and a root for
    every pixel."""
    copy = FP32_BYTES * elements * sizes.casts
    return (sizes.narrow + sizes.wide) * elements + copy + sizes.wide * (elements // channels)


def _kept_by_conv(conv: Conv, sizes: _Sizes) -> int:
    """Its input, what its norm keeps, and where one follows what the GELU takes."""
    kept = sizes.narrow * conv.in_elements + _kept_by_norm(conv.out_elements, sizes, conv.outputs)
    return kept + sizes.wide * conv.out_elements * conv.active


def _kept_by_block(block: Block, sizes: _Sizes) -> int:
    scaled = sizes.wide * block.convs[-1].out_elements * block.scaled
    return sum(_kept_by_conv(one, sizes) for one in block.convs) + scaled


def _kept_by_queries(one: Queries, sizes: _Sizes) -> int:
    """Its input and what the norm made of it, the inputs of its convolutions, the math kernel's factors."""
    elements = one.channels * one.num_queries
    kept = sizes.wide * (2 * elements + one.num_queries)
    kept += sizes.narrow * elements * (3 if sizes.casts and one.down is None else 1)  # of queries, keys, values
    if one.down is not None:
        inputs = sizes.narrow * one.channels * one.num_keys
        kept += 2 * (_kept_by_conv(one.down, sizes) + inputs)
    heads, rows, columns = one.heads, one.num_queries, one.num_keys
    kept += FP32_BYTES * heads * (one.head_dim * (rows + 2 * columns) + rows * columns)
    return kept + sizes.narrow * (heads * one.head_dim * rows + elements)  # the output's matrix and its scale


def _running(conv: Conv, sizes: _Sizes, shortcut: int) -> int:
    """A convolution where nothing is kept: its input as it came, padded and cast, beside what it gives; or its norm."""
    came = sizes.wide * conv.inputs * conv.side**2
    padded = sizes.wide * conv.in_elements * conv.padded + sizes.narrow * conv.in_elements * sizes.casts
    out = sizes.narrow * conv.out_elements
    norm = conv.out_elements * max(sizes.narrow + 2 * sizes.wide, (sizes.narrow + 2 * FP32_BYTES) * sizes.casts)
    return shortcut + came + max(padded + out, norm)


def _attending(one: Queries, sizes: _Sizes) -> int:
    """Attention where nothing is kept: scores and probabilities, beside its input and the norm's output."""
    scores = FP32_BYTES * one.heads * one.num_queries * one.num_keys
    return 2 * scores + 2 * sizes.wide * one.channels * one.num_queries
