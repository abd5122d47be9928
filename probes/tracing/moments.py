"""The moments of a full-depth step that can be a phase's peak, from a run whose sizes are names of forms."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from planner.core.records import dataclass
from planner.memory.profiles import LOSS_BEGINS, Group
from probes.allocator.blocks import MIN_BLOCK_BYTES
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.allocator.repetitions import Pattern, Repetition
from probes.dryrun.analysis import group_of
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import Origin

TOLERANCE = 2e-5
"""Moments within so much of a phase's highest are not told apart."""

Place = tuple[int, int]
"""A moment: (item of the trace, event within it)."""


@dataclass(frozen=True, kw_only=True)
class FoundMoment:
    """One moment: its phase, which micro-batch of the step it falls in (0: loading), and the factors of what is alive,
    [monomials], by group."""

    phase: str
    micro_batch: int
    alive: dict[Group, Any]

    @property
    def total(self) -> Any:
        """Of all groups, [monomials]."""
        return sum(self.alive.values())


class _Part(NamedTuple):
    """A run of a pattern: how many events, the highest bytes within it relative to before it and after which event, and
    the bytes after it, each [points]."""

    num_events: int
    highest: Any
    event: Any
    after: Any


def moments_of(trace: Trace, forms: Any, values: Any) -> list[FoundMoment]:
    """The moments that are the highest of their phase and micro-batch somewhere, no more than it takes.

    Args:
        trace: of the full model; sizes are rows of `forms`.
        forms: [classes, monomials], factors.
        values: [points, monomials]: where the highest is looked for.
    """
    walk = _Walk(trace, forms, values)
    by_phase: dict[tuple[str, int], list[FoundMoment]] = defaultdict(list)
    for one in walk.at(walk.highest()):
        by_phase[one.phase, one.micro_batch].append(one)
    return [one for found in by_phase.values() for one in cover(found, values)]


class _Walk:
    def __init__(self, trace: Trace, forms: Any, values: Any) -> None:
        self.trace, self.forms = trace, forms
        exact = forms @ values.T
        self.sizes = np.ceil(exact / MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES  # [classes, points]
        self._parts_of: dict[int, tuple[list[_Part], Pattern]] = {}
        self._keys_of: dict[int, tuple[list[tuple[int, int]], Pattern]] = {}
        self._numbers: dict[Group, int] = {}

    def _parts(self, pattern: Pattern) -> list[_Part]:
        found = self._parts_of.get(id(pattern))
        if found is None:
            parts = []
            for run in pattern.runs:
                signs = np.array([-1.0 if size is None else 1.0 for _, size in run])
                classes = [pattern.sizes[place] for place, _ in run]
                totals = np.cumsum(signs[:, None] * self.sizes[classes], axis=0) if run else None
                if totals is not None:
                    parts.append(_Part(len(run), totals.max(axis=0), totals.argmax(axis=0), totals[-1]))
                else:
                    parts.append(_Part(0, None, None, None))
            found = self._parts_of[id(pattern)] = parts, pattern
        return found[0]

    def highest(self) -> dict[tuple[str, int], list[Place]]:
        """For each phase of each micro-batch the moments that are its highest at some point, and where its loss begins
        (LOSS_BEGINS)."""
        alive: dict[int, int] = {}
        total = np.zeros(self.sizes.shape[1])
        found: dict[tuple[str, int], tuple[Any, Any]] = {}  # threshold and place of the highest so far, by point
        begins: dict[tuple[str, int], list[Place]] = {}
        sizes = [*self.sizes]
        key = ("load", 0)
        limit, where = found[key] = np.zeros(total.shape), np.zeros((*total.shape, 2), dtype=np.int64)

        def reach(highs: Any, index: int, events: Any) -> None:
            risen = highs > limit
            if risen.any():
                limit[risen] = highs[risen] * (1 + TOLERANCE)
                where[risen, 0] = index
                where[risen, 1] = events[risen] if isinstance(events, np.ndarray) else events

        def single(event: Event, index: int, number: int) -> None:
            nonlocal total
            if isinstance(event, Alloc):
                alive[event.id] = event.size_bytes
                total = total + sizes[event.size_bytes]
                reach(total, index, number)
            else:
                assert isinstance(event, Free)
                total = total - sizes[alive.pop(event.id)]

        for index, item in enumerate(self.trace.events):
            if isinstance(item, Repetition):
                pattern, number = item.pattern, 0
                for place in pattern.left:
                    alive[item.first + place] = pattern.sizes[place]
                for part, hole in zip_longest(self._parts(pattern), item.holes):
                    if part is not None and part.num_events:
                        reach(total + part.highest, index, part.event + number)
                        total = total + part.after
                        number += part.num_events
                    for one in hole or ():
                        single(one, index, number)
                        number += 1
            elif isinstance(item, Phase):
                name = item.name.partition("/")[0]
                key = (name, key[1] + (name == "forward" and key[0] in ("load", "backward")))
                if name == "loss":
                    begins.setdefault((LOSS_BEGINS, key[1]), [(index, 0)])
                if key not in found:
                    found[key] = np.full(total.shape, -1.0), np.zeros((*total.shape, 2), dtype=np.int64)
                limit, where = found[key]
                reach(total, index, 0)
            else:
                single(item, index, 0)
        places = {key: [tuple(one) for one in np.unique(each, axis=0).tolist()] for key, (_, each) in found.items()}
        return places | begins

    # What is alive at some places

    def at(self, places: dict[tuple[str, int], list[Place]]) -> Iterator[FoundMoment]:
        """What is alive at each of them."""
        wanted: dict[int, list[tuple[int, tuple[str, int]]]] = {}
        for key, found in places.items():
            for index, number in found:
                wanted.setdefault(index, []).append((number, key))
        alive: dict[int, tuple[int, int]] = {}  # storage -> group, class
        count = np.zeros((64, len(self.forms)))
        for index, item in enumerate(self.trace.events):
            asked: dict[int, list[tuple[str, int]]] = defaultdict(list)
            for place, key in wanted.get(index, ()):
                asked[place].append(key)
            if isinstance(item, Repetition) and not asked:
                self._whole(item, alive, count)
                continue
            for number, event in enumerate(_events(item)):
                self._one(event, item, alive, count)
                for key in asked.get(number, ()):
                    yield self._found(key, count)
        yield self._found(("step", 1), count)

    def _found(self, key: tuple[str, int], count: Any) -> FoundMoment:
        alive = dict(zip(self._numbers, count @ self.forms, strict=False))  # rows for more groups than there are
        alive = {one: form for one, form in alive.items() if form.any()}
        return FoundMoment(phase=key[0], micro_batch=key[1], alive=alive)

    def _whole(self, item: Repetition, alive: dict[int, tuple[int, int]], count: Any) -> None:
        for place in item.pattern.left:
            self._make(item.first + place, item, alive, count)
        for hole in item.holes:
            for event in hole:
                self._one(event, item, alive, count)

    def _one(self, event: Event, item: Any, alive: dict[int, tuple[int, int]], count: Any) -> None:
        if isinstance(event, Alloc):
            self._make(event.id, item if isinstance(item, Repetition) else None, alive, count)
        elif isinstance(event, Free):
            count[alive.pop(event.id)] -= 1

    def _make(self, number: int, repetition: Repetition | None, alive: dict[int, tuple[int, int]], count: Any) -> None:
        origin = self.trace.origins.get(number)
        if origin is not None:
            key = self._key(origin, self.trace.owners.get(number))
        else:
            assert repetition is not None
            key = self._keys(repetition.pattern)[number - repetition.first]
        alive[number] = key
        count[key] += 1

    def _keys(self, pattern: Pattern) -> list[tuple[int, int]]:
        """Group and class of each storage of a pattern."""
        found = self._keys_of.get(id(pattern))
        if found is None:
            keys = [self._key(origin, pattern.owners.get(place)) for place, origin in enumerate(pattern.origins)]
            found = self._keys_of[id(pattern)] = keys, pattern
        return found[0]

    def _key(self, origin: Origin, owner: tuple[str, str] | None) -> tuple[int, int]:
        group = group_of(origin, owner)
        return self._numbers.setdefault(group, len(self._numbers)), origin.size_bytes


def _events(item: Event | Repetition) -> Iterator[Event]:
    return item.events() if isinstance(item, Repetition) else iter((item,))


def cover(moments: Sequence[FoundMoment], values: Any) -> list[FoundMoment]:
    """Of the moments of one phase those that are needed for its highest everywhere."""
    totals = np.array([values @ one.total for one in moments])
    top = totals.max(axis=0)
    open_points = np.ones(totals.shape[1], dtype=bool)
    chosen: list[FoundMoment] = []
    while open_points.any():
        reached = (totals >= top * (1 - TOLERANCE)) & open_points
        best = int(reached.sum(axis=1).argmax())
        chosen.append(moments[best])
        open_points &= ~reached[best]
    return chosen
