"""The card's memory under a program: PyTorch's allocator as a model, and what it was asked for, in order."""

from collections.abc import Callable

import torch

from planner.core.units import gib
from probes.allocator.blocks import Block
from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory
from probes.allocator.events import Alloc, EmptyCache, Event, Free
from probes.phantom.card import Card
from probes.phantom.origins import Origin, Origins


class CardMemory:
    """The memory of one card.

    Attributes:
        events: allocations and releases in order; `origins.found` says of each allocation whose it was.
        allocator: the card's memory as it is now.
        peak_allocated_bytes, peak_reserved_bytes: up to the last `keep_peaks`.
        group_bytes: what the communication library takes, outside PyTorch.
    """

    def __init__(self, card: Card, origins: Origins, *, limited: bool, expandable_segments: bool) -> None:
        self.events: list[Event] = []
        self.allocator = CachingAllocator(
            expandable_segments=expandable_segments, limit_bytes=card.limit_bytes if limited else None
        )
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_allocations = 0
        self.group_bytes = 0
        self._card = card
        self._origins = origins

    @property
    def free_bytes(self) -> int:
        return self._card.limit_bytes - self.group_bytes - self.allocator.reserved_bytes

    def join(self, num_bytes: int) -> None:
        self.group_bytes = num_bytes
        if self.allocator.limit_bytes is not None:
            self.allocator.limit_bytes = self._card.limit_bytes - num_bytes

    def take(self, size_bytes: int, op: str) -> tuple[int, Callable[[], None]]:
        """Takes memory that is followed: the allocation's number, and what gives it back.

        Raises:
            torch.OutOfMemoryError: the card has no room.
        """
        number = self.num_allocations
        self.num_allocations += 1
        block = self.malloc(size_bytes, op) if size_bytes > 0 else None
        self._origins.by_allocation[number] = Origin(self._origins, op, size_bytes)
        self.events.append(Alloc(number, size_bytes))
        events, free = self.events, self.allocator.free

        def release() -> None:
            events.append(Free(number))
            if block is not None:
                free(block, size_bytes)

        return number, release

    def malloc(self, size_bytes: int, op: str) -> Block:
        """A block that nobody follows.

        Raises:
            torch.OutOfMemoryError: the card has no room.
        """
        try:
            return self.allocator.malloc(size_bytes)
        except OutOfDeviceMemory:
            allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
            self._origins.out_of_memory(size_bytes, op, allocated)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {gib(size_bytes)}. GPU 0 has a total capacity of "
                f"{gib(self._card.memory_bytes)} of which {gib(self.free_bytes)} is free. Of the allocated memory "
                f"{gib(allocated)} is allocated by PyTorch, and {gib(reserved - allocated)} is reserved by PyTorch but "
                "unallocated."
            ) from None

    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        self.events.append(EmptyCache())

    def keep_peaks(self) -> None:
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocator.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocator.peak_reserved_bytes)
