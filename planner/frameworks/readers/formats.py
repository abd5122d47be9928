"""Which tool a mapping of settings belongs to, and the reader for it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from planner.core.errors import NotATraining, NotPlanned
from planner.frameworks.readers import (
    axolotl,
    generic,
    litgpt,
    llamafactory,
    loading,
    mlx,
    shell,
    swift,
    torchtune,
    trl,
    unsloth,
    versions,
)
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools import TOOLS

FORMATS = (
    "trl", "axolotl", "llamafactory", "unsloth", "accelerate", "deepspeed", "torchtitan", "ms-swift", "torchtune",
    "litgpt", "mlx", "hf-script", "notebook", "shell script",
)  # fmt: skip
READERS: dict[str, Callable[[Settings], ReadConfig]] = {
    reader.FORMAT: reader.read
    for reader in (trl, axolotl, llamafactory, unsloth, swift, litgpt, torchtune, mlx, generic)
}
"""Format -> its reader, which raises `ConfigError`: an unknown key, a wrong value, an impossible combination, or
`NotPlanned`: another kind of training, adapter or precision than is planned."""
OTHER_TOOLS = {
    "nanotron": {"data_stages", "parallelism", "tokens"},
    "verl": {"actor_rollout_ref"},
    "prime-rl": {"orchestrator"},
    "verl's SFT": {"data", "model", "optim", "trainer"},
    "Megatron": {"tensor_model_parallel_size"},
    "litgpt's pretraining": {"model_name", "model_config", "initial_checkpoint_dir"},
    "AutoTrain": {"task", "base_model", "project_name"},
    **{f"NeMo-RL ({algorithm})": {algorithm, "policy"} for algorithm in ("grpo", "sft", "dpo", "rm")},
    "NeMo-RL": {"defaults", "policy", "cluster"},  # a recipe, of which another file says the algorithm
    "MMEngine": {"train_dataloader", "optim_wrapper"},
}
"""Engines that are not planned -> settings that only their files have together."""
LOOK_ALIKES = {
    "NeMo AutoModel": {"model", "step_scheduler"},
    "Firefly": {"model_name_or_path", "train_file", "train_mode"},
    **{f"LLaMA-Factory's v1 ({block})": {"model", "train_dataset", block} for block in ("peft_config", "dist_config")},
}
"""The same of those whose files would pass for another tool's."""
MAX_STRANGERS = 0.25
"""Part of a TRL config's settings that TRL does not know: recipes built on it add to 24 %, other programs have more."""
AXOLOTL_KEYS = {
    "micro_batch_size", "sequence_len", "adapter", "datasets", "sample_packing", "lora_target_linear", "num_epochs",
    "pretraining_dataset", "deepspeed", "fsdp", "val_set_size", "special_tokens", "rl",
}  # fmt: skip
LLAMAFACTORY_KEYS = {"finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "template", "dataset_dir"}
LLAMAFACTORY_TASKS = {"do_train", "do_predict", "finetuning_type", "stage", "template", "export_dir"}
"""Without any of these LLaMA-Factory does nothing: the file is another program's."""


def detect(values: dict[str, Any]) -> str:
    """The format of a mapping, by keys that only one tool has; "" when none is there."""
    keys = set(values)
    if any(marks <= keys for marks in LOOK_ALIKES.values()):
        return ""
    if isinstance(values.get("model"), dict) and "_component_" in values["model"]:
        return torchtune.FORMAT
    if "checkpoint_dir" in keys and "base_model" not in keys and keys & {"lora_r", "train", "precision", "quantize"}:
        return litgpt.FORMAT
    if "model" in keys and keys & mlx.MARKS and not keys & {"training", "lora"}:
        return mlx.FORMAT
    if keys & swift.MODELS and keys & swift.MARKS:
        return swift.FORMAT
    flat = not any(isinstance(value, dict) for value in values.values())
    if {"base_model", "model"} & keys == {"base_model"} and (keys & AXOLOTL_KEYS or flat):
        most = max(2, MAX_STRANGERS * len(keys)) if keys & AXOLOTL_KEYS else 1  # a slip; more are of an export
        foreign = len(keys - versions.known_settings(axolotl.FORMAT)) > most
        return axolotl.FORMAT if not foreign else generic.FORMAT if generic.is_training(values) else ""
    if {"micro_batch_size", "sequence_len"} <= keys and "model" not in keys:
        return axolotl.FORMAT
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu"}:
        return "deepspeed"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    if "num_processes" in keys and keys & {"fsdp_config", "deepspeed_config"}:
        return "accelerate"
    if unsloth.is_config(values):
        return unsloth.FORMAT
    # whose settings these are, of the tools and programs that take transformers' names
    others = keys - versions.accepted(trl.FORMAT)
    of_llamafactory = bool(keys & LLAMAFACTORY_KEYS and keys & LLAMAFACTORY_TASKS)
    if not keys & {"stage", "finetuning_type"} and generic.is_training(values):
        strange = len(keys - versions.accepted(llamafactory.FORMAT))
        of_llamafactory = of_llamafactory and strange <= max(2, MAX_STRANGERS * len(keys))
    if of_llamafactory and ("model_name_or_path" in keys or not generic.is_training(values)):
        return llamafactory.FORMAT
    if others & generic.SPOKEN and generic.is_training(values):
        return generic.FORMAT  # another program's names, no slips of the pen
    if keys <= versions.accepted("transformers") and generic.is_training(values):
        return generic.FORMAT  # the Trainer's arguments alone: of what, the program says that reads them
    few = len(others) <= max(2, MAX_STRANGERS * len(keys))
    if keys & {"model_name_or_path", "per_device_train_batch_size"} and few:
        return trl.FORMAT
    if generic.is_training(values):
        return generic.FORMAT
    return trl.FORMAT if keys & {"model_name_or_path", "use_peft", "dataset_name"} and not others else ""


OF_FLAGS = (trl.FORMAT, axolotl.FORMAT, litgpt.FORMAT, "torchtitan")
"""Tools that take settings as flags on top of their file; LLaMA-Factory takes `name=value`."""


def with_words(values: dict[str, Any], kind: str, words: Sequence[str]) -> dict[str, Any]:
    """A tool's settings with those on top that its command line says behind the file's name."""
    overrides: dict[str, Any] = {}
    if kind in OF_FLAGS:
        overrides = versions.of_words(shell.flags(tuple(words)), kind)
    elif kind == llamafactory.FORMAT:
        overrides = dict(word.split("=", 1) for word in words if "=" in word and word[:1] != "-")
    accepted = {*versions.snapshot().get(kind, {}).get("fields", ()), *(TOOLS[kind].names if kind in TOOLS else ())}
    merged = copy.deepcopy(values) if overrides else values
    for key, value in overrides.items():
        if key in accepted or key.partition(".")[0] in values:
            loading.put(merged, key.split("."), value)
    return merged


def of_mapping(settings: Settings, kind: str) -> ReadConfig:
    """The setup of settings that stand as a mapping, in a file or on a command line."""
    values, name = settings.values, settings.name
    unread = {**OTHER_TOOLS, **LOOK_ALIKES} if not kind else {}
    if other := next((tool for tool, marks in unread.items() if marks <= set(values)), ""):
        raise NotPlanned(f"{name}: a config of {other}: not planned", hint="plan estimate answers for a setup you name")
    if kind not in READERS:
        raise NotATraining(
            f"{name} is no config of a known tool (its settings: {', '.join(list(values)[:6]) or 'none'})",
            hint=f"known: {', '.join(FORMATS)}",
        )
    return READERS[kind](settings)
