"""Tools whose files are read and not written, but for torchtitan's and DeepSpeed's."""

from dataclasses import replace

from planner.frameworks.tools.field import Field, Tool
from planner.frameworks.tools.transformers import BATCH, CHECKPOINTING, COMPILE, KERNELS, OPTIMIZER, PARALLEL


def _read_only(*fields: Field) -> tuple[Field, ...]:
    """The rows as they are read where `--fix` writes nothing."""
    return tuple(replace(field, fix=False) for field in fields)


SWIFT = Tool(
    name="ms-swift",
    title="ms-swift",
    fields=_read_only(
        Field(of="model", key="model", older=("model_id_or_path", "model_type")),
        Field(of="micro_batch_seqs", key="per_device_train_batch_size", older=("batch_size",), default=1),
        Field(of="accumulation_steps", key="gradient_accumulation_steps"),
        Field(of="seq_len_tokens", key="max_length"),
        Field(of="packing", key="packing", more=("padding_free",)),
        OPTIMIZER,
        Field(of="attention", key="attn_impl", more=("use_flash_attn",)),
        CHECKPOINTING,
        KERNELS,
        COMPILE,
        Field(of="method", key="tuner_type", older=("train_type", "sft_type")),
        Field(of="quantization", key="quant_bits", older=("quantization_bit",)),
        Field(of="precision", key="torch_dtype", older=("dtype",), more=("bf16", "fp16")),
        Field(of="lora_rank", key="lora_rank", default=8),
        Field(of="lora_dropout", key="lora_dropout", older=("lora_dropout_p",), default=0.05),
        Field(of="lora_targets", key="target_modules", older=("lora_target_modules",)),
        Field(of="modules_to_save", key="modules_to_save", older=("lora_modules_to_save",)),
        PARALLEL,
    ),
)
"""ms-swift 4; the older names are those of 2 and 3."""
LITGPT = Tool(
    name="litgpt",
    title="litgpt",
    fields=_read_only(
        Field(of="model", key="checkpoint_dir"),
        Field(of="micro_batch_seqs", key="train.micro_batch_size", default=1),
        Field(of="accumulation_steps", key="train.global_batch_size"),
        Field(of="seq_len_tokens", key="train.max_seq_length"),
        Field(of="quantization", key="quantize"),
        Field(of="precision", key="precision"),
        Field(of="lora_rank", key="lora_r", default=8),
        Field(of="lora_dropout", key="lora_dropout", default=0.05),
    ),
)
TORCHTUNE = Tool(
    name="torchtune",
    title="torchtune",
    fields=_read_only(
        Field(of="model", key="checkpointer.checkpoint_dir"),
        Field(of="micro_batch_seqs", key="batch_size", default=1),
        BATCH[1],
        Field(of="seq_len_tokens", key="tokenizer.max_seq_len"),
        Field(of="packing", key="dataset.packed", default=False),
        Field(of="checkpointing", key="enable_activation_checkpointing"),
        Field(of="compile", key="compile"),
        Field(of="loss", key="loss._component_"),
        Field(of="optimizer", key="optimizer._component_"),
        Field(of="method", key="model._component_"),
        Field(of="precision", key="dtype"),
        Field(of="lora_rank", key="model.lora_rank", default=8),
        Field(of="lora_dropout", key="model.lora_dropout", default=0.0),
        Field(of="lora_targets", key="model.lora_attn_modules"),
    ),
    fixed=("kernels", "attention"),
)
TORCHTITAN_ADAMW = {"foreach": "adamw", "for-loop": "adamw", "fused": "adamw-fused"}
"""torchtitan's implementations of AdamW -> the optimizer that each is."""
TORCHTITAN = Tool(
    name="torchtitan",
    title="torchtitan",
    fields=(
        *_read_only(
            Field(of="model", key="model.hf_assets_path"),
            Field(of="micro_batch_seqs", key="training.local_batch_size", default=8),
            Field(of="accumulation_steps", key="training.global_batch_size"),
            Field(of="seq_len_tokens", key="training.seq_len", default=2048),
            Field(of="checkpointing", key="activation_checkpoint.mode"),
            Field(of="compile", key="compile.enable", default=False),
            Field(of="precision", key="training.dtype", more=("training.mixed_precision_param",)),
        ),
        Field(
            of="optimizer",
            key="optimizer.implementation",
            fix=False,
            words={name: word for word, name in reversed(TORCHTITAN_ADAMW.items())},
            runs=tuple(TORCHTITAN_ADAMW.values()),
        ),
    ),
    fixed=("kernels", "method", "loss", "attention"),
)
ACCELERATE = Tool(
    name="accelerate",
    title="Accelerate",
    fields=_read_only(
        Field(of="num_gpus", key="num_processes"),
        Field(of="parallel", key="distributed_type", more=("fsdp_config", "deepspeed_config")),
        Field(of="precision", key="mixed_precision"),
    ),
)
DEEPSPEED = Tool(
    name="deepspeed",
    title="DeepSpeed",
    fields=(
        Field(of="micro_batch_seqs", key="train_micro_batch_size_per_gpu"),
        Field(of="accumulation_steps", key="gradient_accumulation_steps"),
        Field(of="parallel", key="zero_optimization", fix=False),
        Field(of="precision", key="bf16.enabled", more=("fp16.enabled",), fix=False),
    ),
)
TOOLS = (DEEPSPEED, SWIFT, LITGPT, TORCHTUNE, TORCHTITAN, ACCELERATE)


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
        Field(
            of="checkpointing",
            key="grad_checkpoint",
            edit=lambda key, _, after: {key: after.checkpointing > 0},
            runs=(0, 1),
        ),
        Field(of="optimizer", key="optimizer", words=OPTIMIZERS, runs=tuple(OPTIMIZERS)),
        Field(of="lora_rank", key="lora_parameters.rank", default=8),
        Field(of="lora_dropout", key="lora_parameters.dropout", default=0.0, fix=False),
        Field(of="lora_targets", key="lora_parameters.keys", fix=False),
        Field(of="trained_layers", key="num_layers", fix=False),
    ),
    fixed=("precision", "quantization", "kernels", "attention", "loss", "packing", "compile"),
)
