"""The one console command. `plan MODEL ...` is the main job; the other words are subcommands of the same command."""

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple

import typer

from finetune_planner.cli import completion
from finetune_planner.cli.output import BRIEF_WORD, FULL, FULL_WORD, fail, fail_environment, show_warning
from planner.core.errors import PlannerError

MAIN_COMMAND = "make"
"""The name behind `plan MODEL`: `main` writes it in where the first word is no subcommand."""


CommandLineError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""The base of typer's own errors: newer versions ship their own copy of click."""


class Command(NamedTuple):
    """Where a subcommand's function lives; its module is imported only when the command runs or shows its own help."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    MAIN_COMMAND: Command("make", "make", "Plan MODEL on a GPU (the word 'make' may be left out)."),
    "estimate": Command("estimate", "estimate", "Memory and speed of one setup, or of many (--setups)."),
    "probe": Command("probe", "probe", "Run a few real training steps of one setup and measure them."),
    "confirm": Command("probe", "confirm", "Run a plan's setup or launch file and compare with its promise."),
    "tune": Command("tune", "tune", "Search with GPU probes for the fastest setup that fits."),
    "check": Command("check", "check", "Does an existing training config fit, and what would make it faster?"),
    "race": Command("race", "race", "Existing configs, or the tools' defaults, against the plan for the same work."),
    "diff": Command("diff", "diff", "What a new version or another config changes in memory and speed."),
    "oom": Command("oom", "oom", "Why a run ran out of memory, from its traceback, log or memory snapshot."),
    "trace": Command("trace", "trace", "Run any training program on a GPU that computes nothing."),
    "report": Command("report", "report", "Write a plan's reports anew from its plan.json."),
    "compare": Command("report", "compare", "Several plans side by side."),
    "which-gpu": Command("tables", "which_gpu", "Rank the GPU table for a model."),
    "compare-adapters": Command("tables", "compare_adapters", "Every kind of adapter in LoRA's place."),
    "compare-targets": Command("tables", "compare_targets", "Which program runs a job fastest."),
    "which-model": Command("tables", "which_model", "What a card can fine-tune, how long, how fast."),
    "table": Command("bulk", "table", "Every model x card x length x method, to Parquet."),
    "init": Command("init", "init", "Five questions, then a plan and the command that made it."),
    "ui": Command("ui", "ui", "A local page with sliders: memory and speed at once."),
    "which-cluster": Command("which_cluster", "which_cluster", "The smallest, cheapest and fastest set of GPUs."),
    "explain": Command("lists", "explain", "What a word of a plan means."),
    "mcp": Command("serve", "mcp", "Serve plans to coding agents (Model Context Protocol)."),
    "gpus": Command("lists", "gpus", "The GPU table."),
    "prices": Command("prices", "prices", "Today's prices of the clouds, by gpuhunt, to a file."),
    "models": Command("lists", "models", "The built-in model catalogue."),
    "doctor": Command("lists", "doctor", "What this machine can do, and how to mend what is missing."),
    "calibrate": Command("calibrate", "calibrate", "Fit the speed model's constants to measurements."),
}
INTERRUPTED = 130
NAMES_A_MODEL = frozenset(
    {MAIN_COMMAND, "estimate", "probe", "tune", "which-gpu", "which-cluster", "compare-adapters", "compare-targets"}
)
"""Commands whose one argument is a model's name."""
MEASURING = frozenset({"confirm", "probe", "race", "tune"})
"""Commands that measure and keep what they measured."""
GROUP_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
GROUPS = {"store": Command("store", "store_app", "Export and import the store of measurements.")}
MORE = "more"
FIRST = (MAIN_COMMAND, "init", "estimate", "check", "oom", "trace", "confirm", "tune", "which-gpu", "doctor", MORE)
"""What `plan --help` lists; `plan more` lists the others."""


def build_app(words: Sequence[str]) -> typer.Typer:
    """The application with only the command that `words` start with; else, to be listed, with those of `FIRST`, or with
    all others behind `more`, by name and help alone."""
    app = typer.Typer(
        name="plan",
        help="Plan the fastest fine-tuning setup that fits a GPU.\n\nMain job: plan MODEL --gpu GPU",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    commands = {**COMMANDS, **GROUPS}
    if not words or words[0] not in commands:
        others = {MORE: Command("", "", "The other commands.")}
        rest = [command_name for command_name in commands if command_name not in FIRST]
        names = (*FIRST, *rest) if completion.wanted() else rest if words[:1] == [MORE] else FIRST
        for name in names:
            app.command(name, help=(commands | others)[name].help)(lambda: None)
        return app
    name, command = words[0], commands[words[0]]
    handler = getattr(import_module(f"finetune_planner.cli.{command.module}"), command.attribute)
    if name in GROUPS:
        app.add_typer(handler, name=name, help=command.help)
    else:
        app.command(name, help=command.help)(handler)
    return app


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments with the main command written in, where the first word names no subcommand.

    A leading option other than help, version and completion belongs to the main job too (plan --gpu GPU MODEL). A
    directory that is named like a subcommand is meant with a path: ./gpus. A model's name of several words need not be
    quoted: plan llama 3.1 8b --gpu GPU.
    """
    if not arguments or list(arguments) == ["help"]:
        return ["--help"]
    if len(arguments) == 1 and arguments[0] in GROUPS:
        return [*arguments, "--help"]
    if arguments[0] in {MORE, *COMMANDS, *GROUPS} or arguments[0] in GROUP_OPTIONS:
        words = ["--help" if word == "-h" else word for word in arguments]
    else:
        words = [MAIN_COMMAND, *arguments]
    if words[0] not in NAMES_A_MODEL:
        return words
    end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return [words[0], *([" ".join(words[1:end])] if end > 1 else []), *words[end:]]


def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from planner.core.version import version_words

        typer.echo(f"finetune-planner {version_words()}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 nothing fits, 2 bad input, 3 the machine lacks something, 70 a
    fault of this program.

    Errors go to stderr with a `hint:`; stdout is data.
    """
    atexit.register(gc.freeze)  # the interpreter's last collections would go through all that a plan made
    open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):  # an encoding that lacks a character of a name is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = show_warning
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def open_closed_streams() -> None:
    """Streams that the caller closed (`>&-`), which Python has as None, lead nowhere: nobody listens."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def run(arguments: Sequence[str]) -> int:
    """The command line as a function: the exit code."""
    words = complete_arguments(arguments)
    end = words.index("--") if "--" in words else len(words)  # what follows is a program's
    token = FULL.set(FULL_WORD in words[:end])
    words = [*("--json" if word in (FULL_WORD, BRIEF_WORD) else word for word in words[:end]), *words[end:]]
    completed = completion.write_in(MAIN_COMMAND, {MORE, *COMMANDS, *GROUPS, *GROUP_OPTIONS})
    try:
        called = ["--help"] if words[:1] == [MORE] else words
        code = build_app([completed] if completed else words)(called, standalone_mode=False, prog_name="plan")
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted(words)
    except (PlannerError, CommandLineError) as error:
        code = fail(error)
        if meant := _misspelt(arguments):
            print(f"hint: did you mean plan {meant}?", file=sys.stderr)
        return code
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing is wrong, and nobody listens
        return 0
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer would say 1, which means "nothing fits" here
            return 0
        raise
    except OSError as error:
        return fail_environment(error)
    except Exception as error:  # whatever is left is a fault of ours, and says nothing about a plan
        from finetune_planner.cli.faults import fail_internal

        return fail_internal(error, words)
    finally:
        FULL.reset(token)
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code itself
        return _interrupted(words)
    return code if isinstance(code, int) else 0


def _misspelt(arguments: Sequence[str]) -> str:
    """The subcommand that the first word, taken for a model, nearly is; "" for none."""
    named = {MORE, *COMMANDS, *GROUPS}
    if not arguments or arguments[0] in named or arguments[0].startswith("-"):
        return ""
    from difflib import get_close_matches  # late: seldom needed

    return next(iter(get_close_matches(arguments[0].lower().replace("_", "-"), named, n=1, cutoff=0.8)), "")


def _interrupted(words: Sequence[str]) -> int:
    note = "; what was measured is kept" if words and words[0] in MEASURING else ""
    print(f"interrupted{note}", file=sys.stderr)
    return INTERRUPTED
