"""What torch, Triton, bitsandbytes and flash-attn really do on this machine. Run as a child by `probes.doctor`.

One line "DOCTOR {JSON}" for every check, as soon as it is done: a kernel that kills the process loses only what comes
after it.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any


def gpus() -> dict[str, Any]:
    """torch's version and build, what it says about the driver, and every GPU on which a product runs."""
    import torch

    answer: dict[str, Any] = {"torch": torch.__version__, "built_for": torch.version.cuda or torch.version.hip or ""}
    answer["rocm"] = bool(torch.version.hip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    answer["driver_says"] = "; ".join(str(warning.message).strip() for warning in caught)
    answer["gpus"] = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        where = f"cuda:{index}"
        (torch.ones(64, 64, device=where) @ torch.ones(64, 64, device=where)).sum().item()
        gpu = {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
        }
        answer["gpus"].append(gpu)
    return answer


def bf16() -> dict[str, Any]:
    """Whether 16-bit products run on the hardware: from Ampere on, and on all that ROCm supports but RDNA 1 and 2."""
    import torch

    if torch.version.hip:
        return {"bf16": not torch.cuda.get_device_properties(0).gcnArchName.startswith("gfx10")}
    return {"bf16": bool(torch.cuda.get_device_capability()[0] >= 8)}


def host() -> dict[str, Any]:
    """How long the CPU takes to issue a kernel: it sets the pace of steps with small ones."""
    import torch

    from probes.gpu.microbench import issue_s

    return {"issue_s": issue_s(torch, "cuda:0")}


def expandable() -> dict[str, Any]:
    """Whether the allocator grows its segments when asked to: on some platforms it ignores the setting."""
    import torch

    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    grown = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    del block
    return {"expandable": grown}


def triton() -> dict[str, Any]:
    """Whether Triton compiles and runs a kernel: it needs a C compiler and a driver, and many libraries need it."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # compiled here and now, not found from last week
        import torch

        from probes.doctor_kernel import double

        values = torch.arange(64, device="cuda", dtype=torch.float32)
        out = torch.empty_like(values)
        double[(1,)](values, out, size=64)
        return {"triton": bool((out == 2 * values).all())}


def nf4() -> dict[str, Any]:
    """Whether 4-bit weights come back as they went, nearly."""
    import bitsandbytes as bnb
    import torch

    weight = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    back = bnb.functional.dequantize_4bit(packed, state)
    return {"nf4": float((back - weight).abs().mean() / weight.abs().mean()) < 0.2}


def adam8bit() -> dict[str, Any]:
    import bitsandbytes as bnb
    import torch

    parameter = torch.nn.Parameter(torch.randn(64, 128, device="cuda"))
    optimizer = bnb.optim.AdamW8bit([parameter], lr=1e-3)
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"adam8bit": bool((parameter.detach() != before).any())}


def flash() -> dict[str, Any]:
    import flash_attn
    import torch

    q = torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    return {"flash": list(flash_attn.flash_attn_func(q, q, q, causal=True).shape) == [1, 64, 4, 64]}


def ranks() -> dict[str, Any]:
    """Through what the ranks of a job would speak."""
    import torch.distributed as dist

    if not dist.is_available():
        return {"ranks": {}}
    backends = {"gloo": dist.is_gloo_available(), "nccl": ""}
    if dist.is_nccl_available():
        import torch.cuda.nccl

        backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"ranks": backends}


NEED_GPU: tuple[Callable[[], dict[str, Any]], ...] = (bf16, host, expandable, triton, nf4, adam8bit, flash)


def tell(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One check's line; an error is its answer."""
    started = time.perf_counter()
    try:
        answer = check()
    except Exception as error:  # whatever a library raises is what the doctor wants to know
        answer = {"problems": {check.__name__: f"{type(error).__name__}: {error}".splitlines()[0][:300]}}
    answer["seconds"] = {check.__name__: round(time.perf_counter() - started, 2)}
    sys.stdout.write("DOCTOR" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    return answer


def main() -> None:
    """Every check that this machine allows; bitsandbytes alone takes ten seconds to import, for nothing on a CPU."""
    answer = tell(gpus)
    for check in NEED_GPU if answer.get("gpus") else ():
        tell(check)
    tell(ranks)


if __name__ == "__main__":
    main()
