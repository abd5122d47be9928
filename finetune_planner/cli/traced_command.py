"""The `plan trace` command of a program that cannot be read: how it starts from here, with the words it insists on."""

import ast
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from planner.core.errors import PlannerError
from planner.frameworks.readers.loading import read_bounded

ANY = "plan trace -- python FILE"
"""How the readers' hints name it."""
_SHELLS = (".sh", ".bash")


def exact(hint: str, file: Path, card: str, words: Sequence[str] = ()) -> str:
    """A hint whose `plan trace` is the command for this file and card.

    Args:
        words: of the program's command line, as far as they are known.
    """
    traced = f"plan trace --gpu {card} --"
    if file.suffix in _SHELLS:
        return hint.replace(ANY, f"{traced} {shlex.join(['bash', str(file)])}")
    if file.suffix == ".py":
        return hint.replace(ANY, f"{traced} {_python(file, words)}")
    if file.suffix == ".ipynb":
        script = shlex.quote(str(file.with_suffix(".py")))
        converted = f"jupyter nbconvert --to script {shlex.quote(str(file))} && {traced} python {script}"
        return hint.replace(ANY, converted)
    return hint.replace("plan trace --", traced)


def _python(file: Path, words: Sequence[str]) -> str:
    """A program's start: as a module where it imports what lies here and not beside it, with what it requires."""
    try:
        tree = ast.parse(read_bounded(file))
    except (PlannerError, SyntaxError, ValueError, RecursionError):
        return shlex.join(["python", str(file)])
    parts = file.with_suffix("").parts
    module = not file.is_absolute() and len(parts) > 1 and all(part.isidentifier() for part in parts)
    named = ["-m", ".".join(parts)] if module and _imports_from_here(tree, file) else [str(file)]
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    asked = [flag for flag in _required(tree) if not words or (flag[0] == "-" and flag.replace("_", "-") not in given)]
    blanks = [f"{flag} ..." if flag.startswith("-") else f"{flag.upper()}" for flag in asked]
    return " ".join([shlex.join(["python", *named, *words]), *blanks])


def _imports_from_here(tree: ast.Module, file: Path) -> bool:
    """Whether a package of the working directory is imported that the program's own folder has not."""
    names = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module and not one.level}
    names |= {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
    moved = any(isinstance(one, ast.Attribute) and one.attr == "path" for one in ast.walk(tree))  # sys.path
    firsts = {name.partition(".")[0] for name in names}
    return not moved and any(_lies_in(Path(), name) and not _lies_in(file.parent, name) for name in firsts)


def _lies_in(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _required(tree: ast.Module) -> Iterator[str]:
    """The options of argparse that a program does not start without, in their order."""
    for call in ast.walk(tree):
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        ):
            continue
        flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        said = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
        optional = said.get("nargs") in ("?", "*") or any(one.arg == "default" for one in call.keywords)
        if flags and (said.get("required") is True or (flags[0][:1] != "-" and not optional)):
            yield next((flag for flag in flags if flag.startswith("--")), flags[0])
