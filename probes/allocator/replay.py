"""`replay`: the events of a step through the caching allocator, and what `torch.cuda` would have reported."""

from collections.abc import Mapping
from dataclasses import dataclass

from probes.allocator.blocks import Block
from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory
from probes.allocator.events import Alloc, Events, Free, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Where a replay ended: the event that could not be served.

    Attributes:
        event_index: its place in the events.
        free_bytes: cached but free at that moment; `largest_free_block_bytes` the largest piece of it.
        fragmentation: True when the free bytes (cached and never reserved) would have been enough in one piece.
    """

    event_index: int
    phase: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    largest_free_block_bytes: int
    fragmentation: bool


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What the allocator would have reported.

    Attributes:
        peak_allocated_bytes: `torch.cuda.max_memory_allocated`.
        peak_reserved_bytes: `torch.cuda.max_memory_reserved`.
        allocated_by_phase, reserved_by_phase: the peak inside each phase, in order of first appearance.
        end_allocated_bytes, end_reserved_bytes: after the last event.
        peak_event_index: the first event at which the allocated peak was reached; -1 without an allocation.
        out_of_memory: None when everything was served.
        num_retries: `num_alloc_retries`: each cost a synchronisation and a new cudaMalloc.
        num_driver_calls: segments (pages' batches, with expandable segments) asked of the driver.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_by_phase: Mapping[str, int]
    reserved_by_phase: Mapping[str, int]
    end_allocated_bytes: int
    end_reserved_bytes: int
    peak_event_index: int
    out_of_memory: OutOfMemory | None
    num_retries: int
    num_driver_calls: int

    @property
    def gap_bytes(self) -> int:
        """Reserved above allocated, peak against peak: what caching and fragmentation cost."""
        return self.peak_reserved_bytes - self.peak_allocated_bytes


def replay(
    events: Events,
    *,
    expandable_segments: bool = False,
    limit_bytes: int | None = None,
    first_phase: str = "load",
) -> ReplayResult:
    """Peak allocated and reserved bytes of `events`, whole and by phase.

    Args:
        events: in order; storages never freed stay alive to the end.
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        limit_bytes: what the driver has left for PyTorch on the card; beyond it the replay ends out of memory.
        first_phase: the phase of events before the first `Phase`.

    Raises:
        ValueError: an id allocated twice, or freed without being alive, or a negative size.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    live: dict[int, tuple[Block, int] | None] = {}  # None: of zero bytes
    allocated_by_phase: dict[str, int] = {}
    reserved_by_phase: dict[str, int] = {}
    phase = first_phase
    overall_allocated = overall_reserved = 0
    peak_event_index = -1
    out_of_memory = None
    malloc, free = allocator.malloc, allocator.free

    def close_phase() -> None:
        nonlocal overall_allocated, overall_reserved
        allocated, reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        allocated_by_phase[phase] = max(allocated_by_phase.get(phase, 0), allocated)
        reserved_by_phase[phase] = max(reserved_by_phase.get(phase, 0), reserved)
        overall_allocated, overall_reserved = max(overall_allocated, allocated), max(overall_reserved, reserved)
        allocator.reset_peaks()

    highest = 0
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            storage, size = event
            if storage in live:
                raise ValueError(f"event {index}: storage {storage} is allocated twice")
            if size <= 0:
                if size < 0:
                    raise ValueError(f"event {index}: size_bytes must not be negative, got {size}")
                live[storage] = None
                continue
            try:
                live[storage] = (malloc(size), size)
            except OutOfDeviceMemory:
                out_of_memory = _out_of_memory(allocator, index, phase, size)
                break
            if allocator.allocated_bytes > highest:
                highest = allocator.allocated_bytes
                peak_event_index = index
        elif isinstance(event, Free):
            try:
                entry = live.pop(event.id)
            except KeyError:
                raise ValueError(f"event {index}: storage {event.id} is freed but not alive") from None
            if entry is not None:
                free(*entry)
        elif isinstance(event, Phase):
            if index:
                close_phase()
            phase = event.name
        else:
            allocator.empty_cache()
    close_phase()
    return ReplayResult(
        peak_allocated_bytes=overall_allocated,
        peak_reserved_bytes=overall_reserved,
        allocated_by_phase=allocated_by_phase,
        reserved_by_phase=reserved_by_phase,
        end_allocated_bytes=allocator.allocated_bytes,
        end_reserved_bytes=allocator.reserved_bytes,
        peak_event_index=peak_event_index,
        out_of_memory=out_of_memory,
        num_retries=allocator.num_retries,
        num_driver_calls=allocator.num_driver_calls,
    )


def _out_of_memory(allocator: CachingAllocator, index: int, phase: str, size: int) -> OutOfMemory:
    limit = allocator.limit_bytes
    assert limit is not None  # without a limit the driver never refuses
    free_bytes = allocator.reserved_bytes - allocator.allocated_bytes
    return OutOfMemory(
        event_index=index,
        phase=phase,
        requested_bytes=size,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        free_bytes=free_bytes,
        largest_free_block_bytes=max(allocator.small.largest_free_bytes, allocator.large.largest_free_bytes),
        fragmentation=limit - allocator.allocated_bytes >= size,
    )
