"""Which kernels a step really ran: PyTorch chooses the SDPA backend at run time, by card, data type and shape."""

from collections.abc import Callable, Sequence

import torch

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
