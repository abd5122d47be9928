"""What a run evaluates between its training steps: sequences at once, which may decide its peak."""

from collections.abc import Mapping
from typing import Any

from planner.frameworks.readers.program.values import CallResult, Constant
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.memory.around import DEFAULT_EVAL_SEQS

NEVER = ("no", "none", "false")
LATER = "evaluation_strategy", "eval_strategy"
OF_TRAINER = ("per_device_eval_batch_size", DEFAULT_EVAL_SEQS)
HOW_MANY = {
    **dict.fromkeys(("trl", "llamafactory", "hf-script", "unsloth-script"), OF_TRAINER),
    "axolotl": ("eval_batch_size", 0),
    "ms-swift": ("per_device_eval_batch_size", 1),
}
"""Format -> (the setting, its default; 0: as many as train at once)."""


def setting_of(config: ReadConfig) -> str:
    """The setting that says how many sequences a file's run evaluates at once: the file's own, else the tool's."""
    return config.keys.get("eval_seqs") or HOW_MANY.get(config.format, OF_TRAINER)[0]


DATA = {
    "llamafactory": ("val_size", "eval_dataset"),
    "axolotl": ("val_set_size", "test_datasets"),
    "ms-swift": ("split_dataset_ratio", "val_dataset", "cached_val_dataset", "eval_dataset"),
}
"""Format -> the settings of which one has to name data to evaluate on."""
NO_DATA = ("0", "0.", "0.0", "none", "false")
WITH_DATA = {"axolotl": "", "ms-swift": "save_strategy"}
"""Formats that evaluate wherever there is data for it, as often as the setting named here says.

Source: ms-swift 4.6 swift/arguments/sft_args.py `_init_eval_strategy`, data_args.py `_init_val_dataset_exists`.
"""


def sequences(form: str, values: Mapping[str, Any]) -> int:
    """Sequences that a file's run evaluates at once; 0 where it evaluates none, or does not say."""
    key, default = HOW_MANY.get(form, ("", 0))
    batch_size = values.get(key, default)
    if not isinstance(batch_size, int | str) or not str(batch_size).isdigit() or not _evaluates(form, values):
        return 0
    return int(batch_size)


def _evaluates(form: str, values: Mapping[str, Any]) -> bool:
    if form in DATA and all(str(values.get(name) or 0).lower() in NO_DATA for name in DATA[form]):
        return False
    strategies = (values[name] for name in (*LATER, WITH_DATA.get(form, "")) if values.get(name) is not None)
    when = next(strategies, None)
    if when is None:
        return form in WITH_DATA or values.get("do_eval") is True or values.get("eval_on_start") is True
    return str(when).lower().rpartition(".")[2] not in NEVER


def of_program(trainer: CallResult | None, arguments: Settings, *, measured: bool) -> int:
    """Sequences that a program's trainer evaluates at once, 0 where none; where that is not known it is asked for.

    `measured`: the program itself calls its `evaluate` or `predict`.
    """
    if not measured and not given(trainer, "eval_dataset"):
        return 0
    values: dict[str, Any] = {**arguments.values}
    values |= {"do_eval": True, **dict.fromkeys(LATER)} if measured else {}
    when = [key for key in (*LATER, "do_eval", "eval_on_start") if key in arguments.unknown and not measured]
    scheduled = measured or any(values.get(key) is not None for key in LATER)
    size = arguments.unknown.get("per_device_eval_batch_size")
    why = arguments.unknown[when[0]] if when and not scheduled else arguments.more if not scheduled else ""
    if why or (size and _evaluates("hf-script", values)):
        arguments.missing["eval_seqs"] = why or str(size)
        return 0
    return sequences("hf-script", values)


def keeps_logits(trainer: CallResult | None, arguments: Settings) -> bool:
    """Whether the evaluation's logits are kept for metrics, as they come; one that generates keeps tokens."""
    generates = arguments.values.get("predict_with_generate") is True
    return not generates and given(trainer, "compute_metrics") and not given(trainer, "preprocess_logits_for_metrics")


def given(trainer: CallResult | None, name: str) -> bool:
    """Whether a trainer is handed something under a name."""
    value = trainer.argument(name) if trainer is not None else None
    return value is not None and not (isinstance(value, Constant) and value.data is None)
