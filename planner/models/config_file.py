"""Reading one `config.json` from disk or from bytes: whatever the file holds, a JSON object or a `ConfigError`."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from planner.errors import ConfigError

MAX_CONFIG_BYTES = 5_000_000
"""Far above any real config.json (the largest of the catalogue has 4 kB)."""

CONFIG_NAME = "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        ConfigError: it is missing, no regular file, too large, unreadable, not UTF-8 or not a JSON object.
    """
    hint = "MODEL is a hub id, a directory with a config.json, or the path of a config.json"
    try:
        # O_NONBLOCK: opening a named pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", hint=_adapter_hint(path.parent) or hint) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {_reason(error)}", hint=hint) from error
    try:
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file", hint=hint)
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {_reason(error)}", hint=hint) from error
    return parse_config(content, str(path))


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
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 text (byte {error.start})", hint="a config.json is JSON in UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply", hint="a config.json is a flat JSON object") from error
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {_reason(error)}", hint="a config.json is a JSON object") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{where}: expected a JSON object, got a {type(config).__name__}",
            hint="point at the config.json of a transformers model",
        )
    return config


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error))[:200]


def _adapter_hint(directory: Path) -> str:
    """What to say of a directory that holds an adapter, a GGUF or original weights instead of a config.json."""
    try:
        names = set(os.listdir(directory))
    except (OSError, ValueError):
        return ""
    if "adapter_config.json" in names:
        return "the directory holds a PEFT adapter: plan for its base model (base_model_name_or_path)"
    if any(name.endswith(".gguf") for name in names):
        return "the directory holds GGUF weights: plan for the original model, training needs its transformers form"
    if "params.json" in names:
        return "the directory holds original weights: convert them to the transformers form first"
    return ""
