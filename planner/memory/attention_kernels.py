"""Which kernels the target GPU has and would run: decided once, for formula, speed model, space and notes."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from planner.core.shipped import by_model_type, model_types
from planner.hardware.gpu import GpuSpec
from planner.models.spec import AttentionSpec, ModelSpec
from planner.models.targets import adapts_expert_stacks
from planner.options.kernels import FUSED_LORA, KERNELS, LIGER_LOSS, kernels_refusal
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS
from planner.options.sound import WITH_SOUND, WITH_TWO_HALVES
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX, XFORMERS
from planner.setup.packages import CHUNKED_TYPES, DELTA

Kernel = Literal["flash", "efficient", "math", "eager", "linear"]


def always_masked(model: ModelSpec) -> bool:
    """Whether its class always hands SDPA a mask: a position bias, or one that it makes in any case (Falcon)."""
    return model.traits.position_bias or model.model_type in model_types("always_masked")


PACKS_TOGETHER = model_types("masks_without_positions")
"""Types whose class makes its mask without positions, so that packed samples attend to each other; SDPA gets none for
them.

Source: transformers 5.23 `OPTDecoder.forward` and the same of the others (create_causal_mask without `position_ids`;
every other type of the catalogue hands them on).
"""


def packs_apart(model: ModelSpec, attention: str) -> bool:
    """Whether packed samples keep to themselves: by the mask of the model's class, or by flash attention 2 where the
    class hands positions on to it (`OPTDecoderLayer`; Falcon's own flash attention takes none)."""
    handed_on = attention == "flash-attention-2" and model.model_type in model_types("positions_to_flash")
    return handed_on or model.model_type not in PACKS_TOGETHER


def masks_packed(model: ModelSpec) -> bool:
    """Whether SDPA is handed a mask where samples are packed: one that keeps them apart, or one that is always made."""
    return always_masked(model) or model.model_type not in PACKS_TOGETHER


MAX_FUSED_HEAD_DIM = 256
"""Widest head of SDPA's flash kernel, and of transformers' grouped-query form."""
TRITON_FROM = (7, 0)
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))


FLASH_HEAD_DIM = 256
"""Widest head of queries and keys that flash-attention's kernels train (values are padded to it)."""
FLASH: Mapping[str, bool] = {
    "flash_attention_2": False,
    "flash_attention_3": False,
    "kernels-community/vllm-flash-attn3": False,
    "flash_attention_4": True,
}
"""Whether attention sinks get a gradient, by the name that transformers takes as `attn_implementation`. A setup asks
for the first alone; the others need compute capability 9.0.

Source: flash-attention (commit 0251105a, August 2026) `csrc/flash_attn/flash_api.cpp` mha_fwd, mha_bwd ("head dimension
at most 256"; no sinks), `hopper/flash_attn_interface.py` (no sinks), `flash_attn/cute/interface.py` _validate_head_dims
(up to 256 on 9.x; on 10.x to 128, and 256 with 256) and _flash_attn_bwd (a sink's gradient on 9.x, 10.x and 11.x);
vllm-flash-attn3 has sinks forward only (github.com/nvidia-cosmos/cosmos-rl/issues/219). transformers 5.23
`modeling_flash_attention_utils.py` FLASH_ATTENTION_COMPATIBILITY_MATRIX, FLASH_ATTN_KERNEL_FALLBACK. A model class with
`_compatible_flash_implementations` (gpt_oss) gets the first of that list whatever flash name was asked for.
"""


SINK_KERNELS = by_model_type("flash_kernel")
"""Model type -> the kernel that its class gets whatever flash attention is asked for (FLASH)."""


def untrained_sinks(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    """What is wrong with the gradients of a run whose attention has sinks in the forward alone, "" where nothing is.

    Such a run goes through: Axolotl publishes a config of one, and LLaMA-Factory's pull request 9354 ran it.
    """
    runs = setup.attention == "flash-attention-2" and gpu.arch == "Hopper" and model.model_type in SINK_KERNELS
    return flash_refusal(model) if runs else ""


def flash_refusal(model: ModelSpec, name: str = "flash_attention_2") -> str:
    """Why a flash-attention implementation cannot train this model, "" where it can.

    One layer that its kernels do not take is enough: transformers gives one implementation to all layers of a model
    and checks neither head sizes nor whether a backward exists.

    Args:
        name: as in transformers' `attn_implementation`, one of FLASH.
    """
    title = name.removeprefix("kernels-community/").replace("_", "-")
    if name == "flash_attention_2" and model.model_type in SINK_KERNELS:
        title = SINK_KERNELS[model.model_type]
    if "flash-attention-2" not in model.attentions:
        return f"transformers has no flash attention for {model.model_type}"
    softmax = [attention for attention in _attentions(model) if attention.kind == "softmax"]
    if not FLASH[name] and any(attention.sinks for attention in softmax):
        return f"{title} has no gradient of attention sinks, which {model.model_id} trains with"
    widest = max((attention.head_dim for attention in softmax), default=0)
    if widest > FLASH_HEAD_DIM:
        return f"{title} stops at head size {FLASH_HEAD_DIM}; {model.model_id} has layers with {widest}"
    return ""


HUBLESS = model_types("own_attention_table")
"""Types whose class looks its attention up in a table of its own, which has no name of a kernel from the hub: where
flash-attn is not built, flash attention ends in a KeyError as the model loads. No launch file asks for it.

Source: transformers 5.23 `FALCON_ATTENTION_CLASSES`, `GPT_NEO_ATTENTION_CLASSES`, `GPTJ_ATTENTION_CLASSES`;
`_check_and_adjust_attn_implementation` (takes the hub's name where flash_attn is not installed).
"""


def hub_refusal(model: ModelSpec, attention: str) -> str:
    """Why a launch file cannot ask for this attention, "" where it can: flash attention comes from the hub."""
    if attention != "flash-attention-2" or model.model_type not in HUBLESS:
        return ""
    return f"transformers' {model.built_class} does not take the hub's flash attention: use sdpa or eager"


def _attentions(model: ModelSpec) -> tuple[AttentionSpec, ...]:
    """Attention of every kind of layer, those of idle encoders too (they are built with the same implementation)."""
    layers = (*model.layer_kinds, *(layer for layer, _ in model.idle_layers))
    return tuple(
        attention for layer in layers for attention in (layer.attention, layer.cross_attention) if attention is not None
    )


def supported_attentions(model: ModelSpec, gpu: GpuSpec) -> tuple[str, ...]:
    """Attention implementations that transformers has for this model and that train it on this GPU from a launch file,
    best first."""
    names = ["sdpa"] if "sdpa" in model.attentions else []
    if gpu.flash_attention_2 and not (flash_refusal(model) or hub_refusal(model, "flash-attention-2")):
        names.append("flash-attention-2")
    return (*names, "eager")


def default_attention(model: ModelSpec | None) -> str:
    """What transformers runs where no implementation is named: SDPA, or eager for a class without it."""
    return "sdpa" if model is None or "sdpa" in model.attentions else "eager"


WITHOUT_SDPA = by_model_type("part_without_sdpa")
"""The part of a model type that refuses SDPA by name while the text has it: its section of the configuration.

Source: transformers 5.23 `Gemma4AudioPreTrainedModel._supports_sdpa`, `get_correct_attn_implementation` (an unnamed
implementation is SDPA for every part that has it, eager for the others; a named one is an error there).
"""


def left_unnamed(config: Mapping[str, Any], attention: str) -> bool:
    """Whether a model of this `config.json` gets an attention only when its name is not given: `WITHOUT_SDPA`."""
    return attention == "sdpa" and bool(config.get(WITHOUT_SDPA.get(config.get("model_type", ""), "")))


def attention_refusal(model: ModelSpec, attention: str) -> str:
    """Why an attention implementation of a setup cannot train this model on any card, "" where it can."""
    if attention == "flash-attention-2":
        return flash_refusal(model)
    if attention == FLEX:
        sinks = any(spec.sinks for spec in _attentions(model))
        return "" if sinks else f"FlexAttention is planned for attention sinks, which {model.model_type} has not"
    if attention == XFORMERS:
        plain = model.model_type in FUSED_LORA and "sdpa" in model.attentions  # it is handed no cap and no sink
        return "" if plain else f"xformers was read with no class of {model.model_type}"
    if attention not in model.attentions:
        return f"transformers has no {attention} attention for {model.model_type}"
    return ""


def class_refusal(model: ModelSpec, setup: TrainSetup) -> str:
    """Why transformers' class of this model does not train this setup on any card, "" where it does, or is not run."""
    if setup.trainer.own_models:
        return ""
    if setup.checkpointing and "checkpointing" in model.lacks:
        return f"transformers' {model.built_class} has no gradient checkpointing"
    if setup.loss != "full" and "bare-head" in model.lacks and setup.objective_spec.head == "vocabulary":
        more = "more than a matrix between hidden states and logits"
        return f"{model.built_class} puts {more}, which a fused loss leaves out"
    return ""


def missing_kernels(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> str:
    """What of a setup has no kernel for this model on this GPU, "" where everything runs.

    Source: the GPU table (flash-attention 2); bitsandbytes 0.50 (`backends/mps` has no optimizer, `get_paged` needs
    CUDA's managed memory); Triton compiles for NVIDIA cards from compute capability 7.0 on, and for AMD.
    """
    if reason := halves_refusal(model, setup):
        return reason
    of_class = "" if setup.trainer.own_models else attention_refusal(model, setup.attention)
    if reason := of_class or class_refusal(model, setup):
        return reason
    seen_by_flash = setup.images is not None and setup.attention == "flash-attention-2"
    # transformers 5.23 `create_masks_for_vision_model`, which flash attention does not follow
    if seen_by_flash and any(attention.sees_ahead for attention in _attentions(model)):
        return (
            f"flash-attention 2 takes no mask, and the tokens of a picture see each other in {model.model_type} by one"
        )
    if setup.loss == "liger" and model.model_type not in LIGER_LOSS:
        return f"Liger has no fused loss for {model.model_type}: the logits would be held in full"
    if reason := kernels_refusal(setup.kernels, model.model_type):
        return reason
    if setup.quantize_experts and (reason := experts_refusal(model, setup)):
        return reason
    if setup.quantize_experts and gpu.vendor != "NVIDIA":
        return f"experts in 4 bits need CUDA, not {gpu.name}"
    if gpu.vendor == "Apple" and OPTIMIZERS[setup.optimizer].bitsandbytes:
        return f"bitsandbytes has no optimizer ({setup.optimizer}) for Apple GPUs"
    if setup.linear_attention == "fla" and (reason := linear_attention_refusal(model, gpu)):
        return reason
    triton = LOSSES[setup.loss].triton or KERNELS[setup.kernels].triton
    if (triton or setup.compile) and not _compiles_triton(gpu):
        return f"{'Liger' if triton else 'torch.compile'}'s kernels are Triton's, which does not compile for {gpu.name}"
    if KERNELS[setup.kernels].nvidia and gpu.vendor != "NVIDIA":
        return f"{KERNELS[setup.kernels].words} are known to run on NVIDIA's cards only, not on {gpu.name}"
    if setup.attention == "flash-attention-2" and not gpu.flash_attention_2:
        return f"flash-attention 2 has no kernels for {gpu.name}"
    if setup.attention == FLEX and not gpu.flash_attention_2:
        return (
            f"FlexAttention's kernels are planned on NVIDIA's and AMD's cards with flash attention, not on {gpu.name}"
        )
    if setup.attention == XFORMERS and (gpu.vendor != "NVIDIA" or gpu.flash_attention_2):
        return f"xformers is planned on NVIDIA's cards before Ampere; {gpu.name} has SDPA's faster kernels"
    return ""


def _compiles_triton(gpu: GpuSpec) -> bool:
    return gpu.vendor != "Apple" and (gpu.compute_capability or TRITON_FROM) >= TRITON_FROM


def linear_attention_refusal(model: ModelSpec, gpu: GpuSpec) -> str:
    """Why flash-linear-attention computes nothing of a model on a card, "" where it does."""
    if model.model_type not in CHUNKED_TYPES:
        return f"transformers asks {DELTA} for nothing that is known here in {model.model_type}"
    return "" if _compiles_triton(gpu) else f"{DELTA}'s kernels are Triton's, which does not compile for {gpu.name}"


def planned_linear_attentions(model: ModelSpec, gpu: GpuSpec) -> tuple[str, ...]:
    """What may compute a model's gated delta rule on a card, the better first: the package keeps less and is faster
    at every size."""
    return ("torch",) if linear_attention_refusal(model, gpu) else ("fla", "torch")


def halves_refusal(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no trainer runs this setup of an encoder-decoder, "" where one does or it is none."""
    if not model.is_encoder_decoder:
        return "only an encoder-decoder has an encoder to freeze" if setup.frozen_encoder else ""
    with_it = WITH_SOUND if model.front_end is not None else WITH_TWO_HALVES
    for name, allowed in with_it.items():
        if (value := getattr(setup, name)) not in allowed:
            planned = ", ".join(map(str, allowed))
            return f"{model.model_type} is not planned with {name} {value!r} (planned: {planned})"
    return ""


def experts_refusal(model: ModelSpec, setup: TrainSetup) -> str:
    """Why the experts of this model cannot be stored in 4 bits under this setup, "" where they can.

    Source: Axolotl 0.21 `monkeypatch/moe_quant.py` (parameters of three dimensions with "expert" in their name);
    `utils/schemas/config.py` check_quantize_moe_experts.
    """
    if not has_expert_stacks(model):
        return f"{model.model_id} has no experts in stacked parameters: there is nothing to quantize beside the base"
    if adapts_expert_stacks(model, setup.lora_targets) and not setup.trainer.grouped_experts:
        return "experts in 4 bits are planned without adapters of their own: use --targets attention"
    return ""


def has_expert_stacks(model: ModelSpec) -> bool:
    """Whether transformers keeps the experts in bare parameters, which bitsandbytes leaves as they are."""
    return bool(model.expert_stacks)


def masked(setup: TrainSetup, attention: AttentionSpec, *, masks_packed: bool = True) -> bool:
    """Whether SDPA is handed a mask: packed samples (but `Stack.masks_samples`), a window no longer than the sequence,
    or keys before it (prefix tuning), or pictures whose tokens see each other, or any where torch.compile traces the
    making of it.

    Args:
        masks_packed: whether the model's class hands SDPA a mask of packed samples (`masks_packed`).

    A padded batch whose sequences all have the full length hides nothing, and its mask is dropped; of others see
    `gives_mask`. xformers gets the samples' lengths instead, FlexAttention which blocks to skip.

    Source: transformers 5.23 `masking_utils.py` `_ignore_causal_mask_sdpa` (kv_length < local_attention_size; never
    while tracing: a padding mask's values, and before PyTorch 2.14 any).
    """
    if setup.attention in (XFORMERS, FLEX):
        return False
    pictures = attention.padded or (attention.sees_ahead and setup.images is not None)
    traced = setup.compiled and setup.trainer.traces_masks
    packed = setup.packing and masks_packed and setup.trainer.masks_samples
    if packed or setup.adapter == "prefix" or pictures or traced:
        return True
    return (
        attention.window_tokens is not None and setup.seq_len_tokens + setup.virtual_tokens >= attention.window_tokens
    )


def gives_mask(setup: TrainSetup, attention: AttentionSpec, kernel: Kernel, *, masks_packed: bool = True) -> bool:
    """Whether that kernel is handed a mask, `masked` or padding's. Where a full batch runs the math kernel, which
    keeps every score, that batch and not one with padding takes the most."""
    return (setup.pads and kernel == "efficient") or masked(setup, attention, masks_packed=masks_packed)


def padded(model: ModelSpec, setup: TrainSetup) -> TrainSetup | None:
    """A setup of full micro-batches with samples that differ in length; None where attention is told of no padding: of
    clips labels alone are padded (the collator of Hugging Face's course)."""
    uneven = setup.replace_trusted(uneven=True)
    return uneven if not setup.uneven and uneven.pads and model.front_end is None else None


def handed_mask(model: ModelSpec, setup: TrainSetup, attention: AttentionSpec) -> bool:
    """Whether SDPA gets a mask of tokens x tokens in a layer of this model: `masked`, or its class always makes one."""
    return always_masked(model) or masked(setup, attention, masks_packed=masks_packed(model))


_AOTRITON = re.compile(r"MI ?[23]\d\d|7900|W7800|9070|R9700|80[56]0S", re.IGNORECASE)
_EXPERIMENTAL = re.compile(r"RX 7[678]00|W7[567]00|9060", re.IGNORECASE)
"""Names of AMD's cards for which PyTorch's fused attention is built (gfx90a, 942, 950, 1100, 1151, 1201), and of those
where it runs under `AOTRITON_SWITCH` alone (gfx1101, 1102, 1200); others (MI100's gfx908, MI50's gfx906) have none.

Source: PyTorch 2.13 `sdp_utils.cpp` check_flash_attention_hardware_support, check_mem_efficient_hardware_support;
AOTriton 0.12b (2.13's) `v3src/util.cc` string_to_classifier, isArchExperimentallySupported.
"""
AOTRITON_SWITCH = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"
_XE2 = re.compile(r"\bB\d{2,3}\b")
"""Intel's cards with SYCL-TLA's flash attention (BMG-G21), since PyTorch 2.11 the one fused kernel there with a
gradient: 16 bits, no mask, equal heads up to 192 wide.

Source: PyTorch `transformers/xpu/sdp_utils.cpp` can_use_flash_attention; intel/torch-xpu-ops issues 2232, 2390 (with a
mask 1.66 GB where a fused kernel takes 0.22).
"""
XE2_HEAD_DIM = 192
STAND_INS = {"unfused": (0, 0), "xe2": (0, 2)}
"""What stands for the compute capability of cards that have none, where the dry run asks which attention runs."""


def attention_generation(gpu: GpuSpec) -> str:
    """What of a card decides which attention kernels run: cards of one generation run the same."""
    if gpu.vendor == "Apple":
        return "metal"
    if gpu.vendor == "Intel":
        return "xe2" if _XE2.search(gpu.name) else "unfused"
    if gpu.vendor == "AMD" and not _AOTRITON.search(gpu.name):
        return "experimental" if _EXPERIMENTAL.search(gpu.name) else "unfused"
    if gpu.arch == "Hopper":
        return "hopper"
    capability = gpu.compute_capability or (8, 0)
    return "before 8.0" if capability < (8, 0) else "small" if capability in _SMALL else "large"


def _generation(gpu: GpuSpec, setup: TrainSetup) -> str:
    """`attention_generation` with the switch of AMD's experimental kernels, which importing Unsloth sets (pull request
    8821)."""
    generation = attention_generation(gpu)
    switched = {"experimental": "large" if setup.stack == "unsloth" else "unfused"}
    return switched.get(generation, generation)


def sdpa_capability(gpu: GpuSpec, setup: TrainSetup) -> tuple[int, int]:
    """The compute capability by which the dry run chooses attention kernels, A100's for AMD's cards with fused ones."""
    return gpu.compute_capability or STAND_INS.get(_generation(gpu, setup), (8, 0))


def takes_cudnn(gpu: GpuSpec, attention: str) -> bool:
    """Whether SDPA hands attention, with a mask or without, to cuDNN's kernels first: Hopper and data-centre Blackwell,
    under PyTorch 2.13 with cuDNN above 9.15.

    Source: PyTorch 2.13 `sdp_utils.cpp` check_prefer_cudnn_attention; can_use_cudnn_attention (check_attn_mask_shape).
    """
    return attention == "sdpa" and (gpu.compute_capability or (0, 0))[0] in (9, 10)


def brings_xformers(model_type: str, setup: TrainSetup) -> bool:
    """Whether 16-bit attention without a mask runs by xformers' kernel on NVIDIA's cards before Ampere, not by SDPA: of
    types whose attention Unsloth runs itself, where it is neither capped nor sunk."""
    return setup.stack == "unsloth" and setup.attention == "sdpa" and model_type in FUSED_LORA


def attention_kernel(
    model: ModelSpec, setup: TrainSetup, gpu: GpuSpec, attention: AttentionSpec, qkv_dtype: str
) -> Kernel:
    """The kernel that computes one layer's attention.

    "flash" and "efficient" keep no tokens x tokens matrix; "math" and "eager" do. PyTorch tries flash, then
    memory-efficient, then math. Flash needs compute capability 8.0, 16-bit inputs, no mask and equal head sizes up to
    256 (193 to 224 have no backward on 8.6, 8.9 and 12.x). Memory-efficient takes masks, fp32 and older cards, but not
    grouped-query form, which transformers (from 4.54 on) asks for without a mask and up to 256 wide. Of samples
    that are `uneven` the batch counts that takes the most: padded, or full where that runs the math kernel.

    On Apple's GPUs training always takes the math kernel, on some of AMD's and Intel's too (`_AOTRITON`, `_XE2`).
    Unsloth brings xformers and hands its memory-efficient kernel keys and values repeated to all heads, so that grouped
    queries run fused on cards without flash attention; Axolotl does where xformers is named (`XFORMERS`).

    Source: PyTorch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (2.9 to 2.13), `_fused_sdp_choice_mps`
    (pytorch pull request 182746: math for every shape); transformers 5.23 `integrations/sdpa_attention.py`,
    `use_gqa_in_sdpa`; Unsloth `utils/attention_dispatch.py` (November 2026), whose package requires xformers 0.0.35.
    """
    if attention.kind == "linear":
        return "linear"
    if setup.attention == "flash-attention-2":
        sunk = attention.sinks and not untrained_sinks(model, gpu, setup)
        taken = attention.head_dim <= FLASH_HEAD_DIM and not sunk
        return "flash" if taken else "eager"  # such a model is refused; counted as what a person would have to run
    if setup.attention == XFORMERS:
        return "efficient"
    if setup.attention == FLEX:
        return "flash"
    # torchtune's and LitGPT's own Gemma 2 multiplies by hand where scores are capped, as transformers' does
    has_sdpa = "sdpa" in model.attentions or (setup.trainer.own_models and not attention.softcap)
    if setup.attention == "eager" or not has_sdpa:
        return "eager"
    generation = _generation(gpu, setup)
    if generation in ("metal", "unfused"):
        return "math"
    half, old = qkv_dtype != "fp32", generation == "before 8.0"
    equal_heads = attention.head_dim == attention.value_head_dim
    fused_width = attention.head_dim <= MAX_FUSED_HEAD_DIM
    has_mask = handed_mask(model, setup, attention)
    if generation == "xe2":
        taken = half and equal_heads and attention.head_dim <= XE2_HEAD_DIM and not has_mask and not setup.pads
        return "flash" if taken else "math"
    no_backward = generation == "small" and 192 < attention.head_dim <= 224
    if half and not old and equal_heads and fused_width and not has_mask and not no_backward:
        return "efficient" if setup.pads else "flash"
    if always_masked(model) and attention.num_kv_heads == 1:
        return "math"
    grouped = attention.num_kv_heads != attention.num_heads and equal_heads and fused_width and not has_mask
    grouped &= not setup.repeats_keys
    by_xformers = half and old and brings_xformers(model.model_type, setup)
    if (grouped and not by_xformers) or (qkv_dtype == "bf16" and old):
        return "math"
    return "efficient"
