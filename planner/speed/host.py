"""How long the host takes to issue a call: seconds by class of call, and how fast a machine's host is beside them.

The seconds are those of a rented virtual machine (16 virtual Xeon CPUs beside an H100, torch 2.11, Python 3.12), from
rows of calls by themselves (host: lines of benchmarks/data/h100/prices.jsonl) but for Triton launches and
bitsandbytes' forwards, which a row of equal calls flatters: those are what PyTorch's profiler saw inside training steps
(profiles.jsonl.gz), without its own 4.5 microseconds an event.
"""

from collections.abc import Sequence
from typing import Protocol

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.speed.operators import HOST, ISSUERS, TRAINER
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.rented import HOST_SPREAD, MICRO_BATCH_S, STEP_S, WALK_S

_FORWARD, _NO_GRAD, _ENGINE, _RECOMPUTE = map(ISSUERS.index, ("forward", "no-grad", "engine", "recompute"))

MODULE_S = 20e-6
"""A module's call with the Python of its forward: LoRA's linear layer, 194.5 microseconds for 5 calls, three products
of 21.6 and two launches."""
VIEW_S, VIEW_IN_ENGINE_S, EMPTY_S = 1.5e-6, 3.0e-6, 2.6e-6
LAUNCH_S = {_FORWARD: 14.9e-6, _RECOMPUTE: 14.9e-6, _NO_GRAD: 7.6e-6, _ENGINE: 20.0e-6}
"""Operators that launch a kernel: with a graph recorded (`y * 1.5` in a chain), without (`x + x`), as a node of a
backward (that chain's backward, and LoRA's: 322 microseconds for 13 launches, 5 products and 9 views)."""
PRODUCT_S = 9e-6
"""Beyond another launch: 14.4 microseconds against 7.6 in a row of small ones, and 0.62 further launches of some 3.5 in
training steps: the sum of what an inner loop was split into, four bytes of counters set to zero (0.1 to 0.9 a product
in 16 profiles). In steps a linear layer's eleven events take 71 microseconds, 20 without the profiler's own
(l1-lora-mb1-512); 21.6 in a row."""
TRITON_S = 190e-6
"""One launch from Python with the autograd function around it: 160 to 250 microseconds in steps (Liger), 128 in a
row."""
HOOK_S = 25e-6
"""A tensor that a checkpoint's second forward hands over (packed, found, unpacked): 118 microseconds more for a
checkpointed linear layer, of which 42 are its operators, over four such calls, times 1.3: on a CPU 36 layers of a
transformer that keep 2,166 and 2,418 tensors take 52 and 51 milliseconds more when checkpointed (random states,
contexts and all: 22.6 a tensor), a row of linear layers 17.4 a tensor."""


def _attention(way: str) -> list[str]:
    return [f"aten._scaled_dot_product_{kernel}_attention{way}" for kernel in ("flash", "efficient", "cudnn")]


BEYOND_S = {
    "bitsandbytes.gemm_4bit": 203e-6,
    "bitsandbytes.dequantize_4bit": 130e-6,
    "bitsandbytes.int8_vectorwise_quant": 345e-6,
    "bitsandbytes.int8_linear_matmul": 118e-6,
    "bitsandbytes.int8_mm_dequant": 30e-6,
    "bitsandbytes.optimizer_update_8bit_blockwise": 62e-6,
    **dict.fromkeys(_attention(""), 90e-6),
    **dict.fromkeys(_attention("_backward"), 110e-6),
}
"""What calls of libraries' own Python, and of cuDNN's graphs, take beyond a launch.

Backward of Linear4bit 205, AdamW8bit 67 a tensor: in a row. The forwards inside training steps: a row of layers with 16
tokens (67 and 361) takes bitsandbytes' one kernel for few rows and its fp16 path without a warning. Linear4bit 218:
`MatMul4Bit` 51, `gemm_4bit` 87, the `linear` within and three launches 40, and 40 of peft's and its own Python outside
(52 by itself on a CPU on which a module's call takes 0.58 of this host's). Linear8bitLt: `MatMul8bitLt` 170, the
quantization 117, a look at a value 11, writing zeros into no columns 47; products 72, 43 and 25, dequantization 33.
Attention in steps (cuDNN's, whose plan is looked up and whose tensors are described anew in every call): forward 75 to
148, backward 115 to 150 over six profiles; the kernels of other cards were not read.
"""
COPY_S = 13e-6
"""Beyond another launch, of a tensor that is copied as it lies, which is a `cudaMemcpyAsync`: 20.5 to 22.6 microseconds
in steps against 7.1 to 8.1 of a kernel's launch (peft clones the result of every 4-bit layer)."""
TENSOR_S = {"aten._fused_adamw_": 1.1e-6, "aten._foreach_norm": 3e-6}
"""Of multi-tensor operators by tensor in their lists: fused AdamW 5.3 microseconds for five lists, clipping 6 for its
norms and products, foreach AdamW 15.6."""
FOREACH_TENSOR_S = 1.0e-6
SLOW_HOST_BAND = 1.4
"""How much longer the host's part of a step may take, as a fraction: CPU-Adam moves what the host's memory does, and
its rate was fitted on servers (124 GB/s a node). Two channels of DDR4-3200 move 51 GB/s at most.

Source: JEDEC JESD79-4. Two TITAN RTX with GPT-2 XL under ZeRO-3 took longer still (huggingface/blog
accelerate-deepspeed.md: 362 tokens/s, 2,740 predicted)."""
_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "bitsandbytes.gemm_4bit",
    "bitsandbytes.int8_linear_matmul",
)
_KERNELS = ("fla.", "liger.", "trl.", "unsloth.", "triton.")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine's host.

    Attributes:
        name: what it is.
        scale: how many times longer its calls take than those of the rented machine that was measured.
    """

    name: str = "a rented virtual machine's CPU"
    scale: float = 1.0

    @property
    def slowest(self) -> float:
        """The scale of a host as slow as such a machine's may be."""
        return self.scale * HOST_SPREAD

    @property
    def fastest(self) -> float:
        """The same of a fast one."""
        return self.scale / HOST_SPREAD


def host_of(gpu: GpuSpec) -> Host:
    """The host beside a card: this machine's where it was measured (`plan calibrate --measure`), else a rented one."""
    measured_scale = load_calibration().architectures.get(gpu.key, {}).get("host_scale")
    return Host() if measured_scale is None else Host(name="this machine's CPU", scale=measured_scale)


def moving_words(bytes_per_s: float) -> str:
    """What to say of how fast the host works on its own memory."""
    return f"taken to move {bytes_per_s / 1e9:.0f} GB/s as servers did; a workstation's memory moves 50 or less"


class Named(Protocol):
    """What an operator is to the host, of whatever size."""

    @property
    def name(self) -> str: ...
    @property
    def numbers(self) -> tuple[float, ...]: ...
    @property
    def listed(self) -> int: ...
    @property
    def inputs(self) -> "Sequence[Lying]": ...
    @property
    def outputs(self) -> "Sequence[Lying]": ...


class Lying(Protocol):
    """How a tensor lies, of whatever size."""

    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def dense(self) -> bool: ...


def issued_s(call: Named, issuer: int, launches: bool, *, checkpointed: bool) -> float:
    """Host seconds of one call on the measured machine.

    Args:
        launches: whether the device runs anything.
        checkpointed: whether the step recomputes: what is detached inside the engine then passes a checkpoint's hooks.
    """
    name = call.name.rpartition(".")[0] if call.name.count(".") > 1 else call.name
    if name.startswith(_KERNELS):
        return TRITON_S
    if name.startswith(TRAINER):
        what = name.removeprefix(TRAINER)
        return call.numbers[0] * WALK_S[what] + {"micro-batch": MICRO_BATCH_S, "step": STEP_S}[what]
    if name.startswith(HOST):
        return call.numbers[0] / load_calibration().layout_constants.cpu_adam_bytes_per_s
    if "empty" in name:
        return EMPTY_S
    if name == "aten.detach" and issuer == _ENGINE and checkpointed:
        return HOOK_S
    if not launches:
        return VIEW_IN_ENGINE_S if issuer == _ENGINE else VIEW_S
    seconds = LAUNCH_S[issuer] + (PRODUCT_S if name.startswith(_PRODUCTS) else 0.0) + BEYOND_S.get(name, 0.0)
    if name == "aten.clone" and call.inputs[0].dense and call.inputs[0].order == call.outputs[0].order:
        seconds += COPY_S
    return seconds + call.listed * TENSOR_S.get(name, FOREACH_TENSOR_S)
