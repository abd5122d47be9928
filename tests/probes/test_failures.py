"""What a child says of its end: where memory ran out is part of it."""

import errno
from pathlib import Path

import pytest

from planner.setup.outcome import FailureKind
from probes.gpu import failures
from probes.gpu.failures import building, classify_exception, classify_exit, oom_kill_count


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()], ids=["cuda", "host"]
)
def test_memory_that_runs_out_while_building_says_that_nothing_was_trained(error: Exception) -> None:
    with pytest.raises(RuntimeError) as raised, building("building 80 layers"):
        raise error
    kind, message = classify_exception(raised.value)
    assert kind is FailureKind.OUT_OF_MEMORY
    assert "before any training step, building 80 layers" in message
    assert type(error).__name__ in message


OOM_TEXTS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
    "Triton Error [CUDA]: out of memory",
    "CUDA driver error: out of memory",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed."
    "\nLast error:\nCuda failure 2 'out of memory'",
    "Last error:\nFailed to CUDA calloc async 608 bytes",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "HIP out of memory. Tried to allocate 2.00 GiB",
)


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_every_librarys_word_for_a_refused_allocation(text: str) -> None:
    assert classify_exception(RuntimeError(text))[0] is FailureKind.OUT_OF_MEMORY
    assert classify_exit(1, f"Traceback\nRuntimeError: {text}\n", oom_killed=False)[0] is FailureKind.OUT_OF_MEMORY


class OutOfResources(Exception):
    """As triton.runtime.errors names it."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources("out of resource: shared memory, Required: 262144, Hardware limit: 232448."),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs"),
    ],
)
def test_a_kernel_that_cannot_be_built_here_is_unsupported(error: Exception) -> None:
    assert classify_exception(error)[0] is FailureKind.UNSUPPORTED


MACHINE_TEXTS = (
    "0 active drivers ([]). There should only be one.",  # Triton on a machine whose driver it does not find
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from https",
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver",
    "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: all CUDA-capable devices are busy or unavailable",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA driver initialization failed, you might not have a CUDA gpu.",
    "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "CUDA unknown error - this may be due to an incorrectly set up environment",
)


@pytest.mark.parametrize("text", MACHINE_TEXTS)
def test_what_the_machine_is_to_blame_for_says_nothing_about_the_setup(text: str) -> None:
    assert classify_exception(RuntimeError(text))[0] is FailureKind.MACHINE
    assert classify_exit(1, f"Traceback\nRuntimeError: {text}\n", oom_killed=False)[0] is FailureKind.MACHINE


def test_a_full_disk_is_the_machines_fault() -> None:
    assert classify_exception(OSError(errno.ENOSPC, "No space left on device"))[0] is FailureKind.MACHINE


def test_other_errors_while_building_are_left_alone() -> None:
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError) as raised, building("building 2 layers"):
        raise illegal
    assert raised.value is illegal
    assert classify_exception(raised.value)[0] is FailureKind.CRASHED
    with pytest.raises(KeyError), building("building 2 layers"):
        raise KeyError("a bug of ours")


def test_only_other_peoples_missing_packages_are_unsupported() -> None:
    """Seen in a rehearsal: the code was replaced while probes ran, and the setup was stored as unsupported."""
    ours = ImportError("cannot import name 'auto_class' from 'probes.stack.build'", name="probes.stack.build")
    theirs = ImportError("the package flash_attn is not installed", name="flash_attn")
    assert classify_exception(ours)[0] is FailureKind.CRASHED
    assert classify_exception(theirs)[0] is FailureKind.UNSUPPORTED
    assert classify_exception(ImportError("FlashAttention2 has been toggled on"))[0] is FailureKind.UNSUPPORTED


def test_a_neighbour_that_runs_out_of_memory_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's own counter stands before the machine's."""
    ours, machines = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(failures, "COUNTERS", (str(ours), str(machines)))
    machines.write_text("pgfault 7\noom_kill 5\n")
    assert oom_kill_count() == 5
    ours.write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kill_count() == 2
    monkeypatch.setattr(failures, "COUNTERS", (str(tmp_path / "none"),))
    assert oom_kill_count() == 0


def test_what_cudnn_says_on_a_full_device_is_out_of_memory() -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify_exception(error, lambda: True)[0] is FailureKind.OUT_OF_MEMORY
    assert classify_exception(error, lambda: False)[0] is FailureKind.CRASHED
