"""Which attention kernel the target GPU would run: decided once, for the formula, the speed model and the launch notes."""

from typing import Literal

from planner.gpu import GpuSpec
from planner.models.spec import AttentionSpec
from planner.setup import TrainSetup

Kernel = Literal["flash", "efficient", "math", "eager", "linear"]

MAX_FUSED_HEAD_DIM = 256
_FLASH_BACKWARD_LIMIT = 192


def attention_kernel(setup: TrainSetup, gpu: GpuSpec, attention: AttentionSpec, qkv_dtype: str) -> Kernel:
    """The kernel that computes one layer's attention.

    "flash" and "efficient" keep no tokens x tokens matrix; "math" and "eager" do. PyTorch tries flash, then
    memory-efficient, then math. Flash needs compute capability 8.0, 16-bit inputs and equal head sizes up to 256
    (192 for training on 8.6, 8.9 and 12.x); memory-efficient takes fp32 and older cards, but not grouped-query form,
    which transformers asks for when there is no mask and heads are at most 256 wide.

    Source: PyTorch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (2.9 to 2.13); transformers 5.23
    `integrations/sdpa_attention.py`, `use_gqa_in_sdpa`.
    Not counted: padding masks. The worst batch is full (every sequence at the full length), and transformers drops a
    mask that hides nothing.
    """
    if attention.kind == "linear":
        return "linear"
    if setup.attention == "eager" or (attention.softcap and setup.attention == "sdpa") or attention.sinks:
        return "eager" if setup.attention != "flash-attention-2" else "flash"
    if setup.attention == "flash-attention-2":
        return "flash"
    half = qkv_dtype != "fp32"
    capability = gpu.compute_capability or (8, 0)
    equal_heads = attention.head_dim == attention.value_head_dim
    fused_width = attention.head_dim <= MAX_FUSED_HEAD_DIM
    grouped = attention.num_kv_heads != attention.num_heads and equal_heads and fused_width
    narrow = capability in ((8, 6), (8, 9)) or capability[0] == 12
    if (
        half
        and capability >= (8, 0)
        and equal_heads
        and fused_width
        and attention.window_tokens is None
        and not (narrow and attention.head_dim > _FLASH_BACKWARD_LIMIT)
    ):
        return "flash"
    if grouped and attention.window_tokens is None:
        return "math"
    if qkv_dtype == "bf16" and capability < (8, 0):
        return "math"
    return "efficient"
