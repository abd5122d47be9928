"""`plan init`: five questions, and the command that they make."""

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

from finetune_planner.app.progress import printable
from finetune_planner.cli.app import run
from planner.core.errors import PlannerError, UsageError
from planner.hardware.gpus import find_gpu, local_gpu
from planner.models.resolve import resolve_model
from planner.planning.option_values import choices

METHODS = ("any", "full", "lora", "qlora")


def init() -> int:
    """Asks five questions, then plans; the command is shown, to be kept and changed.

    Enter takes the answer in brackets.
    """
    model = _ask("Which model? (hub id, folder with config.json, or as people call it: llama 3.1 8b)", "", _model)
    default_gpu = ""
    with suppress(PlannerError):
        local_gpu()
        default_gpu = "local"
    gpu = _ask("Which GPU? (a name such as 4090 or a100-80gb; local: this machine's)", default_gpu, _gpu)
    data = _ask("Which data set? (a .jsonl or .parquet file; Enter: none yet)", "", _data)
    method = _ask(f"Which method? ({', '.join(METHODS)})", "any", lambda text: choices("method", [text], METHODS)[0])
    folder = _ask("Where to write plan, report and launch files? (Enter: nowhere)", "", lambda text: text)
    words = [model, "--gpu", gpu]
    for option, value in (("--dataset", data), ("--method", "" if method == "any" else method), ("--out", folder)):
        words += [option, value] if value else []
    typer.echo(f"plan {printable(shlex.join(words))}\n", err=True)
    return run(words)


def _ask(question: str, default: str, understood: Callable[[str], str]) -> str:
    while True:
        try:
            answer = typer.prompt(question, default=default, show_default=bool(default), err=True).strip()
        except typer.Abort as error:
            if sys.stdin.isatty():
                raise
            raise UsageError("plan init asks: it needs a terminal", hint="plan MODEL --gpu GPU asks nothing") from error
        try:
            return understood(answer)
        except PlannerError as error:
            typer.echo(f"  {printable(error.message)}\n  {printable(error.hint)}", err=True)


def _model(answer: str) -> str:
    if not answer:
        raise UsageError("a plan needs a model", hint="for example Qwen/Qwen3-4B; `plan models` lists the catalogue")
    resolve_model(answer)
    return answer


def _gpu(answer: str) -> str:
    find_gpu(answer)
    return answer


def _data(answer: str) -> str:
    if answer and not Path(answer).expanduser().exists():
        raise UsageError(f"no file at {answer}", hint="a path that exists, or Enter for none")
    return str(Path(answer).expanduser()) if answer else ""
