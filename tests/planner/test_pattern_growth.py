"""No regular expression that meets strangers' text takes time that grows with its square.

Every pattern is searched in runs of 2,500 characters of what patterns are made of. A linear one takes a
fraction of a millisecond of CPU, a quadratic one more than 12: the bound lies two orders of magnitude from either.
"""

import ast
import importlib
import re
import time
from collections.abc import Iterator

from planner.core.children import ROOT

LENGTH = 1_500
LIMIT_S = 0.01
RUNS = (
    " ",
    "\t",
    "\n",
    " \n",
    "a",
    "_",
    "1",
    '"',
    "$",
    "{",
    "-",
    "\\\n",
    ",",
    "a,",
    "a|",
    "$(",
    ".",
    "[a",
    "!a\n",
    "b=c ",
)
STARTS = ("", "declare ", "[ ", "case ", "pip install ", "$(expr ", '"')
FLAGS = ("MULTILINE", "DOTALL", "IGNORECASE", "VERBOSE")


def patterns() -> Iterator[tuple[str, "re.Pattern[str]", str]]:
    """Every pattern written in the program, with how it is used: those compiled once, and the literals given to `re`'s
    functions. Not those of names of cards and models, which are cut to 200 and 100 letters and matched whole."""
    rooms = [ROOT / name for name in ("planner", "finetune_planner", "reports", "search")]
    files = {file for room in rooms for file in room.rglob("*.py")} - {ROOT / "planner/models/name_matching.py"}
    for path in sorted(file for file in files if file.parent.name != "hardware"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for key, value in vars(importlib.import_module(name)).items():
            if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                yield f"{name}.{key}", value, "search"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "re"
                and node.args
                and (written := _written(node.args[0]))
                and node.func.attr != "escape"
            ):
                rest = " ".join(
                    ast.unparse(argument)
                    for argument in [*node.args[1:], *(keyword.value for keyword in node.keywords)]
                )
                flags = sum(getattr(re, flag) for flag in FLAGS if re.search(rf"re\.{flag[0]}(?:{flag[1:]})?\b", rest))
                yield f"{name}:{node.lineno}", re.compile(written, flags), node.func.attr


def _written(node: ast.expr) -> str:
    """The pattern that a literal holds, a letter for every name put into it; "" of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_written(part) or "a" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def slow_texts(pattern: "re.Pattern[str]", used: str = "search") -> Iterator[tuple[str, str, float]]:
    """(start, what is repeated, CPU seconds) where searching takes longer than it may."""
    for start in STARTS:
        for run in RUNS:
            text = start + run * (LENGTH // len(run)) + "\x00"
            for _ in range(3):  # again: the first may have met a collection of garbage
                began = time.process_time()
                if used in ("match", "fullmatch"):
                    getattr(pattern, used)(text)
                else:
                    sum(1 for _ in pattern.finditer(text))
                took_s = time.process_time() - began
                if took_s < LIMIT_S:
                    break
            else:
                yield start, run, took_s
                return


def test_a_quadratic_pattern_is_noticed() -> None:
    assert list(slow_texts(re.compile(r"^\[\s+(\S*)\s+x|declare\s+\S*\s*(\w+)=")))
    assert not list(slow_texts(re.compile(r"^\[\s++(\S*+)\s++x")))


def test_no_pattern_is_quadratic() -> None:
    assert {name: texts for name, pattern, used in patterns() if (texts := list(slow_texts(pattern, used)))} == {}
