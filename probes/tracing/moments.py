"""The moments of a full-depth step that can be a phase's peak, from a run whose sizes are names of forms."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import numpy as np

from planner.core.units import MIN_BLOCK_BYTES
from planner.memory.profiles import GRADIENTS, LOSS_BEGINS, Group
from probes.allocator.events import Alloc, Event, Free, Pattern, Phase, Repetition
from probes.dryrun.analysis import Alive
from probes.dryrun.trace import Trace
from probes.tracing.sizes import NoPolynomial, Scale, Terms, add

TOLERANCE = 2e-5
"""Moments within so much of a phase's highest are not told apart."""

Place = tuple[int, int]
"""A moment: (item of the trace, event within it)."""
PhaseOf = tuple[str, int]
"""Its phase, and which micro-batch of the step it falls in (0: loading)."""
Name = tuple[int, bool, int, int, int]
"""A place at any depth: section of the trace, whether counted from its end, item, part of the item (what lies between
the pattern's runs counts too), event."""
END: tuple[PhaseOf, Name] = ("step", 1), (0, False, 0, 0, 0)
"""What is left when the optimizer's step begins."""
Class = tuple[Terms, bool]
"""The terms of storages, and whether they are looked at apart: gradients, which a rank may pass on at once."""
Counts = dict[tuple[Group, int], int]
"""How many storages of a group and a class are alive."""


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """One moment: its phase, which micro-batch of the step it falls in, and the terms of what is alive, by group."""

    phase: str
    micro_batch: int
    alive: dict[Group, Terms]

    def total(self, without: str = "") -> Terms:
        """Of all groups but those of a category."""
        total: Terms = {}
        for (category, _), terms in self.alive.items():
            if category != without:
                add(total, terms)
        return total


class _Part(NamedTuple):
    """A run of a pattern: how many events, the highest bytes within it relative to before it and after which event, and
    the bytes after it, each [points]."""

    num_events: int
    highest: Any
    event: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Depth:
    """A full-depth trace whose sizes are numbers of classes.

    Attributes:
        repeats: how often what depends on the depth comes (0: nothing is told apart by it).
    """

    trace: Trace
    repeats: int


def moments_of(depths: Sequence[Depth], kinds: Sequence[Class], scale: Scale) -> list[MemoryMoment]:
    """The moments that are the highest of their phase and micro-batch somewhere, no more than it takes.

    Args:
        kinds: each class of storages; with some apart, the moments that are the highest without them too.

    Raises:
        NoPolynomial: what is alive at a moment does not grow evenly with the depth.
    """
    classes, apart = [terms for terms, _ in kinds], np.array([[apart] for _, apart in kinds])
    sizes = np.array([scale.total(terms) for terms in classes])
    walks = [_Walk(depth.trace, sizes) for depth in depths]
    repeats = [depth.repeats for depth in depths]
    by_phase: dict[PhaseOf, list[MemoryMoment]] = defaultdict(list)

    def grown(names: Sequence[tuple[PhaseOf, Name]]) -> list[tuple[PhaseOf, Name]]:
        left = []
        for (key, name), *counts in zip([*names, END], *(walk.counts(names) for walk in walks), strict=True):
            try:
                alive = growing(counts, repeats, classes)
            except NoPolynomial:
                left.append((key, name))
            else:
                by_phase[key].append(MemoryMoment(phase=key[0], micro_batch=key[1], alive=alive))
        return left

    others = [_Walk(depth.trace, sizes * ~apart) for depth in depths] if apart.any() else []
    every = [*walks, *others]
    peaks = {(key, walk.name(place)) for walk in every for key, places in walk.highest().items() for place in places}
    left = grown(sorted(peaks))
    grown(sorted({(key, end) for key, name in left for end in _at_the_ends(name)} - peaks))
    if missing := {key for key, _ in peaks} - {*by_phase}:
        raise NoPolynomial(f"what is alive in {missing} does not grow evenly with the depth")
    chosen = [moment for moments in by_phase.values() for moment in cover(moments, scale)]
    if others:
        chosen += [moment for moments in by_phase.values() for moment in cover(moments, scale, without=GRADIENTS)]
    return chosen


_ENDS = 8
"""Items of a section at either end among which each kind of layer comes."""


def _at_the_ends(name: Name) -> Iterator[Name]:
    """The same in the first and last layers: of what changes evenly from layer to layer the highest is at an end, and
    where nothing changes it is anywhere."""
    section, _, _, part, number = name
    for offset in range(1, _ENDS):
        yield section, False, offset, part, number
        yield section, True, offset, part, number


def growing(counts: Sequence[Counts], repeats: Sequence[int], classes: Sequence[Terms]) -> dict[Group, Terms]:
    """The terms of what is alive, from how much is at each depth."""
    by_group: dict[Group, Terms] = {}
    for group, number in dict.fromkeys(key for depth_counts in counts for key in depth_counts):
        fixed, each = counts[0].get((group, number), 0), 0
        if len(counts) > 1:
            more, rest = divmod(counts[1].get((group, number), 0) - fixed, repeats[1] - repeats[0])
            fixed, each = fixed - more * repeats[0], more
            if rest:
                raise NoPolynomial(f"storages of {group} do not grow evenly with the depth")
        terms = by_group.setdefault(group, {})
        for (index, factor, _), times in classes[number].items():
            add(terms, {(index, factor, 0): fixed * times, (index, factor, 1): each * times})
    return {group: terms for group, terms in by_group.items() if terms}


class _Walk:
    def __init__(self, trace: Trace, sizes: Any) -> None:
        self.trace = trace
        self.sizes = np.ceil(sizes / MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES  # [classes, points]
        starts = [index for index, event in enumerate(trace.events) if isinstance(event, Phase)]
        self._starts = [0, *(start for start in starts if start), len(trace.events)]
        self._parts_of: dict[Pattern, list[_Part]] = {}

    def _parts(self, pattern: Pattern) -> list[_Part]:
        if pattern not in self._parts_of:
            parts = self._parts_of[pattern] = []
            for run in pattern.runs:
                if not run:
                    parts.append(_Part(0, None, None, None))
                    continue
                signs = np.array([-1.0 if size is None else 1.0 for _, size in run])
                classes = [pattern.sizes[place] for place, _ in run]
                totals = np.cumsum(signs[:, None] * self.sizes[classes], axis=0)
                parts.append(_Part(len(run), totals.max(axis=0), totals.argmax(axis=0), totals[-1]))
        return self._parts_of[pattern]

    def highest(self) -> dict[PhaseOf, list[Place]]:
        """For each phase of each micro-batch the moments that are its highest at some point, and where its loss begins
        (LOSS_BEGINS)."""
        alive: dict[int, int] = {}
        total = np.zeros(self.sizes.shape[1])
        peaks: dict[tuple[str, int], tuple[Any, Any]] = {}  # threshold and place of the highest so far, by point
        begins: dict[tuple[str, int], list[Place]] = {}
        sizes = [*self.sizes]
        key = ("load", 0)
        limit, where = peaks[key] = np.zeros(total.shape), np.zeros((*total.shape, 2), dtype=np.int64)

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
                for part, external in zip_longest(self._parts(pattern), item.external):
                    if part is not None and part.num_events:
                        reach(total + part.highest, index, part.event + number)
                        total = total + part.after
                        number += part.num_events
                    for event in external or ():
                        single(event, index, number)
                        number += 1
            elif isinstance(item, Phase):
                name = item.name.partition("/")[0]
                key = (name, key[1] + (name == "forward" and key[0] in ("load", "backward")))
                if name == "loss":
                    begins.setdefault((LOSS_BEGINS, key[1]), [(index, 0)])
                if key not in peaks:
                    peaks[key] = np.full(total.shape, -1.0), np.zeros((*total.shape, 2), dtype=np.int64)
                limit, where = peaks[key]
                reach(total, index, 0)
            else:
                single(item, index, 0)
        places = {key: [tuple(row) for row in np.unique(each, axis=0).tolist()] for key, (_, each) in peaks.items()}
        return places | begins

    # The same place at another depth

    def name(self, place: Place) -> Name:
        """What names a place at any depth: counted from the nearer end of its section."""
        index, number = place
        section = bisect_right(self._starts, index) - 1
        start, end = self._starts[section : section + 2]
        from_end = 2 * (index - start) >= end - start
        ends = [*accumulate(_lengths(self.trace.events[index]))]
        part = bisect_right(ends, number)
        offset = end - index if from_end else index - start
        return section, from_end, offset, part, number - (ends[part - 1] if part else 0)

    def place(self, name: Name) -> Place:
        section, from_end, offset, part, number = name
        index = self._starts[section + 1] - offset if from_end else self._starts[section] + offset
        return index, number + sum(_lengths(self.trace.events[index])[:part])

    # What is alive at some places

    def counts(self, names: Sequence[tuple[PhaseOf, Name]]) -> list[Counts]:
        """What is alive at each of them, and at the end."""
        wanted: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for at, (_, name) in enumerate(names):
            index, number = self.place(name)
            wanted[index][number].append(at)
        snapshots: list[Counts] = [{} for _ in names]
        alive = Alive(self.trace)
        for index, item in enumerate(self.trace.events):
            requests = wanted.get(index)
            repetition = item if isinstance(item, Repetition) else None
            if repetition is not None and not requests:
                alive.add_repetition(repetition)
                continue
            for number, event in enumerate(item.events() if isinstance(item, Repetition) else (item,)):
                alive.add(event, repetition)
                for at in requests.get(number, ()) if requests else ():
                    snapshots[at] = {key: many for key, many in alive.count.items() if many}
        return [*snapshots, {key: many for key, many in alive.count.items() if many}]


def _lengths(item: Event | Repetition) -> list[int]:
    """How many events the runs of an item's pattern, and what lies between them, have, in turn."""
    if not isinstance(item, Repetition):
        return [1]
    pairs = zip_longest(item.pattern.runs, item.external, fillvalue=())
    return [len(events) for pair in pairs for events in pair]


def cover(moments: Sequence[MemoryMoment], scale: Scale, without: str = "") -> list[MemoryMoment]:
    """Of the moments of one phase those that are needed for its highest everywhere, without a category."""
    totals = np.array([scale.total(moment.total(without)) for moment in moments])
    top = totals.max(axis=0)
    open_points = np.ones(totals.shape[1], dtype=bool)
    chosen: list[MemoryMoment] = []
    while open_points.any():
        reached = (totals >= top * (1 - TOLERANCE)) & open_points
        best = int(reached.sum(axis=1).argmax())
        chosen.append(moments[best])
        open_points &= ~reached[best]
    return chosen
