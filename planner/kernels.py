"""Which kernels the target GPU has and would run: decided once, for formula, speed model, space and notes."""

from typing import Literal

from planner.gpu import GpuSpec
from planner.models.spec import AttentionSpec, ModelSpec
from planner.setup import TrainSetup

Kernel = Literal["flash", "efficient", "math", "eager", "linear"]

ALWAYS_MASKED = frozenset({"falcon", "t5"})
"""Types that always hand SDPA a mask (T5: its position bias). Falcon repeats its keys to all heads where it has more
than one."""

MAX_FUSED_HEAD_DIM = 256
TRITON_FROM = (7, 0)
_ADA = ((8, 6), (8, 9), (12, 0), (12, 1))


def supported_attentions(model: ModelSpec, gpu: GpuSpec) -> tuple[str, ...]:
    """Attention implementations that transformers has for this model and that run on this GPU, best first."""
    names = []
    if "sdpa" in model.attentions:
        names.append("sdpa")
    if "flash-attention-2" in model.attentions and gpu.flash_attention_2:
        names.append("flash-attention-2")
    return (*names, "eager")


def missing_kernels(gpu: GpuSpec, setup: TrainSetup) -> str:
    """What of a setup has no kernel on this GPU, "" where everything runs.

    Source: the GPU table (flash-attention 2); bitsandbytes 0.50 (`backends/mps` has no optimizer, `get_paged` needs
    CUDA's managed memory); Triton compiles for NVIDIA cards from compute capability 7.0 on, and for AMD.
    """
    if gpu.vendor == "Apple" and ("8bit" in setup.optimizer or "paged" in setup.optimizer):
        return f"bitsandbytes has no optimizer ({setup.optimizer}) for Apple GPUs"
    if setup.loss == "liger" and (gpu.vendor == "Apple" or (gpu.compute_capability or TRITON_FROM) < TRITON_FROM):
        return f"Liger's kernels are Triton's, which does not compile for {gpu.name}"
    if setup.attention == "flash-attention-2" and not gpu.flash_attention_2:
        return f"flash-attention 2 has no kernels for {gpu.name}"
    return ""


def masked(setup: TrainSetup, attention: AttentionSpec) -> bool:
    """Whether transformers hands SDPA a mask: packed samples, or a window no longer than the sequence.

    The worst padded batch is full (every sequence at the full length), and a mask that hides nothing is dropped.

    Source: transformers 5.23 `masking_utils.py` `_ignore_causal_mask_sdpa` (kv_length < local_attention_size).
    """
    return setup.packing or (attention.window_tokens is not None and setup.seq_len_tokens >= attention.window_tokens)


def attention_kernel(
    model: ModelSpec, setup: TrainSetup, gpu: GpuSpec, attention: AttentionSpec, qkv_dtype: str
) -> Kernel:
    """The kernel that computes one layer's attention.

    "flash" and "efficient" keep no tokens x tokens matrix; "math" and "eager" do. PyTorch tries flash, then
    memory-efficient, then math. Flash needs compute capability 8.0, 16-bit inputs, no mask and equal head sizes up to
    256 (193 to 224 have no backward on 8.6, 8.9 and 12.x). Memory-efficient takes masks, fp32 and older cards, but not
    grouped-query form, which transformers asks for when there is no mask and heads are at most 256 wide.

    On Apple's GPUs training always takes the math kernel.

    Source: PyTorch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (2.9 to 2.13), `_fused_sdp_choice_mps`
    (pytorch pull request 182746: math for every shape); transformers 5.23 `integrations/sdpa_attention.py`,
    `use_gqa_in_sdpa`.
    """
    if attention.kind == "linear":
        return "linear"
    if setup.attention == "flash-attention-2":
        return "flash"
    if setup.attention == "eager" or "sdpa" not in model.attentions:
        return "eager"
    if gpu.vendor == "Apple":
        return "math"
    half = qkv_dtype != "fp32"
    capability = gpu.compute_capability or (8, 0)
    equal_heads = attention.head_dim == attention.value_head_dim
    fused_width = attention.head_dim <= MAX_FUSED_HEAD_DIM
    always = model.model_type in ALWAYS_MASKED
    has_mask = always or masked(setup, attention)
    no_backward = capability in _ADA and 192 < attention.head_dim <= 224
    if half and capability >= (8, 0) and equal_heads and fused_width and not has_mask and not no_backward:
        return "flash"
    if always and attention.num_kv_heads == 1:
        return "math"
    grouped = attention.num_kv_heads != attention.num_heads and equal_heads and fused_width and not has_mask
    if grouped or (qkv_dtype == "bf16" and capability < (8, 0)):
        return "math"
    return "efficient"
