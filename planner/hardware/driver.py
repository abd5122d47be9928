"""Which of the machine's GPUs this process sees, as the driver (NVML, or AMD's) tells it: no torch, no CUDA context.

CUDA_VISIBLE_DEVICES renumbers CUDA's devices and never NVML's. It names them by number, by UUID or its beginning, or
names MIG slices. The order is that of the PCI bus, which every probe's child sets.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from planner.core.records import dataclass
from planner.hardware.amd import AmdSmi, connect

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def nvml() -> Iterator[Any]:
    """The initialised NVML module, AMD's driver under its names (`amd`), or None where neither answers."""
    module: Any = _nvidia() or connect()
    if module is None:
        yield None
        return
    try:
        yield module
    finally:
        module.nvmlShutdown()


def _nvidia() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_names() -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES up to the first that names nothing, as CUDA reads them; None: all GPUs."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return None
    names = []
    for part in (word.strip() for word in given.split(",")):
        if not (part.isdecimal() or part.startswith(("GPU-", "MIG-"))):
            break
        names.append(part)
    return tuple(names)


def visible_handles(module: Any) -> tuple[Any, ...]:
    """NVML's handle of every device that CUDA would show this process, in CUDA's numbering; of a GPU in MIG mode its
    first slice, of which CUDA uses one. An entry that no device answers to ends the list, as in CUDA."""
    if isinstance(module, AmdSmi):
        return module.visible_handles()
    whole = [module.nvmlDeviceGetHandleByIndex(index) for index in range(int(module.nvmlDeviceGetCount()))]
    names = visible_names()
    if names is None:
        return tuple(_first_slice(module, gpu) for gpu in whole)
    handles = []
    for name in names:
        if name.isdecimal():
            handle = _first_slice(module, whole[int(name)]) if int(name) < len(whole) else None
        else:
            slices = [mig_slice for gpu in whole for mig_slice in _slices(module, gpu)]
            handle = _named(module, name, slices if name.startswith("MIG-") else whole)
            handle = _first_slice(module, handle) if handle is not None else None
        if handle is None:
            break
        handles.append(handle)
    return tuple(handles)


def _named(module: ModuleType, name: str, handles: list[Any]) -> Any:
    """The one device whose UUID begins so; None for none and for several."""
    matching = [handle for handle in handles if text(module.nvmlDeviceGetUUID(handle)).startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _slices(module: ModuleType, gpu: Any) -> list[Any]:
    """The MIG slices of one GPU; none where it is whole, or cannot be sliced."""
    try:
        if not module.nvmlDeviceGetMigMode(gpu)[0]:
            return []
        most = int(module.nvmlDeviceGetMaxMigDeviceCount(gpu))
    except module.NVMLError:
        return []
    slices = []
    for index in range(most):
        with contextlib.suppress(module.NVMLError):  # not every place holds a slice
            slices.append(module.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return slices


def _first_slice(module: ModuleType, gpu: Any) -> Any:
    return next(iter(_slices(module, gpu)), gpu)


def device_index(device: str) -> int:
    """The N of "cuda:N" (0 for "cuda")."""
    return int(device.partition(":")[2] or 0)


def device_handle(module: ModuleType, device: str) -> Any:
    """NVML's handle of "cuda:N".

    Raises:
        LookupError: this process sees fewer devices.
    """
    handles = visible_handles(module)
    index = device_index(device)
    if index >= len(handles):
        raise LookupError(f"{device} does not exist: the driver shows this process {len(handles)} GPU(s)")
    return handles[index]


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What NVML tells of a device beside its memory.

    Attributes:
        num_cores: CUDA cores; core_clock_hz: the highest of the multiprocessors.
        bandwidth_bytes_per_s: bus width times the memory's highest clock, two transfers each.
    """

    capability: tuple[int, int]
    num_cores: int
    core_clock_hz: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """One device as the driver shows it.

    Attributes:
        used_bytes: what others hold of it now; the driver's own reserve is not counted.
        num_sms: multiprocessors of a MIG slice, None of a whole GPU.
        share: of the GPU's memory that a MIG slice has.
        properties: what else the driver tells of it; None of a slice, or where it does not.
    """

    name: str
    total_bytes: int
    used_bytes: int
    num_sms: int | None = None
    share: float = 1.0
    properties: DeviceProperties | None = None


def seen_gpu(module: ModuleType, device: str) -> SeenGpu:
    """The driver's view of "cuda:N".

    Raises:
        LookupError: this process sees fewer devices.
        module.NVMLError: the driver does not tell.
    """
    handle = device_handle(module, device)
    name, _, slice_name = text(module.nvmlDeviceGetName(handle)).partition(" MIG ")
    total = int(module.nvmlDeviceGetMemoryInfo(handle).total)
    num_sms, share = None, 1.0
    if slice_name:
        whole = module.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        share = total / int(module.nvmlDeviceGetMemoryInfo(whole).total)
        with contextlib.suppress(module.NVMLError):
            num_sms = int(module.nvmlDeviceGetAttributes(handle).multiprocessorCount)
    used_bytes, properties = _used_bytes(module, handle), None if slice_name else properties_of(module, handle)
    return SeenGpu(
        name=name, total_bytes=total, used_bytes=used_bytes, num_sms=num_sms, share=share, properties=properties
    )


def _used_bytes(module: ModuleType, handle: Any) -> int:
    """NVML's second form of the memory question counts the driver's reserve apart; 0 where only the first answers."""
    version = getattr(module, "nvmlMemory_v2", None)
    if version is None:
        return 0
    try:
        return int(module.nvmlDeviceGetMemoryInfo(handle, version=version).used)
    except (module.NVMLError, TypeError):
        return 0


def properties_of(module: Any, handle: Any) -> DeviceProperties | None:
    """None where the driver does not tell (AMD's, an old one, a slice)."""
    try:
        core_mhz = module.nvmlDeviceGetMaxClockInfo(handle, module.NVML_CLOCK_SM)
        memory_mhz = module.nvmlDeviceGetMaxClockInfo(handle, module.NVML_CLOCK_MEM)
        major, minor = module.nvmlDeviceGetCudaComputeCapability(handle)
        return DeviceProperties(
            capability=(int(major), int(minor)),
            num_cores=int(module.nvmlDeviceGetNumGpuCores(handle)),
            core_clock_hz=core_mhz * 1e6,
            bandwidth_bytes_per_s=2 * memory_mhz * 1e6 * module.nvmlDeviceGetMemoryBusWidth(handle) / 8,
        )
    except (AttributeError, module.NVMLError):
        return None
