"""Tokens x tokens matrices: what eager attention and SDPA's math kernel keep and hold per score."""

from typing import NamedTuple

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.traits import Traits


class ScoreBytes(NamedTuple):
    """Bytes per score (query, key and head): kept for the backward, held beyond that at the largest moment of the
    forward and of the backward."""

    kept: int = 0
    forward: int = 0
    backward: int = 0


def eager_scores(
    dtypes: DtypePolicy, traits: Traits, qkv_dtype: str, *, softcap: bool = False, sinks: bool = False
) -> ScoreBytes:
    """Attention in single operations: product, mask, softmax in fp32, cast, dropout, product; some classes leave the
    softmax in its input's type, as do attention sinks, which add a column (gpt-oss).

    The softmax is kept, and so is what meets the values: a cast copy of it, or with dropout the dropped copy beside a
    mask of one byte. A soft cap keeps its tanh. The backward's largest moment is the gradient of the values' product
    beside all that, or the softmax's with its output, gradient, the product of both, and result.

    Source: transformers 5.23 `eager_attention_forward`; PyTorch autocast's fp32 list; SoftMax.cu
    `softmax_backward_cuda_out`.
    """
    value, dropout = SIZE_BYTES[dtypes.autocast or qkv_dtype], traits.attention_dropout
    plain = max(value, SIZE_BYTES[dtypes.table]) if sinks else value
    softmax = plain if sinks or (traits.plain_softmax and not dtypes.autocast) else 4
    copy = value if softmax != value or dropout else 0
    kept = softmax + copy + int(dropout)
    forward = 3 * softmax if sinks else 2 * softmax + (value if dtypes.table != "fp32" and softmax != value else 0)
    backward = max(kept + value, 4 * softmax) - kept
    return ScoreBytes(kept + (value if softcap else 0), forward, backward)


def mask_bytes(kernel: str, dtypes: DtypePolicy, *, masked: bool, adds: bool = False) -> int:
    """Bytes per pair of positions of the mask that all layers of one kind share: eager attention adds one in the
    model's type, SDPA gets a boolean one where it gets one at all, but of a class that `adds` its own.

    Source: transformers 5.23 `masking_utils.py` `eager_mask`, `sdpa_mask`.
    Shapes: [seqs, 1, tokens, keys].
    """
    if kernel == "eager" or (adds and masked):
        return SIZE_BYTES[dtypes.table]
    return int(masked and kernel in ("efficient", "math"))


def math_scores(traits: Traits) -> ScoreBytes:
    """SDPA's math kernel: everything in fp32, the softmax kept, with dropout also the dropped copy and a mask.

    Source: PyTorch 2.13 `_scaled_dot_product_attention_math` (`attention.cpp`).
    """
    kept = 9 if traits.attention_dropout else 4
    return ScoreBytes(kept, 8, max(kept + 4, 16 + int(traits.attention_dropout)) - kept)
