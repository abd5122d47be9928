"""torch.cuda's memory statistics and the driver's, without a GPU: served from a recording, or from the allocator's
model while a step really runs on the CPU.

The first replays for ever what a GPU once said; the second rehearses how that is recorded.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from planner.core.records import dataclass
from planner.core.units import MIB
from probes.allocator.blocks import Block
from probes.allocator.caching import CachingAllocator
from probes.allocator.events import Alloc, Event, Free
from probes.dryrun.tracker import Tracker
from probes.gpu import meters as measure_meters

MODELLED_CONTEXT_BYTES = 500 * MIB
"""What the modelled driver counts beyond PyTorch: a round figure that no card is claimed to have."""

Stats = Mapping[str, int]
"""`allocated_bytes`, `max_allocated_bytes`, `reserved_bytes`, `max_reserved_bytes`, `num_alloc_retries`, `used_bytes`:
what torch.cuda and the driver say at one moment, peaks since they were last reset."""
KEYS = (
    "allocated_bytes",
    "max_allocated_bytes",
    "reserved_bytes",
    "max_reserved_bytes",
    "num_alloc_retries",
    "used_bytes",
)


class PlayedCuda(ABC):
    """A device whose statistics come from elsewhere."""

    @abstractmethod
    def stats(self) -> Stats:
        """What is said now."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""

    def used_bytes(self) -> int:
        """As `NvmlReader`."""
        return self.stats()["used_bytes"]

    def throttle_flags(self) -> set[str]:
        """As `NvmlReader`."""
        return set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it `CudaMeter` measures this device."""
        served: dict[str, Any] = {
            "memory_allocated": lambda *_: self.stats()["allocated_bytes"],
            "max_memory_allocated": lambda *_: self.stats()["max_allocated_bytes"],
            "memory_reserved": lambda *_: self.stats()["reserved_bytes"],
            "max_memory_reserved": lambda *_: self.stats()["max_reserved_bytes"],
            "memory_stats": lambda *_: {"num_alloc_retries": self.stats()["num_alloc_retries"]},
            "reset_peak_memory_stats": lambda *_: self.reset_peaks(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda *_: None,
        }
        with ExitStack() as patches:
            for name, function in served.items():
                patches.enter_context(patch.object(torch.cuda, name, function))
            patches.enter_context(patch.object(measure_meters, "nvml_reader", lambda resources, device: self))
            yield


@dataclass(kw_only=True)
class Recorded(PlayedCuda):
    """Says what a row of a recording says; between two rows nothing happens but that the peaks are reset."""

    row: dict[str, int]

    def at(self, row: Stats) -> None:
        self.row = {key: row[key] for key in KEYS}

    def stats(self) -> Stats:
        return self.row

    def reset_peaks(self) -> None:
        self.row["max_allocated_bytes"] = self.row["allocated_bytes"]
        self.row["max_reserved_bytes"] = self.row["reserved_bytes"]


class Modelled(PlayedCuda):
    """What PyTorch would say of the CPU's tensors if its GPU allocator held them, by the allocator's model."""

    def __init__(self, tracker: Tracker, *, expandable_segments: bool) -> None:
        self._tracker = tracker
        self._read = 0
        self._allocator = CachingAllocator(expandable_segments=expandable_segments)
        self._live: dict[int, tuple[Block, int]] = {}

    def stats(self) -> Stats:
        self._settle()
        model = self._allocator
        return {
            "allocated_bytes": model.allocated_bytes,
            "max_allocated_bytes": model.peak_allocated_bytes,
            "reserved_bytes": model.reserved_bytes,
            "max_reserved_bytes": model.peak_reserved_bytes,
            "num_alloc_retries": model.num_retries,
            "used_bytes": MODELLED_CONTEXT_BYTES + model.reserved_bytes,
        }

    def reset_peaks(self) -> None:
        self._settle()
        self._allocator.reset_peaks()

    @property
    def driver_calls(self) -> int:
        """Segments or pages asked of the driver so far."""
        self._settle()
        return self._allocator.num_driver_calls

    def events(self) -> list[Event]:
        return [event for event in self._tracker.events if isinstance(event, (Alloc, Free))]

    def _settle(self) -> None:
        events = self._tracker.events
        while self._read < len(events):
            event = events[self._read]
            self._read += 1
            if isinstance(event, Alloc) and event.size_bytes:
                self._live[event.id] = self._allocator.malloc(event.size_bytes), event.size_bytes
            elif isinstance(event, Free) and event.id in self._live:
                self._allocator.free(*self._live.pop(event.id))
