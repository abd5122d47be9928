"""Axolotl's YAML (0.21)."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.frameworks.tools.transformers import ATTENTIONS, COMPILE, OPTIMIZERS, WHOLE
from planner.options.kernels import FUSED_LORA, KERNELS, running
from planner.setup import TrainSetup
from planner.setup.allowed import XFORMERS

LIGER_SWITCHES = {"rotary": "liger_rope", "norm": "liger_rms_norm", "gated": "liger_glu_activation"}
"""Part of a layer -> the switch of the Liger plugin that computes it. Source: 0.21 `integrations/liger/args.py`."""
MLP_SWITCH = "lora_mlp_kernel"
LORA_SWITCHES = (MLP_SWITCH, "lora_qkv_kernel", "lora_o_kernel")
"""Axolotl's own LoRA functions."""


def lora_switches(setup: TrainSetup) -> dict[str, bool]:
    """Axolotl's LoRA functions, each on or off, as the setup's kernel family has them."""
    on, whole = "lora" in KERNELS[setup.kernels].parts, setup.lora_targets == "all-linear"
    return {switch: on and (whole or switch != MLP_SWITCH) for switch in LORA_SWITCHES}


def own_kernels(layers: str, fields: Mapping[str, Any], switches: Sequence[Any], model_type: str) -> str:
    """The kernel family of a run whose layers are `layers`', with Axolotl's LoRA functions where they are on: by
    themselves for adapters without dropout where the config says nothing of them. "" where no family is that pair.

    Source: Axolotl 0.21 `utils/schemas/config.py` check_auto_enable_lora_kernels.
    """
    plain = fields["method"] != "full" and not fields["lora_dropout"] and fields["quantization"] != "int8"
    plain = plain and isinstance(fields["lora_targets"], str)
    on = plain and (all(switch is None for switch in switches) or any(switch is True for switch in switches))
    if not on or (model_type and model_type not in FUSED_LORA):
        return layers
    return running(KERNELS[layers].parts | {"lora"})


def _four_bits(_: str, before: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    edits: dict[str, Any] = {"adapter": "qlora", "load_in_4bit": True}
    if before.quantization == "nf4":
        edits["bnb_config_kwargs"] = {"bnb_4bit_use_double_quant": after.quantization == "nf4-double"}
    return edits | ({"load_in_8bit": False} if before.quantization == "int8" else {})


def _checkpointing(key: str, before: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    edits: dict[str, Any] = {key: after.checkpointing > 0}
    if after.checkpointing or before.checkpointing > 1:
        every = {"every_n_layers": after.checkpointing} if after.checkpointing > 1 else {}
        edits[f"{key}_kwargs"] = {"use_reentrant": after.reentrant_checkpointing, **every}
    if before.selective_checkpointing:
        edits["selective_checkpointing"] = after.selective_checkpointing
    return edits


AXOLOTL = Tool(
    name="axolotl",
    title="Axolotl",
    fields=(
        Field(of="model", key="base_model", fix=False),
        Field(of="micro_batch_seqs", key="micro_batch_size", default=1),
        Field(of="accumulation_steps", key="gradient_accumulation_steps", more=("batch_size",), default=1),
        Field(of="seq_len_tokens", key="sequence_len", default=512),
        Field(of="packing", key="sample_packing", default=False),
        Field(of="optimizer", key="optimizer", default="adamw-fused", words=OPTIMIZERS),
        Field(
            of="attention",
            key="attn_implementation",
            older=("flash_attention",),
            more=("sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
            words={**ATTENTIONS, XFORMERS: "xformers"},
        ),
        Field(
            of="checkpointing",
            key="gradient_checkpointing",
            more=("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"),
            edit=_checkpointing,
        ),
        Field(
            of="loss",
            key="chunked_cross_entropy",
            more=("liger_fused_linear_cross_entropy", "cut_cross_entropy"),
            edit=lambda key, _, after: {key: after.loss == "chunked"},
            fixes=("chunked",),  # Liger is a plugin
        ),
        COMPILE,
        Field(of="method", key="adapter", edit=_four_bits),
        Field(of="quantization", key="load_in_4bit", more=("load_in_8bit", "gptq"), edit=_four_bits),
        Field(of="quantize_experts", key="quantize_moe_experts", default=False),
        Field(of="precision", key="bf16", more=("fp16", "bfloat16", "float16"), fix=False),
        Field(of="lora_rank", key="lora_r", default=8),
        Field(of="lora_dropout", key="lora_dropout", default=0.0, fix=False),
        Field(of="lora_targets", key="lora_target_modules", more=("lora_target_linear",), fix=False),
        Field(of="modules_to_save", key="lora_modules_to_save", fix=False),
        Field(
            of="parallel",
            key="deepspeed",
            more=("fsdp", "fsdp_config", "context_parallel_size", "sequence_parallel_degree"),
            fix=False,
        ),
        WHOLE,
    ),
)
