"""`ReadConfig`: what a config file says, as a setup, with everything that had to be assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """One existing config, understood.

    Attributes:
        format: "trl", "axolotl", "llamafactory", "unsloth", "hf-script", "accelerate", "deepspeed" or "torchtitan".
        path: the file.
        model_id: None where the format does not say (Accelerate, DeepSpeed).
        setup: with the tool's own defaults for what is absent.
        assumptions: defaults and readings a person should know, one sentence each.
        approximations: features the memory model does not follow exactly; they widen the error band.
        dataset: hub id or path, None where none is named.
        keys: TrainSetup field -> (key in the file, value in the file), for `--fix`; nested keys dotted.
    """

    format: str
    path: str
    setup: TrainSetup
    model_id: str | None = None
    assumptions: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    dataset: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


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
