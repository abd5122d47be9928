"""A card that the table lacks: described on the command line, or by this machine's driver."""

import re
from collections.abc import Callable

from planner.core.errors import UsageError
from planner.core.units import GIB
from planner.hardware.driver import SeenGpu
from planner.hardware.gpu import GpuSpec

FORM = '"NAME:12GiB:360GB/s:29TFLOPS"'
MEANING = "its memory, its bandwidth, its dense bf16 or fp16 rate with fp32 accumulation"
FIRST_BF16 = (8, 0)
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_MEMORY = re.compile(_NUMBER + r"(g|m)i?b", re.IGNORECASE)
_BANDWIDTH = re.compile(_NUMBER + r"(g|t)b(?:ps|/s)", re.IGNORECASE)
_RATE = re.compile(_NUMBER + r"(t|p)flops?(?:/s)?", re.IGNORECASE)
_CAPABILITY = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.IGNORECASE)
_VENDORS = (
    ("Apple", re.compile(r"\bapple\b|\bmac|^m\d\b", re.IGNORECASE)),
    ("AMD", re.compile(r"\bamd\b|radeon|instinct|\brx\b|^mi\d", re.IGNORECASE)),
    ("Intel", re.compile(r"\bintel\b|\barc\b|gaudi", re.IGNORECASE)),
)


def is_description(text: str) -> bool:
    """Whether this names no card but describes one: fields between colons."""
    return text.count(":") >= 2


def described_gpu(text: str, usable_bytes: Callable[[float], tuple[int, str]]) -> GpuSpec:
    """The card that NAME:MEMORY:BANDWIDTH:RATE[:COMPUTE_CAPABILITY] describes.

    Its maker is told by its name (NVIDIA where that says nothing). An NVIDIA card without a compute capability is taken
    to have bf16 and flash attention, as all have from 8.0 on.

    Args:
        usable_bytes: (what torch shows of so many GiB, a sentence for it).

    Raises:
        UsageError: a field that cannot be read, or a figure that no card has.
    """
    name, *fields = (part.strip() for part in text.split(":"))
    if not name or len(fields) not in (3, 4):
        raise UsageError(
            f"--gpu {text:.80}: a description has a name and three figures, got {len(fields)}",
            hint=f"--gpu {FORM}: {MEANING}; for old NVIDIA cards also the compute capability, :sm75",
        )
    memory_gib = _figure("memory", fields[0], _MEMORY, "12GiB", {"m": 1 / 1024, "g": 1.0}, (1.0, 2048.0), "GiB")
    bandwidth = _figure(
        "bandwidth", fields[1], _BANDWIDTH, "360GB/s", {"g": 1.0, "t": 1000.0}, (10.0, 50_000.0), "GB/s"
    )
    rate = _figure("rate", fields[2], _RATE, "29TFLOPS", {"t": 1.0, "p": 1000.0}, (0.5, 50_000.0), "TFLOPS")
    vendor = next((maker for maker, words in _VENDORS if words.search(name)), "NVIDIA")
    capability = _capability(fields[3]) if len(fields) == 4 else None
    bf16 = capability is None or capability >= FIRST_BF16
    memory_bytes, basis = usable_bytes(memory_gib) if vendor == "NVIDIA" else (int(memory_gib * GIB), "as described")
    return GpuSpec(
        key=_key(name, memory_gib, bandwidth, rate, capability),
        name=name,
        driver_name=name,
        vendor=vendor,
        arch="described" if capability is None else _arch(capability),
        compute_capability=capability,
        memory_bytes=memory_bytes,
        memory_basis=basis,
        bf16_flops_per_s=rate * 1e12 if bf16 else None,
        fp16_flops_per_s=rate * 1e12,
        memory_bandwidth_bytes_per_s=bandwidth * 1e9,
        flash_attention_2=vendor == "NVIDIA" and bf16,
        source="described with --gpu",
        unsourced=("fp32", "sm", "l2", "nvlink"),
    )


def _key(name: str, memory_gib: float, bandwidth: float, rate: float, capability: tuple[int, int] | None) -> str:
    """A description that reads back as the same card; bandwidth in GB/s, rate in TFLOPS."""
    key = f"{name.replace(':', ' ')}:{memory_gib:.4g}GiB:{bandwidth:.4g}GB/s:{rate:.4g}TFLOPS"
    return key if capability is None else f"{key}:sm{capability[0]}{capability[1]}"


def _arch(capability: tuple[int, int]) -> str:
    if capability == (8, 9):
        return "Ada"
    names = {6: "Pascal", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}
    return names.get(capability[0], "described") if capability[0] != 7 else "Turing" if capability[1] == 5 else "Volta"


def _figure(
    what: str,
    text: str,
    form: re.Pattern[str],
    usual: str,
    scale: dict[str, float],
    bounds: tuple[float, float],
    unit: str,
) -> float:
    match = form.fullmatch(text)
    if match is None:
        raise UsageError(f"--gpu: {text!r:.40} is no {what}", hint=f"for example {usual}; the whole form is {FORM}")
    value = float(match[1]) * scale[match[2].lower()]
    if not bounds[0] <= value <= bounds[1]:
        raise UsageError(
            f"--gpu: a {what} of {text:.40} is no card's", hint=f"{bounds[0]:g} to {bounds[1]:g} {unit}, as in {FORM}"
        )
    return value


def _capability(text: str) -> tuple[int, int]:
    match = _CAPABILITY.fullmatch(text)
    if match is None or not 3 <= int(match[1]) <= 15:
        raise UsageError(
            f"--gpu: {text!r:.40} is no compute capability", hint="for example sm86 or 8.6; or leave it out"
        )
    return int(match[1]), int(match[2])


_CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_TENSOR_RATIOS = {(7, 0): 8, (7, 2): 8, (8, 0): 16, (8, 7): 8, (9, 0): 16, (10, 0): 32, (10, 3): 32}
"""16-bit tensor rate over the cores' fp32 rate at the same clock, by compute capability; of others `_tensor_ratio`.

Source: NVIDIA's architecture white papers, operations per multiprocessor and clock.
"""


def _tensor_ratio(name: str, capability: tuple[int, int]) -> int:
    if capability in _TENSOR_RATIOS:
        return _TENSOR_RATIOS[capability]
    if capability < (7, 0):
        return 2 if capability == (6, 0) else 1  # no tensor cores; cuBLAS computes 16 bits in fp32
    consumer = "GeForce" in name or "GTX" in name
    if capability == (7, 5):
        return 2 if "GTX" in name else 4 if consumer else 8
    return 2 if consumer else 4


def unlisted_gpu(seen: SeenGpu) -> GpuSpec:
    """A device that the table lacks, from what its driver tells, at its highest clocks (which few cards keep)."""
    properties = seen.properties
    assert properties is not None
    fp32 = 2 * properties.num_cores * properties.core_clock_hz
    half = fp32 * _tensor_ratio(seen.name, properties.capability)
    bf16 = properties.capability >= FIRST_BF16
    return GpuSpec(
        key=_key(
            seen.name,
            seen.total_bytes / GIB,
            properties.bandwidth_bytes_per_s / 1e9,
            half / 1e12,
            properties.capability,
        ),
        name=seen.name,
        driver_name=seen.name,
        vendor="NVIDIA",
        arch=_arch(properties.capability),
        compute_capability=properties.capability,
        memory_bytes=seen.total_bytes,
        memory_basis="this machine's driver",
        bf16_flops_per_s=half if bf16 else None,
        fp16_flops_per_s=half,
        fp32_flops_per_s=fp32,
        tf32_flops_per_s=half / 2 if bf16 else None,
        memory_bandwidth_bytes_per_s=properties.bandwidth_bytes_per_s,
        sm_count=properties.num_cores // _CORES_PER_SM.get(properties.capability, 128),
        flash_attention_2=bf16,
        source="this machine's driver: cores, highest clocks and bus width; tensor rates by the architecture's ratio",
        unsourced=("bf16", "fp16", "tf32", "l2", "nvlink"),
        taken_as=f"{seen.name} is not in the table: its rates are computed from its driver's cores and highest clocks",
    )
