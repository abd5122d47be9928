"""Which cluster for a piece of work: every GPU of a list in every number, with time and cost, on the formula level.

The walk is a coarse one (DDP and FSDP2; few optimizers and losses): `plan MODEL --gpu GPU --gpus N` looks closer.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner.core.records import dataclass
from planner.hardware.cluster import Cluster
from planner.memory.workload import Workload
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS, PLANNED_OPTIMIZERS
from planner.options.precisions import PRECISIONS
from planner.planning.decision.candidates import candidate
from planner.planning.decision.choosing import choose, spaces
from planner.planning.decision.layouts import FIRST_STAGES, ONE_GPU, layouts
from planner.planning.decision.node import Node
from planner.planning.decision.results import WalkResults, add_layouts, best_layout
from planner.planning.space import dimension_values
from planner.planning.useful import cost_usd, job_s
from planner.planning.walk import WalkedSetup
from planner.setup.outcome import Candidate

COARSE: Mapping[str, tuple[Any, ...]] = {
    "precision": tuple(name for name, row in PRECISIONS.items() if row.autocast),
    "quantization": ("none", "nf4-double"),
    "kbit_fp32_cast": (False,),
    "optimizer": tuple(name for name in PLANNED_OPTIMIZERS if not OPTIMIZERS[name].paged),
    "checkpointing": (0, 1),
    "loss": tuple(name for name, loss in LOSSES.items() if loss.coarse),
}
"""What the coarse walk keeps of each dimension that the user left open."""
COARSE_LAYOUTS = ("ddp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class ClusterOption:
    """One method on one cluster.

    Attributes:
        workload: what is asked of it.
        node: what is trained.
        duration_s: for all tokens asked for; cost_usd: for all GPUs that long, None without a price.
        meets: whether it keeps deadline and budget.
    """

    cluster: Cluster
    workload: Workload
    node: Node
    candidate: Candidate
    duration_s: float
    cost_usd: float | None
    meets: bool


def counts(max_gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs to try: powers of two up to the largest allowed."""
    return tuple(1 << power for power in range(max_gpus.bit_length()) if 1 << power <= max_gpus)


def coarse_values(workload: Workload) -> dict[str, tuple[Any, ...]]:
    """The dimensions of the coarse walk: what the user fixed stays whole."""
    values = dimension_values(workload)
    for name, coarse in COARSE.items():
        if name not in workload.fixed:
            # a dimension of which nothing is coarse stays as it is: ORPO's trainers have the full loss alone
            values[name] = tuple(value for value in values[name] if value in coarse) or values[name]
    batches = [1 << power for power in range(8)]
    values.setdefault("micro_batch_seqs", tuple(size for size in batches if workload.global_batch_seqs % size == 0))
    return values


def best_of(workload: Workload) -> dict[Node, WalkedSetup | None]:
    """The best point of every node over the coarse walk."""
    chosen = [
        layout
        for layout in layouts(workload, FIRST_STAGES)
        if layout.fields["parallel"] in COARSE_LAYOUTS and layout.fields.get("reshard_after_forward", True)
    ]
    results = WalkResults()
    for request, _ in spaces(workload, dimension_values(workload)):
        add_layouts(request, coarse_values(request), results, chosen if workload.num_gpus > 1 else [ONE_GPU])
    return _best(results)


def best_points(workload: Workload) -> dict[Node, WalkedSetup | None]:
    """The best point of every node: as a plan walks it on one GPU, of the coarse walk on several."""
    if workload.num_gpus > 1:
        return best_of(workload)
    results = WalkResults()
    choose(workload, dimension_values(workload), results)
    return _best(results)


def _best(results: WalkResults) -> dict[Node, WalkedSetup | None]:
    results.nodes()  # settles what quality is taken over all layouts
    return {node: best_layout(results.of_node(node)) for node in Node}


def options_of(
    workload: Workload, cluster: Cluster, *, deadline_s: float | None, budget_usd: float | None
) -> Iterator[ClusterOption]:
    """The best setup of every method that fits on this cluster.

    Args:
        workload: its `cluster` is None with one GPU; the size of its data is known.
        cluster: the same, also for one GPU.
    """
    best = best_of(workload)
    for node in Node:
        point = best[node]
        if point is None:
            continue
        best_candidate = candidate(workload, point.setup)
        duration_s = job_s(workload, best_candidate)
        if duration_s is None:
            continue
        cost = cost_usd(workload, duration_s)
        late = deadline_s is not None and duration_s > deadline_s
        dear = budget_usd is not None and (cost is None or cost > budget_usd)
        yield ClusterOption(
            cluster=cluster,
            node=node,
            candidate=best_candidate,
            workload=workload,
            duration_s=duration_s,
            cost_usd=cost,
            meets=not late and not dear,
        )


def smallest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The fewest GPUs that keep deadline and budget; of those the least memory, then the fastest."""
    kept = [option for option in options if option.meets]
    return min(
        kept,
        key=lambda option: (option.cluster.num_gpus, option.workload.memory_bytes, option.duration_s),
        default=None,
    )


def cheapest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The least cost that keeps deadline and budget; of equals the fewer GPUs."""
    kept = [option for option in options if option.meets and option.cost_usd is not None]
    return min(kept, key=lambda option: (option.cost_usd, option.cluster.num_gpus), default=None)


def fastest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """The shortest time that keeps deadline and budget; of equals the fewer GPUs."""
    kept = [option for option in options if option.meets]
    return min(kept, key=lambda option: (option.duration_s, option.cluster.num_gpus), default=None)


def nearest(options: Iterable[ClusterOption]) -> ClusterOption | None:
    """Where nothing keeps the limits: the fastest of what fits, because more time or money would make it do."""
    return min(options, key=lambda option: option.duration_s, default=None)
