"""Shell completion: names of models and GPUs, and the main job's words although its command is left out."""

import os
from collections.abc import Collection, Mapping

VARIABLE = "_PLAN_COMPLETE"
"""What the shell sets when it asks; typer answers."""
_LINE = "_TYPER_COMPLETE_ARGS"  # zsh, fish, PowerShell; bash says COMP_WORDS and COMP_CWORD


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a shell asks for words."""
    return VARIABLE in environ


def complete_gpu(incomplete: str) -> list[str]:
    """Keys of the GPU table that begin so, and "local"."""
    from planner.hardware.gpus import LOCAL, all_gpus

    return [key for key in (LOCAL, *(gpu.key for gpu in all_gpus())) if key.startswith(incomplete.lower())]


def complete_model(incomplete: str) -> list[str]:
    """Hub ids of the catalogue that begin so (typer itself drops all that do not, case included)."""
    from planner.models import catalogue

    ids = (name for entry in catalogue.entries() for name in (entry.model_id, *entry.aliases))
    return [name for name in ids if name.startswith(incomplete)]


def write_in(main_command: str, others: Collection[str]) -> str:
    """Writes the main command into the line that a shell wants completed, where its first word is, or begins, none of
    the other words that may stand there (subcommands, options of the program itself).

    Returns: the command that the line then names, "" where it names none yet, or nothing is to be completed.
    """
    if not wanted():
        return ""
    name = "COMP_WORDS" if "COMP_WORDS" in os.environ else _LINE
    program, space, rest = os.environ.get(name, "").partition(" ")
    first = rest.split(" ")[0]
    if first in others:
        return first
    if not first or (" " not in rest and any(other.startswith(first) for other in others)):
        return ""
    os.environ[name] = f"{program}{space}{main_command} {rest}"
    if "COMP_CWORD" in os.environ:
        os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) + 1)
    return main_command
