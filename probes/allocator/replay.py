"""`replay`: the events of a step through the caching allocator, and what `torch.cuda` would have reported."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from probes.allocator.blocks import Block
from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory
from probes.allocator.events import Alloc, Event, Free, Phase, Repetition, Step

_Live = dict[int, tuple[Block, int] | None]
"""Storage -> its block and the bytes asked for; None: of zero bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What the allocator would have reported.

    Attributes:
        peak_allocated_bytes: `torch.cuda.max_memory_allocated`.
        peak_reserved_bytes: `torch.cuda.max_memory_reserved`.
        end_allocated_bytes, end_reserved_bytes: after the last event that was served.
        fits: whether everything was served.
        num_retries: `num_alloc_retries`: each cost a synchronisation and a new cudaMalloc.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    fits: bool
    num_retries: int


def replay(
    events: Iterable[Event | Repetition], *, expandable_segments: bool = False, limit_bytes: int | None = None
) -> ReplayResult:
    """Peak allocated and reserved bytes of `events`.

    Args:
        events: in order; storages never freed stay alive to the end.
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        limit_bytes: what the driver has left for PyTorch on the card; beyond it the replay ends.

    Raises:
        ValueError: an id allocated twice, or freed without being alive, or a negative size.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    fits = True
    try:
        _serve(allocator, events, {})
    except OutOfDeviceMemory:
        fits = False
    return ReplayResult(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        end_allocated_bytes=allocator.allocated_bytes,
        end_reserved_bytes=allocator.reserved_bytes,
        fits=fits,
        num_retries=allocator.num_retries,
    )


def _serve(allocator: CachingAllocator, events: Iterable[Event | Repetition], live: _Live) -> None:
    malloc, free = allocator.malloc, allocator.free
    for event in events:
        if isinstance(event, Alloc):
            storage, size = event
            if storage in live:
                raise ValueError(f"storage {storage} is allocated twice")
            if size < 0:
                raise ValueError(f"size_bytes of storage {storage} must not be negative, got {size}")
            live[storage] = (malloc(size), size) if size else None
        elif isinstance(event, Free):
            try:
                entry = live.pop(event.id)
            except KeyError:
                raise ValueError(f"storage {event.id} is freed but not alive") from None
            if entry is not None:
                free(*entry)
        elif isinstance(event, Repetition):
            for run, external in zip_longest(event.pattern.runs, event.external, fillvalue=()):
                _serve_run(allocator, run, event.first, live)
                _serve(allocator, external, live)
        elif not isinstance(event, Phase):
            allocator.empty_cache()


def _serve_run(allocator: CachingAllocator, run: Iterable[Step], first: int, live: _Live) -> None:
    malloc, free = allocator.malloc, allocator.free
    for place, size in run:
        if size:
            live[first + place] = malloc(size), size
        elif size is not None:
            live[first + place] = None
        else:
            entry = live.pop(first + place)
            if entry is not None:
                free(*entry)
