"""Experts distributed over GPUs under FSDP2: what a rank stores of them, and what two groups to a layer gather.

transformers wraps a layer's experts as a group of their own, over the ranks that hold the same experts, inside the
layer's, which is over all ranks (`planner.memory.layer_terms` for what a layer's backward holds of it).
"""

from dataclasses import replace
from functools import lru_cache

from planner.core.records import dataclass
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines.gather import Groups, padded
from planner.memory.states import COMPUTE, Allocation, weight_allocation
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """A rank's experts, in elements.

    Attributes:
        stored: of all layers, sharded and padded; `layer`: of the largest layer, `largest`: of its largest stack.
        gathered: of the largest layer with some, as it is gathered, padded.
        replicas: ranks over which they are sharded.
    """

    stored: int
    layer: int
    largest: int
    gathered: int
    replicas: int


@lru_cache(maxsize=256)
def moe_layers_without_experts(model: ModelSpec) -> ModelSpec:
    """As `without_experts`, of the layers alone that have some: a mixture may begin with dense ones."""
    expert_kinds = [
        kind for kind, layer in enumerate(model.layer_kinds) if any(linear.expert_parallel for linear in layer.linears)
    ]
    order = tuple(expert_kinds.index(kind) for kind in model.layer_order if kind in expert_kinds)
    kinds = tuple(model.layer_kinds[kind] for kind in expert_kinds)
    return without_experts(replace(model, layer_kinds=kinds, layer_order=order))


@lru_cache(maxsize=256)
def without_experts(model: ModelSpec) -> ModelSpec:
    """The model but for its stacks of experts: what is sharded over all ranks."""
    kinds = tuple(
        replace(layer, linears=tuple(linear for linear in layer.linears if not linear.expert_parallel))
        for layer in model.layer_kinds
    )
    return replace(model, layer_kinds=kinds)


@lru_cache(maxsize=256)
def share_of(model: ModelSpec, ranks: int) -> ExpertShare:
    """A rank's share of a part's experts (`planner.memory.rank_part.expert_shard`), of so many ranks: FSDP2 cuts
    a stack along its experts, padded to a multiple of the ranks."""
    layers: list[tuple[int, int, int]] = []
    stored = 0
    for layer, num in model.layer_counts:
        stacks: list[tuple[int, int]] = []
        for linear in layer.linears:
            if linear.expert_parallel:
                each = linear.in_features * linear.out_features + linear.out_features * linear.bias
                elements = padded(linear.num, ranks) * each
                stacks.append((elements // ranks, elements))
        stored += num * sum(share for share, _ in stacks)
        if stacks:
            shares = [share for share, _ in stacks]
            layers.append((sum(stack_elements for _, stack_elements in stacks), sum(shares), max(shares)))
    whole, layer_own, largest = max(layers)
    return ExpertShare(stored, layer_own, largest, whole, ranks)


def gathered_with_experts(
    model: ModelSpec, groups: Groups, around: int, share: ExpertShare, inner: TrainSetup
) -> list[Allocation]:
    """Gathered weights and all-gather buffers where a layer's experts are a group of their own; `groups` are of all the
    rest, `around` bytes of a layer that has experts without them.

    As without (`planner.memory.engines.fsdp2`), but for the order: a layer's other weights arrive, then its experts,
    which stay until their forward or backward is over. One rank's experts come without a buffer. The first layer may be
    a dense one.

    Source: PyTorch 2.13 `_fsdp_param_group.py` (wait_for_unshard, unshard for a group of one, _backward_prefetch).
    """
    experts = SIZE_BYTES[inner.weight_dtype] * share.gathered
    tied = groups.tail if model.tied else 0
    name, buffer = "gathered weights", "all-gather buffer"
    dense_first = groups.layer + groups.embedding - around - experts if groups.layer > around else groups.embedding
    return [
        weight_allocation(name, tied + 2 * around + experts * (1 + (share.replicas > 1)), "gather"),
        weight_allocation(name, tied + around + experts, "forward", "first", "turn", "last"),
        weight_allocation(name, groups.tail, "loss"),
        weight_allocation(name, tied, "head"),
        weight_allocation(buffer, around, "head", "first", "turn"),
        weight_allocation(buffer, max(groups.layer, dense_first), "last"),
        weight_allocation("gathered root group", groups.root, *COMPUTE, "end"),
    ]
