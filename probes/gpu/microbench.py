"""A micro-benchmark of a few seconds: matmul rates, copy bandwidth and issue time of this machine's device.

`plan calibrate --measure` uses it, for a card whose rates nobody measured. Shapes are those of real layers; each figure
is the best of a few timings, so that a busy neighbour or a cold clock does not count. Limit: about `BUDGET_S` seconds.
"""

import os
import platform
import time
from collections.abc import Callable
from datetime import date
from typing import Any

BUDGET_S = 5.0
MATMUL_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (1024, 4096, 4096))
CPU_SHAPES = ((256, 512, 512), (512, 512, 512))
COPY_BYTES = 1 << 29
CPU_COPY_BYTES = 1 << 26
ISSUE_KERNELS = 500
_REPEATS = 3


def microbenchmark(device: str = "cuda:0", *, budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Figures of one device as JSON values, the form of `planner.speed.roofline.local.Microbench`.

    Rates are per second; `matmul_shapes` keeps every shape's rate. Needs about 1.6 GiB of free device memory.

    Raises:
        EnvironmentProblem: torch is missing or the device does not work.
    """
    torch = _torch(device)
    from probes.stack.dtypes import DTYPES

    on_cpu = torch.device(device).type == "cpu"
    deadline = time.perf_counter() + budget_s
    shapes: dict[str, dict[str, float]] = {}
    for name in ("fp32",) if on_cpu else ("bf16", "fp16", "fp32"):
        shapes[name] = {}
        for shape in CPU_SHAPES if on_cpu else MATMUL_SHAPES:
            if shapes[name] and time.perf_counter() > deadline:
                break
            shapes[name]["x".join(map(str, shape))] = _matmul_rate(torch, device, DTYPES[name], shape)
    return {
        "form": 1,
        "date": date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "matmul_flops_per_s": {name: max(rates.values()) for name, rates in shapes.items()},
        "matmul_shapes": shapes,
        "copy_bytes_per_s": _copy_rate(torch, device, CPU_COPY_BYTES if on_cpu else COPY_BYTES),
        "issue_s": issue_s(torch, device),
        **_identity(torch, device, on_cpu),
    }


def _torch(device: str) -> Any:
    from planner.core.errors import EnvironmentProblem
    from planner.core.install import install_command

    try:
        import torch
    except ImportError as error:
        raise EnvironmentProblem(f"the micro-benchmark needs torch: {error}", hint=install_command("torch")) from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentProblem(f"device {device!r} does not work: {error}", hint="see plan doctor") from error
    return torch


def _identity(torch: Any, device: str, on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        return {
            "gpu_name": platform.processor() or "CPU",
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "sm_count": os.cpu_count(),
            "capability": None,
            "l2_bytes": None,
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu_name": properties.name,
        "memory_bytes": properties.total_memory,
        "sm_count": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def _wait(torch: Any, device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(torch: Any, device: str, run: Callable[[], object]) -> float:
    """Best time of one call, after a warm-up; short calls are repeated so that the clock's grain does not count."""
    run()
    _wait(torch, device)
    start = time.perf_counter()
    run()
    _wait(torch, device)
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(1, min(50, int(0.02 / once)))
    best = once
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(torch, device)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _matmul_rate(torch: Any, device: str, dtype: Any, shape: tuple[int, int, int]) -> float:
    """Flops per second of one matmul [m, k] x [n, k]^T on random data (zeros would draw less power and run faster)."""
    m, n, k = shape
    left = torch.randn(m, k, device=device, dtype=dtype)
    right = torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2.0 * m * n * k / _seconds(torch, device, lambda: torch.mm(left, right.t(), out=out))


def _copy_rate(torch: Any, device: str, size_bytes: int) -> float:
    """Bytes per second of a copy, counted as read plus written."""
    source = torch.empty(size_bytes // 4, device=device, dtype=torch.float32).fill_(1.0)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / _seconds(torch, device, lambda: target.copy_(source))


def free_copy_rate(device: str) -> float:
    """The same of a device that a step is about to run on; 0 where there is no room for it. Shows a card that is
    throttled or shared."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and torch.cuda.mem_get_info(torch.device(device))[0] < 4 * COPY_BYTES:
        return 0.0
    return _copy_rate(torch, device, COPY_BYTES if on_gpu else CPU_COPY_BYTES)


def issue_s(torch: Any, device: str) -> float:
    """Host seconds to issue one small kernel: a row of them is issued without waiting, best of a few rows."""
    small = torch.zeros(16, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(torch, device)
        start = time.perf_counter()
        for _ in range(ISSUE_KERNELS):
            small.add_(1.0)
        best = min(best, (time.perf_counter() - start) / ISSUE_KERNELS)
        _wait(torch, device)
    return best
