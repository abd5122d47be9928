"""A step's time and its conditions."""

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.options.kernels import LAYER_PARTS
from planner.options.stacks import STACKS
from planner.setup import TrainSetup
from planner.speed.roofline.bands import Uncertainty
from planner.speed.roofline.calibration import Calibration, Constants

# `StepTime`: what the speed model answers about one setup.


WITHOUT_GRADIENTS = "forwards without gradients"
PARTS = (
    "generation",
    WITHOUT_GRADIENTS,
    "matmul",
    "recompute",
    "attention",
    "elementwise",
    "lora",
    "dequantization",
    "loss",
    "vision encoder",
    "encoder",
    "optimizer",
    "paging",
    "host",
    "trainer",
)
"""Where time goes. generation: of completions, where the objective makes its own; recompute: everything that
checkpointing runs a second time; paging: of a paged optimizer's states over the link to the host; host: time that the
GPU waits for the Python side to issue kernels; trainer: the trainer's stated constant."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of one optimizer step on one GPU.

    Attributes:
        parts_s: seconds by operator class, keys of PARTS; they sum to `step_time_s`.
        flops: what the step needs on one GPU (forward and the gradients asked for; recomputation not counted).
        mfu_fraction: `flops` over the step time and the data sheet's rate for the compute type.
        tokens_per_s: tokens of all GPUs per second, padding included.
        uncertainty: how far off it may be.
        notes: what a person must know, one sentence each.
    """

    step_time_s: float
    parts_s: Mapping[str, float]
    flops: float
    mfu_fraction: float
    tokens_per_s: float
    uncertainty: Uncertainty
    notes: tuple[str, ...] = field(default=())

    @property
    def band_fraction(self) -> float:
        """By how much longer the step may take, in 9 of 10 runs."""
        return self.uncertainty.slower_fraction

    def share(self, part: str) -> float:
        """The fraction of the step that `part` takes."""
        return self.parts_s.get(part, 0.0) / self.step_time_s

    def without_paging(self) -> "StepTime":
        """The same step where all of a paged optimizer's states stay on the card."""
        saved = self.parts_s.get("paging", 0.0)
        faster = self.step_time_s / (self.step_time_s - saved)
        return replace(
            self,
            step_time_s=self.step_time_s - saved,
            parts_s={**self.parts_s, "paging": 0.0},
            mfu_fraction=self.mfu_fraction * faster,
            tokens_per_s=self.tokens_per_s * faster,
        )


# What a training stack does that no field of `TrainSetup` says: fused kernels, checkpoint flavour, expert loops.


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The software around a setup; the defaults are transformers 5, TRL 1 and peft 0.21 on the PyTorch of the
    measured runs; CURRENT has today's.

    Attributes:
        fused_norm_rope: norm, rotary and gated-MLP kernels are fused (Liger, fms fast kernels): one pass over memory.
        fused_loss: log-softmax and its gradient in one kernel over materialised logits (a Triton cross-entropy).
        padded_head: head and loss are compiled together, the head's matrices padded to aligned sizes.
        single_operations: softmax, activation, loss and matrices are single operations in Python
            (`planner.speed.roofline.counts.SINGLE_HOST`).
        fused_lora: LoRA and its base matrix run as one autograd function (Unsloth): fewer kernels, fewer passes. So do
            its checkpoints, without hooks and random states (unsloth_zoo 2026.1 `gradient_checkpointing.py`).
        reentrant_checkpointing: old default; the recomputation runs the whole layer instead of stopping early.
        loop_experts: experts run one after another (transformers before 5) instead of one grouped matmul.
        gradient_clipping: the trainer computes the gradient norm and scales (the default of every trainer here).
        trainer_overhead: count the trainer's constant per step and per micro-batch; False for a bare loop.
        masked_attention: batches are really padded. SDPA then gets an explicit mask and skips no causal half;
            flash attention unpads in each layer, which waits for the GPU.
        rented_host: the host is a rented virtual machine's (`planner.speed.roofline.rented`); else that of the
            published runs, as fast as fitted.
        cudnn_attention: SDPA takes cuDNN's kernels on Hopper and data-centre Blackwell: PyTorch 2.13, cuDNN above 9.15.
        torch_nf4: matrices in 4 bits are unpacked by operations of torch's, not by one kernel.
        flash_1: attention is the first FlashAttention (before July 2023) or its Triton form.
        optimizer_part: share of the optimizer step that this GPU does (0: none runs; 1/n: sharded over n).
        fp32_reduction: gradients travel between GPUs in fp32 although weights are gathered in 16 bit.
        fsdp_1: FSDP version 1: its flat buffers and rate limiter hide less communication, and with PEFT every adapter
            matrix is a unit of its own that is gathered and freed.
    """

    fused_norm_rope: bool = False
    fused_loss: bool = False
    padded_head: bool = False
    single_operations: bool = False
    fused_lora: bool = False
    reentrant_checkpointing: bool = False
    loop_experts: bool = False
    gradient_clipping: bool = True
    trainer_overhead: bool = True
    masked_attention: bool = False
    rented_host: bool = False
    cudnn_attention: bool = False
    torch_nf4: bool = False
    flash_1: bool = False
    optimizer_part: float = 1.0
    fp32_reduction: bool = False
    fsdp_1: bool = False

    @property
    def fused_parts(self) -> frozenset[str]:
        """What of a layer the stack computes by kernels of its own, whatever the setup's kernel family."""
        layer = LAYER_PARTS if self.fused_norm_rope else frozenset()
        return layer | {"lora"} if self.fused_lora else layer


CURRENT = Conditions(cudnn_attention=True, rented_host=True)


def conditions_of(setup: TrainSetup) -> Conditions:
    """The conditions of a setup's stack (`planner.options.stacks`): CURRENT for trainers on transformers."""
    return _conditions_of(setup.stack, setup.reentrant_checkpointing, setup.compiled, setup.fsdp_version)


@cache
def _conditions_of(stack: str, reentrant: bool, compiled: bool, fsdp_version: int) -> Conditions:
    by = STACKS[stack]
    conditions = Conditions(
        fused_norm_rope=by.fused,
        fused_loss=(by.in_place_loss and not by.shifted_loss) or (compiled and bool(by.compiles_loss)),
        padded_head=compiled and bool(by.compiles_loss),
        single_operations=by.single_operations and not compiled,
        fused_lora=by.fused,
        reentrant_checkpointing=reentrant,
        gradient_clipping=by.clips_gradients,
        trainer_overhead=by.trainer_overhead,
        rented_host=by.trainer_overhead,
        torch_nf4=by.torch_nf4 and not compiled,
        cudnn_attention=True,
        fp32_reduction=by.reduces_fp32,
        fsdp_1=fsdp_version == 1,
    )
    return CURRENT if conditions == CURRENT else conditions


# What a GPU really sustains: matmul rates by data type and size, memory bandwidth.


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
