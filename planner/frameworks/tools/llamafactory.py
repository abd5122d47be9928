"""LLaMA-Factory's YAML (0.9.5)."""

from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.frameworks.tools.transformers import BATCH, COMPILE, OPTIMIZER, PARALLEL, WHOLE
from planner.setup import TrainSetup

ATTENTIONS = {"eager": "disabled", "sdpa": "sdpa", "flash-attention-2": "fa2"}


def _four_bits(_: str, __: TrainSetup, ___: TrainSetup) -> dict[str, Any]:
    return {"quantization_method": "bnb", "quantization_bit": 4, "double_quantization": True}


def _liger(key: str, _: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    return {key: "liger" in (after.kernels, after.loss)}


LLAMAFACTORY = Tool(
    name="llamafactory",
    title="LLaMA-Factory",
    fields=(
        Field(of="model", key="model_name_or_path", fix=False),
        *BATCH,
        Field(of="seq_len_tokens", key="cutoff_len", default=2048),
        Field(
            of="packing",
            key="packing",
            more=("neat_packing",),
            edit=lambda _, __, after: {"packing": after.packing, "neat_packing": after.packing},
        ),
        OPTIMIZER,
        Field(of="attention", key="flash_attn", words=ATTENTIONS),
        Field(
            of="checkpointing",
            key="disable_gradient_checkpointing",
            edit=lambda key, _, after: {key: after.checkpointing == 0},
            runs=(0, 1),
        ),
        Field(of="loss", key="enable_liger_kernel", more=("use_liger_kernel",), edit=_liger, runs=("full", "liger")),
        Field(of="kernels", key="enable_liger_kernel", more=("use_liger_kernel",), edit=_liger),
        COMPILE,
        Field(of="method", key="finetuning_type", edit=_four_bits),
        Field(of="quantization", key="quantization_bit", more=("double_quantization",), edit=_four_bits),
        Field(of="precision", key="bf16", more=("fp16", "pure_bf16"), fix=False),
        Field(of="lora_rank", key="lora_rank", default=8),
        Field(of="lora_dropout", key="lora_dropout", default=0.0, fix=False),
        Field(of="lora_targets", key="lora_target", fix=False),
        Field(
            of="modules_to_save",
            key="additional_target",
            more=("add_tokens", "add_special_tokens", "new_special_tokens", "resize_vocab"),
            fix=False,
        ),
        PARALLEL,
        WHOLE,
    ),
    fixed=("precision",),
)
