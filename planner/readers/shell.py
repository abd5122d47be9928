"""Launch commands in shell scripts, Slurm jobs and Makefiles: which program or config they start, with which words.

Variables that the script itself sets are put in; nothing is executed, no command is substituted.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from planner.errors import NotATraining

SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
_SET = re.compile(r"^\s*(?:export\s+|declare\s+\S*\s*)?([A-Za-z_]\w*)\s*[:?]?=\s*(.*)$")
_USE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|\((\w+)\)|(\w+))")
_SUM = re.compile(r"\$\(expr\s+(\d+)\s*([-+*/])\s*(\d+)\)|\$\(\(\s*(\d+)\s*([-+*/])\s*(\d+)\s*\)\)")
LAUNCHERS = {
    "accelerate": ("--num_processes", "--num-processes"),
    "torchrun": ("--nproc_per_node", "--nproc-per-node"),
    "deepspeed": ("--num_gpus",),
}
"""Launcher -> its flags for the number of processes."""
FLAGS_WITHOUT_VALUE = {"--multi_gpu", "--use_deepspeed", "--use_fsdp", "--standalone", "-m", "--module", "--debug"}
TOOLS = ("trl", "axolotl", "llamafactory-cli", "swift", "litgpt", "tune", "unsloth")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One launch.

    Attributes:
        tool: "python" for a program, else the tool's own name ("trl", "swift", ...).
        target: the program or config file, "" where the words say all.
        arguments: the words behind it.
        num_gpus: processes that the launcher starts, None where it does not say.
        launcher: Accelerate's config file, "" where none is named.
    """

    tool: str
    target: str
    arguments: tuple[str, ...]
    num_gpus: int | None = None
    launcher: str = ""


def commands(text: str, name: str) -> tuple[Command, ...]:
    """The launches in a script, in order.

    Raises:
        ConfigError: none in it.
    """
    found = tuple(_commands(text))
    if not found:
        raise NotATraining(
            f"{name} starts no training that is known (accelerate, torchrun, deepspeed, python, {', '.join(TOOLS)})",
            hint="give the program or the config that it starts",
        )
    return found


def _commands(text: str) -> Iterator[Command]:
    variables: dict[str, str] = {}
    for line in re.sub(r"[ \t]*\\\r?\n[ \t]*", " ", text.rstrip("\\ \n")).splitlines():
        line = _SUM.sub(_sum, line.strip().removeprefix("@"))
        if line.startswith("#") or not line:
            continue
        assigned = _SET.match(line)
        if assigned and len(_words(assigned[2])) <= 1:
            variables[assigned[1]] = _filled("".join(_words(assigned[2])), variables)
            continue
        for part in re.split(r"&&|;|\|\|", line):
            command = _command([_filled(word, variables) for word in _words(part)], dict(variables))
            if command is not None:
                yield command


def _sum(match: re.Match[str]) -> str:
    """The result of the shell's arithmetic on two numbers."""
    left, sign, right = (match[1], match[2], match[3]) if match[1] else (match[4], match[5], match[6])
    one, other = int(left), int(right)
    if sign == "/":
        return str(one // other) if other else match[0]
    return str({"+": one + other, "-": one - other, "*": one * other}[sign])


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _filled(word: str, variables: dict[str, str]) -> str:
    """A word with the script's own variables put in; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _USE.sub(value, word)


def _command(words: list[str], variables: dict[str, str]) -> Command | None:
    while words and (_SET.match(words[0]) or words[0] in ("env", "exec", "time", "nohup", "srun", "uv", "run", "sudo")):
        assigned = _SET.match(words[0])
        if assigned:
            variables[assigned[1]] = assigned[2]
        words = words[1:]
    if not words:
        return None
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    shown = len(visible.split(",")) if re.fullmatch(r"\d+(,\d+)*", visible) else None
    per_node = variables.get("NPROC_PER_NODE", "")
    started = int(per_node) if per_node.isdigit() else None
    tool = PurePosixPath(words[0]).name
    if tool in LAUNCHERS:
        return _launched(tool, words[1:], shown)
    if tool.startswith("python"):
        rest = words[1:]
        if rest[:2] == ["-m", "torch.distributed.run"] or rest[:2] == ["-m", "torch.distributed.launch"]:
            return _launched("torchrun", rest[2:], shown)
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:]
        return _program(rest, shown if shown and shown > 1 else None, "")
    if tool in TOOLS and len(words) > 1:
        return _of_tool(tool, words[1:], started or shown)
    return None


def _launched(launcher: str, words: list[str], shown: int | None) -> Command | None:
    num_gpus, config = None, ""
    index = 1 if launcher == "accelerate" and words[:1] == ["launch"] else 0
    if launcher == "accelerate" and index == 0:
        return None
    while index < len(words) and words[index].startswith("-"):
        flag, equals, value = words[index].partition("=")
        takes = not equals and flag not in FLAGS_WITHOUT_VALUE
        value = value if equals else words[index + 1] if takes and index + 1 < len(words) else ""
        if flag in LAUNCHERS[launcher] and value.isdigit():
            num_gpus = int(value)
        if flag in ("--config_file", "--config-file"):
            config = value
        if flag in ("-m", "--module"):
            break
        index += 2 if takes else 1
    return _program(words[index:], num_gpus or shown, config)


def _program(words: list[str], num_gpus: int | None, config: str) -> Command | None:
    if words[:1] in (["-m"], ["--module"]) and len(words) > 1:
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    if not words or not words[0].endswith(".py"):
        return None
    return Command(tool="python", target=words[0], arguments=tuple(words[1:]), num_gpus=num_gpus, launcher=config)


def _of_tool(tool: str, words: list[str], num_gpus: int | None) -> Command | None:
    verbs = {
        "trl": ("sft",), "axolotl": ("train", "finetune"), "llamafactory-cli": ("train",), "unsloth": ("train",),
        "swift": ("sft", "pt", "rlhf"), "litgpt": ("finetune_lora", "finetune", "finetune_full"), "tune": ("run",),
    }[tool]  # fmt: skip
    if words[0] not in verbs:
        return None
    rest = words[1:]
    config = next((word for word in rest if word.endswith((".yaml", ".yml", ".json", ".toml"))), "")
    return Command(tool=tool, target=config, arguments=tuple(words), num_gpus=num_gpus)


def flags(arguments: tuple[str, ...]) -> dict[str, str | list[str] | Literal[True]]:
    """--name value pairs of a command as a mapping; several values are a list, none is true."""
    found: dict[str, str | list[str] | Literal[True]] = {}
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(arguments) and not arguments[index].startswith("--"):
            values.append(arguments[index])
            index += 1
        found[name.replace("-", "_")] = values[0] if len(values) == 1 else values or True
    return found
