"""TRL's configs (`trl sft --config FILE`, 1.16): transformers' arguments, the model's and the adapters'."""

from dataclasses import replace
from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.frameworks.tools.transformers import (
    ATTENTIONS,
    BATCH,
    CHECKPOINTING,
    COMPILE,
    KERNELS,
    OPTIMIZER,
    PARALLEL,
    precision,
)
from planner.setup import TrainSetup


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
    ),
)
