"""From a path to a `ReadConfig`: which format it is, and the reader for it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.models.spec import ModelSpec
from planner.readers import axolotl, launchers, llamafactory, llamafactory_v1, script, torchtitan, trl, unsloth
from planner.readers.loading import parse_json, parse_toml, parse_yaml, read_bounded
from planner.readers.sharding import Sharding
from planner.readers.types import ReadConfig
from planner.setup import TrainSetup

FORMATS = ("trl", "axolotl", "llamafactory", "unsloth", "accelerate", "deepspeed", "torchtitan", "hf-script")
READERS = {
    trl.FORMAT: trl.read,
    axolotl.FORMAT: axolotl.read,
    llamafactory.FORMAT: llamafactory.read,
    llamafactory_v1.FORMAT: llamafactory_v1.read,
    unsloth.FORMAT: unsloth.read,
}
LLAMAFACTORY_KEYS = {"finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "do_train", "template"}


def detect(values: dict[str, Any]) -> str:
    """The format of a mapping, by keys that only one tool has; "" when none is there."""
    keys = set(values)
    if keys & {"base_model", "micro_batch_size", "sequence_len"} and "model" not in keys:
        return axolotl.FORMAT
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu"}:
        return "deepspeed"
    if (
        keys & {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"}
        and "num_processes" in keys
    ):
        return "accelerate"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    if isinstance(values.get("training"), dict) or isinstance(values.get("lora"), dict):
        return unsloth.FORMAT
    if "model" in keys and keys & {"train_dataset", "dist_config", "peft_config", "micro_batch_size"}:
        return llamafactory_v1.FORMAT
    if keys & LLAMAFACTORY_KEYS:
        return llamafactory.FORMAT
    if keys & {"model_name_or_path", "per_device_train_batch_size", "use_peft", "lora_r", "dataset_name", "max_length"}:
        return trl.FORMAT
    return ""


def read_text(
    text: str,
    name: str,
    *,
    model: ModelSpec | None = None,
    base: TrainSetup | None = None,
    sharding: Sharding | None = None,
    launcher: str | None = None,
) -> ReadConfig:
    """The setup of a config given as text; `name` says which kind of file it is by its ending.

    `base` stands for what Accelerate and DeepSpeed files do not say; `launcher` is the text of an Accelerate config
    that the run is launched with.

    Raises:
        ConfigError: not a config of a known tool, or a wrong one.
    """
    found = _read(text, name, model=model, base=base, sharding=sharding or Sharding(), launcher=launcher)
    if not _keeps_whole_gradients(found):
        return found
    return replace(found, approximations=(*found.approximations, WHOLE_GRADIENTS))


WHOLE_GRADIENTS = (
    "with accumulation FSDP2 keeps the whole model's gradients on every GPU between micro-batches unless "
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch is true: counted as if it were"
)


def _keeps_whole_gradients(found: ReadConfig) -> bool:
    """Whether the Trainer would not reduce gradients before the last micro-batch of an FSDP2 step.

    Source: transformers 5.23 `Trainer._inner_training_loop`; accelerate 1.15 `Accelerator.no_sync`.
    """
    setup = found.setup
    sharded = setup.parallel == "fsdp2" and setup.tensor_degree == 1 and setup.accumulation_steps > 1
    if not sharded or found.format not in TRAINERS:
        return False
    value: Any = found.values
    for key in ("accelerator_config", "gradient_accumulation_kwargs", "sync_each_batch"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not True


TRAINERS = ("trl", "axolotl", "llamafactory", "hf-script")
"""Formats that run transformers' Trainer."""


def _read(
    text: str,
    name: str,
    *,
    model: ModelSpec | None,
    base: TrainSetup | None,
    sharding: Sharding,
    launcher: str | None = None,
) -> ReadConfig:
    """`read_text` without its last word."""
    if launcher is not None:
        values, _ = parse_yaml(launcher, "accelerate config")
        processes = launchers.num_processes(values, "accelerate config")
        inside = Sharding(num_gpus=processes, roots=sharding.roots)
        inner = _read(text, name, model=model, base=base, sharding=inside)
        spread = launchers.read_accelerate(values, "accelerate config", inner.setup, sharding=inside)
        setup = spread.setup
        if inner.format == trl.FORMAT and setup.parallel == "zero3" and setup.method == "lora":
            setup = setup.with_(adapter_dtype=setup.weight_dtype)  # TRL switches peft's cast off under ZeRO-3
        return replace(
            inner,
            setup=setup,
            assumptions=(*inner.assumptions, *spread.assumptions[:-1]),
            approximations=(*inner.approximations, *spread.approximations),
        )
    if name.endswith(".py"):
        return script.read(text, name, model, sharding=sharding)
    if name.endswith(".toml"):
        return torchtitan.read(parse_toml(text, name), name, model, sharding=sharding)
    duplicates: tuple[str, ...] = ()
    if name.endswith(".json"):
        values = parse_json(text, name)
    else:
        values, duplicates = parse_yaml(text, name)
    kind = detect(values)
    if kind == "deepspeed":
        return launchers.read_deepspeed(values, name, base or TrainSetup(), sharding.num_gpus)
    if kind == "accelerate":
        return launchers.read_accelerate(values, name, base or TrainSetup(), sharding=sharding)
    if kind not in READERS:
        raise ConfigError(
            f"{name} is no config of a known tool (its settings: {', '.join(list(values)[:6]) or 'none'})",
            hint=f"known: {', '.join(FORMATS)}",
        )
    found = READERS[kind](values, name, model, sharding=sharding)
    if not duplicates:
        return found
    warned = tuple(f"{key} is written twice: the last one counts" for key in duplicates)
    return replace(found, assumptions=(*warned, *found.assumptions))


def read_config(
    path: Path,
    *,
    model: ModelSpec | None = None,
    base: TrainSetup | None = None,
    num_gpus: int = 1,
    launcher: Path | None = None,
) -> ReadConfig:
    """The setup of a config file.

    Raises:
        ConfigError: the file cannot be read or makes no sense; nothing in it is ever executed.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint="give the config file in it")
    if path.suffix not in (".yaml", ".yml", ".json", ".toml", ".py"):
        raise ConfigError(f"{path.name}: a config ends in .yaml, .yml, .json, .toml or .py", hint="rename it")
    text = read_bounded(path)
    roots = (path.parent, path.parent.parent, Path())
    return read_text(
        text,
        path.name,
        model=model,
        base=base,
        sharding=Sharding(num_gpus=num_gpus, roots=roots),
        launcher=read_bounded(launcher) if launcher is not None else None,
    )
