"""A model of PyTorch's CUDA caching allocator: what a step's allocations reserve, without torch and without a GPU."""

from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory, segment_size
from probes.allocator.events import Alloc, EmptyCache, Event, Free, Phase
from probes.allocator.replay import ReplayResult, replay

__all__ = [
    "Alloc",
    "CachingAllocator",
    "EmptyCache",
    "Event",
    "Free",
    "OutOfDeviceMemory",
    "Phase",
    "ReplayResult",
    "replay",
    "segment_size",
]
