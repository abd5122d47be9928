"""`if` and `case` of a shell script: which branch is certainly taken, and which variables are open behind them."""

import operator
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import field
from fnmatch import fnmatchcase

from planner.records import dataclass

_WORD = re.compile(r"^(if|elif|else|fi)\b\s*(.*)$", re.DOTALL)
_EQUAL = re.compile(r"^\[{1,2}\s{1,80}\"?([^\"\s]*+)\"?\s{1,80}(==?|!=)\s+[\"']?([^\"'\s*]*)[\"']?\s+\]{1,2}$")
_NUMBERS = re.compile(r"^\[{1,2}\s{1,80}\"?([^\"\s]*+)\"?\s{1,80}-(eq|ne|gt|ge|lt|le)\s+\"?([^\"\s]*)\"?\s+\]{1,2}$")
_EMPTY = re.compile(r"^\[{1,2}\s+(-z|-n)\s+\"?\$\{?(\w+)(?::-)?\}?\"?\s+\]{1,2}$")
_CASE = re.compile(r"^case\s+\"?([^\"\s]+)\"?\s+in\b\s*(.*)$", re.DOTALL)
_PATTERN = re.compile(r"^\(?\s*([^()\s;|]+(?:\s*\|\s*[^()\s;|]+)*)\s*\)\s*(.*)$", re.DOTALL)
_ONE_OF = re.compile(r"^\[ \"([^\"]*)\" in \"([^\"]*)\" \]$")
_LAUNCH = re.compile(r"\b(?:accelerate|torchrun|deepspeed|python3?)\b")
"""A launch that a variable holds: how it is started changes its GPUs, not its program."""


@dataclass
class _Case:
    """A `case` that is open: its word, whether it has had a pattern, and whether a branch of it is open."""

    word: str
    begun: bool = False
    inside: bool = False


def with_ifs(lines: Iterable[str]) -> Iterator[str]:
    """The lines with every `case` as an `if` of its patterns; those of a loop, which reads the script's own options,
    stay."""
    cases: list[_Case] = []
    loops = 0
    for line in lines:
        loops += bool(re.match(r"(?:while|until|for)\b", line)) - bool(re.search(r"(?:^|;\s*)done\b", line))
        if loops > 0 or not (cases or _CASE.match(line)):
            yield line
            continue
        rest = line
        while rest := rest.strip(" \t\n"):
            if found := _CASE.match(rest):
                cases.append(_Case(found[1]))
                rest = found[2]
            elif not cases:
                yield rest
                break
            else:
                rest = yield from _in_case(cases, rest)


def _in_case(cases: list[_Case], text: str) -> Generator[str, None, str]:
    """One step inside the innermost `case`; what of the line is left."""
    case = cases[-1]
    if re.match(r"esac\b", text):
        cases.pop()
        if case.begun:
            yield "fi"
        return text.removeprefix("esac").lstrip("; ")
    if not case.inside and (found := _PATTERN.match(text)):
        patterns = re.sub(r"[\s\"']", "", found[1])
        word = "else" if case.begun and patterns == "*" else "elif" if case.begun else "if"
        yield word if word == "else" else f'{word} [ "{case.word}" in "{patterns}" ]; then'
        case.begun = case.inside = True
        return found[2]
    head, ends, tail = text.partition(";;")
    case.inside = case.inside and not ends
    quoted = '"' in head or "'" in head or "$(" in head
    yield from filter(None, [part.strip() for part in ([head] if quoted else head.split(";"))])
    return tail


@dataclass
class Block:
    """One `if`: the variables before it and at the end of each branch that may run; `live`: whether this branch runs
    (None: not known); `decided`: whether an earlier one certainly did, `open`: whether one may have; `left`: whether it
    ends the script; `otherwise`: whether it is the `else`."""

    before: dict[str, str]
    ends: list[dict[str, str]] = field(default_factory=list)
    live: bool | None = None
    decided: bool = False
    open: bool = False
    left: bool = False
    otherwise: bool = False

    def ended(self, variables: dict[str, str]) -> None:
        """The branch is over: what it leaves, and the variables as they were."""
        if self.live is not False and not self.left:
            self.ends.append(dict(variables))
        self.decided, self.open = self.decided or self.live is True, self.open or self.live is None
        self.left = False
        variables.clear()
        variables.update(self.before)


class Branches:
    """The blocks that are open; `filled` puts variables into a word, `is_open` tells whether one is left."""

    def __init__(self, filled: Callable[[str, dict[str, str]], str], is_open: Callable[[str], bool]) -> None:
        self.blocks: list[Block] = []
        self.filled, self.is_open = filled, is_open

    def skips(self, line: str, variables: dict[str, str]) -> bool:
        """Follows a line; whether it does not run."""
        found = None if line.rstrip().endswith(":") else _WORD.match(line.strip())  # of Python between the lines
        if found is None or (found[1] == "if" and re.search(r";\s*fi\b", line)):
            if self.blocks and re.match(r"(?:exit|return)\b", line.strip()):
                self.blocks[-1].left = True
            return any(block.live is False for block in self.blocks)
        if found[1] == "if":
            self.blocks.append(Block(dict(variables), live=self.truth(found[2], variables)))
        elif self.blocks:
            block = self.blocks[-1]
            block.ended(variables)
            if found[1] == "fi":
                self.closed(self.blocks.pop(), variables)
            else:
                block.otherwise = found[1] == "else"
                truth = True if block.otherwise else self.truth(found[2], variables)
                unsure = block.open and truth is True  # an earlier branch may have run instead
                block.live = False if block.decided else None if unsure else truth
        return any(block.live is False for block in self.blocks)

    def closed(self, block: Block, variables: dict[str, str]) -> None:
        """Behind a block a variable that its branches leave different is open; words that one appends are taken."""
        ends = block.ends if block.decided or block.otherwise else [*block.ends, block.before]
        for name in {name for end in ends for name in end}:
            values = list(dict.fromkeys(end.get(name, "") for end in ends))
            longest = max(values, key=len)
            launches = [value for value in values if _LAUNCH.search(value)]
            grown = [longest] if " " in longest and all(longest.startswith(value) for value in values) else []
            variables[name] = values[0] if len(values) == 1 else next(iter((*launches[::-1], *grown)), f"${name}")

    def truth(self, condition: str, variables: dict[str, str]) -> bool | None:
        """Whether a test of one variable is true; None where that is not known."""
        test = re.sub(r"(?<!\s)\s*;\s*then\b.*$", "", condition.strip(), flags=re.DOTALL)
        if found := _ONE_OF.match(test):
            value, patterns = self.filled(found[1], variables), found[2].split("|")
            if "*" in patterns:
                return True
            return None if self.is_open(value) else any(fnmatchcase(value, pattern) for pattern in patterns)
        if found := _EMPTY.match(test):
            value = variables.get(found[2], "")
            return None if self.is_open(value) else (value == "") is (found[1] == "-z")
        if found := _NUMBERS.match(test):
            sides = [self.filled(side, variables) for side in (found[1], found[3])]
            numbers = [int(side) for side in sides if side.isdigit()]
            return getattr(operator, found[2])(*numbers) if len(numbers) == 2 else None
        if found := _EQUAL.match(test):
            value = self.filled(found[1], variables)
            return None if self.is_open(value) else (value == found[3]) is (found[2] != "!=")
        return None
