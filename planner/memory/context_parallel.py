"""What attention over a sequence that is cut over several GPUs holds beside what it holds on one.

Two ways, by the engine: under FSDP2 every rank gathers the keys and values of all (PyTorch's context parallelism with
Accelerate's default, "allgather") and takes them piece by piece, results and gradients added up in fp32; under ZeRO
(DeepSpeed's Ulysses) ranks exchange tokens for heads before the attention and back behind it.

Source: PyTorch 2.13 `distributed/tensor/experimental/_context_parallel/_attention.py` _templated_ring_attention and
_templated_ring_attention_backward; accelerate 1.15 TorchContextParallelConfig; DeepSpeed 0.19
`runtime/sequence_parallel/ulysses_sp.py` UlyssesSPAttentionHF; Liu et al. 2023, Ring Attention,
https://arxiv.org/abs/2310.01889; Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
Not counted: what the collectives keep for themselves (`planner.memory.workspace.communicator_bytes`).
"""

from dataclasses import replace

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.layer_context import LayerContext
from planner.models.spec import AttentionSpec
from planner.setup import TrainSetup


def dealt_heads(attention: AttentionSpec, setup: TrainSetup) -> AttentionSpec:
    """The attention as a rank of the cut sequence sees it: Ulysses repeats a key-value head for the GPUs that share
    it."""
    if setup.context_degree == 1 or setup.rings or attention.num_kv_heads >= setup.context_degree:
        return attention
    return replace(attention, num_kv_heads=setup.context_degree)


def exchanged_bytes(attention: AttentionSpec, context: LayerContext) -> tuple[int, int]:
    """(forward, backward) bytes of one layer's exchange at its largest, queries, keys and values included; zeros where
    no sequence is cut.

    A ring's forward merges a piece's result into the one so far: four fp32 tensors of the output and the piece's own,
    beside all ranks' keys and values. Its backward adds up fp32 gradients, those of keys and values on their way round
    twice more, beside a piece's own and the copy that half an update makes. Ulysses holds a tensor three times while it
    changes hands.

    Shapes: queries and output [tokens of a rank, heads x head_dim], gathered keys and values [all tokens, ...].
    """
    setup, tokens = context.setup, context.tokens
    if setup.context_degree == 1:
        return 0, 0
    size = SIZE_BYTES[context.dtypes.attention_input]
    queries = attention.num_heads * attention.head_dim
    given = attention.num_heads * attention.value_head_dim
    dealt = dealt_heads(attention, setup)
    pairs = dealt.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    if not setup.rings:
        moved = size * (3 * max(queries, given) + pairs)
        return tokens * moved, tokens * moved
    gathered = size * setup.context_degree * pairs
    forward = gathered + size * (queries + pairs + given) + 4 * 4 * given
    backward = gathered + size * (queries + pairs) + 4 * (2 * queries + 3 * pairs)
    return tokens * forward, tokens * backward
