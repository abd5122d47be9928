"""`CudaMeter` and the device's turn, with torch.cuda's statistics served from the storage tracker and a fake driver."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.core.units import GIB, MIB
from planner.memory.workspace import CONTEXT_BYTES
from planner.setup import TrainSetup
from probes.gpu import device, environment
from probes.gpu import meters as measure_meters
from probes.gpu.meters import CpuMeter, CudaMeter
from tests.fake_nvml import Card, nvml_module

CONTEXT = 560 * MIB


class FakeCuda:
    """torch.cuda's memory statistics of one process: what the tracker of a `CpuMeter` counts, in segments of 2 MiB."""

    def __init__(self) -> None:
        self.live = CpuMeter()
        self.others_bytes = 0
        self.context_bytes = 0
        self.managed_bytes = 0
        self.num_retries = 1
        self.reserved = 0
        self._peak_from = 0

    def allocated(self) -> int:
        self.live._settle()
        return self.live._curve._total

    def max_memory_allocated(self, device: object = None) -> int:
        self.live._settle()
        peak = self.live.phase_peaks()[self.live._curve._phase]
        self.reserved = max(self.reserved, -(-peak // (2 * MIB)) * 2 * MIB)
        return peak

    def max_memory_reserved(self, device: object = None) -> int:
        self.max_memory_allocated()
        return self.reserved

    def memory_reserved(self, device: object = None) -> int:
        return self.max_memory_reserved()

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.live.rebase()

    def used_bytes(self) -> int:
        return self.others_bytes + self.context_bytes + self.managed_bytes + self.max_memory_reserved()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_alloc_retries": fake.num_retries})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    module = nvml_module([Card("NVIDIA H200", "GPU-1", 143771, used=fake.used_bytes)])

    @contextmanager
    def nvml() -> Iterator[Any]:
        yield module

    for place in (measure_meters, environment):
        monkeypatch.setattr(place, "nvml", nvml)
    return fake


def driver_used(cuda: FakeCuda) -> int:
    status = environment.device_status("cuda:0")
    return status.used_bytes


def test_phases_are_the_trackers_byte_for_byte(cuda: FakeCuda) -> None:
    """The same allocations through both meters: torch.cuda's peak statistics, reset at every mark, lose nothing."""
    reference = CpuMeter()
    with ExitStack() as resources:
        meter = CudaMeter("cuda:0", resources, driver_used(cuda))
        with cuda.live.following(), reference.following():
            tensors = []
            for phase, size in (("forward", 3 << 20), ("loss", 9 << 20), ("backward", 1000), ("step", 5 << 20)):
                meter.mark(phase)
                reference.mark(phase)
                tensors.append(torch.empty(size, dtype=torch.uint8))
                torch.empty(2 * size, dtype=torch.uint8)  # gone at once
        assert meter.phase_peaks() == reference.phase_peaks()
        peak = max(reference.phase_peaks().values())
        assert meter.reserved_peak() == -(-peak // (2 * MIB)) * 2 * MIB


def test_context_is_what_the_driver_counts_beyond_pytorch(cuda: FakeCuda) -> None:
    cuda.others_bytes = 300 * MIB  # a desktop: there before us, there after us
    before = driver_used(cuda)
    with ExitStack() as resources:
        cuda.context_bytes = CONTEXT
        meter = CudaMeter("cuda:0", resources, before)
        assert meter.context_bytes() == CONTEXT
        assert meter.has_nvml
        assert not meter.flags()


def test_context_that_cannot_be_read_is_the_formulas_and_says_so(cuda: FakeCuda) -> None:
    """What was counted before us is gone now: the difference is no context."""
    with ExitStack() as resources:
        cuda.context_bytes = CONTEXT
        meter = CudaMeter("cuda:0", resources, driver_used(cuda) + CONTEXT)
        assert meter.context_bytes() == CONTEXT_BYTES
        assert not meter.has_nvml
        assert meter.flags() == {"context-unread"}
        blind = CudaMeter("cuda:0", resources, None, assumed_context_bytes=7)
        assert (blind.context_bytes(), blind.has_nvml) == (7, False)


def test_memory_that_was_given_back_and_asked_for_again_is_told(cuda: FakeCuda) -> None:
    """Only since the meter began: what an earlier depth had to do is that one's."""
    with ExitStack() as resources:
        meter = CudaMeter("cuda:0", resources, driver_used(cuda))
        assert not meter.flags()
        cuda.num_retries += 1
        assert meter.flags() == {"allocator-retries"}


def test_managed_states_are_no_context(cuda: FakeCuda) -> None:
    """Before: the pages of a paged optimizer were counted as context."""
    with ExitStack() as resources:
        before = driver_used(cuda)
        cuda.context_bytes = CONTEXT
        meter = CudaMeter("cuda:0", resources, before, paged=True)
        meter.mark("forward")
        meter.mark("step")
        cuda.managed_bytes = 4 * GIB
        meter.mark("forward")
        assert meter.context_bytes() == CONTEXT


def test_paged_optimizer_never_asks_for_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from probes.gpu.failures import UnsupportedProbe
    from probes.gpu.run import _only_what_is_free

    parameter = torch.empty(GIB, device="meta")
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}])
    free = [3 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[0], 80 * GIB))
    marks: list[str] = []

    def note(phase: str, layer: int | None = None) -> None:
        marks.append(phase)

    def careful() -> Callable[..., None]:
        return _only_what_is_free(note, optimizer, "paged-adamw-8bit", torch.device("cuda:0"))

    mark = careful()
    mark("forward", None)
    mark("step", None)
    free[0] = 0  # the states are there now
    mark("step", None)
    assert marks == ["forward", "step", "step"]
    with pytest.raises(UnsupportedProbe, match="managed memory"):
        careful()("step", None)


# The turn


class Teardown:
    """What the driver shows of a predecessor that was killed: its tensors go at once, its context later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, base: int = 0, context_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.base, self.context_s = base, context_s
        self.gone_from_s = 0.0
        monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self, name: str) -> environment.DeviceStatus:
        left = CONTEXT if self.now_s < self.gone_from_s + self.context_s else 0
        return environment.DeviceStatus(
            name="GPU", uuid="GPU-1", used_bytes=self.base + left, total_bytes=80 * GIB, process_ids=()
        )


@pytest.mark.parametrize("context_s", [0.3, 2.5, 4.5])
def test_a_predecessors_teardown_is_never_the_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, context_s: float
) -> None:
    """Before: 560 MiB of a dying process were below "quiet", became the base, and the next context read 0."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    driver = Teardown(monkeypatch, base=4 * MIB)
    first = device.lease_device("cuda:0", lambda begins: None, read=driver)
    assert first.descriptor is not None
    device.os.close(first.descriptor)
    driver.gone_from_s, driver.context_s = driver.now_s, context_s
    second = device.lease_device("cuda:0", lambda begins: None, read=driver)
    assert second.before.used_bytes == 4 * MIB
    assert second.shared_bytes == 0


def test_a_neighbour_who_stays_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    driver = Teardown(monkeypatch)
    waits = []
    for base in (0, 2 * GIB, 2 * GIB, 0):
        driver.base, began = base, driver.now_s
        lease = device.lease_device("cuda:0", lambda begins: None, read=driver)
        assert lease.descriptor is not None
        device.os.close(lease.descriptor)
        assert lease.shared_bytes == base
        waits.append(round(driver.now_s - began))
    assert waits == [device.STABLE_S, device.TEARDOWN_S, 0, 0]


def test_a_process_on_the_gpu_makes_it_shared_however_little_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Teardown(monkeypatch, base=CONTEXT)

    def busy(name: str) -> environment.DeviceStatus:
        from dataclasses import replace

        return replace(driver(name), process_ids=(1,))

    assert device.clean_lease("cuda:0", read=busy).shared_bytes == CONTEXT
    assert device.clean_lease("cuda:0", read=driver).shared_bytes == 0  # a desktop


def test_setup_names_paged_optimizers() -> None:
    """`paged-` is how the meter knows them."""
    from planner.setup.allowed import OPTIMIZERS

    paged = [name for name in OPTIMIZERS if "paged" in name]
    assert paged
    assert all(name.startswith("paged-") for name in paged)
    assert TrainSetup(optimizer=paged[0]).optimizer == paged[0]
