"""The launch files' settings as keyword arguments, for those who write their own program: the lines that `hf` and `trl`
write, by the class that takes them. All plain values: names of dtypes, no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from planner.core.errors import UsageError
from planner.frameworks.exporters import TARGETS, common, hf, trl
from planner.frameworks.exporters.text import Code, Line
from planner.frameworks.exporters.types import ExportRequest
from planner.frameworks.tools.transformers import DTYPES
from planner.models.stored import dequantizing_class
from planner.setup import TrainSetup

OF_THE_FILE = ("remove_unused_columns", "reward_funcs")
"""What the emitted program needs for its own collator and rewards."""


def trainer_keywords(request: ExportRequest, target: str) -> dict[str, Any]:
    """Of TRL's configuration for the setup's objective (target "trl": SFTConfig, DPOConfig, ...; the model's own in
    `model_init_kwargs`), or of TrainingArguments ("hf").

    Raises:
        UsageError: the target cannot run the setup.
    """
    runs = TARGETS[target].as_run(request.setup, request.model, request.gpu)
    if isinstance(runs, str):
        hint = f'plan(..., target="{target}") plans for it'
        raise UsageError(f"{target} cannot run this setup: {runs}", hint=hint)
    if target == "hf":
        return _keywords(hf.argument_lines(request, runs))
    lines = [line for block in trl.training_sections(request, runs) for line in block.lines]
    return {**_keywords(lines), "model_init_kwargs": model_keywords(request)}


def model_keywords(request: ExportRequest) -> dict[str, Any]:
    """Of `from_pretrained`; the quantization as the dictionary that it takes too."""
    setup = request.setup
    if name := dequantizing_class(request.model):
        raise UsageError(f"the published weights need {name}(dequantize=True)", hint="write the files: .write(FOLDER)")
    lines = [Line("dtype", DTYPES[setup.weight_dtype]), common.attention_line(request)]
    if setup.parallel == "device-map":
        lines.append(Line("device_map", "auto"))
    quantized = quantization_keywords(setup)
    return _keywords(lines) | (
        {"quantization_config": {"quant_method": "bitsandbytes", **quantized}} if quantized else {}
    )


def quantization_keywords(setup: TrainSetup) -> dict[str, Any]:
    """Of BitsAndBytesConfig; empty where nothing is quantized."""
    return _keywords(hf.quantization_lines(setup))


def adapter_keywords(request: ExportRequest) -> dict[str, Any]:
    """Of peft's configuration of the setup's adapter (LoraConfig); empty without one."""
    return {} if request.setup.method == "full" else _keywords(hf.adapter_lines(request))


def _keywords(lines: Iterable[Line | None]) -> dict[str, Any]:
    return {line.key: _plain(line) for line in lines if line is not None and line.key not in OF_THE_FILE}


def _plain(line: Line) -> Any:
    """The value, a dtype by its name.

    Raises:
        UsageError: it is made by a call.
    """
    value = line.value
    if not isinstance(value, Code):
        return dict(value) if isinstance(value, Mapping) else value
    if value.startswith("torch."):
        return value.removeprefix("torch.")
    raise UsageError(f"{line.key} is no plain value: {value}", hint="write the files: .write(FOLDER)")
