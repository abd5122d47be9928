"""MLX-LM's YAML (`mlx_lm.lora --config FILE`, mlx-lm 0.32)."""

from typing import Any

from planner.frameworks.tools.field import Field, Tool
from planner.setup import TrainSetup


def _checkpointed(key: str, _: TrainSetup, after: TrainSetup) -> dict[str, Any]:
    return {key: after.checkpointing > 0}


OPTIMIZERS = {"adamw-fused": "adamw", "adafactor": "adafactor", "sgd": "sgd"}
MLX = Tool(
    name="mlx",
    title="MLX-LM",
    fields=(
        Field(of="model", key="model", fix=False),
        Field(of="method", key="fine_tune_type", fix=False),
        Field(of="micro_batch_seqs", key="batch_size", default=4),
        Field(of="accumulation_steps", key="grad_accumulation_steps", default=1),
        Field(of="seq_len_tokens", key="max_seq_length", default=2048),
        Field(of="checkpointing", key="grad_checkpoint", edit=_checkpointed, runs=(0, 1)),
        Field(of="optimizer", key="optimizer", words=OPTIMIZERS, runs=tuple(OPTIMIZERS)),
        Field(of="lora_rank", key="lora_parameters.rank", default=8),
        Field(of="lora_dropout", key="lora_parameters.dropout", default=0.0, fix=False),
        Field(of="lora_targets", key="lora_parameters.keys", fix=False),
        Field(of="trained_layers", key="num_layers", fix=False),
    ),
    fixed=("precision", "quantization", "kernels", "attention", "loss", "packing", "compile"),
)
