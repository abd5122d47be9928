"""Python scripts as text: calls with one keyword a line, for a person, a diff and `planner.readers.script`."""

from collections.abc import Iterable
from typing import Any

from planner.exporters.text import Line


class Code(str):
    """Python source that stands as it is, not as a string literal (`torch.bfloat16`)."""

    __slots__ = ()


def literal(value: Any) -> str:
    """`value` as Python source."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if value.isprintable() else ascii(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    return repr(value)


def call(target: str, function: str, lines: Iterable[Line | None], *, first: str = "", indent: str = "") -> str:
    """`target = function(first, key=value, ...)`, one keyword a line."""
    rows = [f"{indent}{target} = {function}(" if target else f"{indent}{function}("]
    if first:
        rows.append(f"{indent}    {first},")
    for line in lines:
        if line is not None:
            rows.append(f"{indent}    {line.key}={literal(line.value)},{line.tail}")
    return "\n".join([*rows, f"{indent})", ""])


def constant(name: str, value: Any, comment: str = "") -> str:
    """`NAME = value  # comment`."""
    return f"{name} = {literal(value)}{Line(name, value, comment).tail}\n"
