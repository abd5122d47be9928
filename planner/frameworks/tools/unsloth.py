"""Unsloth's YAML (`unsloth train -c FILE`, 2026.10), and programs with its FastLanguageModel."""

from collections.abc import Mapping
from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.frameworks.tools.transformers import BATCH, CHECKPOINTING, OPTIMIZER
from planner.models.spec import ModelSpec
from planner.options.kernels import kernels_refusal
from planner.options.stacks import TARGET_ROWS
from planner.setup import TrainSetup


def _four_bits(_: str, __: TrainSetup, after: TrainSetup) -> dict[str, bool]:
    return {"training.load_in_4bit": after.four_bit}


UNSLOTH = Tool(
    name="unsloth",
    title="Unsloth",
    fields=(
        Field(of="model", key="model", fix=False),
        Field(of="micro_batch_seqs", key="training.batch_size", default=2),
        Field(of="accumulation_steps", key="training.gradient_accumulation_steps", default=4),
        Field(of="seq_len_tokens", key="training.max_seq_length", default=2048),
        Field(of="packing", key="training.packing", default=False),
        Field(
            of="checkpointing",
            key="training.gradient_checkpointing",
            edit=lambda key, _, after: {key: "true" if after.checkpointing else "none"},
            runs=(0, 1),
        ),
        Field(of="method", key="training.training_type", edit=_four_bits),
        Field(of="quantization", key="training.load_in_4bit", edit=_four_bits),
        Field(of="lora_rank", key="lora.lora_r", default=64),
        Field(of="lora_dropout", key="lora.lora_dropout", default=0.0, fix=False),
        Field(of="lora_targets", key="lora.target_modules", fix=False),
    ),
    fixed=("kernels", "attention", "optimizer"),
)
SCRIPT = Tool(
    name="unsloth-script",
    title="Unsloth",
    fields=(
        *BATCH,
        OPTIMIZER,
        Field(of="checkpointing", key=CHECKPOINTING.key, more=("use_gradient_checkpointing",), fix=False, runs=(0, 1)),
        Field(of="method", key="full_finetuning", fix=False),
    ),
    fixed=("kernels", "attention"),
)


EXPERTS_IN_4_BITS = frozenset({"gpt_oss"})
NOT_IN_THEM = frozenset({"gate_proj", "up_proj", "down_proj"})


OWN_DEFAULTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_8bit",
    "per_device_eval_batch_size": 4,
    "eval_accumulation_steps": 2,
}
"""What Unsloth's copies of TRL's configurations (not transformers' TrainingArguments) say by themselves.

Source: unsloth@015bdef0 `models/rl.py` _patch_trl_rl_trainers (replacements).
"""


def converted(fields: Mapping[str, Any], model: ModelSpec | None) -> tuple[dict[str, Any], str]:
    """A method's fields where Unsloth loads a 4-bit conversion of its own in place of the published weights, and what
    to say of it, "" where it loads none: experts are in NF4 too, and their matrices (gate_up_projs.0, down_projs.0)
    have none of the usual names.

    Source: unsloth 2026.10.9 `models/mapper.py` (unsloth/gpt-oss-20b -> -unsloth-bnb-4bit); unsloth_zoo
    `temporary_patches/gpt_oss.py` GptOssExpertsBnb4bit (in training a stack is unpacked whole, and again in the
    backward).
    """
    four_bit = fields["quantization"].startswith("nf4")
    if model is None or model.model_type not in EXPERTS_IN_4_BITS or not four_bit:
        return dict(fields), ""
    targets = fields["lora_targets"]
    if not isinstance(targets, str):
        targets = tuple(name for name in targets if name not in NOT_IN_THEM)
    note = "Unsloth loads its own 4-bit conversion, experts too; gate_proj, up_proj and down_proj match nothing in it"
    return {**fields, "lora_targets": targets, "quantize_experts": True}, note


def own_kernels(fields: Mapping[str, Any], model: ModelSpec | None) -> str:
    """The kernel family of a run by Unsloth: its own, which take adapters of whole attention without dropout, and 16 or
    4 bits, of models that it has them for.

    Source: Unsloth `models/llama.py` patch_peft_model (all of q, k, v with adapters, lora_dropout 0, bias "none").
    """
    kernels, others = TARGET_ROWS["unsloth"].kernels
    if model is not None and kernels_refusal(kernels, model.model_type):
        return others
    plain = fields["method"] != "full" and not fields.get("lora_dropout") and fields.get("quantization") != "int8"
    return kernels if plain and isinstance(fields.get("lora_targets", "all-linear"), str) else others
