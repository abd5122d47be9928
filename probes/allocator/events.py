"""What a step does to device memory, in order: the input of `replay`.

Four kinds of event, as named tuples because a step has up to 100,000 of them. `id` is any whole number that the
recorder chose for one storage; it may be used again once freed.
"""

from typing import NamedTuple


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
