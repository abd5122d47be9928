"""MLX-LM configs (`mlx_lm.lora --config FILE`) as setups. Defaults of mlx-lm 0.32."""

from typing import Any

from planner.core.errors import NotATraining, NotPlanned
from planner.frameworks.readers import common
from planner.frameworks.readers.common import config, settings_fields
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import MLX
from planner.frameworks.tools.others import OPTIMIZERS as WORDS

FORMAT = "mlx"
KINDS = ("lora", "dora", "full")
MARKS = {"fine_tune_type", "lora_parameters", "grad_checkpoint", "num_layers", "mask_prompt", "steps_per_report"}
"""Settings that no other tool has together with a `model`."""
OPTIMIZERS = {"adam": "adamw-fused"} | {word: kind for kind, word in WORDS.items()}
NUM_LAYERS = 16
"""Layers, counted from the end, that it adapts where nobody says."""


def read(settings: Settings) -> ReadConfig:
    """The setup of an MLX-LM fine-tuning.

    Source: mlx-lm 0.32 `lora.py` CONFIG_DEFAULTS and train_model, `tuner/utils.py` linear_to_lora_layers
    (`model.layers[-max(num_layers, 0):]`: the last, or all; more than there are is an error).
    """
    if not settings.flag("train", False):
        raise NotATraining(f"{settings.name}: train is not true: MLX-LM only evaluates", hint="train: true, or --train")
    kind = settings.text("fine_tune_type", "lora")
    if kind not in KINDS:
        raise settings.error("fine_tune_type", f"one of {', '.join(KINDS)}", kind)
    optimizer = settings.text("optimizer", "adam")
    if optimizer not in OPTIMIZERS:
        raise NotPlanned(f"{settings.name}: optimizer {optimizer} is not planned", hint=f"{', '.join(OPTIMIZERS)} are")
    layers = max(0, settings.integer("num_layers", NUM_LAYERS, at_least=-1))
    if settings.model is not None and layers > settings.model.num_layers:
        raise settings.error("num_layers", f"at most {settings.model.num_layers}, the model's layers", layers)
    if not settings.has("num_layers"):
        settings.assume(f"num_layers absent: the last {NUM_LAYERS}, MLX-LM's default")
    if kind == "full" and not layers:
        settings.approximate("MLX-LM's full fine-tuning leaves embeddings and head alone: counted as trained too")
    named = settings.text("model", "").lower().rpartition("/")[2]
    four, eight = any(word in named for word in BITS[4]), any(word in named for word in BITS[8])
    if four or eight:
        settings.assume(
            "the base is quantized, by its name; MLX's 4 bits take what nf4 takes without double quantization"
        )
    quantization = "none" if kind == "full" else "nf4" if four else "int8" if eight else "none"
    fields: dict[str, Any] = {
        **settings_fields(settings, MLX, "micro_batch_seqs", "accumulation_steps", "seq_len_tokens"),
        "method": "full" if kind == "full" else "lora" if quantization == "none" else "qlora",
        "quantization": quantization,
        "precision": "bf16-pure",
        "optimizer": OPTIMIZERS[optimizer],
        "attention": "sdpa",
        "checkpointing": int(settings.flag("grad_checkpoint", False)),
        "loss": "full",
        "kernels": "eager",
        "packing": False,
        "trained_layers": layers,
        "lora_rank": 0,
    }
    if kind != "full":
        block = settings.block("lora_parameters")
        keys = tuple(key.rpartition(".")[2] for key in block.names("keys"))
        fields |= {
            **settings_fields(block, MLX, "lora_rank", "lora_dropout"),
            "lora_targets": common.targets(block, keys) if keys else "all-linear",
            "adapter_dtype": "fp32",
            "adapter": kind,
        }
    data = settings.raw("data")
    return config(MLX, settings, fields, dataset=data if isinstance(data, str) else None)


BITS = {4: ("4bit", "4-bit", "-q4"), 8: ("8bit", "8-bit", "-q8")}
"""What names of quantized bases say (mlx-community's), and what is written here calls its own."""
