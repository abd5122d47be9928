"""AMD's driver under NVML's names: what this project asks of a GPU, answered by amdsmi, which ROCm brings along.

What amdsmi does not tell, or tells in another sense, raises as NVML does on a card that lacks it: why clocks are held
down (its counters of violations need two readings 100 ms apart), links between GPUs, parts of a partitioned card.

Source: amdsmi 7.0.2, amdsmi_interface.py; units and order of devices as torch.cuda reads them (PyTorch 2.11
torch/cuda/__init__.py `_get_amdsmi_device_memory_used`, `_get_amdsmi_device_index`). ROCm documentation, "GPU isolation
techniques": ROCR_VISIBLE_DEVICES chooses first, HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES) among those.
"""

import contextlib
import io
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from planner.core.units import MIB

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


class AmdSmi:
    """The part of `pynvml` that this project uses."""

    vendor = "AMD"
    nvmlMemory_v2 = 2

    def __init__(self, amdsmi: Any) -> None:
        self._smi = amdsmi
        self.NVMLError: type[Exception] = amdsmi.AmdSmiException

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """What amdsmi cannot answer."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def unsupported(*args: Any, **kwargs: Any) -> Any:
            raise self.NVMLError(f"amdsmi has no {name}")

        return unsupported

    def nvmlShutdown(self) -> None:
        self._smi.amdsmi_shut_down()

    def visible_handles(self) -> tuple[Any, ...]:
        """Every device that HIP would show this process, in its order."""
        handles = list(self._smi.amdsmi_get_processor_handles())
        for name in (ROCR, HIP if os.environ.get(HIP) is not None else CUDA):
            given = os.environ.get(name)
            if given is not None:
                handles = self._chosen(given, handles)
        return tuple(handles)

    def _chosen(self, given: str, handles: list[Any]) -> list[Any]:
        chosen: list[Any] = []
        for word in (part.strip() for part in given.split(",")):
            if word.isdecimal():
                matching = handles[int(word) : int(word) + 1]
            else:
                serial = word.removeprefix("GPU-").lower()
                matching = [handle for handle in handles if word.startswith("GPU-") and self._serial(handle) == serial]
            if not matching:  # as in CUDA, what names no device ends the list
                break
            chosen += matching
        return chosen

    def _serial(self, handle: Any) -> str:
        """What HIP's variables name a GPU by."""
        return str(self._smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]).lower().removeprefix("0x")

    def nvmlDeviceGetCount(self) -> int:
        """GPUs of this machine, visible or not."""
        return len(self._smi.amdsmi_get_processor_handles())

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(self._smi.amdsmi_get_gpu_asic_info(handle)["market_name"])

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        """As HIP's variables take it."""
        return f"GPU-{self._serial(handle)}"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int = 1) -> SimpleNamespace:
        """As `nvmlMemory_t`, bytes. amdsmi counts in MiB; the firmware's part is in `used`, no program can have it."""
        usage = self._smi.amdsmi_get_gpu_vram_usage(handle)
        total, used = int(usage["vram_total"]) * MIB, int(usage["vram_used"]) * MIB
        return SimpleNamespace(total=total, used=used, reserved=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[SimpleNamespace]:
        """Whoever holds memory of this GPU, as `nvmlProcessInfo_t`."""
        listed = self._smi.amdsmi_get_gpu_process_list(handle)
        holding = [(int(process["pid"]), int(process["memory_usage"]["vram_mem"])) for process in listed]
        return [SimpleNamespace(pid=pid, usedGpuMemory=used_bytes) for pid, used_bytes in holding if used_bytes]

    def nvmlSystemGetDriverVersion(self) -> str:
        driver = self._smi.amdsmi_get_gpu_driver_info(self._smi.amdsmi_get_processor_handles()[0])
        return f"{driver['driver_name']} {driver['driver_version']}"

    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int:
        """Milliwatts; amdsmi says microwatts."""
        return int(self._smi.amdsmi_get_power_cap_info(handle)["power_cap"]) // 1000


def connect() -> AmdSmi | None:
    """amdsmi, initialised; None where it, its library or a GPU is missing."""
    with contextlib.redirect_stdout(io.StringIO()):  # without its library it prints, and raises whatever it met
        try:
            import amdsmi
            from amdsmi import AmdSmiException  # a folder of that name has none
        except (ImportError, OSError, LookupError, AttributeError):
            return None
    try:
        amdsmi.amdsmi_init()
    except AmdSmiException:
        return None
    smi = AmdSmi(amdsmi)
    if smi.nvmlDeviceGetCount():
        return smi
    smi.nvmlShutdown()
    return None
