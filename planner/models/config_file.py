"""Reading one `config.json` from disk or from bytes: whatever the file holds, a JSON object or a `ConfigError`."""

import os
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_bytes

MAX_CONFIG_BYTES = 5_000_000
"""Far above any real config.json (the largest of the catalogue has 4 kB)."""

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
"""PEFT's. Source: peft 0.21 `utils/constants.py`."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        ConfigError: it is missing, no regular file, too large, unreadable, not UTF-8 or not a JSON object.
    """
    hint = "MODEL is a hub id, a directory with a config.json, or the path of a config.json"
    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist", hint=_adapter_hint(path.parent) or hint)
    return parse_config(read_bytes(path, max_bytes=MAX_CONFIG_BYTES, hint=hint), str(path))


def parse_config(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `content`; `where` names it in messages.

    Raises:
        ConfigError: it is too large, not UTF-8 or not a JSON object.
    """
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{where} has more than {MAX_CONFIG_BYTES // 1_000_000} MB, too much for a config.json",
            hint="point at the model's config.json, not at its weights or tokenizer",
        )
    if content.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(
            f"{where} begins with a byte order mark, which transformers refuses", hint="save it as UTF-8 without BOM"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 text (byte {error.start})", hint="a config.json is JSON in UTF-8"
        ) from error
    return parse_object(text, where, constant=tagged, hint="point at the config.json of a transformers model")


FLOAT_TAG = "__float__"
"""Source: transformers 5.23 `PreTrainedConfig._encode_special_floats`."""


def tagged(constant: str) -> dict[str, str]:
    """NaN, Infinity or -Infinity as transformers 5 writes them, which stays JSON; version 4 wrote the bare word (the
    `time_step_limit` of Mamba 2, Bamba, Granite 4, Nemotron-H)."""
    return {FLOAT_TAG: constant}


def with_floats(value: Any) -> Any:
    """A configuration's value with the tagged numbers as numbers, for transformers."""
    if isinstance(value, dict):
        if value.keys() == {FLOAT_TAG} and value[FLOAT_TAG] in ("NaN", "Infinity", "-Infinity"):
            return float(value[FLOAT_TAG])
        return {key: with_floats(entry) for key, entry in value.items()}
    return [with_floats(element) for element in value] if isinstance(value, list) else value


def _adapter_hint(directory: Path) -> str:
    """What to say of a directory that holds an adapter, a GGUF or original weights instead of a config.json."""
    try:
        names = set(os.listdir(directory))
    except (OSError, ValueError):
        return ""
    if ADAPTER_CONFIG_NAME in names:
        words, field = "the directory holds a PEFT adapter: plan for its base model", "base_model_name_or_path"
        try:
            base = read_config(directory / ADAPTER_CONFIG_NAME).get(field)
        except ConfigError:
            base = None
        return f"{words}, {base or field!s:.200}"
    if any(name.endswith(".gguf") for name in names):
        return "the directory holds GGUF weights: plan for the original model, training needs its transformers form"
    if "params.json" in names:
        return "the directory holds original weights: convert them to the transformers form first"
    return ""
