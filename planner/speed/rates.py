"""What a card does per second, as measured: matrices by type, copies, attention by kernel and head size."""

from dataclasses import replace
from typing import NamedTuple

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import brings_xformers, takes_cudnn
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import Calibration, load_calibration

COPY_SHARE = {"h100-sxm": 0.91, "h200": 0.867, "t4": 0.8}
"""Share of the data sheet's bandwidth that a large elementwise kernel moves.

Measured: H100 3.05 TB/s (`add`, `mul`, `silu` of 200 MB in training steps, benchmarks/data/h100/profiles.jsonl.gz);
H200 4.16 TB/s (copy; shared readings of 26 November 2026); T4
242 GB/s of 300 (`mul`, `add`, `neg` of 25 million elements, Colab: starbeeva/LLM-Training-Efficiency-Benchmark@8c6b0b4
results/profiles/fp16_attn-eager/trace.json.gz)."""
DEFAULT_COPY_SHARE = 0.88
DEFAULT_L2_BYTES = 40 << 20


class AttentionRate(NamedTuple):
    """Flops per second over the two (backward: five) products of the pairs that count, as a share of the card's large
    16-bit matrices, for unboundedly long sequences; tokens at which half of that is reached."""

    forward: float
    forward_half: float
    backward: float
    backward_half: float


CUDNN = {
    64: AttentionRate(0.591, 315, 0.585, 960),
    128: AttentionRate(0.826, 520, 0.724, 900),
    256: AttentionRate(0.864, 1670, 0.635, 1900),
}
FLASH_ON_HOPPER = {
    64: AttentionRate(0.361, 140, 0.343, 760),
    128: AttentionRate(0.419, 300, 0.413, 1050),
    256: AttentionRate(0.419, 700, 0.413, 1000),
}
EFFICIENT_ON_HOPPER = {
    64: AttentionRate(0.155, 10, 0.121, 40),
    128: AttentionRate(0.226, 330, 0.17, 440),
    256: AttentionRate(0.16, 600, 0.032, 600),
}
"""By head size. Measured on an H100 with torch 2.11 (benchmarks/data/h100/prices.jsonl: sdpa_forward and sdpa_both at
512 to 32,768 tokens): within 6 % from 2,048 tokens on."""
EFFICIENT_ELSEWHERE = {
    64: AttentionRate(0.33, 0, 0.25, 0),
    128: AttentionRate(0.38, 0, 0.31, 0),
    256: AttentionRate(0.34, 0, 0.08, 0),
}
"""The same kernel where the data sheet's rate is that of its own instruction (`mma.sync`), which reaches no more than
two thirds of Hopper's: shares of an A100's 258.7 (16-bit float) and 265 TFLOP/s, taken for Ampere, Ada and older cards.

Source: xformers on an A100. Forward, 16 x 1,024 tokens of 16 heads: 64 wide 763 to 861 microseconds, 128 wide 1,346 to
1,434, 256 wide 3,120 (github.com/facebookresearch/xformers/pull/587, issues/712). Backward with a mask, as torch has it
since 2.1: 256 x 4,096 tokens of 16 heads of 64 in 689 ms, 2 x 4,096 of 8 heads of 128 in 4.33, 1 x 8,192 in 8.48
(github.com/NVIDIA/cutlass/pull/992, "v3"; which card is not said: its "v2" takes what the A100 of pull 557 does, within
7 %); 256 wide 16 x 512 tokens in 8.28 ms, the older kernel (pull 587).
"""
EFFICIENT_ON_TURING = {64: AttentionRate(0.243, 0, 0.187, 0)}
"""Measured: a T4 (`attention_sweep.json` of `COPY_SHARE`'s source): what 8,192 tokens of 12 heads of 64 in 12 layers
take beyond four times 2,048, forward 100 ms, backward 326."""
MASKED = {
    64: AttentionRate(0.32, 0, 0.34, 0),
    128: AttentionRate(0.4, 0, 0.35, 0),
    256: AttentionRate(0.32, 0, 0.25, 0),
}
"""cuDNN's kernel with a mask, over all pairs: the "masked" lines there, and Gemma 3's window in a training step."""
FLASH_ELSEWHERE = AttentionRate(0.73, 0, 0.61, 0)
"""Where no kernel was read by itself: what the formula's published runs say (`attention_forward_share` and
`attention_backward_share` of planner/data/calibration.json times its `training_share`)."""
SINGLE_ELEMENTS_PER_SM = {"t4": 1.25e9}
DEFAULT_SINGLE_ELEMENTS_PER_SM = 2.6e9
"""Measured: 292 to 370e9 elements a second on the 132 multiprocessors of an H100 (profiles.jsonl.gz); T4 42 to 53e9
on 40 (`where`, `sub`, `eq` of 25 million 16-bit elements, the trace of `COPY_SHARE`)."""
MATRIX_TILE = 128 * 256


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """Rates of one card.

    Attributes:
        gpu: the card.
        matrix: type -> flops per second of a large matrix.
        copy: bytes per second that a large elementwise kernel reads and writes.
        launch_s: least time of a kernel on the device.
        single_elements: elements per second of an elementwise kernel without wide loads.
        start_up_columns: of a product's inner loop, whose time its start takes.
        sample_tokens: tokens of a sample where several lie packed in one row and attention keeps them apart, else 0.
        told_apart: attention is told where samples end and needs no mask, whatever a dry run hands SDPA in its place.
    """

    gpu: GpuSpec
    matrix: dict[str, float]
    copy: float
    l2_bytes: int
    sms: int
    launch_s: float
    single_elements: float
    start_up_columns: float
    cudnn: bool
    sample_tokens: int = 0
    told_apart: bool = False

    @property
    def pcie(self) -> float:
        """Bytes per second of a pinned copy between host and device."""
        from planner.hardware.cluster import host_link  # late: few programs copy

        return host_link(self.gpu).bytes_per_s * load_calibration().layout_constants.host_copy_share

    def attention(self, kernel: str, head_size: int, *, masked: bool = False, dtype: str = "bfloat16") -> AttentionRate:
        """Of the kernel ("flash", "efficient") that PyTorch would choose without cuDNN; on Hopper SDPA takes cuDNN's
        for either, but for more than the efficient kernel's masks."""
        hopper = self.gpu.arch == "Hopper"
        size = 64 if head_size <= 64 else 128 if head_size <= 128 else 256
        if kernel == "efficient" and masked and self.cudnn and hopper:
            return MASKED[size]
        on_turing = self.gpu.arch == "Turing" and dtype == "float16"
        if kernel == "efficient" and on_turing and size in EFFICIENT_ON_TURING:
            return EFFICIENT_ON_TURING[size]
        if kernel == "efficient":
            return (EFFICIENT_ON_HOPPER if hopper or self.cudnn else EFFICIENT_ELSEWHERE)[size]
        if not hopper:
            return FLASH_ELSEWHERE
        return (CUDNN if self.cudnn else FLASH_ON_HOPPER)[size]


SUSTAINED = frozenset({"h100-sxm", "h200"})
"""Cards whose matrices were seen inside training steps to run as fast as by themselves (760 to 796 TFLOP/s of 787 on
an H100). Elsewhere they lose what published runs say (`training_share` of planner/data/calibration.json), to power and
clocks."""
_START_UP_COLUMNS, _H100_RATE_PER_SM = 150.0, 989e12 / 132


def card_rates(
    gpu: GpuSpec, attention: str = "sdpa", *, sample_tokens: int = 0, calibration: Calibration | None = None
) -> CardRates:
    """The rates of a card: what was measured of it, else its family's share of the data sheet.

    Args:
        attention: the implementation that the setup asks for.
        sample_tokens: of samples that are packed and kept apart.
    """
    calibration = calibration or load_calibration()
    share = calibration.share_for(gpu)[0]
    fp32 = (gpu.fp32_flops_per_s or (gpu.fp16_flops_per_s or 0.0) / 8) * calibration.fp32_share_for(gpu)
    half = (gpu.fp16_flops_per_s or 0.0) * share or fp32
    brain = (gpu.bf16_flops_per_s or 0.0) * share or 0.55 * fp32
    matrix = {"float32": fp32, "bfloat16": brain, "float16": half, "int8": 0.9 * half}
    named = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    for name, rate in calibration.rates_flops_per_s.get(gpu.key, {}).items():
        matrix[named[name]] = rate
    if gpu.key not in SUSTAINED:
        sustained = calibration.constants_for(gpu).training_share
        matrix = {name: rate * sustained for name, rate in matrix.items()}
    nominal, slower = gpu.fp16_flops_per_s or matrix["float16"], calibration.constants_for(gpu).card_scale
    matrix = {name: rate / slower for name, rate in matrix.items()}
    return CardRates(
        gpu=gpu,
        matrix=matrix,
        start_up_columns=_START_UP_COLUMNS * nominal / (gpu.sm_count or 100) / _H100_RATE_PER_SM,
        sample_tokens=sample_tokens,
        copy=gpu.memory_bandwidth_bytes_per_s * COPY_SHARE.get(gpu.key, DEFAULT_COPY_SHARE) / slower,
        l2_bytes=gpu.l2_bytes or DEFAULT_L2_BYTES,
        sms=gpu.sm_count or 100,
        launch_s=1.3e-6,
        single_elements=SINGLE_ELEMENTS_PER_SM.get(gpu.key, DEFAULT_SINGLE_ELEMENTS_PER_SM) * (gpu.sm_count or 100),
        cudnn=takes_cudnn(gpu, attention),
    )


def setup_rates(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> CardRates:
    """The rates of a card for a setup's operators: packed samples are kept apart by flash attention 2, and by Unsloth's
    own attention, which a dry run cannot call and SDPA with a mask of all pairs stands for.

    Measured: eight rows of surogate_unsloth (benchmarks/gathered.py) on an RTX 5090, whose steps were said 1.5 to 2.2
    times as long with that mask.
    """
    by_unsloth = brings_xformers(model.model_type, setup)
    apart = setup.packing and (by_unsloth or setup.attention == "flash-attention-2")
    rates = card_rates(gpu, setup.attention, sample_tokens=setup.seq_len_tokens if apart else 0)
    return replace(rates, told_apart=True) if by_unsloth else rates
