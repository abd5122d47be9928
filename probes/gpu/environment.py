"""Where a measurement was taken: GPU, driver, libraries; and the driver's view of the device (NVML).

Nothing here imports torch: the runner asks NVML before and after the child, and must stay light.
"""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.core.install import installed
from planner.frameworks.exporters.common import allocator_settings
from planner.hardware.driver import device_handle, nvml, text
from planner.setup.outcome import Environment

LIBRARIES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "liger-kernel", "flash-attn", "triton",
    "deepspeed",
)  # fmt: skip
"""What can change a measurement."""

FINGERPRINT_LIBRARIES = tuple(name for name in LIBRARIES if name != "deepspeed")
"""What can run in a step of one GPU: without trl its chunked loss is this project's own, Triton compiles kernels."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch 2.9 and newer read the first, older ones the second; where both are set the first holds."""

# Names that hide behind the bits of nvmlDeviceGetCurrentClocksEventReasons. A GPU that is idle, or held at clocks that
# somebody set, is not throttled by heat or power; those bits are left out.
_THROTTLE_BITS = {
    0x0000000000000004: "power-capped",
    0x0000000000000008: "hardware-slowdown",
    0x0000000000000020: "thermal-slowdown",
    0x0000000000000040: "thermal-slowdown",
    0x0000000000000080: "power-brake",
}


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """What the driver says about one GPU at one moment."""

    name: str
    uuid: str
    used_bytes: int
    total_bytes: int
    process_ids: tuple[int, ...]


def device_status(device: str) -> DeviceStatus | None:
    """The driver's view of a GPU; None for the CPU, or where the driver cannot be asked."""
    if device == "cpu":
        return None
    with nvml() as module:
        if module is None:
            return None
        try:
            handle = device_handle(module, device)
            memory = module.nvmlDeviceGetMemoryInfo(handle)
            return DeviceStatus(
                name=text(module.nvmlDeviceGetName(handle)),
                uuid=text(module.nvmlDeviceGetUUID(handle)),
                used_bytes=int(memory.used),
                total_bytes=int(memory.total),
                process_ids=_process_ids(module, handle),
            )
        except (module.NVMLError, LookupError):
            return None


def _process_ids(module: ModuleType, handle: Any) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(process.pid) for process in module.nvmlDeviceGetComputeRunningProcesses(handle)))
    except module.NVMLError:  # containers often hide other processes
        return ()


@dataclass(frozen=True, slots=True)
class NvmlReader:
    """Repeated cheap readings of one GPU inside the child (memory in use, throttle reasons)."""

    module: ModuleType
    handle: Any

    def used_bytes(self) -> int:
        return int(self.module.nvmlDeviceGetMemoryInfo(self.handle).used)

    def throttle_flags(self) -> set[str]:
        """Why the clocks are lower than they could be: heat, power, a hardware brake. Empty when they are not."""
        try:
            bits = int(self.module.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle))
        except self.module.NVMLError:
            return set()
        return {name for bit, name in _THROTTLE_BITS.items() if bits & bit}


def read_environment(device: str, gpu_key: str | None, *, cuda: str = "") -> Environment:
    """Everything about this machine that a measurement depends on.

    Args:
        cuda: the CUDA version torch was built with, "" when not asked (the runner does not import torch).
    """
    name, driver, power_w = cpu_name(), "", None
    if device != "cpu":
        with nvml() as module:
            name = "unknown GPU"
            if module is not None:
                try:
                    handle = device_handle(module, device)
                    name = text(module.nvmlDeviceGetName(handle))
                    driver = text(module.nvmlSystemGetDriverVersion())
                    power_w = module.nvmlDeviceGetPowerManagementLimit(handle) / 1000.0
                except (module.NVMLError, LookupError):
                    pass  # a driver that hides the power limit still names the GPU
    return Environment(
        gpu_name=name,
        gpu_key=gpu_key,
        driver=driver,
        cuda=cuda,
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        libraries=installed(LIBRARIES),
        power_limit_w=power_w,
        device="cpu" if device == "cpu" else "cuda",
        settings={} if device == "cpu" else device_settings(child_settings()),
    )


def child_settings() -> dict[str, str]:
    """Environment variables that a probe's child runs with because a launch file sets them; what the user has set
    stays."""
    given = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    return dict.fromkeys(ALLOCATOR_VARIABLES, given) if given else allocator_settings()


def device_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """What of the environment decides a measurement on a GPU: the allocator's settings, and whether there is a compiler
    for what Triton builds."""
    compiler = os.environ.get("CC") or next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), "")
    return {"allocator": variables[ALLOCATOR_VARIABLES[0]], "c_compiler": Path(compiler).name}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def fingerprint_environment(environment: Environment, *, layout: bool = False) -> Mapping[str, Any]:
    """The part of an environment under which a measurement is worth reusing; `layout`: a job of several ranks."""
    names = LIBRARIES if layout else FINGERPRINT_LIBRARIES
    return {
        "gpu_name": environment.gpu_name,
        "device": environment.device,
        "driver": environment.driver,
        "settings": dict(environment.settings),
        "libraries": {name: environment.libraries.get(name, "") for name in names},
    }
