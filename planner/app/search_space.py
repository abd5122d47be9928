"""What a search with GPU probes chooses from: the walked space where it may fit and is not hopelessly slow."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from planner.decision.candidates import candidate
from planner.outcome import Candidate
from planner.plan import Plan
from planner.planning.space import dimension_values
from planner.planning.walk import Point, walk

if TYPE_CHECKING:
    from search.problem import Unprobed


MAX_CANDIDATES = 1500
"""Of the walked space, the fastest this many that may fit are searched: predicting one costs half a millisecond."""


NEAR_MISS_FRACTION = 0.15
"""A setup predicted this much above the budget may still fit: the formula errs by less in nearly all cases."""


SLOWEST_FRACTION = 0.5
"""What is predicted at less than this share of the best speed cannot become the best by any error seen so far."""


MIN_PER_SPREAD = 60
"""With several GPUs so many of every spread are searched, even where another spread's fastest fill the list: how well
links are used is what the formula knows least."""


def search_candidates(plan: Plan, unprobed: "Unprobed" = lambda setup: "") -> tuple[Candidate, ...]:
    """What the search may choose from: the walked space where it may fit and is not hopelessly slow, fastest first.

    The tree's first answer stands: a plan for full fine-tuning is tuned among full fine-tuning setups, one for
    adapters among adapters (quantized or not). With several GPUs every way of spreading the job keeps its best, however
    fast the others are; of a way that no probe can run only the fastest that fits stays, told with its prediction.
    """
    wish = plan.workload
    full = plan.chosen.setup.method == "full"
    limit_bytes = wish.budget_bytes * (1 + NEAR_MISS_FRACTION)
    points = [
        point
        for point in _walked(plan)
        if (point.family.method == "full") == full and point.peak_device_bytes <= limit_bytes
    ]
    if wish.objective == "memory":
        points.sort(key=lambda point: point.peak_device_bytes)
    else:
        points.sort(key=lambda point: -point.tokens_per_s)
    told: list[Point] = []
    if wish.num_gpus > 1:
        points, told = _probed_and_told(points, unprobed, wish.budget_bytes)
    if wish.objective != "memory":
        fitting = [point.tokens_per_s for point in points if point.peak_device_bytes <= wish.budget_bytes]
        floor = SLOWEST_FRACTION * max(fitting, default=0.0)
        points = [point for point in points if point.tokens_per_s >= floor]
    kept = points[:MAX_CANDIDATES]
    if wish.num_gpus > 1:
        kept += _best_of_each(points, MIN_PER_SPREAD)
    setups = dict.fromkeys([plan.chosen.setup, *(point.setup for point in (*kept, *told))])
    return tuple(candidate(wish, setup) for setup in setups)


def _walked(plan: Plan) -> Iterable[Point]:
    """The space of one GPU, or that of every spread; states on the host only where the plan or the user wants them."""
    wish = plan.workload
    if wish.num_gpus == 1:
        return walk(wish)
    from planner.decision.spreads import STAGES, spreads

    hosted = plan.chosen.setup.offload != "none" or "offload" in wish.fixed
    found = spreads(wish, [stage for stage in STAGES if hosted or stage != "offload"])
    return walk(wish, dimension_values(wish), found) if found else ()


def _probed_and_told(
    points: Sequence[Point], unprobed: "Unprobed", budget_bytes: int
) -> tuple[list[Point], list[Point]]:
    """(what a probe can run, of every spread that none can the first that fits)."""
    from planner.decision.spreads import spread_key

    probed: list[Point] = []
    told: dict[Any, Point] = {}
    reasons: dict[Any, str] = {}
    for point in points:
        key = spread_key(point.shared)
        if key not in reasons:
            reasons[key] = unprobed(point.shared)
        if not reasons[key]:
            probed.append(point)
        elif key not in told and point.peak_device_bytes <= budget_bytes:
            told[key] = point
    return probed, list(told.values())


def _best_of_each(points: Sequence[Point], num: int) -> Iterator[Point]:
    """The first points of every spread."""
    from planner.decision.spreads import spread_key

    counts: Counter[Any] = Counter()
    for point in points:
        key = spread_key(point.shared)
        counts[key] += 1
        if counts[key] <= num:
            yield point
