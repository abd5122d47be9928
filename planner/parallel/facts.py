"""What the walk over the spreads learned, by spread and by node of the decision tree."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from types import MappingProxyType
from typing import Any

from planner.engines import why_not
from planner.engines.host import assumed_host_bytes, host_bytes_per_node
from planner.errors import SetupError
from planner.parallel.strategies import Spread, SpreadKey, spread_key, spread_rank, spreads
from planner.planning import corrected
from planner.refine import CorrectionKey
from planner.setup import TrainSetup
from planner.space import Point, branches, walk
from planner.tree import KEEP, NODES, TIE_FRACTION, NodeFacts, collect_into, near_fastest, node_of_setup
from planner.units import gib
from planner.workload import Workload

SPREAD_GAIN_FRACTION = 0.10
"""A less simple spread replaces one that fits only where it is predicted so much faster: the model errs by more."""


@dataclass(slots=True)
class SpreadFacts:
    """Facts of every (spread, node) walked so far.

    Attributes:
        walked: the spreads, in the order they were walked.
        refused: (spread, node) -> why no engine runs it, where none of the node's branches can run.
    """

    facts: dict[tuple[SpreadKey, str], NodeFacts] = field(default_factory=dict)
    walked: list[Spread] = field(default_factory=list)
    refused: dict[tuple[SpreadKey, str], str] = field(default_factory=dict)

    def of(self, shared: TrainSetup) -> NodeFacts:
        """The facts that a point with this shared setup adds to."""
        return self.facts.setdefault((spread_key(shared), node_of_setup(shared)), NodeFacts())

    def of_node(self, node: str) -> dict[SpreadKey, NodeFacts]:
        """The facts of one node by spread."""
        return {key: known for (key, name), known in self.facts.items() if name == node}

    def nodes(self) -> dict[str, NodeFacts]:
        """Facts of every node over all spreads; of the points that fit those of its best spread (`best_spread`)."""
        found = {}
        for node in NODES:
            known = self.of_node(node)
            whole = found[node] = merged(known.values())
            best = best_spread(known)
            whole.fastest = known[spread_key(best.shared)].fastest if best is not None else []
        return found


def merged(parts: Iterable[NodeFacts]) -> NodeFacts:
    """The facts of several spreads as those of one node."""
    whole = NodeFacts()
    entries = []
    for part in parts:
        whole.budget_bytes = part.budget_bytes
        whole.walked += part.walked
        whole.infeasible += part.infeasible
        entries += part.fastest
        for name in ("smallest", "smallest_unchecked", "smallest_cast"):
            mine, other = getattr(whole, name), getattr(part, name)
            if other is not None and (mine is None or other.peak_device_bytes < mine.peak_device_bytes):
                setattr(whole, name, other)
    whole.fastest = nlargest(KEEP, entries, key=lambda entry: entry[:2])
    return whole


def best_spread(known: Mapping[SpreadKey, NodeFacts]) -> Point | None:
    """The best point over all spreads, None where nothing fits.

    DDP needs no gathering and no tuning, FSDP2 no package beside PyTorch, DeepSpeed no other training loop: each gives
    way to the next only where that is clearly faster. Within a family the fastest counts; within one percent the
    simplest.
    """
    families: dict[int, list[Point]] = {}
    for facts in known.values():
        point = facts.best()
        if point is not None:
            families.setdefault(_family(point.shared), []).append(point)
    taken: Point | None = None
    for number in sorted(families):
        best = _fastest(families[number])
        if taken is None or best.tokens_per_s > taken.tokens_per_s * (1 + SPREAD_GAIN_FRACTION):
            taken = best
    return taken


def _fastest(points: list[Point]) -> Point:
    """The simplest spread of those within one percent of the fastest."""
    close = near_fastest(points, TIE_FRACTION)
    return min(close, key=lambda point: (spread_rank(point.shared), -point.tokens_per_s))


def _family(setup: TrainSetup) -> int:
    """0 DDP, 1 FSDP2, 2 DeepSpeed's ZeRO, 3 anything split, offloaded or in one process."""
    if setup.tensor_degree > 1 or setup.pipeline_degree > 1 or setup.offload != "none":
        return 3
    return {"ddp": 0, "fsdp2": 1, "zero1": 2, "zero2": 2, "zero3": 2}.get(setup.parallel, 3)


def walk_stages(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    facts: SpreadFacts,
    stages: tuple[str, ...],
    corrections: Mapping[CorrectionKey, float],
) -> None:
    """Adds the points of these stages' spreads to the facts."""
    add_spreads(workload, values, facts, spreads(workload, stages), corrections)


def add_spreads(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    facts: SpreadFacts,
    chosen: Sequence[Spread],
    corrections: Mapping[CorrectionKey, float] = MappingProxyType({}),
) -> None:
    """Adds the points of these spreads to the facts."""
    if not chosen:
        return
    facts.walked += [one for one in chosen if one not in facts.walked]
    points: Iterable[Point] = _points(workload, values, tuple(chosen))
    if any(one.stage == "offload" for one in chosen) and "offload" not in workload.fixed:
        points = _that_hosts_hold(workload, facts, points)
    collect_into(corrected(points, corrections), workload.budget_bytes, facts.of)
    for known in facts.facts.values():
        if known.smallest is None:
            known.smallest = known.smallest_cast
    _note_refusals(workload, values, facts, chosen)


_Walked = tuple[Workload, Mapping[str, tuple[Any, ...]], tuple[Spread, ...], tuple[Point, ...]]
_RECENT: deque[_Walked] = deque(maxlen=4)
"""The last walks: a plan that dry runs correct asks for the same points again."""


def _points(workload: Workload, values: Mapping[str, tuple[Any, ...]], chosen: tuple[Spread, ...]) -> tuple[Point, ...]:
    for known_workload, known_values, known_spreads, points in _RECENT:
        if known_workload is workload and known_values == values and known_spreads == chosen:
            return points
    points = tuple(walk(workload, values, chosen))
    _RECENT.append((workload, dict(values), chosen, points))
    return points


def _that_hosts_hold(workload: Workload, facts: SpreadFacts, points: Iterable[Point]) -> Iterator[Point]:
    """The points whose offloaded states a usual host can hold; the others are refused with their bytes.

    Who asks for offloading (--offload) knows the machine: nothing is left out then.
    """
    limit = assumed_host_bytes(workload)
    num_nodes = workload.cluster.num_nodes if workload.cluster is not None else 1
    for point in points:
        plain = point.shared.trusted_with(optimizer=point.optimizer, checkpointing=1, attention="sdpa")
        need = host_bytes_per_node(workload.model, plain, num_nodes)
        if need <= limit:
            yield point
            continue
        reason = (
            f"{gib(need)} would lie in every node's host memory, which is taken to hold {gib(limit)} "
            "(--offload says that yours holds more)"
        )
        facts.refused.setdefault((spread_key(point.shared), node_of_setup(point.shared)), reason)


def _note_refusals(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], facts: SpreadFacts, chosen: Iterable[Spread]
) -> None:
    """Why a spread has no point of a node: the engines' reason for the first of its branches."""
    one_per_node: dict[str, TrainSetup] = {}
    for branch in branches(workload, values):
        one_per_node.setdefault(node_of_setup(branch), branch)
    for spread in chosen:
        for node, branch in one_per_node.items():
            try:
                setup = branch.with_(**spread.fields, optimizer=values["optimizer"][0])
            except SetupError:
                continue
            key = (spread_key(setup), node)
            if key in facts.facts or key in facts.refused:
                continue
            reason = why_not(workload.model, setup)
            if reason:
                facts.refused[key] = reason
