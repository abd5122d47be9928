"""Chats as a model's own template writes them, without transformers: what of a row is the template's is counted too."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.inputs import read_bytes, read_text

NAME = "chat_template.jinja"
MAX_CONFIG_BYTES = 32 << 20
"""Of a `tokenizer_config.json`, which may list every token: the largest known have some MB."""
MAX_TEMPLATE_BYTES = 1 << 20
_MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def tokenizer_config(folder: Path) -> dict[str, Any] | None:
    """`tokenizer_config.json` of a model's folder; None where there is none that can be read.

    Its usual `model_max_length` is 10 to the power of 30, which `planner.inputs.parse_json` takes for no number.
    """
    try:
        found = json.loads(read_bytes(folder / "tokenizer_config.json", max_bytes=MAX_CONFIG_BYTES))
    except (ConfigError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


Render = Callable[[Sequence[dict[str, Any]]], str]


def renderer(folder: Path) -> Render | None:
    """What writes turns as the tokenizer in a model's folder does; None where it has no template that can be read.

    Source: transformers 5.23 `utils/chat_template_utils.py` (_cached_compile_jinja_template).
    """
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if (config := tokenizer_config(folder)) is None:
        return None
    try:
        own = folder / NAME
        text = read_text(own, max_bytes=MAX_TEMPLATE_BYTES) if own.is_file() else config.get("chat_template")
    except ConfigError:
        return None
    if isinstance(text, list):  # several, by name
        text = next((one.get("template") for one in text if one.get("name") == "default"), None)
    if not isinstance(text, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda format: "01 Jan 2026"}
    try:
        template = environment.from_string(_MARKERS.sub("", text))
    except TemplateSyntaxError:
        return None
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}

    def render(turns: Sequence[dict[str, Any]]) -> str:
        return template.render(messages=turns, tools=None, add_generation_prompt=False, **tokens)

    return render


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
