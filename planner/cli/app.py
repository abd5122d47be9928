"""The one console command. `plan MODEL ...` is the main job; the other words are subcommands of the same command."""

import sys
from collections.abc import Sequence

import click
import typer

from planner import __version__
from planner.cli import estimate, lists, make
from planner.cli.output import fail, fail_environment
from planner.errors import EXIT_BAD_INPUT, PlannerError

MAIN_COMMAND = "make"
"""The name behind `plan MODEL`: `main` writes it in where the first word is no subcommand."""

app = typer.Typer(
    name="plan",
    help="Plan the fastest fine-tuning setup that fits a GPU.\n\nMain job: plan MODEL --gpu GPU",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(MAIN_COMMAND, help="Plan MODEL on a GPU (the word 'make' may be left out: plan MODEL --gpu GPU).")(
    make.make
)
app.command("estimate", help="Memory and speed of one setup, or of many (--setups FILE.jsonl).")(estimate.estimate)
app.command("gpus", help="The GPU table.")(lists.gpus)
app.command("models", help="The built-in model catalogue.")(lists.models)


def command_names() -> frozenset[str]:
    """Names of all subcommands."""
    return frozenset(info.name or "" for info in app.registered_commands)


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments with the main command written in, where the first word names no subcommand.

    A leading option other than help, version and completion belongs to the main job too (plan --gpu GPU MODEL). A
    directory that is named like a subcommand is meant with a path: ./gpus.
    """
    group_options = ("--help", "-h", "--version", "--install-completion", "--show-completion")
    if not arguments or arguments[0] in command_names() or arguments[0] in group_options:
        return list(arguments)
    return [MAIN_COMMAND, *arguments]


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"finetune-planner {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 nothing fits, 2 bad input, 3 the machine lacks something.

    Errors go to stderr with a `hint:`; stdout is data.
    """
    words = complete_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(words, standalone_mode=False)
    except PlannerError as error:
        code = fail(error)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        code = EXIT_BAD_INPUT
    except click.ClickException as error:
        code = fail(error)
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("interrupted; what was measured is kept", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing is wrong, and nobody listens
        code = 0
    except OSError as error:
        code = fail_environment(error)
    sys.exit(code if isinstance(code, int) else 0)
