"""The Python text of a program: of a notebook's cells, and of f-strings that only a newer Python parses."""

import ast
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from planner.core.errors import ConfigError
from planner.core.records import dataclass

_SHELL = re.compile(r"^(\s*)(?:!(?!=)|[%?]).*$")
_PIN = re.compile(r"(?<![A-Za-z0-9_.-])([A-Za-z][A-Za-z0-9_.-]*+)\s*+==\s*+([0-9][0-9A-Za-z.+-]*)")
_INSTALL = re.compile(r"pip3?['\"]?,?\s+install\b(.*)")
MAX_REPAIRS = 200


@dataclass(frozen=True, kw_only=True)
class Source:
    """A program's text.

    Attributes:
        label: the name of a line for people; None: its number.
        pins: package -> version, from `pip install` lines in it.
        origin: of a notebook, the code cell and the line in it (both from 1) of every line.
        unreadable: its cells that no Python reads, which are left out.
    """

    text: str
    label: Callable[[int], str] | None = None
    pins: tuple[tuple[str, str], ...] = ()
    origin: tuple[tuple[int, int], ...] = ()
    unreadable: tuple[int, ...] = ()

    def line(self, place: str) -> int:
        """The number of the line that a place ("t.py:7", "n.ipynb:cell 3, line 2") names; 0: none."""
        match = _PLACE.search(place)
        if match is None or match[1] is None:
            return int(match[2]) if match is not None else 0
        inner = (int(match[1]), int(match[2]))
        return self.origin.index(inner) + 1 if inner in self.origin else 0


_PLACE = re.compile(r":(?:cell (\d+), line )?(\d+)(?=,|$)")


def of_script(text: str) -> Source:
    """A .py file."""
    return Source(text=parsable(_without_magics(text)), pins=pins(text))


@lru_cache(maxsize=2)
def of_notebook(text: str, name: str) -> Source:
    """The code cells of a notebook, one after the other."""
    try:
        cells = json.loads(text)["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} is not a notebook that can be read", hint="save it as .ipynb, format 4") from error
    other = re.compile(r"(?<!\s)\s*%%(bash|sh|html|javascript|writefile|script|file)\b")
    python_cells = {
        number: _without_magics(code) for number, code in enumerate(codes, start=1) if not other.match(code)
    }
    unreadable: list[int] = []
    try:
        tree_of(_joined(python_cells))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # empty lines instead of a cell that Python cannot read: other languages, broken examples
        unreadable += [number for number, code in python_cells.items() if code.strip() and not _readable(code, "")]
        python_cells = {number: _readable(code, "\n" * code.count("\n")) for number, code in python_cells.items()}
    lines = ((number, line) for number, code in python_cells.items() for line in range(1, len(code.splitlines()) + 1))
    origin = tuple(lines)

    def label(line: int) -> str:
        cell, inner = origin[line - 1] if 0 < line <= len(origin) else (0, line)
        return f"cell {cell}, line {inner}"

    return Source(
        text=_joined(python_cells),
        label=label,
        pins=pins("\n".join(codes)),
        origin=origin,
        unreadable=tuple(unreadable),
    )


def of_cells(text: str) -> tuple[str, dict[str, str]]:
    """What a notebook gives the shell (`!` lines, %%bash cells), and the files that its %%writefile cells write."""
    commands: list[str] = []
    written: dict[str, str] = {}
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
        first, _, rest = code.lstrip().partition("\n")
        if target := re.match(r"%%writefile\s+(?:-a\s+)?[\"']?([^\s\"']+)", first):
            written[target[1]] = rest
        elif re.match(r"%%(?:script\s+)?(?:bash|sh|shell)\b", first):
            commands.append(rest)
        else:
            lines = re.findall(r"^[ \t]*[!%](?!%)((?:.*\\\n)*.*)$", code, re.MULTILINE)
            commands += [line for line in lines if not line.startswith("pip")]
    return "\n".join(commands), written


def _joined(cells: Mapping[int, str]) -> str:
    return "\n".join(line for code in cells.values() for line in code.splitlines()) + "\n"


@lru_cache(maxsize=256)
def tree_of(text: str) -> ast.Module:
    """The tree of a program or of a module beside it. It is asked for at least twice: for its model's name, then with
    that model at hand; and once more for every way of a condition that nothing decides."""
    return ast.parse(text)


def imported(text: str, package: str) -> tuple[str, ...]:
    """The names that a program takes from a package at its start, where no `try` says that it may have none."""
    imports = (node for node in tree_of(text).body if isinstance(node, ast.ImportFrom) and node.level == 0)
    return tuple(alias.name for node in imports if (node.module or "").split(".")[0] == package for alias in node.names)


def pins(text: str) -> tuple[tuple[str, str], ...]:
    """package -> version of the `pip install` lines (the last of each)."""
    versions: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        install = _INSTALL.search(line)
        if install:
            versions.update({name.lower(): version for name, version in _PIN.findall(install[1])})
    return tuple(versions.items())


def of_requirements(text: str) -> tuple[tuple[str, str], ...]:
    """package -> version of a requirements file."""
    return tuple((name.lower(), version) for name, version in _PIN.findall(text))


def _without_magics(text: str) -> str:
    """Lines for the shell or the notebook as `pass`, so that blocks stay whole; of what Python reads, none is: a
    line that begins with `%` may go on with an expression."""
    if not re.search(r"^[^\S\n]*+[!%?]", text, re.MULTILINE) or _readable(text, ""):
        return text
    lines = []
    continued = False
    for line in text.splitlines():
        magic = None if continued else _SHELL.match(line)
        if magic or continued:
            indent = magic[1] if magic else ""
            lines.append("" if continued else f"{indent}pass")
            continued = line.rstrip().endswith("\\")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=256)
def parsable(text: str) -> str:
    """The text without what this Python (before 3.12) cannot read: quotes nested in f-strings, names for types."""
    return _readable(text, text)


def _readable(text: str, otherwise: str) -> str:
    """`parsable`; `otherwise` where no Python reads it."""
    for _ in range(MAX_REPAIRS):
        try:
            tree_of(text)
        except SyntaxError as error:
            lines = text.splitlines(keepends=True)
            if error.lineno is None or not 0 < error.lineno <= len(lines):
                return otherwise
            line = lines[error.lineno - 1]
            if "f-string" in str(error):
                repaired = _requoted(line)
            else:
                repaired = re.sub(r"^(\s*)type (\w+)(?:\[[^\]]*\])? = ", r"\1\2 = ", line)  # PEP 695
                repaired = re.sub(r"^(\s*(?:async )?(?:def|class) \w+)\[[^\]]*\]", r"\1", repaired)
            if repaired == line:
                return otherwise
            lines[error.lineno - 1] = repaired
            text = "".join(lines)
        except (ValueError, RecursionError, MemoryError):
            return otherwise
        else:
            return text
    return otherwise


def _requoted(line: str) -> str:
    pieces: list[str] = []
    quote, depth, index = "", 0, 0
    while index < len(line):
        character = line[index]
        if not quote:
            start = re.match(r"[rRbB]?[fF][rR]?(\"|')", line[index:])
            if start and (index == 0 or not (line[index - 1].isalnum() or line[index - 1] == "_")):
                quote, depth = start[1], 0
                pieces.append(start[0])
                index += len(start[0])
                continue
        elif line[index : index + 2] in ("{{", "}}"):
            pieces.append(character)
            index += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
        elif character == quote:
            if depth > 0:
                character = "'" if quote == '"' else '"'
            else:
                quote = ""
        pieces.append(character)
        index += 1
    return "".join(pieces)


def environment_word(text: str, given: Mapping[str, str], name: str) -> str:
    """What a program, or `env` in a config of TRL, sets a variable to, else what it is given; "" where nobody does."""
    quoted = rf"[\"']{name}[\"']\s?[\]:,]\s?=?\s?[\"']([^\"'\n]*)[\"']"
    match = re.search(rf"(?m){quoted}|^[ \t]++{name}:[ \t]++[\"']?([^\"'\s]++)[\"']?[ \t]*+(?:#.*)?$", text)
    return (match[1] or match[2] or "") if match is not None else given.get(name, "")
