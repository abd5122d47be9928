"""A local micro-benchmark's figures as calibration: for a card whose rates nobody measured, or not in the table.

The figures come as plain data (`probes.gpu.microbench` measures them); nothing here touches a device.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.speed.roofline.calibration import Calibration, Constants

REFERENCE_COPY_SHARE = 0.90
"""Share of the nominal bandwidth that a large copy reaches; elementwise kernels reach slightly less."""
REFERENCE_ISSUE_S = 7.6e-6
"""Host time to issue one small PyTorch kernel on the rented machine that was measured (benchmarks/data/h100)."""
HOST_SCALE_LIMITS = (0.2, 4.0)


@dataclass(frozen=True, kw_only=True)
class Microbench:
    """What a micro-benchmark of a few seconds measured.

    Attributes:
        gpu_name: what the driver or torch calls the device.
        matmul_flops_per_s: data type -> best rate over the shapes tried.
        copy_bytes_per_s: device memory read and written by a large copy.
        issue_s: host time to issue one small kernel.
        memory_bytes: the device's memory as torch reports it.
        sm_count, capability, l2_bytes: None where unknown.
    """

    gpu_name: str
    matmul_flops_per_s: Mapping[str, float]
    copy_bytes_per_s: float
    issue_s: float
    memory_bytes: int
    date: str = ""
    sm_count: int | None = None
    capability: tuple[int, int] | None = None
    l2_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.matmul_flops_per_s or min(self.matmul_flops_per_s.values()) <= 0:
            raise ConfigError("a micro-benchmark needs matmul rates above 0")
        if self.copy_bytes_per_s <= 0 or self.issue_s <= 0 or self.memory_bytes <= 0:
            raise ConfigError("a micro-benchmark needs a copy rate, an issue time and a memory size above 0")


def microbench_from_dict(values: Mapping[str, Any]) -> Microbench:
    """A micro-benchmark from JSON values.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    try:
        capability = values.get("capability")
        return Microbench(
            gpu_name=str(values["gpu_name"]),
            matmul_flops_per_s={str(name): float(rate) for name, rate in values["matmul_flops_per_s"].items()},
            copy_bytes_per_s=float(values["copy_bytes_per_s"]),
            issue_s=float(values["issue_s"]),
            memory_bytes=int(values["memory_bytes"]),
            date=str(values.get("date", "")),
            sm_count=values.get("sm_count"),
            capability=(int(capability[0]), int(capability[1])) if capability else None,
            l2_bytes=values.get("l2_bytes"),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"not a micro-benchmark: {type(error).__name__}: {error}") from error


def with_microbench(calibration: Calibration, gpu: GpuSpec, bench: Microbench) -> Calibration:
    """The calibration with this card's own rates in place of its family's.

    The matmul share is the measured rate over the data sheet's; bandwidth and host speed scale the fitted constants.
    """
    general = Constants(**calibration.constants)
    overrides = dict(calibration.architectures.get(gpu.key, {}))
    copy_share = bench.copy_bytes_per_s / gpu.memory_bandwidth_bytes_per_s
    overrides["bandwidth_share"] = general.bandwidth_share * copy_share / REFERENCE_COPY_SHARE
    low, high = HOST_SCALE_LIMITS
    overrides["host_scale"] = min(max(bench.issue_s / REFERENCE_ISSUE_S, low), high)
    shares, fp32_shares = dict(calibration.matmul_share), dict(calibration.fp32_share)
    halves = [
        bench.matmul_flops_per_s[name] / nominal
        for name, nominal in (("bf16", gpu.bf16_flops_per_s), ("fp16", gpu.fp16_flops_per_s))
        if nominal and name in bench.matmul_flops_per_s
    ]
    if halves:
        shares[gpu.key] = max(halves)
    if gpu.fp32_flops_per_s and "fp32" in bench.matmul_flops_per_s:
        fp32_shares[gpu.key] = bench.matmul_flops_per_s["fp32"] / gpu.fp32_flops_per_s
    rates = dict(calibration.rates_flops_per_s)
    # absolute rates of others' cards give way to this one's
    absolute = {name: rate for name, rate in bench.matmul_flops_per_s.items() if name == "fp16"}
    if not gpu.bf16 and "bf16" in bench.matmul_flops_per_s:
        absolute["bf16"] = bench.matmul_flops_per_s["bf16"]
    rates[gpu.key] = absolute
    return replace(
        calibration,
        architectures={**calibration.architectures, gpu.key: overrides},
        matmul_share=shares,
        fp32_share=fp32_shares,
        rates_flops_per_s=rates,
    )


def gpu_from_microbench(bench: Microbench) -> GpuSpec:
    """A card that the table lacks, its measured rates standing in for the data sheet's.

    `with_microbench` on it then gives shares of 1. bf16 counts as missing where it is slower than half of fp16
    (emulated).
    """
    rates = bench.matmul_flops_per_s
    half = rates.get("fp16") or rates.get("bf16")
    brain = rates.get("bf16")
    if brain is not None and half is not None and brain < half / 2:
        brain = None
    capability = bench.capability
    return GpuSpec(
        key="local",
        name=bench.gpu_name,
        driver_name=bench.gpu_name,
        vendor="NVIDIA",
        arch="unknown",
        compute_capability=capability,
        memory_bytes=bench.memory_bytes,
        memory_basis="torch, on this machine",
        bf16_flops_per_s=brain,
        fp16_flops_per_s=half,
        fp32_flops_per_s=rates.get("fp32"),
        memory_bandwidth_bytes_per_s=bench.copy_bytes_per_s / REFERENCE_COPY_SHARE,
        sm_count=bench.sm_count,
        l2_bytes=bench.l2_bytes,
        flash_attention_2=capability is not None and capability >= (8, 0),
        source=f"micro-benchmark on this machine, {bench.date}",
    )
