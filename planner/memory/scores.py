"""Tokens x tokens matrices: what eager attention and SDPA's math kernel keep and hold per score."""

from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.traits import Traits
from planner.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBytes:
    """Bytes per score (query, key and head): kept for the backward, held beyond that at the largest moment of the
    forward and of the backward."""

    kept: int
    forward: int
    backward: int
    handed_on: int = 0
    """Of the last layer's, where it was not kept: alive in the forward too."""


def eager_scores(
    flow: Flow, traits: Traits, qkv_dtype: str, *, softcap: bool = False, sinks: bool = False
) -> ScoreBytes:
    """Attention in single operations: product, mask, softmax, cast, dropout, product.

    The softmax is fp32 where the class asks for it or autocast does, and kept; so is what meets the values: a cast copy
    of it, or with dropout the dropped copy beside a mask of one byte. A soft cap keeps its tanh. The backward's largest
    moment is the gradient of the values' product beside all that, the dropout's, the cast's, or the softmax's with its
    output, gradient, the product of both, and result.

    BLOOM, GPT-J and GPT-Neo cast their probabilities back and hand them on: in fp32 where
    LayerNorm's queries are that of a quantized base.

    Source: transformers 5.23 `eager_attention_forward` of each class, `GPTJAttention._attn`, `BloomAttention`,
    `T5Attention`; PyTorch autocast's fp32 list; SoftMax.cu `softmax_backward_cuda_out`.
    """
    value = SIZE_BYTES[flow.autocast or qkv_dtype]
    if sinks:
        return _with_sinks(value, flow, qkv_dtype)
    score = 4 if traits.fp32_scores and not flow.autocast else value
    softmax = score if traits.plain_softmax and not flow.autocast else 4
    dropout = traits.attention_dropout
    copy = value if softmax != value or dropout else 0
    kept = softmax + copy + int(dropout)
    moments = [kept + value, 4 * softmax]
    if dropout:
        moments.append(softmax + 1 + 2 * value)
    if softmax != value:
        moments.append(2 * softmax + value)
    # the scores, their fp32 copy and the softmax; without a cast the scores and the masked or normalised ones
    forward = score + softmax + (softmax if softmax != score else 0)
    if traits.alibi_sum or traits.hands_on_weights:
        # the sum with the mask; where an fp32 mask makes that fp32, the fp32 copy falls away and the bytes are the same
        forward += score
    elif flow.table == "fp32":  # as is the mask's, and with it their sum
        forward = 2 * softmax
    return ScoreBytes(
        kept=kept + (score if softcap else 0),
        forward=forward,
        backward=max(moments) - kept,
        handed_on=SIZE_BYTES[qkv_dtype] if traits.hands_on_cast else softmax if traits.hands_on_weights else 0,
    )


def _with_sinks(value: int, flow: Flow, qkv_dtype: str) -> ScoreBytes:
    """Over one column more, in the type of scores and mask (autocast leaves a softmax that names its type alone): their
    sum, the same less its maximum, the softmax, and that cast to the values' type; in the backward the softmax's
    output, gradient, the product of both, and result."""
    wide = max(value, SIZE_BYTES[flow.table])
    kept = value if wide == value else wide + value
    cast = SIZE_BYTES[qkv_dtype] if SIZE_BYTES[qkv_dtype] < wide else 0
    return ScoreBytes(kept=kept, forward=3 * wide + cast, backward=max(3 * wide + cast, 4 * wide) - kept)


def mask_bytes(kernel: str, flow: Flow, *, masked: bool, adds: bool = False) -> int:
    """Bytes per pair of positions of the mask that all layers of one kind share: eager attention adds one in the
    model's type, SDPA gets a boolean one where it gets one at all, but of a class that `adds` its own.

    Source: transformers 5.23 `masking_utils.py` `eager_mask`, `sdpa_mask`.
    Shapes: [seqs, 1, tokens, keys].
    """
    if kernel == "eager" or (adds and masked):
        return SIZE_BYTES[flow.table]
    return int(masked and kernel in ("efficient", "math"))


def math_scores(traits: Traits) -> ScoreBytes:
    """SDPA's math kernel: everything in fp32, the softmax kept, with dropout also the dropped copy and a mask.

    Source: PyTorch 2.13 `_scaled_dot_product_attention_math` (`attention.cpp`).
    """
    kept = 9 if traits.attention_dropout else 4
    moments = [kept + 4, 16, 17 if traits.attention_dropout else 0]
    return ScoreBytes(kept=kept, forward=8, backward=max(moments) - kept)
