"""How a band is fitted to published runs: measured over predicted of one kind, or of all stacks but one."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from planner.planning.evidence.bands import Cell

LEAST_ROWS = 10
"""Published rows from which a stack has a band of its own."""
COVERAGE = 0.9
LEAST_SIDE = 0.005
"""No side of a band is narrower: what versions of the libraries alone move."""
UNSEEN_STACK = 1.5
"""How much wider than the other stacks' rows the band of a stack is that nobody measured. With every stack left out in
turn the mean coverage of its rows is 82 % (memory) and 96 % (speed) at 1, 87 and 99 % at 1.5, 91 and 100 % at 2
(November 2026, benchmarks/stack_bands.py)."""


def holds(cell: Cell, ratio: float) -> bool:
    """Whether measured over predicted lies inside."""
    return 1 - cell.below <= ratio <= 1 + cell.above


def as_row(cell: Cell) -> dict[str, Any]:
    """For the data file, rounded to a tenth of a percent."""
    return asdict(cell) | {"below": round(cell.below, 3), "above": round(cell.above, 3)}


def fit_cell(
    ratios: Sequence[float], *, others: Sequence[Sequence[float]] = (), num_sources: int = 0, cards: Sequence[str] = ()
) -> Cell:
    """The central 90 % of measured over predicted, each end with room for the next row.

    Each end is the quantile that a new row of the same kind exceeds with 5 %: the k-th of n rows is exceeded with
    k / (n + 1), and between two of them lies a straight line. Of fewer than 19 rows the outermost is exceeded more
    often: what lies beyond it is as in the other stacks' rows that do. Where one side is as narrow as it may be (a
    prediction that errs to the other), what of its 5 % no row uses is the other's.

    Source: Hyndman and Fan 1996, Sample quantiles in statistical packages, definition 6 (Weibull's plotting position),
    which is split conformal prediction's (Lei et al. 2018, Distribution-free predictive inference for regression, 2.2);
    it has no end where the outermost row is too few, and the others' tail stands there.

    Args:
        others: the rows of the other stacks, by stack; each stack weighs alike.
    """
    ordered = sorted(ratios)
    tail = round((len(ordered) + 1) * (1 - COVERAGE) / 2, 9)  # of 19 rows it is the first
    low, high = (_end(ordered, tail, others, upper=upper) for upper in (False, True))
    if 1 - low <= LEAST_SIDE:
        spare = tail - sum(ratio < 1 - LEAST_SIDE for ratio in ordered)
        high = _end(ordered, tail + spare, others, upper=True)
    elif high - 1 <= LEAST_SIDE:
        spare = tail - sum(ratio > 1 + LEAST_SIDE for ratio in ordered)
        low = _end(ordered, tail + spare, others, upper=False)
    return Cell(
        below=max(LEAST_SIDE, 1 - low),
        above=max(LEAST_SIDE, high - 1),
        num_rows=len(ordered),
        num_sources=num_sources,
        cards=tuple(cards),
    )


def _end(ratios: Sequence[float], place: float, others: Sequence[Sequence[float]], *, upper: bool) -> float:
    """The value at a place counted from 1 at the upper or lower end, on the line between its neighbours; before the
    first, the one of the others' rows beyond it that a share of `place` of them lies beyond."""
    ordered = sorted(ratios, reverse=upper)
    if place < 1:
        outer = [
            [ratio for ratio in group if ratio != ordered[0] and (ratio > ordered[0]) == upper] for group in others
        ]
        weighed = [(ratio, 1 / len(group)) for group, rows in zip(others, outer, strict=True) for ratio in rows]
        return passed_at(sorted(weighed, reverse=upper), place) if weighed else ordered[0]
    place = min(place, float(len(ordered)))
    before = math.floor(place)
    after = min(before, len(ordered) - 1)
    return ordered[before - 1] + (place - before) * (ordered[after] - ordered[before - 1])


def passed_at(weighed: Sequence[tuple[float, float]], share: float) -> float:
    """The first row with which a share of all weight is passed."""
    total, passed = sum(weight for _, weight in weighed), 0.0
    for ratio, weight in weighed:
        passed += weight
        if passed >= total * share:
            return ratio
    return weighed[-1][0]


def pooled_cell(groups: Sequence[Sequence[float]]) -> Cell:
    """The band for a stack that nobody measured: the central 90 % of all others' rows, each stack weighing alike, and
    UNSEEN_STACK times as wide."""
    weighed = [(ratio, 1 / len(group)) for group in groups for ratio in group]
    low, high = (passed_at(sorted(weighed, reverse=upper), (1 - COVERAGE) / 2) for upper in (False, True))
    below, above = max(LEAST_SIDE, 1 - low), max(LEAST_SIDE, high - 1)
    return Cell(below=min(0.95, UNSEEN_STACK * below), above=UNSEEN_STACK * above, num_rows=sum(map(len, groups)))
