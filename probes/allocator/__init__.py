"""A model of PyTorch's CUDA caching allocator: what a step's allocations reserve, without torch and without a GPU."""

from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory, segment_size
from probes.allocator.events import Alloc, EmptyCache, Event, Events, Free, Phase
from probes.allocator.replay import OutOfMemory, ReplayResult, replay

__all__ = [
    "Alloc",
    "CachingAllocator",
    "EmptyCache",
    "Event",
    "Events",
    "Free",
    "OutOfDeviceMemory",
    "OutOfMemory",
    "Phase",
    "ReplayResult",
    "replay",
    "segment_size",
]
