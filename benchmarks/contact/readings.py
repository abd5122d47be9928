"""Raw readings of a GPU that was never seen: `python -m benchmarks.contact.readings NAME,NAME`, one JSON line each.

What the meters, the classifier and the device's turn assume, measured by itself: what the driver shows for allocations
of known size, how long a killed process's memory stays, every library's words for a refused allocation, what products
of matrices do for half a minute, the allocator's traces. Recorded once, they can be replayed for ever.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.contact.forks import begin, end, run_each, warm_up
from planner.core.units import GIB, MIB
from planner.hardware.driver import device_handle, nvml
from probes.gpu.failures import classify_exception

DEVICE = "cuda:0"
TEARDOWN_S = 6.0
SAMPLE_S = 0.01
LEFT_FREE_BYTES = 2 * MIB
REFUSAL_S = 15.0
SUSTAINED_S, SUSTAINED_SHAPE = 30.0, (8192, 4096, 14336)

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 10,
    "vocab_size": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""What a rehearsal on the CPU runs instead of a real model."""

Reading = dict[str, Any]


def driver_view() -> Reading:
    """Both of NVML's forms of memory in use, and the processes that it lists."""
    with nvml() as module:
        if module is None:
            return {}
        handle = device_handle(module, DEVICE)
        first = module.nvmlDeviceGetMemoryInfo(handle)
        view: Reading = {"used_bytes": int(first.used), "total_bytes": int(first.total)}
        try:
            second = module.nvmlDeviceGetMemoryInfo(handle, version=module.nvmlMemory_v2)
            view |= {"v2_used_bytes": int(second.used), "v2_reserved_bytes": int(second.reserved)}
            listed = module.nvmlDeviceGetComputeRunningProcesses(handle)
            view["processes"] = [[int(process.pid), int(process.usedGpuMemory or 0)] for process in listed]
        except (module.NVMLError, TypeError, AttributeError):
            pass
        return view


def torch_view() -> Reading:
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "free_bytes": free,
        "torch_total_bytes": total,
    }


def known() -> Iterator[Reading]:
    """Allocations of known size against the driver's view: before CUDA, with a context, with libraries, and grown."""
    yield {"step": "before torch", **driver_view()}
    torch.cuda.init()
    torch.zeros(1, device=DEVICE)
    yield {"step": "context", **driver_view(), **torch_view()}
    left = torch.ones(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    (left @ left).sum().item()
    yield {"step": "cublas", **driver_view(), **torch_view()}
    tensors = []
    for size in (64 * MIB, GIB, 5 * GIB):
        tensors.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        torch.cuda.synchronize()
        yield {"step": "allocated", "asked_bytes": size, **driver_view(), **torch_view()}
    tensors.clear()
    torch.cuda.empty_cache()
    yield {"step": "given back", **driver_view(), **torch_view()}


def hold() -> Iterator[Reading]:
    """Takes 4 GiB, says so and waits to be killed: whoever asks for more than the first line waits for ever."""
    block = torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    yield {"step": "holding", "bytes": block.numel()}
    signal.pause()


def teardown() -> Iterator[Reading]:
    """The driver's view every 10 ms after a process that held 4 GiB was killed."""
    rest = driver_view()
    reader, says = os.pipe()

    def holding() -> Iterator[Reading]:
        for reading in hold():
            os.write(says, b"x")
            yield reading

    child = begin("hold", holding)
    os.close(says)
    try:
        if not os.read(reader, 1):  # nothing where it has died
            raise RuntimeError("the process that was to hold memory died before it held any")
        full = driver_view()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(reader)
    killed = time.perf_counter()
    samples = []
    while time.perf_counter() - killed < TEARDOWN_S:
        samples.append([round(time.perf_counter() - killed, 4), driver_view().get("used_bytes")])
        time.sleep(SAMPLE_S)
    os.waitpid(child, 0)
    yield {"step": "teardown", "rest": rest, "full": full, "samples": changes(samples)}


def changes(samples: list[list[Any]]) -> list[list[Any]]:
    """The samples at which the value changed, and the last."""
    changed = [sample for index, sample in enumerate(samples) if index == 0 or sample[1] != samples[index - 1][1]]
    return changed if not samples or changed[-1] is samples[-1] else [*changed, samples[-1]]


def _fill() -> list[Any]:
    """Takes nearly all that is free, in blocks that halve."""
    blocks, size = [], 8 * GIB
    while size >= LEFT_FREE_BYTES:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


def _on_full(prepare: Callable[[], Any], use: Callable[[Any], Any]) -> Callable[[], None]:
    """Uses what was prepared once nothing else is free."""

    def refused() -> None:
        prepared, blocks = prepare(), _fill()
        use(prepared)
        torch.cuda.synchronize()
        del blocks

    return refused


def _random(*shape: int) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _doubled(values: Any) -> None:
    from probes.doctor_kernel import double

    double[(1,)](values, torch.empty_like(values), size=64)


def _quantized(weight: Any) -> None:
    import bitsandbytes as bnb

    bnb.functional.quantize_4bit(weight, quant_type="nf4")


REFUSALS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE),
    "cublas": _on_full(lambda: _random(512, 512), lambda left: left @ left),
    "attention": _on_full(
        lambda: _random(1, 8, 512, 128),
        lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
    ),
    "triton": _on_full(lambda: torch.ones(64, device=DEVICE), _doubled),
    "bitsandbytes": _on_full(lambda: _random(4096, 4096), _quantized),
}


def refusal(name: str) -> Iterator[Reading]:
    """What one library says where it gets no memory, and what the classifier makes of it."""
    try:
        REFUSALS[name]()
    except Exception as error:  # the error is the reading
        kind, _ = classify_exception(error)
        text = str(error)[:1500]
        yield {
            "step": name,
            "type": f"{type(error).__module__}.{type(error).__name__}",
            "text": text,
            "kind": kind.value,
            "is_runtime_error": isinstance(error, RuntimeError),
        }
    else:
        yield {"step": name, "type": "", "text": "it had enough", "kind": ""}


def refusals() -> Iterator[Reading]:
    """Every library's word for a refused allocation, each in a process of its own; on the CPU only PyTorch's.

    Raises:
        RuntimeError: a process did not end well: what the reading is about was not read.
    """
    failed = []
    for name in REFUSALS if DEVICE != "cpu" else ("torch",):
        status = end(begin(f"refusal:{name}", partial(refusal, name)), REFUSAL_S)
        if status:
            failed.append(name)
            yield {"step": name, "problem": f"status {status}"}
    if failed:
        raise RuntimeError(f"no reading of {', '.join(failed)}")


def traces() -> Iterator[Reading]:
    """Ten setups' allocator traces and the meter's readings.

    Raises:
        RuntimeError: a setup could not be traced; the others are written.
    """
    base = 0 if DEVICE == "cpu" else driver_view().get("used_bytes")
    from benchmarks.contact import traces as contact_traces
    from planner.models.resolve import resolve_model

    config = TINY if DEVICE == "cpu" else resolve_model(contact_traces.MODEL).config
    failed = []
    for reading in contact_traces.traces(config, DEVICE, base):
        failed += [str(reading["step"])] * ("problem" in reading)
        yield reading
    if failed:
        raise RuntimeError(f"no trace of {', '.join(failed)}")


def sustained() -> Iterator[Reading]:
    """An 8B's matrix products for half a minute: rate, watts, clocks and degrees twice a second. Prices are of
    seconds, jobs of hours."""
    tokens, inner, outer = SUSTAINED_SHAPE
    left, right = _random(tokens, inner), _random(inner, outer)
    with nvml() as module:
        handle = device_handle(module, DEVICE) if module is not None else None
        began, calls = time.monotonic(), 0
        since = began
        while since - began < SUSTAINED_S:
            for _ in range(20):
                left @ right
            torch.cuda.synchronize()
            calls, now = calls + 20, time.monotonic()
            if now - since < 0.5:
                continue
            sample: Reading = {"s": now - began, "flops_per_s": 2 * tokens * inner * outer * calls / (now - since)}
            if handle is not None:
                sample["watts"] = module.nvmlDeviceGetPowerUsage(handle) / 1000
                sample["sm_mhz"] = module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM)
                sample["celsius"] = module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU)
            yield sample
            since, calls = now, 0


READINGS: dict[str, tuple[Callable[[], Iterator[Reading]], float]] = {
    "known": (known, 12.0),
    "teardown": (teardown, 12.0),
    "refusals": (refusals, 35.0),
    "sustained": (sustained, 35.0),
    "traces": (traces, 55.0),
}
"""Name -> what it yields, and the seconds that it may take once the libraries are imported."""


def main(arguments: list[str]) -> int:
    """Prints the lines of some readings: NAME,NAME [DEVICE [SLOWER]], with SLOWER times the limits; 1 where one of them
    did not end well."""
    global DEVICE
    DEVICE = arguments[1] if len(arguments) > 1 else DEVICE
    slower = float(arguments[2]) if len(arguments) > 2 else 1.0
    chosen = {name: (READINGS[name][0], slower * READINGS[name][1]) for name in arguments[0].split(",")}
    warm_up()
    return run_each(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
