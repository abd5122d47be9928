"""What a step does to device memory, in order: the input of `replay`.

Four kinds of event, as named tuples because a step has up to 100,000 of them. `id` is any whole number that the
recorder chose for one storage; it may be used again once freed. A dry run of a deep model has a million events, of
which all but a few thousand are a layer's requests and releases with other storages: `Repetition` names the pattern
instead of listing them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

from planner.core.units import MIN_BLOCK_BYTES


class Alloc(NamedTuple):
    """A storage of `size_bytes` (as asked for, not rounded) came to life. Zero bytes allocate nothing, as in torch."""

    id: int
    size_bytes: int


class Free(NamedTuple):
    """The storage died."""

    id: int


class Phase(NamedTuple):
    """What follows belongs to the phase `name` (one of `planner.setup.memory_terms.PHASES`); a name may come again."""

    name: str


class EmptyCache(NamedTuple):
    """`torch.cuda.empty_cache()`: every cached segment without a live block goes back to the driver."""


Event = Alloc | Free | Phase | EmptyCache

Step = tuple[int, int | None]
"""(place, size in bytes) makes the pattern's storage of that place, (place, None) releases it."""


def rounded(size_bytes: int) -> int:
    """Bytes of a block for `size_bytes`, without what is not worth splitting off."""
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


class Course(NamedTuple):
    """Allocated bytes after each of some steps, relative to before them, and the first place of the highest."""

    totals: list[int]
    top: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """Steps on storages of its own.

    Attributes:
        runs: steps one after another; between one run and the next something happens to other storages.
        sizes: bytes of each storage; `origins` where it came from, `owners` (by place) whose it is.
        left: places of what it does not release.
    """

    runs: list[list[Step]]
    sizes: list[int]
    left: list[int]
    origins: Sequence[Any]
    owners: Mapping[int, tuple[str, str]]

    @cached_property
    def courses(self) -> list[Course]:
        """One for each run."""
        sizes = [rounded(size) for size in self.sizes]
        courses = []
        for run in self.runs:
            totals = [*accumulate(-sizes[place] if size is None else sizes[place] for place, size in run)]
            courses.append(Course(totals, totals.index(max(totals)) if totals else -1))
        return courses


class Repetition(NamedTuple):
    """A pattern with storages numbered from `first` on; `external`: events of others' storages between its runs."""

    pattern: Pattern
    first: int
    external: Sequence[Sequence[Event]]

    @property
    def num_events(self) -> int:
        """Of its pattern and between its runs."""
        return sum(map(len, (*self.pattern.runs, *self.external)))

    def events(self) -> Iterator[Event]:
        first = self.first
        for run, external in zip_longest(self.pattern.runs, self.external, fillvalue=()):
            for place, size in run:
                yield Free(first + place) if size is None else Alloc(first + place, size)
            yield from external


def flat(items: Iterable[Event | Repetition]) -> Iterator[Event]:
    """Events one by one."""
    for item in items:
        if isinstance(item, Repetition):
            yield from item.events()
        else:
            yield item
