"""What a GPU really sustains: matmul rates by data type and size, memory bandwidth."""

from planner.hardware.gpu import GpuSpec
from planner.records import dataclass
from planner.throughput.calibration import Calibration, Constants

TENSOR_TILE, SIMT_TILE = 128 * 256, 128 * 32
"""Elements of an output tile: of a tensor-core kernel, and of the smaller ones that cuBLAS takes for fp32 outside them,
128 x 32, 32 x 128, 128 x 64 and 64 x 32: with these they lose next to nothing to waves.

Measured: 16.9 to 18.0 TFLOP/s at 1,024 tokens whatever the shape, inside a training step on an A100-40GB, of the 18.1
that a large one alone does (yyin-dev/cs336-a2@bc6cc1b:writeup.md, nsys).
"""
_DEFAULT_SM_COUNT = 100
_REFERENCE_SM_RATE = 312e12 / 108  # one A100 multiprocessor; start-up costs are times, so they grow with the rate
_EMULATED_BF16_OF_FP32 = 0.55  # T4: 2.3 to 2.5 of 4.2 to 4.4 TFLOP/s; V100S: 9.9 of 13.6 (gpu_matmul measurements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Sustained rates of one GPU under one calibration.

    Attributes:
        matmul: data type -> flops per second of a large matmul inside a training step.
        nominal: data type -> flops per second of the data sheet (0 where there is none).
        bandwidth: bytes per second of the data sheet, less what ECC takes.
        sms: streaming multiprocessors.
        start_up: inner-loop columns that a tile's start-up costs, relative to an A100's.
        l2: bytes of the L2 cache, 0 where unknown.
        share_source: where the share of peak comes from, "gpu", "family" or "default".
        emulated: data types that the hardware has no units for.
    """

    matmul: dict[str, float]
    nominal: dict[str, float]
    bandwidth: float
    sms: int
    start_up: float
    l2: int
    share_source: str
    emulated: frozenset[str]


def rates_of(gpu: GpuSpec, calibration: Calibration, constants: Constants) -> Rates:
    """Rates of a GPU: the data sheet's, times the measured share of peak, times what a training step sustains.

    fp32 runs outside the tensor cores: PyTorch leaves TF32 off for matmuls. bf16 on hardware without it is emulated
    with fp32 units, at a measured rate where there is one.
    """
    share, source = calibration.share_for(gpu)
    measured = calibration.rates_flops_per_s.get(gpu.key, {})
    half = (gpu.fp16_flops_per_s or gpu.bf16_flops_per_s or 0.0) * share
    fp32 = (gpu.fp32_flops_per_s or half / 8) * calibration.fp32_share_for(gpu)
    brain = gpu.bf16_flops_per_s * share if gpu.bf16_flops_per_s is not None else fp32 * _EMULATED_BF16_OF_FP32
    rates = {"fp32": fp32, "bf16": brain, "fp16": half or fp32}
    for dtype, rate in measured.items():
        rates[dtype] = rate
    return Rates(
        matmul={dtype: rate * constants.training_share / constants.card_scale for dtype, rate in rates.items()},
        nominal={
            "fp32": gpu.fp32_flops_per_s or 0.0,
            "bf16": gpu.bf16_flops_per_s or 0.0,
            "fp16": gpu.fp16_flops_per_s or 0.0,
        },
        bandwidth=gpu.memory_bandwidth_bytes_per_s / constants.card_scale,
        sms=gpu.sm_count or _DEFAULT_SM_COUNT,
        start_up=(gpu.fp16_flops_per_s or rates["fp16"]) / (gpu.sm_count or _DEFAULT_SM_COUNT) / _REFERENCE_SM_RATE,
        l2=gpu.l2_bytes or 0,
        share_source=source,
        emulated=frozenset() if gpu.bf16_flops_per_s is not None else frozenset({"bf16"}),
    )


def matmul_s(m: float, n: float, k: float, rate: float, size_bytes: int, rates: Rates, constants: Constants) -> float:
    """Seconds of one matmul [m, k] x [k, n].

    Roofline with two size effects. Output tiles fill the multiprocessors in waves; the last wave is part empty, on
    average `wave_loss` of a wave. The inner loop has a fixed start-up time, worth `k_half` columns on an A100, more on
    faster multiprocessors, and less to slower kernels. Below that, the bytes of operands and result at the memory's
    rate.

    Source: NVIDIA, Matrix multiplication background user's guide, sections 3 and 4 (tile and wave quantization),
    https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.
    """
    waves = m * n / ((SIMT_TILE if size_bytes == 4 else TENSOR_TILE) * rates.sms)
    start_up = constants.k_half * rates.start_up * min(1.0, rate / rates.matmul["fp16"])
    compute = 2.0 * n * (k + start_up) * m * (1.0 + constants.wave_loss / waves) / rate
    moved = (m * k + k * n + m * n) * size_bytes / (rates.bandwidth * constants.bandwidth_share)
    return (compute if compute > moved else moved) + constants.kernel_gap_s
