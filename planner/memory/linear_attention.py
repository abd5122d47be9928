"""Linear attention (gated delta rule): what transformers' own torch code and flash-linear-attention keep."""

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.models.spec import AttentionSpec

CHUNK = 64
"""Tokens of one chunk. Source: transformers 5.23 `torch_chunk_gated_delta_rule`."""


_DECAY = 22
"""Bytes per token and value head that the operations of the decay and beta keep, in fp32 and 16 bit."""


def linear_attention_saved(attention: AttentionSpec, dtypes: DtypePolicy, tokens: int, *, package: bool = False) -> int:
    """Bytes kept by one gated-delta-rule layer between its projections.

    Per token and value head of key size k and value size v, with keys repeated to the value heads: the convolution's
    input and output; fp32 copies of q, k (normalised), padded q, k, v, the weighted k; the chunk's 64-wide decay and
    attention rows; two triangular solutions; per chunk the fp32 state k x v and what its three products keep; the gated
    norm's product and gate. Under autocast every operand of a product is kept once more in 16 bit.

    With the `package`: the convolution's as before; queries and keys normalized, values as they are, all in 16 bit, and
    each chunk's 64-wide inverse; the gated norm is transformers'. The states are made again in the backward.

    Source: transformers 5.23 `models/qwen3_next/modeling_qwen3_next.py`, `torch_chunk_gated_delta_rule`; fla-core 0.6.0
    `ops/gated_delta_rule/chunk.py` ChunkGatedDeltaRuleFunction.
    Shapes: [tokens, heads, head_dim]; states [chunks, heads, head_dim, value_head_dim].
    Not counted: padding of short sequences to whole chunks; the gated norm's rows (it is one of the layer's norms).
    """
    heads = attention.num_heads
    keys, values = heads * attention.head_dim, heads * attention.value_head_dim
    size = SIZE_BYTES[dtypes.compute]
    conv = 2 * size * (2 * attention.num_kv_heads * attention.head_dim + values)
    states = heads * attention.head_dim * attention.value_head_dim // CHUNK
    casts = 8 if size < 4 else 0  # q and k copied up to fp32
    if package:
        normalized = 2 * attention.num_kv_heads * (size * attention.head_dim + 4)
        chunks = heads * (size * CHUNK + _DECAY)
        return tokens * (conv + normalized + size * values + chunks + (8 + size) * values)
    if dtypes.autocast:
        return tokens * (conv + (34 + casts) * keys + 8 * values + 14 * heads * CHUNK + 8 * states + 10 * values)
    return tokens * (conv + (24 + casts) * keys + 12 * values + 20 * heads * CHUNK + 4 * states + (8 + size) * values)
