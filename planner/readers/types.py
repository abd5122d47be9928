"""`ReadConfig`: what a config file says, as a setup, with everything that had to be assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A setting that decides the answer and that the file does not determine.

    Attributes:
        field: of `TrainSetup`, or "model".
        reason: why, with the place in the file.
    """

    field: str
    reason: str

    @property
    def option(self) -> str:
        """What a person adds to the command to supply it."""
        return OPTIONS.get(self.field, f"--set {self.field}=VALUE")


OPTIONS = {
    "objective": "--set objective=dpo|kto|orpo",
    "model": "--model MODEL",
    "method": "--set method=full|lora|qlora",
    "quantization": "--set quantization=none|int8|nf4|nf4-double",
    "micro_batch_seqs": "--set micro_batch=N",
    "accumulation_steps": "--set accumulation=N",
    "seq_len_tokens": "--set seq_len=N",
    "lora_rank": "--set rank=N",
    "lora_targets": "--set targets=all-linear",
    "checkpointing": "--set checkpointing=true|false",
    "precision": "--set precision=bf16-autocast",
    "packing": "--set packing=true|false",
    "num_gpus": "--gpus N",
}
SHORT_NAMES = {
    "micro_batch": "micro_batch_seqs",
    "batch_size": "micro_batch_seqs",
    "accumulation": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
    "per_device_train_batch_size": "micro_batch_seqs",
    "seq_len": "seq_len_tokens",
    "max_length": "seq_len_tokens",
    "rank": "lora_rank",
    "targets": "lora_targets",
    "optim": "optimizer",
}
"""Words of `--set` for fields of a setup, beside their own names."""


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """One existing config, understood.

    Attributes:
        format: "trl", "axolotl", "llamafactory", "unsloth", "hf-script", "accelerate", "deepspeed" or "torchtitan".
        path: the file.
        model_id: None where the format does not say (Accelerate, DeepSpeed).
        setup: with the tool's own defaults for what is absent; what `missing` names stands there for nothing.
        missing: settings that the file does not determine: no verdict without them.
        origins: TrainSetup field -> where its value was read, "file:line" or the words for a default.
        assumptions: defaults and readings a person should know, one sentence each.
        approximations: features the memory model does not follow exactly; they widen the error band.
        dataset: hub id or path, None where none is named.
        keys: TrainSetup field -> (key in the file, value in the file), for `--fix`; nested keys dotted.
        adapted_tables: names of token tables that get adapters.
        unknown_keys: settings of the file that its tool does not have.
        call_line: of a program, the line of the call that holds the training arguments.
    """

    format: str
    path: str
    setup: TrainSetup
    model_id: str | None = None
    missing: tuple[Missing, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    dataset: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    adapted_tables: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    call_line: int = 0


SETTING_FIELDS = {
    "per_device_train_batch_size": "micro_batch_seqs",
    "gradient_accumulation_steps": "accumulation_steps",
    "max_length": "seq_len_tokens",
    "max_seq_length": "seq_len_tokens",
    "model_max_length": "seq_len_tokens",
    "cutoff_len": "seq_len_tokens",
    "packing": "packing",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "lora_rank": "lora_rank",
    "target_modules": "lora_targets",
    "lora_target": "lora_targets",
    "lora_target_modules": "lora_targets",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "quantization_bit": "quantization",
    "quant_bits": "quantization",
    "full_finetuning": "method",
    "finetuning_type": "method",
    "tuner_type": "method",
    "train_type": "method",
    "sft_type": "method",
    "use_peft": "method",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "use_gradient_checkpointing": "checkpointing",
    "bf16": "precision",
    "fp16": "precision",
    "dtype": "precision",
    "torch_dtype": "precision",
    "optim": "optimizer",
    "attn_implementation": "attention",
    "model": "model",
    "model_name_or_path": "model",
    "deepspeed": "parallel",
    "fsdp": "parallel",
}
"""Settings of the libraries and tools -> the setup's field that they decide ("model": the model's name)."""


def canonical(setup: TrainSetup) -> TrainSetup:
    """The setup with everything that two equal runs may write differently put into one form.

    Adapter data type resolved, target lists sorted, fields that the method does not use at their defaults.
    """
    plain = TrainSetup()
    if setup.method == "full":
        return setup.with_(
            lora_targets=plain.lora_targets, lora_dropout=plain.lora_dropout, adapter_dtype=plain.adapter_dtype
        )
    targets = setup.lora_targets
    if isinstance(targets, tuple):
        targets = tuple(sorted(set(targets)))
    return setup.with_(adapter_dtype=setup.resolved_adapter_dtype, lora_targets=targets)
