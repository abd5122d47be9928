"""transformers' `TrainingArguments` (5.23), which TRL, LLaMA-Factory, ms-swift take over, and what programs
hand to its models and to peft."""

from dataclasses import replace
from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.options.optimizers import OPTIMIZERS as ROWS
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX

OPTIMIZERS = {name: row.transformers for name, row in ROWS.items()}
"""transformers' `OptimizerNames`. "adamw_torch" is PyTorch's default, the foreach form."""
ATTENTIONS = {"eager": "eager", "sdpa": "sdpa", "flash-attention-2": "flash_attention_2", FLEX: "flex_attention"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def checkpointing_kwargs(after: TrainSetup) -> dict[str, Any]:
    """What the arguments' switch is told beside on and off."""
    block: dict[str, Any] = {"use_reentrant": False}
    if after.checkpointing > 1:
        block["every_n_layers"] = after.checkpointing
    if after.selective_checkpointing:  # a key of TRL's SFTTrainer
        block["selective"] = True
    return block | ({"offload": True} if after.activation_offload else {})


def _checkpointing(key: str, before: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    edits: dict[str, Any] = {key: after.checkpointing > 0}
    selective = any(setup.checkpointing > 1 or setup.selective_checkpointing for setup in (before, after))
    if selective or after.activation_offload:
        edits[f"{key}_kwargs"] = checkpointing_kwargs(after)
    return edits


def _liger(key: str, _: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    on = "liger" in (after.kernels, after.loss)
    config = {"fused_linear_cross_entropy": after.loss == "liger"} if on else {}
    return {key: on, "liger_kernel_config": config}


def precision(key: str, _: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    """The type of the weights and the two switches of autocast."""
    autocast = {kind: after.autocast_dtype == kind for kind in ("bf16", "fp16")}
    return {key: DTYPES[after.weight_dtype], **autocast}


def _handed(key: str, before: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    """The type that TRL's arguments hand to the loading of a model that its trainer is named, and what of autocast
    changes."""
    kinds = [kind for kind in ("bf16", "fp16") if (before.autocast_dtype == kind) != (after.autocast_dtype == kind)]
    return {key: {"dtype": DTYPES[after.weight_dtype]}, **{kind: after.autocast_dtype == kind for kind in kinds}}


HANDED = "model_init_kwargs"
BATCH = (
    Field(of="micro_batch_seqs", key="per_device_train_batch_size", default=8),
    Field(of="accumulation_steps", key="gradient_accumulation_steps", default=1),
)
OPTIMIZER = Field(of="optimizer", key="optim", default="adamw-fused", words=OPTIMIZERS)
CHECKPOINTING = Field(
    of="checkpointing", key="activation_checkpointing", older=("gradient_checkpointing",), edit=_checkpointing
)
KERNELS = Field(of="kernels", key="use_liger_kernel", older=("use_liger",), edit=_liger)
COMPILE = Field(of="compile", key="torch_compile", default=False)
PARALLEL = Field(of="parallel", key="deepspeed", more=("fsdp", "fsdp_config"), fix=False)
SYNC = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
WHOLE = Field(of="sync_each_batch", key=SYNC, older=("accelerator_config",), fix=SYNC)
"""Which gradients wait under FSDP with accumulation; in a block that holds something else it is a person's to write."""

OF_QUANTIZATION = ("load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type")

_PEFT = (Field(of="lora_rank", key="r", fix=False), Field(of="lora_targets", key="target_modules", fix=False))
SCRIPT = Tool(
    name="hf-script",
    title="transformers",
    fields=(
        *BATCH,
        OPTIMIZER,
        CHECKPOINTING,
        KERNELS,
        Field(of="loss", key="use_liger_kernel", older=("use_liger",), edit=_liger, runs=("full", "liger")),
        replace(COMPILE, fix=False),
        Field(of="seq_len_tokens", key="max_length", older=("max_seq_length", "model_max_length"), fix=False),
        Field(of="packing", key="packing", fix=False),
        Field(of="attention", key="attn_implementation", words=ATTENTIONS, fix=False),
        Field(of="precision", key="dtype", older=("torch_dtype",), more=("bf16", "fp16"), fix=HANDED, edit=_handed),
        Field(of="quantization", key="load_in_4bit", more=OF_QUANTIZATION, fix=False),
        PARALLEL,
        replace(WHOLE, fix=False),
        *_PEFT,
    ),
)
"""A program with transformers' Trainer or TRL's: what it hands to the arguments, the model and peft."""


def _quantization(_: str, before: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    four = after.four_bit
    edits: dict[str, Any] = {"load_in_4bit": four}
    if four:
        edits |= {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": after.quantization == "nf4-double"}
    return edits | ({"load_in_8bit": False} if before.quantization == "int8" else {})


TRL = Tool(
    name="trl",
    title="TRL",
    fields=(
        Field(of="model", key="model_name_or_path", fix=False),
        *BATCH,
        Field(of="seq_len_tokens", key="max_length", older=("max_seq_length",), default=1024),
        Field(of="packing", key="packing", default=False),
        OPTIMIZER,
        Field(of="attention", key="attn_implementation", words=ATTENTIONS),
        CHECKPOINTING,
        KERNELS,
        COMPILE,
        Field(of="method", key="use_peft", edit=_quantization),
        Field(
            of="quantization",
            key="load_in_4bit",
            more=("load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
            edit=_quantization,
        ),
        Field(of="precision", key="dtype", older=("torch_dtype",), more=("bf16", "fp16"), edit=precision),
        Field(of="lora_rank", key="lora_r", default=16),
        Field(of="lora_dropout", key="lora_dropout", default=0.05, fix=False),
        Field(of="lora_targets", key="lora_target_modules", fix=False),
        Field(of="modules_to_save", key="lora_modules_to_save", fix=False),
        replace(PARALLEL, more=(*PARALLEL.more, "accelerate_config")),
        WHOLE,
    ),
)
