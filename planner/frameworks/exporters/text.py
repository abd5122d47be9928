"""YAML and Python text, written by hand so that keys keep their order and lines their comments.

Calls have one keyword a line, for a person, a diff and `planner.frameworks.readers.script`. Scalars of YAML go through
PyYAML: its writer and the tools' reader then agree (a hand-written `2e-4` is a string to PyYAML).
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

from planner import __version__
from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.core.units import gib
from planner.frameworks.exporters.types import Difference, ExportRequest
from planner.frameworks.tools import Tool
from planner.setup import TrainSetup

_WIDTH = 100
LAUNCH = "Launch:    "
"""What a header's command stands behind."""
WRITTEN = "Written by finetune-planner "
"""What a header's second line begins with, by which a plan's own files are told."""


@dataclass(frozen=True, slots=True)
class Line:
    """One setting: key, value, and what a reader should know about it."""

    key: str
    value: Any
    comment: str = ""

    @property
    def tail(self) -> str:
        """The comment behind it, on its line."""
        return f"  # {one_line(self.comment)}" if self.comment else ""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled block of settings."""

    title: str
    lines: tuple[Line, ...]


def setting_line(tool: Tool, setup: TrainSetup, of: str, comment: str = "") -> Line:
    """The setting that says a field of the setup, by the tool's table."""
    return Line(*tool.setting(setup, of), comment)


def section(title: str, *lines: Line | None) -> Section:
    """A block of the given lines, None left out."""
    return Section(title, tuple(line for line in lines if line is not None))


def scalar(value: Any) -> str:
    """`value` as YAML on one line."""
    return (_scalar if isinstance(value, (str, int)) else _scalar.__wrapped__)(value)


@lru_cache(maxsize=4096, typed=True)
def _scalar(value: Any) -> str:
    """The same words stand in most files."""
    return _dumped(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def _dumped(value: Any, **form: Any) -> str:
    import yaml  # late: who asks only what a target runs writes nothing

    text = str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, **form))
    if text.replace("\n", "").isprintable():
        return text
    return str(yaml.safe_dump(value, sort_keys=False, **form))


def one_line(text: object) -> str:
    """Text that cannot leave its comment line, nor show another order than it has: what is not printable becomes a
    space."""
    line = str(text)
    if not line.isprintable():
        line = re.sub("\0+", " ", "".join(character if character.isprintable() else "\0" for character in line))
    return line.strip()


def comments(texts: Iterable[str]) -> str:
    """Each text as comment lines, wrapped; a command stays on one line, where it can be copied."""
    lines: list[str] = []
    for text in texts:
        if text.startswith(LAUNCH):
            lines.append(f"# {one_line(text)}")
            continue
        words, current = one_line(text).split(" "), "#"
        for word in words:
            if len(current) + 1 + len(word) > _WIDTH and current != "#":
                lines.append(current)
                current = "#  "
            current += " " + word
        lines.append(current)
    return "".join(f"{line}\n" for line in lines)


def yaml_text(sections: Sequence[Section]) -> str:
    """A whole YAML file but for its head."""
    parts = []
    for block in sections:
        if not block.lines:
            continue
        parts.append(f"\n# {one_line(block.title)}\n")
        for line in block.lines:
            rows = isinstance(line.value, list) and line.value and isinstance(line.value[0], dict)
            if rows or (isinstance(line.value, dict) and len(scalar(line.value)) > 40):
                parts.append(f"{line.key}:{line.tail}\n")
                parts += [f"  {row}\n" for row in _dumped(line.value, default_flow_style=False).splitlines()]
            else:
                parts.append(f"{line.key}: {scalar(line.value)}{line.tail}\n")
    return "".join(parts)


class Code(str):
    """Python source that stands as it is, not as a string literal (`torch.bfloat16`)."""

    __slots__ = ()


def literal(value: Any) -> str:
    """`value` as Python source."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char.isprintable() else ascii(char)[1:-1] for char in quoted) + '"'
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


def shipped(name: str) -> str:
    """A program, or a part of one, that launch files are made of, as it stands in `planner/data`."""
    return (DATA / name).read_text("utf-8")


@cache
def program(part: str) -> str:
    """What stands under `#: PART` in `planner/data/launch_programs.py.txt`."""
    _, *parts = re.split(r"^#: (\w+)\n", shipped("launch_programs.py.txt"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))[part]


def header(
    request: ExportRequest,
    title: str,
    command: str,
    validated_with: dict[str, str],
    *,
    differences: Sequence[Difference] = (),
    notes: Sequence[str] = (),
) -> list[str]:
    """The comment block every emitted file starts with."""
    setup = request.setup
    where = f" on {setup.num_gpus} x {request.gpu.name}" if request.gpu else ""
    if request.num_nodes > 1:
        where += f", {request.num_nodes} nodes"
    # what sees different sequences: every GPU, or every group of GPUs that holds one copy of the model
    copies = "GPU" if setup.data_degree == setup.num_gpus else "copy" if setup.data_degree == 1 else "copies"
    versions = ", ".join(f"{name}=={version}" for name, version in validated_with.items())
    lines = [
        f"{title}: {shown_path(request.model_id)}{where}",
        f"{WRITTEN}{__version__}. Effective batch: {setup.micro_batch_seqs} x "
        f"{setup.accumulation_steps} x {setup.data_degree} {copies} = "
        f"{setup.global_batch_seqs} {setup.objective_spec.sample}s of "
        f"{setup.seqs_per_sample * setup.seq_len_tokens} tokens.",
        *request.about,
        f"{LAUNCH}{command}",
        f"Validated: {versions}",
    ]
    if request.gpu is not None:
        lines.append(f"Usable memory of one {request.gpu.name}: {gib(request.gpu.memory_bytes)} ({request.gpu.key})")
    lines += [f"Differs from the plan: {difference.sentence()}." for difference in differences]
    lines += [f"Note: {note}" for note in (*notes, *request.hyper.notes)]
    return lines


def shown_path(path: str) -> str:
    """A hub id or path as a launch file may hold it: an absolute path keeps only its last part (no machine paths).

    Every character stays, for it names a file: what a file is written in (YAML, Python, JSON, a shell) escapes it.

    Raises:
        UsageError: bytes that are no UTF-8, which YAML and JSON cannot hold.
    """
    try:
        with suppress(UnicodeEncodeError):  # in UTF-8, whatever the locale here decoded its bytes by
            path = os.fsencode(path).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path!a}: no launch file can name what is no UTF-8", hint="rename it") from error
    if path.startswith(("/", "~", "\\")) or re.match(r"^[A-Za-z]:[\\/]", path):
        return "./" + re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    return path
