"""`expand`: the events of a deep model from those of two shallow ones, so that reserved memory can be replayed.

Allocated peaks are affine in the number of layers; reserved peaks are not: what a cached block can serve next depends
on everything that came before. So the events themselves are extended. The deeper of two runs holds everything the
shallower does plus one period of layers, as stretches of extra events (in loading, forward, backward, step); a model
deeper by n periods holds each stretch n times more.

A release is told by kind (who allocated it, how large) and by its place among the live ones of its kind, counted from
whichever end is nearer: checkpoints die last in, first out, at any depth.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from probes.allocator.events import Alloc, Event, Free, Phase

Labels = Mapping[int, Hashable]
"""What allocated a storage, by id: the same for every layer of a kind ("forward", "aten.mm")."""

_WINDOWS = (48, 16, 6)  # events that must agree before a stretch counts as ended; the longest that works is used

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

    def same(self, other: "_Token") -> bool:
        """Same event, at whatever rank."""
        return self.kind == other.kind and self.label == other.label and self.size_bytes == other.size_bytes

    def alike(self, other: "_Token") -> bool:
        """Same event, or a small vector whose length counts layers."""
        if self.kind != other.kind or self.label != other.label:
            return False
        return self.size_bytes == other.size_bytes or max(self.size_bytes, other.size_bytes) <= _VECTOR_BYTES


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
    for window in _WINDOWS:
        stretches = _added(short, long, window)
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


def _added(short: list[_Token], long: list[_Token], window: int) -> list[_Stretch] | None:
    """Where the deeper run holds more, in order; None when that does not explain it."""
    stretches: list[_Stretch] = []
    i = j = 0
    room = len(long) - len(short)
    while j < len(long):
        if i < len(short) and short[i].same(long[j]):
            i, j = i + 1, j + 1
        elif i < len(short) and _agree(short, long, i, j, window):
            stretches.append(_Stretch(j, j, long[j].size_bytes - short[i].size_bytes))
            i, j = i + 1, j + 1
        else:
            length = _length(short, long, i, j, window, room)
            if length is None:
                return None
            stretches.append(_Stretch(j, j + length))
            j, room = j + length, room - length
    return stretches if i == len(short) and room == 0 else None


def _agree(short: list[_Token], long: list[_Token], i: int, j: int, window: int) -> bool:
    """Whether the next events of both runs are alike, to the window's length or the shorter run's end."""
    reach = min(window, len(short) - i)
    return j + reach <= len(long) and all(short[i + k].alike(long[j + k]) for k in range(reach))


def _length(short: list[_Token], long: list[_Token], i: int, j: int, window: int, room: int) -> int | None:
    """The shortest stretch of the deeper run after which both agree again."""
    if i == len(short):
        return len(long) - j if len(long) - j <= room else None
    return next((length for length in range(1, room + 1) if _agree(short, long, i, j + length, window)), None)


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
