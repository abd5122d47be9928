"""What a person says about a file that leaves settings open: `--set micro_batch=4`, `--assume trl==0.22`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import SetupError, Undetermined, UsageError
from planner.frameworks.readers.types import EXPANDABLE, SHORT_NAMES, TEXT_ALONE, ReadConfig
from planner.frameworks.tools import PROGRAMS
from planner.options.images import Images
from planner.setup import TrainSetup

SETTABLE = tuple(TrainSetup.__dataclass_fields__)
BESIDE = "beside"
"""GiB of another model on the same GPU: no field of a setup."""
EVALUATED = "eval_seqs"
"""Sequences evaluated at once: no field of a setup either."""
_WORDS = {"true": True, "false": False, "on": True, "off": False}


def parse_sets(pairs: Sequence[str]) -> dict[str, Any]:
    """--set NAME=VALUE pairs as fields of a setup.

    Raises:
        UsageError: no "=", or a name that no setup has.
    """
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        field = SHORT_NAMES.get(name.strip(), name.strip())
        if field == BESIDE and equals:
            fields[field] = round(_number(field, text.strip().lower().removesuffix("gib"), float) * 2**30)
            continue
        if field == EVALUATED and equals:
            fields[field] = _number(field, text.strip(), int)
            continue
        if not equals or field not in SETTABLE:
            raise UsageError(
                f"--set must be NAME=VALUE with a setting's name; got {pair!r}",
                hint=f"for example --set micro_batch=4; names: {', '.join((*SHORT_NAMES, *SETTABLE))}",
            )
        fields[field] = _value(field, text.strip())
    return fields


def _value(field: str, text: str) -> Any:
    default = getattr(TrainSetup(), field)
    if field == "checkpointing":
        return int(_WORDS[text.lower()]) if text.lower() in _WORDS else _number(field, text, int)
    if field == "images":
        return None if text.lower() == "none" else _images(text)
    if field == "lora_targets":
        return tuple(text.split(",")) if "," in text else text
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise UsageError(f"--set {field} must be true or false, got {text!r}", hint=f"--set {field}=true")
        return _WORDS[text.lower()]
    if isinstance(default, (int, float)):
        return _number(field, text, type(default))
    return text


def _images(text: str) -> Images:
    try:
        num, width, height = map(int, text.lower().split("x"))
        return Images(num=num, width=width, height=height)
    except (ValueError, SetupError):
        raise UsageError(
            f"--set images must be NUMxWIDTHxHEIGHT or none, got {text!r}", hint="for example --set images=1x1024x1024"
        ) from None


def _number(field: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"--set {field} must be a number, got {text!r}", hint=f"--set {field}=1") from None


def parse_versions(pairs: Sequence[str]) -> dict[str, str]:
    """--assume PACKAGE==VERSION pairs.

    Raises:
        UsageError: not of that form.
    """
    versions = {}
    for pair in pairs:
        name, equals, version = pair.partition("==")
        if not equals or not name.strip() or not version.strip()[:1].isdigit():
            raise UsageError(f"--assume must be PACKAGE==VERSION, got {pair!r}", hint="for example trl==0.22.2")
        versions[name.strip().lower()] = version.strip()
    return versions


def overrides(config: ReadConfig, given: Mapping[str, Any]) -> ReadConfig:
    """The config with what a person said about it; `missing` loses what was supplied.

    Raises:
        UsageError: a combination that cannot exist.
    """
    if not given:
        return config
    values = {name: value for name, value in given.items() if name not in (BESIDE, EVALUATED)}
    method = values.get("method", config.setup.method)
    if method == "full":
        values = {"lora_rank": 0, "quantization": "none", "kbit_fp32_cast": False, "adapter_dtype": "auto", **values}
    elif method == "lora":
        values = {"quantization": "none", "kbit_fp32_cast": False, **values}
    elif config.setup.quantization == "none":
        values = {"quantization": "nf4-double", **values}
    if method != "full" and not config.setup.lora_rank:
        values.setdefault("lora_rank", TrainSetup().lora_rank)
    if values.get("images") is not None and config.setup.num_gpus == 1:
        values = {
            "parallel": "none",
            "offload": "none",
            **values,
        }  # ZeRO's share of a model of pictures is not modelled
    try:
        setup = config.setup.replace(**values)
    except SetupError as error:
        raise UsageError(f"--set: {error.message}", hint=error.hint) from error
    answered = set(given)
    if method == "full":
        answered |= {"lora_rank", "lora_targets", "quantization"}
    elif "method" in given and method == "lora":
        answered.add("quantization")
    if given.get("parallel") in ("none", "ddp"):
        answered.add("offload")
    missing = tuple(entry for entry in config.missing if entry.field not in answered)
    origins = {**config.origins, **dict.fromkeys(given, "--set")}
    extra_bytes, evaluated = given.get(BESIDE, config.beside_bytes), given.get(EVALUATED, config.eval_seqs)
    supplied_texts = [text for text, of in ((TEXT_ALONE, "images"), (EXPANDABLE, "expandable_segments")) if of in given]
    assumed = tuple(assumption for assumption in config.assumptions if assumption not in supplied_texts)
    supplied = replace(config, setup=setup, missing=missing, origins=origins, assumptions=assumed)
    return replace(supplied, beside_bytes=extra_bytes, eval_seqs=evaluated)


def determined(config: ReadConfig) -> ReadConfig:
    """The config itself, where nothing that decides the answer is open.

    Raises:
        Undetermined: naming each open setting, why, and the option that supplies it.
    """
    if not config.missing:
        return config
    by_reason: dict[str, list[str]] = {}
    for entry in config.missing:
        by_reason.setdefault(entry.reason, []).append(entry.field)
    lines = [f"{', '.join(fields)} ({reason})" for reason, fields in by_reason.items()]
    options = " ".join(dict.fromkeys(entry.option for entry in config.missing))
    words = "; words of its command line go into --args" if config.format in PROGRAMS else ""
    raise Undetermined(
        f"{config.path} ({config.format}) does not determine {'; '.join(lines)}", hint=f"add {options}{words}"
    )
