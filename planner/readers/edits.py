"""Setup changes as settings of each format: which keys to write for which field. The inverse of the readers' looks."""

from typing import Any

from planner.choices.optimizers import OPTIMIZERS
from planner.errors import ConfigError
from planner.exporters.common import HF_ATTENTIONS, HF_OPTIMIZERS
from planner.readers.types import ReadConfig
from planner.setup import TrainSetup

EDITABLE = {
    "trl": ("micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "optimizer", "attention", "checkpointing",
            "packing", "quantization", "method", "precision", "compile", "kernels"),
    "axolotl": ("micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "optimizer", "attention", "checkpointing",
                "packing", "quantization", "method", "loss", "compile"),
    "llamafactory": ("micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "optimizer", "attention",
                     "checkpointing", "packing", "quantization", "method", "loss", "compile", "kernels"),
    "llamafactory-v1": ("micro_batch_seqs", "seq_len_tokens", "checkpointing"),
    "unsloth": ("micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "checkpointing", "packing", "quantization",
                "method"),
    "hf-script": ("micro_batch_seqs", "accumulation_steps", "optimizer", "checkpointing", "loss", "kernels"),
    "unsloth-script": ("micro_batch_seqs", "accumulation_steps", "optimizer"),
    "deepspeed": ("micro_batch_seqs", "accumulation_steps"),
    "accelerate": (),
    "torchtitan": (),
}  # fmt: skip
"""format -> fields that can be changed in place there."""


_ALL_OR_NONE = (0, 1)
RUNNABLE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("axolotl", "checkpointing"): _ALL_OR_NONE,
    ("llamafactory", "checkpointing"): _ALL_OR_NONE,
    ("llamafactory-v1", "checkpointing"): _ALL_OR_NONE,
    ("unsloth", "checkpointing"): _ALL_OR_NONE,
    ("unsloth-script", "checkpointing"): _ALL_OR_NONE,
    ("llamafactory", "loss"): ("full", "liger"),
    ("hf-script", "loss"): ("full", "liger"),
    ("unsloth", "kernels"): (),
    ("unsloth-script", "kernels"): (),
    ("torchtitan", "kernels"): (),
    ("llamafactory", "precision"): (),
    ("unsloth", "attention"): (),
    ("unsloth-script", "attention"): (),
    ("unsloth", "optimizer"): (),
    ("torchtitan", "method"): (),
    ("torchtitan", "loss"): (),
    ("torchtitan", "attention"): (),
    ("torchtitan", "optimizer"): tuple(name for name, row in OPTIMIZERS.items() if row.torchtitan),
}
"""(format, field) -> values that the tool can run at all; fields not named here: all."""

IN_PLACE_ONLY: dict[tuple[str, str], tuple[Any, ...]] = {("axolotl", "loss"): ("chunked",)}
"""(format, field) -> values that one setting in the file can say (Liger is a plugin in Axolotl's)."""


def runnable(kind: str, before: TrainSetup, after: TrainSetup) -> bool:
    """Whether the tool of a format can run a changed setup."""
    return all(
        getattr(after, name) in RUNNABLE.get((kind, name), (getattr(after, name),))
        for name in changed_fields(before, after)
    )


def in_place(kind: str, before: TrainSetup, after: TrainSetup) -> bool:
    """Whether `--fix` can write a changed setup into a file of a format."""
    fields = changed_fields(before, after)
    if not all(name in (*EDITABLE.get(kind, ()), "adapter_dtype") for name in fields):
        return False
    return runnable(kind, before, after) and all(
        getattr(after, name) in IN_PLACE_ONLY.get((kind, name), (getattr(after, name),)) for name in fields
    )


def changed_fields(before: TrainSetup, after: TrainSetup) -> tuple[str, ...]:
    """Names of the fields in which two setups differ."""
    return tuple(name for name in TrainSetup.__dataclass_fields__ if getattr(before, name) != getattr(after, name))


def settings_for(config: ReadConfig, after: TrainSetup) -> dict[str, Any]:
    """key -> value to write (nested keys dotted), so that reading the file again gives `after`.

    Raises:
        ConfigError: a field that this format cannot change in place.
    """
    fields = changed_fields(config.setup, after)
    allowed = EDITABLE.get(config.format, ())
    for name in fields:
        if name not in (*allowed, "adapter_dtype"):
            raise ConfigError(
                f"{config.path}: {name} cannot be changed in a {config.format} file",
                hint="make the changes that plan check lists by hand",
            )
    writer = _WRITERS[config.format]
    edits: dict[str, Any] = {}
    for name in fields:
        edits |= writer(config, name, after)
    return edits


def _hf_common(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    key = config.keys.get(name, "")
    match name:
        case "micro_batch_seqs":
            return {"per_device_train_batch_size": after.micro_batch_seqs}
        case "accumulation_steps":
            return {"gradient_accumulation_steps": after.accumulation_steps}
        case "optimizer":
            return {"optim": HF_OPTIMIZERS[after.optimizer]}
        case "compile":
            return {"torch_compile": after.compile}
        case "kernels" | "loss":
            on = "liger" in (after.kernels, after.loss)
            return {
                "use_liger_kernel": on,
                "liger_kernel_config": {"fused_linear_cross_entropy": after.loss == "liger"} if on else {},
            }
        case "checkpointing":
            old = key.startswith("gradient")
            edits: dict[str, Any] = {key or "activation_checkpointing": after.checkpointing > 0}
            if after.checkpointing > 1 or config.setup.checkpointing > 1 or after.activation_offload:
                block: dict[str, Any] = {"use_reentrant": False}
                if after.checkpointing > 1:
                    block["every_n_layers"] = after.checkpointing
                if after.activation_offload:
                    block["offload"] = True
                edits["gradient_checkpointing_kwargs" if old else "activation_checkpointing_kwargs"] = block
            return edits
    return {}


def _trl(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    match name:
        case "seq_len_tokens":
            return {config.keys.get(name, "max_length"): after.seq_len_tokens}
        case "attention":
            return {"attn_implementation": HF_ATTENTIONS[after.attention]}
        case "packing":
            return {"packing": after.packing}
        case "method" | "quantization":
            four = after.quantization.startswith("nf4")
            edits: dict[str, Any] = {"load_in_4bit": four}
            if four:
                edits |= {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": after.quantization == "nf4-double"}
            return edits | ({"load_in_8bit": False} if config.setup.quantization == "int8" else {})
        case "precision":
            dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[after.weight_dtype]
            return {
                config.keys.get("precision", "dtype"): dtype,
                "bf16": after.autocast_dtype == "bf16",
                "fp16": after.autocast_dtype == "fp16",
            }
    return _hf_common(config, name, after)


def _axolotl(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    match name:
        case "micro_batch_seqs":
            return {"micro_batch_size": after.micro_batch_seqs}
        case "accumulation_steps":
            return {"gradient_accumulation_steps": after.accumulation_steps}
        case "seq_len_tokens":
            return {"sequence_len": after.seq_len_tokens}
        case "optimizer":
            return {"optimizer": HF_OPTIMIZERS[after.optimizer]}
        case "attention":
            return {"attn_implementation": HF_ATTENTIONS[after.attention]}
        case "checkpointing":
            return {"gradient_checkpointing": after.checkpointing > 0}
        case "packing":
            return {"sample_packing": after.packing}
        case "compile":
            return {"torch_compile": after.compile}
        case "loss":
            return {"chunked_cross_entropy": after.loss == "chunked"}
        case "method" | "quantization":
            edits: dict[str, Any] = {"adapter": "qlora", "load_in_4bit": True}
            if config.setup.quantization == "nf4":
                edits["bnb_config_kwargs"] = {"bnb_4bit_use_double_quant": after.quantization == "nf4-double"}
            if config.setup.quantization == "int8":
                edits["load_in_8bit"] = False
            return edits
    return {}


def _llamafactory(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    match name:
        case "seq_len_tokens":
            return {"cutoff_len": after.seq_len_tokens}
        case "attention":
            return {"flash_attn": {"eager": "disabled", "sdpa": "sdpa", "flash-attention-2": "fa2"}[after.attention]}
        case "checkpointing":
            return {"disable_gradient_checkpointing": after.checkpointing == 0}
        case "packing":
            return {"packing": after.packing, "neat_packing": after.packing}
        case "loss" | "kernels":
            return {"enable_liger_kernel": "liger" in (after.kernels, after.loss)}
        case "method" | "quantization":
            return {"quantization_method": "bnb", "quantization_bit": 4, "double_quantization": True}
    return _hf_common(config, name, after)


def _llamafactory_v1(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    match name:
        case "micro_batch_seqs":
            return {"micro_batch_size": after.micro_batch_seqs}
        case "seq_len_tokens":
            return {"cutoff_len": after.seq_len_tokens}
        case "checkpointing":
            return {"enable_activation_checkpointing": after.checkpointing > 0}
    return {}


def _unsloth(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    match name:
        case "micro_batch_seqs":
            return {"training.batch_size": after.micro_batch_seqs}
        case "accumulation_steps":
            return {"training.gradient_accumulation_steps": after.accumulation_steps}
        case "seq_len_tokens":
            return {"training.max_seq_length": after.seq_len_tokens}
        case "packing":
            return {"training.packing": after.packing}
        case "checkpointing":
            return {"training.gradient_checkpointing": "true" if after.checkpointing else "none"}
        case "method" | "quantization":
            return {"training.load_in_4bit": after.quantization.startswith("nf4")}
    return {}


def _deepspeed(config: ReadConfig, name: str, after: TrainSetup) -> dict[str, Any]:
    if name == "micro_batch_seqs":
        return {"train_micro_batch_size_per_gpu": after.micro_batch_seqs}
    return {"gradient_accumulation_steps": after.accumulation_steps} if name == "accumulation_steps" else {}


_WRITERS = {
    "trl": _trl,
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
    "llamafactory-v1": _llamafactory_v1,
    "unsloth": _unsloth,
    "hf-script": _hf_common,
    "unsloth-script": _hf_common,
    "deepspeed": _deepspeed,
}
