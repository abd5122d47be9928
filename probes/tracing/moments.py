"""The moments of a full-depth step that can be a phase's peak, from a run whose sizes are names of forms."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from planner.memory.step_profile import LOSS_BEGINS, Group
from planner.records import dataclass
from probes.allocator.blocks import MIN_BLOCK_BYTES
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.allocator.stretches import Pattern, Stretch
from probes.dryrun.analysis import group_of
from probes.dryrun.trace import Trace

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


class _Course:
    """A stretch's events: number and class of each storage made (sign 1) or released (-1) by its own pattern."""

    def __init__(self, pattern: Pattern) -> None:
        steps = [step for run in pattern.runs for step in run]
        self.signs = np.array([-1.0 if size is None else 1.0 for _, size in steps])
        self.places = np.array([place for place, _ in steps], dtype=np.int64)
        self.classes = np.array([pattern.sizes[place] for place, _ in steps], dtype=np.int64)
        self.ends = np.cumsum([len(run) for run in pattern.runs]).tolist()


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
        self.groups: list[Group] = []
        self._courses: dict[int, tuple[_Course, Any, Any]] = {}
        self._groups_of: dict[int, Any] = {}
        self._numbers: dict[Group, int] = {}

    def _course(self, pattern: Pattern) -> tuple[_Course, Any]:
        """Its events and the bytes after each of them, [events, points]."""
        found = self._courses.get(id(pattern))
        if found is None:
            course = _Course(pattern)
            totals = np.cumsum(course.signs[:, None] * self.sizes[course.classes], axis=0)
            found = self._courses[id(pattern)] = course, totals, pattern
        return found[0], found[1]

    def highest(self) -> dict[tuple[str, int], list[Place]]:
        """For each phase of each micro-batch the moments that are its highest at some point, and where its loss begins
        (LOSS_BEGINS)."""
        total = np.zeros(self.sizes.shape[1])
        best: dict[tuple[str, int], Any] = {}
        where: dict[tuple[str, int], Any] = {}
        begins: dict[tuple[str, int], list[Place]] = {}
        for key, place, change in self._changes():
            if change is None and key[0] == "loss":
                begins.setdefault((LOSS_BEGINS, key[1]), [place])
            if change is not None:
                before, step = total, change
                highs, rows = (before + step.max(axis=0), step.argmax(axis=0)) if step.ndim == 2 else (before + step, 0)
                total = before + (step[-1] if step.ndim == 2 else step)
            else:
                highs, rows = total, 0
            if key not in best:
                best[key] = np.full(total.shape, -1.0)
                where[key] = np.zeros((*total.shape, 2), dtype=np.int64)
            risen = highs > best[key] * (1 + TOLERANCE)
            best[key][risen] = highs[risen]
            where[key][risen, 0] = place[0]
            where[key][risen, 1] = (np.broadcast_to(rows, total.shape) + place[1])[risen]
        found = {key: [tuple(one) for one in np.unique(each, axis=0).tolist()] for key, each in where.items()}
        return found | begins

    def _changes(self) -> Iterator[tuple[tuple[str, int], Place, Any]]:
        """(phase and micro-batch, place of the first event, bytes after each event relative to before: [points] of one
        event, [events, points] of several; None: a mark)."""
        alive: dict[int, int] = {}
        key = ("load", 0)
        for index, item in enumerate(self.trace.events):
            if isinstance(item, Stretch):
                course, totals = self._course(item.pattern)
                for place in item.pattern.left:
                    alive[item.first + place] = item.pattern.sizes[place]
                start, event = 0, 0
                for end, hole in zip_longest(course.ends, item.holes):
                    if end is not None and end > start:
                        part = totals[start:end]
                        yield key, (index, event), part - totals[start - 1] if start else part
                        event, start = event + end - start, end
                    for one in hole or ():
                        yield key, (index, event), self._single(one, alive)
                        event += 1
            elif isinstance(item, Phase):
                name = item.name.partition("/")[0]
                key = (name, key[1] + (name == "forward" != key[0]))
                yield key, (index, 0), None
            else:
                yield key, (index, 0), self._single(item, alive)

    def _single(self, event: Event, alive: dict[int, int]) -> Any:
        if isinstance(event, Alloc):
            alive[event.id] = event.size_bytes
            return self.sizes[event.size_bytes]
        assert isinstance(event, Free)
        return -self.sizes[alive.pop(event.id)]

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
            if isinstance(item, Stretch) and not asked:
                self._whole(item, alive, count)
                continue
            for number, event in enumerate(_events(item)):
                self._one(event, item, alive, count)
                for key in asked.get(number, ()):
                    yield self._found(key, count)
        yield self._found(("step", 1), count)

    def _found(self, key: tuple[str, int], count: Any) -> FoundMoment:
        alive = dict(zip(self.groups, count @ self.forms, strict=False))  # rows for more groups than there are
        alive = {one: form for one, form in alive.items() if form.any()}
        return FoundMoment(phase=key[0], micro_batch=key[1], alive=alive)

    def _whole(self, item: Stretch, alive: dict[int, tuple[int, int]], count: Any) -> None:
        for place in item.pattern.left:
            self._make(item.first + place, item, alive, count)
        for hole in item.holes:
            for event in hole:
                self._one(event, item, alive, count)

    def _one(self, event: Event, item: Any, alive: dict[int, tuple[int, int]], count: Any) -> None:
        if isinstance(event, Alloc):
            self._make(event.id, item if isinstance(item, Stretch) else None, alive, count)
        elif isinstance(event, Free):
            count[alive.pop(event.id)] -= 1

    def _make(self, number: int, stretch: Stretch | None, alive: dict[int, tuple[int, int]], count: Any) -> None:
        origin, owner = self.trace.origins.get(number), self.trace.owners.get(number)
        if origin is None:
            assert stretch is not None
            place = number - stretch.first
            origin, owner = stretch.pattern.origins[place], stretch.pattern.owners.get(place)
        group = group_of(origin, owner)
        if group not in self._numbers:
            self._numbers[group] = len(self.groups)
            self.groups.append(group)
        alive[number] = self._numbers[group], origin.size_bytes
        count[alive[number]] += 1


def _events(item: Event | Stretch) -> Iterator[Event]:
    return item.events() if isinstance(item, Stretch) else iter((item,))


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
