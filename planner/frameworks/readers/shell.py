"""Launch commands in shell scripts, Slurm jobs and Makefiles: which program or config they start, with which words, of
their text alone. Functions are followed where they are called, branches as far as it is certain which is taken."""

import operator
import os
import re
import shlex
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from pathlib import PurePosixPath
from typing import Any, Literal

from planner.core.errors import NotATraining
from planner.core.records import dataclass
from planner.frameworks.readers import launcher_arguments
from planner.frameworks.readers.launcher_arguments import LAUNCHERS
from planner.options.stacks import TARGET_ROWS

MARK = "\x05"
"""Stands for a file that the script writes: MARK, its number, a blank, its path."""
DEFINED = "\x06"
"""Stands for a function's body: DEFINED, its number."""
MAX_CALLS = 64
"""Calls of functions that are followed, one inside another counted too."""
_OPENS = re.compile(r"<<-?[ \t]*(['\"\\]?)([A-Za-z_]\w*)['\"]?")
_INTO = re.compile(r"(?<![\d&])>{1,2}[ \t]*[\"']?([^\s\"'<>|&;]+)")
_BY_TEE = re.compile(r"\btee[ \t]+(?:-\w[ \t]+)?[\"']?([^\s\"'<>|&;-][^\s\"'<>|&;]*)")
_TAKES_TEXT = re.compile(r"(?:^|[|;&(][ \t]*)(?:sudo[ \t]+)?(?:cat|tee|read|python[\d.]*)\b")
_READ = re.compile(r"read[ \t]++(?:-\w++[ \t]++(?:''[ \t]++)?)*+(\w++)")
"""A variable that takes a text: `read -r -d '' COMMANDS <<EOF`."""
_FUNCTION = re.compile(
    r"^(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))[ \t]*(\{)?[ \t]*(.*)$", re.DOTALL
)


@dataclass(slots=True)
class Script:
    """A script while its commands are followed.

    Attributes:
        bodies: functions with the lines of their bodies; functions: those of them that are defined so far, by name;
            called: how many calls were followed.
        documents: the text of files that it writes ("here documents"), each with whether variables are put in.
        files: path -> text of those that were written so far; exported: names of exported variables.
    """

    bodies: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    documents: list[tuple[str, bool]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    called: int = 0


def without_documents(text: str, script: Script) -> str:
    """The text with a marked line for each file that it writes; text for another command than a shell goes."""
    remaining: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        opens = _OPENS.search(line) if "<<" in line and "<<<" not in line else None
        if opens is None or line.lstrip().startswith("#") or not _TAKES_TEXT.search(line.strip()):
            remaining.append(line)  # of `bash <<EOF` the text is commands
            continue
        body: list[str] = []
        for inner in lines:
            if inner.strip() == opens[2]:
                break
            body.append(inner)
        if taken := _READ.fullmatch(line[: opens.start()].strip()):
            remaining.append(f"{taken[1]}=" + shlex.quote(" ".join(body).replace("\\", " ")))
            continue
        around = line[: opens.start()] + line[opens.end() :]
        into = _BY_TEE.search(around) or _INTO.search(around)
        if into is None:
            remaining.append(line[: opens.start()])
            continue
        remaining.append(f"{MARK}{len(script.documents)} {into[1]}")
        script.documents.append(("\n".join(body) + "\n", not opens[1]))
    return "\n".join(remaining)


def without_functions(lines: Iterable[str], script: Script) -> tuple[str, ...]:
    """The lines with a marked one for each function: which of one name counts is decided where it is met."""
    remaining: list[str] = []
    name, depth, body = "", 0, list[str]()
    for line in lines:
        if not name and (match := _FUNCTION.match(line)):
            name, depth, body = match[1] or match[2], 0, []
            line = f"{{ {match[4]}" if match[3] else match[4]
            if not line:
                continue  # its brace opens the next line
        if not name:
            remaining.append(line)
            continue
        starts, ends = re.match(r"\{(?=\s|$)", line), re.search(r"(?:^|[;\s])\}(?:\s*$|\s*[;|&>])", line)
        grouped = re.search(r"(?:^|&&|\|\||;)\s*\{\s*$", line) if depth else None
        depth += bool(starts and not depth) + bool(grouped) - bool(ends)
        inner = line[1:] if starts and not body else line
        inner = inner[: ends.start()] if ends and depth == 0 else inner
        body += [inner.strip()] if inner.strip() else []
        if depth <= 0:
            remaining.append(f"{DEFINED}{len(script.bodies)}")
            script.bodies.append((name, tuple(body)))
            name = ""
    return (*remaining, *body) if name else tuple(remaining)


def positional(words: Sequence[str], quoted: str) -> dict[str, str]:
    """A function's own parameters; `quoted`: its words as one text."""
    return {str(place): word for place, word in enumerate(words, start=1)} | {"@": quoted}


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
            if match := _CASE.match(rest):
                cases.append(_Case(match[1]))
                rest = match[2]
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
    if not case.inside and (match := _PATTERN.match(text)):
        patterns = re.sub(r"[\s\"']", "", match[1])
        word = "else" if case.begun and patterns == "*" else "elif" if case.begun else "if"
        yield word if word == "else" else f'{word} [ "{case.word}" in "{patterns}" ]; then'
        case.begun = case.inside = True
        return match[2]
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
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def skips(self, line: str, variables: dict[str, str]) -> bool:
        """Follows a line; whether it does not run."""
        match = None if line.rstrip().endswith(":") else _WORD.match(line.strip())  # of Python between the lines
        if match is None or (match[1] == "if" and re.search(r";\s*fi\b", line)):
            if self.blocks and re.match(r"(?:exit|return)\b", line.strip()):
                self.blocks[-1].left = True
            return any(block.live is False for block in self.blocks)
        if match[1] == "if":
            self.blocks.append(Block(dict(variables), live=self.truth(match[2], variables)))
        elif self.blocks:
            block = self.blocks[-1]
            block.ended(variables)
            if match[1] == "fi":
                self.closed(self.blocks.pop(), variables)
            else:
                block.otherwise = match[1] == "else"
                truth = True if block.otherwise else self.truth(match[2], variables)
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
        if match := _ONE_OF.match(test):
            value, patterns = _filled(match[1], variables), match[2].split("|")
            if "*" in patterns:
                return True
            return None if is_open(value) else any(fnmatchcase(value, pattern) for pattern in patterns)
        if match := _EMPTY.match(test):
            value = variables.get(match[2], "")
            return None if is_open(value) else (value == "") is (match[1] == "-z")
        if match := _NUMBERS.match(test):
            sides = [_filled(side, variables) for side in (match[1], match[3])]
            numbers = [int(side) for side in sides if side.isdigit()]
            return getattr(operator, match[2])(*numbers) if len(numbers) == 2 else None
        if match := _EQUAL.match(test):
            value = _filled(match[1], variables)
            return None if is_open(value) else (value == match[3]) is (match[2] != "!=")
        return None


SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
_HANDED = re.compile(r"(?:^|[\s/])(?:ba|da|z)?sh(?: -\w+)* -\w*c$")
"""What stands before a shell's own text: bash -lc "$CMD"."""
_SET = re.compile(
    r"^\s*(?:export\s+|declare\s++(?:-\S++\s++)*+|local\s+)?([A-Za-z_]\w*+)\s*+[:?+]?=\s*+(.*)$", re.DOTALL
)
_EXPORTED = re.compile(r"(?:^|;|&&)\s*+(?:export|declare\s+-x)\s+([A-Za-z_]\w*)")
_PAIR = re.compile(r"(?<!\w)([A-Za-z_]\w*+=(?:\"[^\"]*\"|'[^']*'|[^\s\"';&|()])*+)(?=\s|$)")
_EXPORTS = re.compile(rf"(?<!\s)\s*export(?:\s+{_PAIR.pattern}){{2,}}\s*")
_DEFAULT = re.compile(r"^:\s+\"?\$\{(\w+):?=([^{}]*)\}\"?$")
_USE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\((\w+)\)|(\w+))")
_ELEMENT = re.compile(r"\$\{(\w+)\[(\$?\w+)\]\}")
_SUM = re.compile(r"\$\(expr\s++([^()]*+)\)|\$\(\(((?:[^()]++|\([^()]*+\))*+)\)\)")
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_OPEN = re.compile(r"\$[\w{(@*]|`")
_QUOTED = re.compile(r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'")
_OPTION = re.compile(r"^([ \t]*(?:-\w\s*\|\s*)?(--[\w-]+)\)\s*)(\w+)=[\"']?\$\{?2\}?[\"']?", re.MULTILINE)
"""A script's own option in its `case`: `--name) NAME="$2"`."""
_OWN_FOLDER = re.compile(r"dirname|BASH_SOURCE|\$\{?0")
_CONTROL = ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "(")
WRAPPERS = ("env", "exec", "time", "nohup", "srun", "uv", "run", "sudo", "poetry", "pdm", "eval", *_CONTROL)
"""Words before a command that start it."""
OF_FUNCTION = "FUNCNAME"
"""The variable that tells a function from the script."""
SAID_ONLY = (
    "echo", "printf", "cat", "grep", "which", "pkill", "kill", "rm", "cp", "mv", "ls", "sed", "awk", "tee", "find",
    "alias", "trap", "test", "[", "[[",
)  # fmt: skip
"""Commands in whose words a launch is only named."""
SCRIPT_STARTERS = ("bash", "sh", "sbatch")
UTILITIES = ("pip", "http.server", "json.tool", "pytest", "ipykernel", "wandb", "virtualenv", "uv", "build", "jupyter")
"""Modules that `python -m` starts in setup scripts, beside Python's own of one word."""
MAX_CONTINUED = 200
MAX_FILLED = 1 << 17
"""Characters that variables add to one word: Linux takes no longer argument (`MAX_ARG_STRLEN`)."""
TRL_COMMANDS = (*dict.fromkeys(TARGET_ROWS["trl"].objectives.values()), "distillation")
"""What `trl` trains, and "orpo", which only scripts written here start."""
TOOLS_AS_MODULES = ("axolotl", "trl", "litgpt")
COMMANDS_OF = {"llamafactory.cli": "llamafactory-cli"}
"""Modules that do what a command of another name does."""
BY_VARIABLES = ("llamafactory-cli", "swift")
"""Tools that start torchrun themselves, on NNODES nodes of NPROC_PER_NODE processes."""
NAMED = {"mlx_lm.lora": "MLX-LM", "autotrain": "AutoTrain", "litgpt": "litgpt"}
"""Commands of tools whose flags are not read -> the tool."""
TOOLS = ("trl", "axolotl", "llamafactory-cli", "swift", "litgpt", "tune", "unsloth", "mlx_lm.lora", "autotrain")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One launch.

    Attributes:
        tool: "python" for a program, "script" for another shell script, else the tool's own name ("trl", "swift", ...).
        target: the program or config file, "" where the words say all.
        arguments: the words behind it.
        num_gpus: processes of the job, None where the launcher does not say; num_nodes: on how many machines.
        launcher: Accelerate's config file, "" where none is named.
        layout: what Accelerate's own words say of it, as its file would.
        open_gpus: the launcher's word for the processes that only the shell or the machine knows.
        folder: where the script went with `cd` before, relative to its own folder.
        environment: variables that the script exports, or sets for this launch.
        written: files that the script has written itself, by their paths.
    """

    tool: str
    target: str
    arguments: tuple[str, ...]
    num_gpus: int | None = None
    num_nodes: int = 1
    launcher: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    open_gpus: str = ""
    folder: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)


def commands(text: str, name: str, num_gpus: int = 1, arguments: Sequence[str] = ()) -> tuple[Command, ...]:
    """The launches in a script, in order; `num_gpus` is what it is told where it counts the machine's GPUs.

    Args:
        arguments: the words behind the script's own name.
    """

    def put_in(match: re.Match[str]) -> str:
        if re.search("device_count|nvidia-smi", match[0]):
            return str(num_gpus)
        above = "/".join([".", *[".."] * (match[0].count("dirname") - 1)])
        below = re.search(r"\)\"?(/[\w./-]+)\"?\s*(?:&&|;|\))", match[0])
        return above + (below[1] if below else "") if _OWN_FOLDER.search(match[0]) else match[0]

    def given(match: re.Match[str]) -> str:
        if match[2] not in arguments[:-1]:
            return match[1] if arguments else f"{match[1]}\n{match[3]}=$2\n"
        return f"{match[1]}\n{match[3]}={shlex.quote(arguments[arguments.index(match[2]) + 1])}\n"

    variables = launcher_arguments.variables(text) | {str(place): word for place, word in enumerate(arguments, start=1)}
    variables["@"] = shlex.join(arguments)
    script = Script()
    named = _FOUND.sub(r"\1\2", re.sub(r"[\x00-\x08]", " ", text))  # marks are ours
    code = without_documents(named, script)
    lines = tuple(_lines(_SUBSTITUTION.sub(put_in, _OPTION.sub(given, code))))
    launches = tuple(_commands(with_ifs(without_functions(lines, script)), dict(variables), script))
    script.functions = {}  # what nothing calls, or calls in a way that is not followed
    launches = launches or tuple(_commands(with_ifs(lines), dict(variables), script))
    if all(command.tool == "script" for command in launches):  # a menu: without a word it shows its help
        launches = tuple(_commands(lines, variables, script))
    if not launches:
        raise NotATraining(
            f"{name} starts no training that is known (accelerate, torchrun, deepspeed, python, {', '.join(TOOLS)})",
            hint="give the program or the config that it starts",
        )
    return launches


_FOUND = re.compile(r"\$\((?:which|command -v) +([\w.-]+)\)|`(?:which|command -v) +([\w.-]+)`")
"""A command by where it is found."""


def _one_by_one(line: str) -> list[str]:
    return [f"export {assignment}" for assignment in _PAIR.findall(line)] if _EXPORTS.fullmatch(line) else [line]


def _commands(lines: Iterable[str], variables: dict[str, str], script: Script) -> Iterator[Command]:
    folder, exported, branches = ".", script.exported, Branches()
    for line in chain.from_iterable(map(_one_by_one, lines)):
        if branches.skips(line, variables):
            continue
        if line.startswith(MARK):
            number, _, path = line.removeprefix(MARK).partition(" ")  # a file that the script writes
            text, filled = script.documents[int(number)]
            text = _filled(text, variables) if filled else text
            path = os.path.normpath(_filled(path, variables))
            script.files |= dict.fromkeys((path, path.rpartition("/")[2]), text)
            continue
        if line.startswith(DEFINED):
            name, body = script.bodies[int(line.removeprefix(DEFINED))]
            script.functions[name] = body
            continue
        exported.update(_EXPORTED.findall(line))
        if unless_set := _DEFAULT.match(line):
            line = "=".join(unless_set.groups()) if not variables.get(unless_set[1]) else ""
        assigned = _SET.match(line)
        if assigned and (assigned[2].startswith("(") or len(_words(assigned[2])) <= 1):
            _assign(assigned, line, variables)
            continue
        placeholders = _Placeholders("\x01")
        whole = _SUBSTITUTION.sub(placeholders.hold, _QUOTED.sub(placeholders.hold, line))
        for part in map(placeholders.back, re.split(r"&&|;|\|\||\|(?!\|)", whole)):
            local_variables = dict(variables)
            words = _expanded(_words(part), local_variables)
            if words[:1] == ["cd"] and len(words) == 2 and not is_open(words[1]):
                folder = os.path.normpath(os.path.join(folder, words[1]))
            if words[:1] == ["for"] and words[2:3] == ["in"] and len(words) > 3 and not is_open(words[3]):
                variables[words[1]] = words[3]  # the first turn
            if words[:1] == ["shift"] and OF_FUNCTION in variables:  # of a script nobody follows the words
                num = int(words[1]) if words[1:2] and words[1].isdigit() else 1
                rest = shlex.split(variables.get("@", ""))[num:]
                for name in [name for name in variables if name.isdigit()]:
                    del variables[name]
                variables |= positional(rest, shlex.join(rest))
            if called := _call(words, script):
                yield from _called(called, variables, script, folder)
                continue
            inner = _handed_to_shell(words)
            alone = None if inner else _command(words, local_variables)
            handed = _commands(with_ifs(_lines(inner)), local_variables, script) if inner else ()
            for command in handed if alone is None else (alone,):
                pairs = local_variables.items()
                environment = {key: value for key, value in pairs if key in exported or variables.get(key) != value}
                yield replace(
                    command,
                    folder=os.path.normpath(os.path.join(folder, command.folder or ".")),
                    environment=(*environment.items(), *command.environment),
                    written=dict(script.files),
                )


def _call(words: list[str], script: Script) -> list[str]:
    """The words of a call of one of the script's functions, [] where they are none."""
    while words and words[0] not in script.functions and (words[0] in WRAPPERS or _SET.match(words[0])):
        words = words[1:]
    return words if words and words[0] in script.functions and script.called < MAX_CALLS else []


def _called(words: list[str], variables: dict[str, str], script: Script, folder: str) -> Iterator[Command]:
    script.called += 1
    outer = {name: variables.pop(name) for name in list(variables) if name.isdigit() or name in ("@", OF_FUNCTION)}
    variables |= positional(words[1:], shlex.join(words[1:])) | {OF_FUNCTION: words[0]}
    for command in _commands(with_ifs(script.functions[words[0]]), variables, script):
        yield replace(command, folder=os.path.normpath(os.path.join(folder, command.folder or ".")))
    for name in [name for name in variables if name.isdigit() or name in ("@", OF_FUNCTION)]:
        del variables[name]
    variables |= outer


def _handed_to_shell(words: list[str]) -> str:
    """The commands that a command gives a shell of its own: `srun singularity exec image bash -lc "..."`."""
    shell = False
    for before, flag, text in zip(words, words[1:], words[2:], strict=False):
        shell = PurePosixPath(before).name in ("bash", "sh") or (shell and before[:1] in ("-", "p"))
        if shell and re.fullmatch(r"-\w*c", flag):
            return text if PurePosixPath(words[0]).name not in SAID_ONLY else ""
    return ""


class _Placeholders:
    """Pieces of a line that stay whole while it is cut: a mark stands for each."""

    def __init__(self, mark: str) -> None:
        self.mark, self.pieces = mark, list[str]()

    def hold(self, match: re.Match[str]) -> str:
        """The mark of a piece."""
        self.pieces.append(match[0])
        return f"{self.mark}{len(self.pieces) - 1}{self.mark}"

    def back(self, text: str) -> str:
        """The text with its pieces back, those inside others too."""
        filled = re.sub(rf"{self.mark}(\d+){self.mark}", lambda match: self.pieces[int(match[1])], text)
        return filled if filled == text else self.back(filled)


def _lines(text: str) -> Iterator[str]:
    pending, kept = "", list[str]()
    for line in text.splitlines():  # a backslash at a comment's end continues nothing
        if line.lstrip()[:1] != "#" or not line.endswith("\\") or (kept[-1:] and kept[-1].endswith("\\")):
            kept.append(line)
    for line in re.sub(r"(?<![ \t])(?:[ \t]*+\\\n[ \t]*+)++", " ", "\n".join(kept).rstrip("\\ \n")).splitlines():
        line = line if pending else line.strip().removeprefix("@")
        if not pending and (not line or line.startswith("#")):
            continue
        pending = f"{pending}\n{line}" if pending else line
        starts = re.match(r"(?:export\s+|local\s+|declare\s++(?:-\S++\s++)*+)?[A-Za-z_]\w*+\+?=([\"'(])", pending)
        starts = starts or re.search(r"\b(?:bash|sh)\s+(?:-\w+\s+(?:pipefail\s+)?)*-\w*c\s+([\"'])", pending)
        if starts and _is_open(pending[starts.start(1) :], starts[1]) and pending.count("\n") < MAX_CONTINUED:
            continue
        yield pending
        pending = ""
    if pending:
        yield from pending.splitlines()


def _is_open(value: str, opens: str) -> bool:
    if opens == "(":
        return ")" not in re.sub(r"\$\([^)]*\)|#.*", "", value)
    return value.count(opens) - value.count("\\" + opens) < 2


def _assign(assigned: re.Match[str], line: str, variables: dict[str, str]) -> None:
    """Notes a variable. What a positional parameter sets is open, unless the script gave it a value before."""
    name, value = assigned[1], assigned[2]
    if value.startswith("("):
        items, closed, _ = value[1:].rpartition(")")
        text = " ".join(_expanded(_words(items if closed else value[1:]), variables))
    else:
        text = _filled("".join(_words(value)), variables)
    if re.fullmatch(r"\$\{?[\d@*#]\}?", text):
        if not variables.get(name):
            variables[name] = f"${name}"
        return
    if re.match(r"\w+\+=", line.strip()):
        text = f"{variables.get(name, '')} {text}".strip()
    variables[name] = text


def _expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    expanded: list[str] = []
    for word in words:
        if word in ("$@", "$*", "${@}", "${*}"):
            expanded += shlex.split(variables.get("@", ""))
            continue
        filled = _filled(word, variables)
        alone = _USE.fullmatch(word) is not None and not _HANDED.search(" ".join(expanded[-4:]))
        filled_words = _words(filled.replace("\n", " ")) if alone and re.search(r"\s", filled) else [filled]
        expanded += [part for part in filled_words if part or not word]  # '' is a word, an empty variable is none
    return expanded


def _sum(text: str) -> str | None:
    """The result of the shell's arithmetic on whole numbers, None where a part of it is not known."""
    while (inner := re.sub(r"\(([^()]*+)\)", lambda within: _sum(within[1]) or "?", text)) != text:
        text = inner
    parts = re.findall(r"\d+|[-+*/%]", text)
    if not parts or not re.fullmatch(r"[\d\s*/%+-]*", text) or not re.fullmatch(r"(\d+ [-+*/%] )*\d+", " ".join(parts)):
        return None
    total, product, sign = 0, int(parts[0]), 1
    for sign_of, number in zip(parts[1::2], map(int, parts[2::2]), strict=True):
        if sign_of in "/%" and number == 0:
            return None
        if sign_of in "+-":
            total, product, sign = total + sign * product, number, 1 if sign_of == "+" else -1
        else:
            product = product * number if sign_of == "*" else divmod(product, number)[sign_of == "%"]
    return str(total + sign * product)


def _words(line: str) -> list[str]:
    """The words of a line; a command or sum that the shell would put in stays one word."""
    placeholders = _Placeholders("\x00")
    try:
        words = shlex.split(re.sub(r"(?<=\S)#", "\x02", _SUBSTITUTION.sub(placeholders.hold, line)), comments=True)
    except ValueError:
        return []
    return [placeholders.back(word).replace("\x02", "#") for word in words]  # a comment starts a word


def _filled(word: str, variables: dict[str, str]) -> str:
    """A word with the script's own variables put in; others stay as they are written, and so do those that would make
    it longer than MAX_FILLED: `A=$A$A` doubles line by line."""
    filled = 0

    def value(match: re.Match[str]) -> str:
        text = found_of(match)
        nonlocal filled
        filled += len(text)
        return text if filled <= MAX_FILLED else match[0]

    def found_of(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        current = variables.get(name, "")
        if match[2] is not None and (not current or is_open(current)):
            return _filled(match[2].strip("\"'"), variables) if is_open(match[2]) else match[2].strip("\"'")
        return current if name in variables else match[0]

    def summed(match: re.Match[str]) -> str:
        text = (match[1] or match[2] or "").replace("\\", "")  # `expr 2 \* 4`
        bare = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", lambda name: variables.get(name[1], name[1]), text)
        return _sum(_USE.sub(value, bare)) or match[0]

    def element(match: re.Match[str]) -> str:
        items, place = _words(variables.get(match[1], "")), int(match[2]) if match[2].isdigit() else 0
        return items[place] if place < len(items) else match[0]

    text = _USE.sub(value, _SUM.sub(summed, _ELEMENT.sub(element, word)))
    return _COUNT.sub(lambda listed: str(len(listed[1].replace(",", " ").split())), text)


_COUNT = re.compile(
    r"""\$\(\s*echo ["']?([\d, ]+)["']? *\| *(?:tr ["']?,["']? ['"]?\\+n['"]? *\| *wc -[lw]|awk [^|)]*NF[^|)]*)\)"""
)
"""How many GPUs a list names, as scripts count them."""


def is_open(word: str) -> bool:
    """Whether only the shell would know a word: a variable, a parameter or a command in it."""
    return _OPEN.search(word) is not None


def num_visible(variables: Mapping[str, str]) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES names, 0 where that is not known."""
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) if re.fullmatch(r"\d+(,\d+)*", visible) else 0


def _command(words: list[str], variables: dict[str, str]) -> Command | None:
    while words and (_SET.match(words[0]) or words[0] in WRAPPERS or (words[0][:1] == "-" and len(words) > 1)):
        assigned = _SET.match(words[0])
        if assigned:
            variables[assigned[1]] = assigned[2]
        words = words[1:]
    if not words:
        return None
    shown = num_visible(variables) or None
    per_node, nodes = variables.get("NPROC_PER_NODE", ""), variables.get("NNODES", "")
    started = int(per_node) if per_node.isdigit() else None
    tool = PurePosixPath(words[0]).name
    if is_open(tool) and re.search(r"PYTHON|PYBIN|\bPY\b", tool, re.IGNORECASE):
        tool = "python"
    if words[1:2] == ["-m"] and words[2:] and words[2] in COMMANDS_OF:
        words = [tool := COMMANDS_OF[words[2]], *words[3:]]
    if tool in LAUNCHERS:
        return _launched(tool, words[1:], shown)
    if re.fullmatch(r"python[\d.]*", tool):
        return _python(words[1:], shown)
    if tool == "megatron" and len(words) > 1:
        return Command(tool="python", target=f"megatron/{words[1]}", arguments=tuple(words[2:]))
    if tool in TOOLS and len(words) > 1:
        command, num = _of_tool(tool, words[1:], started or shown), int(nodes) if nodes.isdigit() else 1
        if command is not None and command.num_gpus and num > 1 and tool in BY_VARIABLES:
            return replace(command, num_gpus=command.num_gpus * num, num_nodes=num)
        open_ = [f"{key}={variables[key]}" for key in ("NNODES", "NPROC_PER_NODE") if is_open(variables.get(key, ""))]
        if command is not None and open_ and tool in BY_VARIABLES:
            return replace(command, num_gpus=None, open_gpus=open_[0])
        return command
    if tool in SCRIPT_STARTERS or tool.endswith(SUFFIXES):
        for index, word in enumerate(words):
            if word.endswith(SUFFIXES):
                return Command(tool="script", target=word, arguments=tuple(words[index + 1 :]))
    if tool in SAID_ONLY:
        return None
    inner = nested(words, variables)
    if inner is None and "--model_name_or_path" in words:  # a program that is installed as a command
        return Command(tool="python", target=tool, arguments=tuple(words[1:]), num_gpus=started or shown)
    return inner


def _python(rest: list[str], shown: int | None) -> Command | None:
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[1:]
    if rest[:2] == ["-m", "torch.distributed.run"] or rest[:2] == ["-m", "torch.distributed.launch"]:
        return _launched("torchrun", rest[2:], shown)
    if rest[:2] == ["-m", "accelerate.commands.launch"]:
        return _launched("accelerate", ["launch", *rest[2:]], shown)
    if rest[:1] == ["-m"] and len(rest) > 1 and rest[1].partition(".")[0] in TOOLS_AS_MODULES:
        verb = rest[1].rpartition(".")[2]
        return _of_tool(rest[1].partition(".")[0], [*(() if "." not in rest[1] else (verb,)), *rest[2:]], shown)
    return _program(rest, shown if shown and shown > 1 else None, "")


def nested(words: Sequence[str], variables: dict[str, str] | None = None) -> Command | None:
    """The launch that another command's words hold: a container's, a cluster's `submit ... -- python train.py`."""
    for index, word in enumerate(words[1:], start=1):
        tool = PurePosixPath(word).name
        if tool in (*LAUNCHERS, *TOOLS, "bash", "sh") or re.fullmatch(r"python[\d.]*", tool):
            command = _command([*words[index:]], variables or {})
            if command is not None:
                return command
    return None


def _launched(launcher: str, words: list[str], shown: int | None) -> Command | None:
    if launcher == "accelerate" and words[:1] != ["launch"]:
        return None
    parsed = launcher_arguments.parse_launcher(launcher, words[launcher == "accelerate" :], shown)
    command = _program(list(parsed.rest), parsed.num_gpus, parsed.config)
    if command is None:
        return None
    return replace(command, num_nodes=parsed.num_nodes, open_gpus=parsed.open, layout=parsed.accelerate)


def _program(words: list[str], num_gpus: int | None, config: str) -> Command | None:
    if words[:1] in (["-m"], ["--module"]) and len(words) > 1:
        if {words[1].partition(".")[0], words[1]} & {*UTILITIES} or words[1] in sys.stdlib_module_names:
            return None
        tool, _, verb = words[1].partition(".")
        if tool in TOOLS_AS_MODULES and verb:
            return _of_tool(tool, [verb.rpartition(".")[2], *words[2:]], num_gpus, config)
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    if words[:1] and words[0] in TOOLS and len(words) > 1:  # torchrun ... $(which swift) sft
        return _of_tool(words[0], words[1:], num_gpus, config)
    if not words or not words[0].endswith(".py"):
        return None
    return Command(tool="python", target=words[0], arguments=tuple(words[1:]), num_gpus=num_gpus, launcher=config)


def _of_tool(tool: str, words: list[str], num_gpus: int | None, launcher: str = "") -> Command | None:
    verbs = {
        "trl": TRL_COMMANDS, "axolotl": ("train", "finetune"), "llamafactory-cli": ("train",), "unsloth": ("train",),
        "swift": ("sft", "pt", "rlhf"), "tune": ("run",),
        **dict.fromkeys(NAMED, ()),
    }[tool]  # fmt: skip
    if (not words or words[0] not in verbs) and tool not in NAMED:
        return None
    rest = words[1:]
    apart = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    named = [word for before, word in pairwise(["--config", *apart]) if before[:2] != "--" or before == "--config"]
    config = next((word for word in named if word.endswith((".yaml", ".yml", ".json", ".toml"))), "")
    parsed = launcher_arguments.parse_tool_launcher(tool, rest, num_gpus)
    command = Command(tool=tool, target=config, arguments=tuple(words), launcher=parsed.config or launcher)
    command = replace(command, num_gpus=parsed.num_gpus, num_nodes=parsed.num_nodes, open_gpus=parsed.open)
    return replace(command, layout=parsed.accelerate)


def flags(arguments: tuple[str, ...]) -> dict[str, str | list[str] | Literal[True]]:
    """--name value pairs of a command as a mapping; several values are a list, none is true."""
    by_name: dict[str, str | list[str] | Literal[True]] = {}
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if re.match(r"\d?>|\|", word):
            break
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(arguments) and not re.match(r"--|\d?>|\|", arguments[index]):
            values.append(arguments[index])
            index += 1
        by_name[name.replace("-", "_")] = values[0] if len(values) == 1 else values or True
    return by_name
