"""What a layer of routed experts holds where they are dealt out over GPUs: token dispatch, and the experts' own group.

Every rank holds an even share of a layer's experts whole (sharded again over the ranks that hold the same, if any), and
sends each of its (token, expert) pairs to the rank that holds the expert. Routing is taken to be balanced: every rank
receives as many pairs as it sends. Nothing is padded and none is dropped.

Source: transformers 5.23 `distributed/expert_parallel.py` AllToAllEP, `distributed/fsdp.py` (the experts' group),
`integrations/moe.py` grouped_mm_experts_forward; PyTorch 2.13 `distributed/fsdp/_fully_shard` (a group of one rank
copies its parameters and reduces through three buffers).
"""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.layer_context import LayerContext, Saved
from planner.models.spec import LayerSpec
from planner.setup import TrainSetup

PAIR_BYTES = 11
"""Beside what experts that are not dealt out keep of a (token, expert) pair: its place in the sent order, and marks."""


def replicas(setup: TrainSetup) -> int:
    """Ranks that hold the same experts, over which these are sharded again."""
    return setup.shards // setup.expert_degree


def dealt(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether the layer's experts are dealt out."""
    return context.setup.expert_degree > 1 and layer.mlp is not None and layer.mlp.kind == "moe"


def dispatch_saved(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes that the dispatch keeps for the backward beyond what routed experts keep anyway: the outputs of a token's
    experts are weighed where the token is instead of where the expert is, which keeps as much."""
    assert layer.mlp is not None
    return PAIR_BYTES * context.tokens * layer.mlp.num_active_experts if dealt(layer, context) else 0


def dispatched_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[tuple[int, int], ...]:
    """Moments of a dealt-out layer's backward beside what it keeps, as `planner.memory.temporary.constant_transients`:
    (bytes beside the gathered weights of the whole layer, 0). Zeros of a layer without experts beside others with some.

    In order: a recomputed forward's end, with received rows, results and their way back; the experts' gradients beside
    those of the rows, or the largest of them once more (the product of a transposed stack is copied); their reduction.
    """
    setup, dtypes = context.setup, context.dtypes
    if not dealt(layer, context):
        return ((0, 0),) * 3
    assert layer.mlp is not None
    size = SIZE_BYTES[dtypes.table]
    rows = size * context.tokens * layer.mlp.num_active_experts * context.hidden
    residual = 2 * context.tokens * SIZE_BYTES[dtypes.residual] * context.hidden
    stacks = [one.num_weights + one.num_bias for one in layer.linears if one.is_stack]
    elements, experts, ranks = sum(stacks), max(one.num for one in layer.linears if one.is_stack), replicas(setup)
    wide = elements // experts * -(-experts // ranks) * ranks * (SIZE_BYTES["fp32"] if dtypes.autocast else size)
    gradients = size * elements
    recomputed = ((6 if dtypes.autocast else 3) * rows + residual) * (setup.checkpointing > 0)
    return (
        (recomputed, 0),
        (residual - saved.fed + gradients + max(3 * rows, size * max(stacks)), 0),
        (residual - saved.fed + max(gradients + wide, 3 * wide * (ranks == 1)) - size * elements, 0),
    )
