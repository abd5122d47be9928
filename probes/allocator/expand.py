"""`expand`: the events of a deep model from those of two shallow ones, so that reserved memory can be replayed.

Allocated peaks are affine in the number of layers; reserved peaks are not: what a cached block can serve next depends
on everything that came before. So the events themselves are extended. The deeper of two runs holds everything the
shallower does plus one period of layers, as stretches of extra events (in loading, forward, backward, step); a model
deeper by n periods holds each stretch n times more.

A release is told by kind (who allocated it, how large) and by its place among the live ones of its kind, counted from
whichever end is nearer: checkpoints die last in, first out, at any depth.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from probes.allocator.events import Alloc, Event, Free, Phase

Labels = Mapping[int, Hashable]
"""What allocated a storage, by id: the same for every layer of a kind ("forward", "aten.mm")."""

_WINDOWS = ((48,), (16,), (6,), (48, 16, 6, 2))
"""How many events must agree before a stretch counts as ended: one length for all of them, or, last, any."""

_VECTOR_BYTES = 4096  # a vector with one entry per parameter (of gradient norms) is no larger in a shallow run


class CannotExpand(ValueError):
    """The deeper run is not the shallower one with whole stretches added."""


@dataclass(frozen=True, slots=True)
class _Token:
    """One event, comparable between runs: `kind` "A", "F", "P" or "E"; `rank` of a release among its live kin."""

    kind: str
    label: Hashable
    size_bytes: int = 0
    newest: int = 0
    oldest: int = 0


def expand(
    small: Sequence[Event], small_labels: Labels, large: Sequence[Event], large_labels: Labels, *, periods: int
) -> list[Event]:
    """Events at a depth `periods` periods beyond `large`, where `large` is one period deeper than `small`.

    Phase names may carry a layer ("forward/3"); the expanded events carry the phase alone.

    Raises:
        CannotExpand: the two runs differ by more than added stretches.
        ValueError: `periods` is negative.
    """
    if periods < 0:
        raise ValueError(f"periods must not be negative, got {periods}")
    short, long = _tokens(small, small_labels), _tokens(large, large_labels)
    for windows in _WINDOWS:
        stretches = _Alignment(short, long, windows).stretches()
        if stretches is not None:
            return _emit(long, stretches, periods)
    raise CannotExpand("the deeper run is not the shallower one with whole stretches added")


def _tokens(events: Sequence[Event], labels: Labels) -> list[_Token]:
    tokens: list[_Token] = []
    live: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
    kinds: dict[int, tuple[Hashable, int]] = {}
    for event in events:
        if isinstance(event, Alloc):
            kind = (labels.get(event.id), event.size_bytes)
            kinds[event.id] = kind
            live[kind].append(event.id)
            tokens.append(_Token("A", *kind))
        elif isinstance(event, Free):
            kind = kinds.pop(event.id)
            kin = live[kind]
            oldest = kin.index(event.id) if len(kin) > 1 else 0
            tokens.append(_Token("F", *kind, newest=len(kin) - 1 - oldest, oldest=oldest))
            del kin[oldest]
        elif isinstance(event, Phase):
            tokens.append(_Token("P", event.name.partition("/")[0]))
        else:
            tokens.append(_Token("E", None))
    return tokens


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Events begin..end of the deeper run that one period adds; or, empty, a single event that grows with depth."""

    begin: int
    end: int
    growth_bytes: int = 0


class _Alignment:
    """Finds what the deeper run adds, stepping back where a guess leads nowhere.

    Events are numbered so that whole windows compare at once: `same` by kind, label and size, `alike` also where both
    are small vectors, whose length may count layers.
    """

    def __init__(self, short: list[_Token], long: list[_Token], windows: tuple[int, ...]) -> None:
        same: dict[Hashable, int] = {}
        alike: dict[Hashable, int] = {}
        self._short = [same.setdefault((one.kind, one.label, one.size_bytes), len(same)) for one in short]
        self._long = [same.setdefault((one.kind, one.label, one.size_bytes), len(same)) for one in long]
        self._short_alike = [alike.setdefault(_shape(one), len(alike)) for one in short]
        self._long_alike = [alike.setdefault(_shape(one), len(alike)) for one in long]
        self._sizes = [one.size_bytes for one in short], [one.size_bytes for one in long]
        self._windows = windows
        self._failed: set[tuple[int, int]] = set()

    def stretches(self) -> list[_Stretch] | None:
        """What is added, in order; None when that does not explain the deeper run."""
        room = len(self._long) - len(self._short)
        found = self._from(0, 0, room) if room >= 0 else None
        return None if found is None else found[::-1]

    def _from(self, i: int, j: int, room: int) -> list[_Stretch] | None:
        """The stretches after both runs' positions, last first."""
        short, long = self._short, self._long
        while i < len(short) and j < len(long) and short[i] == long[j]:
            i, j = i + 1, j + 1
        if j == len(long):
            return [] if i == len(short) and room == 0 else None
        if (i, j) in self._failed or room > len(long) - j:
            return None
        for candidate in self._candidates(i, j, room):
            length = candidate.end - candidate.begin
            step = 0 if length else 1  # a grown event is there in both runs
            rest = self._from(i + step, j + length + step, room - length)
            if rest is not None:
                rest.append(candidate)
                return rest
        self._failed.add((i, j))
        return None

    def _candidates(self, i: int, j: int, room: int) -> Iterator[_Stretch]:
        tried = set()
        short_sizes, long_sizes = self._sizes
        for window in self._windows:
            if i < len(self._short) and 0 not in tried and self._agree(i, j, window):
                tried.add(0)
                yield _Stretch(j, j, long_sizes[j] - short_sizes[i])
            length = self._length(i, j, window, room)
            if length is not None and length not in tried:
                tried.add(length)
                yield _Stretch(j, j + length)

    def _agree(self, i: int, j: int, window: int) -> bool:
        """Whether the next events of both runs are alike, to the window's length or the shorter run's end."""
        reach = min(window, len(self._short) - i)
        return self._short_alike[i : i + reach] == self._long_alike[j : j + reach]

    def _length(self, i: int, j: int, window: int, room: int) -> int | None:
        """The shortest stretch of the deeper run after which both agree again."""
        if i == len(self._short):
            rest = len(self._long) - j
            return rest if 0 < rest <= room else None
        first, last = self._short_alike[i], j + room
        place = j
        while True:
            try:
                place = self._long_alike.index(first, place + 1, last + 1)
            except ValueError:
                return None
            if self._agree(i, place, window):
                return place - j


def _shape(token: _Token) -> Hashable:
    small = 0 < token.size_bytes <= _VECTOR_BYTES
    return (token.kind, token.label, -1 if small else token.size_bytes)


def _emit(long: list[_Token], stretches: list[_Stretch], periods: int) -> list[Event]:
    events: list[Event] = []
    live: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
    number = 0
    growth = {one.begin: one.growth_bytes for one in stretches if one.begin == one.end}

    def put(index: int) -> None:
        nonlocal number
        token = long[index]
        size = token.size_bytes + growth.get(index, 0) * periods
        if token.kind == "A":
            events.append(Alloc(number, size))
            live[token.label, size].append(number)
            number += 1
        elif token.kind == "F":
            kin = live[token.label, size]
            if not kin:
                raise CannotExpand(f"nothing of the kind {token.label!r} is left to release")
            from_end = token.newest <= token.oldest
            place = len(kin) - 1 - token.newest if from_end else token.oldest
            events.append(Free(kin.pop(min(max(place, 0), len(kin) - 1))))
        elif token.kind == "P":
            events.append(Phase(str(token.label)))

    position = 0
    for stretch in stretches:
        for index in range(position, stretch.end):
            put(index)
        position = stretch.end
        if stretch.end > stretch.begin:
            for _ in range(periods):
                for index in range(stretch.begin, stretch.end):
                    put(index)
    for index in range(position, len(long)):
        put(index)
    return events
