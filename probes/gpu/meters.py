"""Memory and time on one device: CUDA's own statistics and events, or on the CPU the dry run's storage tracker.

Both meters are told the phases by the step's marks and answer the peak of each. Which kernels a step really ran is the
profiler's: PyTorch chooses the SDPA backend at run time, by card, data type and shape.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.core.units import MIB
from planner.hardware.driver import device_handle, nvml
from planner.memory.workspace import CONTEXT_BYTES
from planner.setup.memory_terms import PHASES
from probes.allocator.events import Phase
from probes.dryrun.analysis import Curve
from probes.dryrun.layout_tracker import LayoutTracker
from probes.dryrun.tracker import Tracker, local
from probes.gpu.environment import NvmlReader
from probes.gpu.timing import PHASE_OF_BUILDING

MIN_CONTEXT_BYTES = 64 * MIB
"""Less than any CUDA context with PyTorch's kernels takes: the reading before us held what is gone now."""
KEPT = 40
"""Names kept, those that took longest first."""
LONGEST_NAME = 160
_ATTENTION = (  # (part of a kernel's name, backend); the first that occurs in any name holds
    ("cudnn_generated_fort_native_sdpa", "cudnn"),
    ("cudnn_sdpa", "cudnn"),
    ("flash_fwd", "flash"),
    ("flash_bwd", "flash"),
    ("FlashAttn", "flash"),
    ("fmha_cutlass", "memory-efficient"),
    ("attn_fwd", "flash"),  # AOTriton's, on ROCm
)


class _RankTracker(LayoutTracker):
    """One rank's memory on the CPU: real tensors only. DTensor tries its operators on fake ones first, which claim to
    be there."""

    def track(self, tensor: torch.Tensor, op: str) -> int | None:
        return None if isinstance(tensor, FakeTensor) else super().track(tensor, op)


class CpuMeter:
    """Real CPU tensors, followed as the dry run follows meta tensors: same rounding, same phases."""

    has_nvml = False

    def __init__(self, *, layout: bool = False) -> None:
        """With `layout` of one rank of several: parameters are parts of others, and storages change their size."""
        self._tracker = Tracker("cpu")
        self._resizing: Callable[[], AbstractContextManager[None]] = nullcontext
        if layout:
            ranked = _RankTracker("cpu")
            self._tracker, self._resizing = ranked, ranked.resizing
        self._curve = Curve()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it allocations are counted."""
        with self._tracker, self._resizing():
            yield

    def track(self, tensor: torch.Tensor) -> None:
        """Counts a tensor made outside `following` (loaded weights); of a sharded one this rank's part."""
        self._tracker.track(local(tensor), "load")

    def mark(self, phase: str, layer: int | None = None) -> None:
        """A phase begins (layers inside a phase make no difference here)."""
        self._settle()
        self._curve.add(Phase(phase))

    def rebase(self) -> None:
        """Forgets the peaks so far: what is held now is where the measurement begins."""
        self._settle()
        self._curve.rebase()

    def phase_peaks(self) -> dict[str, int]:
        self._settle()
        return dict.fromkeys(PHASES, 0) | {phase: peak for phase, (peak, _) in self._curve.best.items()}

    def reserved_peak(self) -> int:
        return max(self.phase_peaks().values())

    def context_bytes(self) -> int:
        """Device memory in use beyond what the allocator holds."""
        return 0

    def flags(self) -> set[str]:
        """What disturbed the measurement."""
        return set()

    def time_steps(self, step: Callable[[], object], num: int) -> list[float]:
        """Seconds of each of `num` calls."""
        times = []
        for _ in range(num):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return times

    def _settle(self) -> None:
        for event in self._tracker.events:
            self._curve.add(event)
        self._tracker.events.clear()


def nvml_reader(resources: ExitStack, device: str) -> NvmlReader | None:
    """The driver's readings of one GPU as long as `resources` are held; None where it cannot be asked."""
    module = resources.enter_context(nvml())
    return NvmlReader(module, device_handle(module, device)) if module is not None else None


class CudaMeter:
    """PyTorch's statistics of one GPU, the driver's view through NVML, times from CUDA events; asked as `CpuMeter`."""

    following = nullcontext

    def __init__(
        self,
        device: str,
        resources: ExitStack,
        base_used_bytes: int | None,
        *,
        paged: bool = False,
        assumed_context_bytes: int = CONTEXT_BYTES,
    ) -> None:
        """With `paged` the optimizer's states are managed memory, which the driver counts and PyTorch does not.
        `assumed_context_bytes` stands in where the driver does not tell the context."""
        self._assumed_context = assumed_context_bytes
        self._paged = paged
        self._context: int | None = None
        self._torch_device = torch.device(device)
        self._phase = PHASE_OF_BUILDING
        self._flags: set[str] = set()
        self._base_used_bytes = base_used_bytes
        self._nvml = nvml_reader(resources, device)
        self.has_nvml = self._nvml is not None and base_used_bytes is not None
        self.rebase()
        self._retries_before = self._retries()

    def mark(self, phase: str, layer: int | None = None) -> None:
        """Allocation happens on the host as operators are enqueued, so no synchronisation is needed here."""
        if phase == self._phase:
            return
        if phase == "step" and self._paged and self._context is None:  # before the states exist
            self._read_context()
        self._close_phase()
        self._phase = phase

    def rebase(self) -> None:
        torch.cuda.synchronize(self._torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._torch_device)
        self._peaks, self._reserved = dict.fromkeys(PHASES, 0), 0

    def phase_peaks(self) -> dict[str, int]:
        self._close_phase()
        return dict(self._peaks)

    def reserved_peak(self) -> int:
        # reset_peak_memory_stats resets the reserved peak too; the allocator gives segments back only on a retry, which
        # is flagged, so the largest value seen at any mark is the peak.
        self._close_phase()
        return self._reserved

    def context_bytes(self) -> int:
        """Where the driver does not tell, or tells less than any context has, the formula's figure stands in."""
        if not self._paged:
            self._read_context()
        return self._assumed_context if self._context is None else self._context

    def _read_context(self) -> None:
        """What the driver shows beyond what was there before us and what PyTorch's allocator holds."""
        if self._nvml is None or self._base_used_bytes is None:
            return
        torch.cuda.synchronize(self._torch_device)
        reserved_bytes = int(torch.cuda.memory_reserved(self._torch_device))
        context_bytes = self._nvml.used_bytes() - self._base_used_bytes - reserved_bytes
        if context_bytes < MIN_CONTEXT_BYTES:
            self._flags.add("context-unread")
            self.has_nvml = False
        else:
            self._context = context_bytes

    def time_steps(self, step: Callable[[], object], num: int) -> list[float]:
        """Events between the steps, one synchronisation at the end: steps overlap with the host as in training."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        events[-1].synchronize()
        if self._nvml is not None:
            self._flags |= self._nvml.throttle_flags()
        return [first.elapsed_time(second) / 1000.0 for first, second in pairwise(events)]

    def flags(self) -> set[str]:
        flags = set(self._flags)
        if self._retries() > self._retries_before:
            flags.add("allocator-retries")
        return flags

    def _close_phase(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._torch_device)
        self._peaks[self._phase] = max(self._peaks[self._phase], peak)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._torch_device))
        torch.cuda.reset_peak_memory_stats(self._torch_device)

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._torch_device).get("num_alloc_retries", 0))


Meter = CpuMeter | CudaMeter


def kernels_of_step(step: Callable[[], object]) -> tuple[str, ...]:
    """Names of the CUDA kernels of one step, those that took longest first; none where the profiler does not work."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    except RuntimeError:  # a container without CUPTI: the names are missing, nothing else is
        return ()
    return tuple(event.key[:LONGEST_NAME] for event in events if event.self_device_time_total > 0)[:KEPT]


def attention_backend(kernels: Sequence[str]) -> str:
    """The backend of scaled-dot-product attention that these kernels are of: "cudnn", "flash", "memory-efficient", else
    "math" (plain products and a softmax); empty where no kernel is known."""
    if not kernels:
        return ""
    for part, backend in _ATTENTION:
        if any(part in name for name in kernels):
            return backend
    return "math"
