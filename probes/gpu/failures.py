"""Naming what went wrong: an exception in the child, or the way the child ended, as a `FailureKind`.

The order of the checks matters. A sticky CUDA error (an illegal access) can surface later as a failed allocation, and
its text speaks of memory too: only the exact signs of a refused allocation count as out of memory.
"""

import contextlib
import errno
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from planner.core.errors import PlannerError
from planner.setup.outcome import FailureKind

CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

_OOM_TEXT = re.compile(
    r"(?:CUDA|HIP) out of memory"
    r"|(?:CUDA|HIP) (?:driver )?error: out of memory"  # "driver": expandable segments map pages through the driver
    r"|Triton Error \[(?:CUDA|HIP)\]: out of memory"
    r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)"  # NCCL
    r"|cudaErrorMemoryAllocation"
    r"|DefaultCPUAllocator: (?:not enough memory|can't allocate memory)"
    r"|CU[A-Z]+_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"  # a handle's own memory; a driver that does not work fails long before
    r"|std::bad_alloc"
    r"|Error out of memory at line"  # bitsandbytes' own check, which ends the process
    r"|Cannot allocate memory"
)
# What cuDNN says of a refused allocation, and of much else: recorded on a full H100, torch 2.11, 27 November 2026
# (benchmarks/data/gpu_recordings/h100.jsonl). Out of memory where the device is full.
_SPEECHLESS_TEXT = re.compile(r"CUDNN_STATUS_INTERNAL_ERROR\b")
FULL_BYTES = 64 << 20
_DEVICE_FAULT_TEXT = re.compile(
    r"illegal memory access|illegal address|misaligned address|device-side assert|unspecified launch failure"
    r"|launch timed out|CUBLAS_STATUS_EXECUTION_FAILED|illegal instruction was encountered"
)
# The machine's fault, whatever the setup: texts of cudart's and NVML's error strings, of c10/cuda/CUDAFunctions.cpp and
# torch/cuda/__init__.py (PyTorch 2.13).
_MACHINE_TEXT = re.compile(
    r"no CUDA-capable device is detected|CUDA-capable device(?:s|\(s\)) (?:is/)?are busy or unavailable"
    r"|CUDA driver version is insufficient|Found no NVIDIA driver|NVIDIA driver on your system is too old"
    r"|CUDA driver initialization failed|initialization error|system not yet initialized|CUDA unknown error"
    r"|Unexpected error from cudaGetDeviceCount|forward compatibility was attempted|[Dd]river/library version mismatch"
    r"|[Uu]ncorrectable ECC|fallen off the bus|GPU is lost|No (?:CUDA|HIP) GPUs are available|invalid device ordinal"
    r"|Cannot re-initialize CUDA in forked subprocess"  # of the process that started this one; seen on an H200
    r"|no ROCm-capable device is detected|\b0 active drivers \("  # the latter: Triton 3.6 runtime/driver.py
)
_UNSUPPORTED_TEXT = re.compile(
    r"not implemented for '|no kernel image is available|No available kernel|does not support|is not supported"
    r"|out of resource: |Failed to find C compiler"  # Triton: a kernel too large for the card, no compiler here
    r"|only supports|requires compute capability|FlashAttention2 has been toggled on, but it cannot be used"
)
# What a rank says when another one is late, and what it says when another one is gone. The texts of gloo
# (transport/tcp/pair.cc, unbound_buffer.cc), of PyTorch's TCPStore and of ProcessGroupNCCL's watchdog, PyTorch 2.13.
_COLLECTIVE_TIMEOUT_TEXT = re.compile(
    r"Timed out waiting \d+ ?ms|[Tt]imed out after \d+ (?:seconds|ms|milliseconds)|[Ss]ocket [Tt]imeout"
    r"|wait timeout after \d+ ?ms|Watchdog caught collective operation timeout|Application timeout caused pair closure"
)
_PEER_GONE_TEXT = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|failed to recv, got 0 bytes"
    r"|remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|\bDist(?:Network|Store)Error\b"
)


class UnsupportedProbe(Exception):
    """A setup or a model that cannot be run here, with the reason for a person."""


class MachineFault(Exception):
    """No setup can be measured here until the machine is mended; the reason for a person."""


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """Within it a refused allocation says that `what` was being made when memory ran out: no step had been run.

    Raises:
        RuntimeError: in place of the refused allocation, which is its cause.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not any(_is_out_of_memory(cause) for cause in exception_chain(error)):
            raise
        raise OutOfMemoryWhileBuilding(f"before any training step, {what}: {one_line(error)}") from error


class OutOfMemoryWhileBuilding(RuntimeError):
    """Memory ran out although nothing was trained yet."""


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def device_is_full() -> bool:
    torch = sys.modules.get("torch")
    try:
        return bool(torch and torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < FULL_BYTES)
    except RuntimeError:  # a device that failed for another reason
        return False


def classify_exception(
    error: BaseException, device_is_full: Callable[[], bool] = device_is_full
) -> tuple[FailureKind, str]:
    """(kind, one line for a person) of an exception that ended a probe's child."""
    message = one_line(error)
    if any(_is_machine_fault(cause) for cause in exception_chain(error)):
        return FailureKind.MACHINE, message
    if any(_DEVICE_FAULT_TEXT.search(str(cause)) for cause in exception_chain(error)):
        return FailureKind.CRASHED, message
    if any(_is_out_of_memory(cause) for cause in exception_chain(error)):
        return FailureKind.OUT_OF_MEMORY, message
    if any(_SPEECHLESS_TEXT.search(str(cause)) for cause in exception_chain(error)) and device_is_full():
        return FailureKind.OUT_OF_MEMORY, message
    if isinstance(error, ImportError) and f"{error.name}.".startswith(("planner.", "probes.")):
        return FailureKind.CRASHED, message  # our own code, changed or broken: no fact about the setup
    if (
        isinstance(error, (UnsupportedProbe, NotImplementedError, ImportError, PlannerError))
        or type(error).__name__ == "OutOfResources"  # triton.runtime.errors, a plain Exception
        or (isinstance(error, (RuntimeError, ValueError)) and _UNSUPPORTED_TEXT.search(str(error)))
    ):
        return FailureKind.UNSUPPORTED, message
    if isinstance(error, RuntimeError) and _COLLECTIVE_TIMEOUT_TEXT.search(str(error)):
        return FailureKind.TIMEOUT, message
    return FailureKind.CRASHED, message


def is_peer_trouble(message: str) -> bool:
    """Whether a rank's failure speaks of another rank: one that is late, or gone."""
    return bool(_COLLECTIVE_TIMEOUT_TEXT.search(message) or _PEER_GONE_TEXT.search(message))


def _is_machine_fault(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return isinstance(error, MachineFault) or (
        isinstance(error, (RuntimeError, AssertionError)) and bool(_MACHINE_TEXT.search(str(error)))
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if type(error).__name__ == "OutOfMemoryError":  # torch.OutOfMemoryError, without importing torch
        return True
    if getattr(error, "error_code", None) == CUDA_ERROR_MEMORY_ALLOCATION:  # torch.AcceleratorError
        return True
    return isinstance(error, RuntimeError) and bool(_OOM_TEXT.search(str(error)))


def one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def classify_exit(returncode: int, log_tail: str, *, oom_killed: bool) -> tuple[FailureKind, str]:
    """(kind, message) of a child that ended without writing a result.

    Args:
        returncode: as `subprocess` gives it, negative for a signal.
        oom_killed: whether the kernel's out-of-memory killer struck meanwhile (its counters rose).
    """
    last = _last_line(log_tail)
    if returncode < 0:
        name = _signal_name(-returncode)
        if -returncode == signal.SIGKILL and oom_killed:
            return FailureKind.OUT_OF_MEMORY, "killed by the kernel: the machine's main memory ran out"
        if -returncode == signal.SIGABRT and _OOM_TEXT.search(log_tail) and not _DEVICE_FAULT_TEXT.search(log_tail):
            return FailureKind.OUT_OF_MEMORY, f"ended by {name} on a refused allocation: {last}"
        if -returncode == signal.SIGABRT and _COLLECTIVE_TIMEOUT_TEXT.search(log_tail):  # NCCL's watchdog aborts
            return FailureKind.TIMEOUT, f"ended by {name} because a collective timed out: {last}"
        return FailureKind.CRASHED, f"killed by {name}" + (f"; last output: {last}" if last else "")
    if _MACHINE_TEXT.search(log_tail):
        return FailureKind.MACHINE, f"exit status {returncode}; last output: {last}"
    if _OOM_TEXT.search(log_tail) and not _DEVICE_FAULT_TEXT.search(log_tail):
        return FailureKind.OUT_OF_MEMORY, f"exit status {returncode} on a refused allocation: {last}"
    if returncode == 0:
        return FailureKind.CRASHED, "ended without writing a result" + (f"; last output: {last}" if last else "")
    return FailureKind.CRASHED, f"exit status {returncode}" + (f"; last output: {last}" if last else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def oom_kill_count() -> int:
    """How many processes the kernel's out-of-memory killer has ended: in this container, or where it does not say, on
    this machine, on which other containers run out of memory too."""
    for path in COUNTERS:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
    return 0
