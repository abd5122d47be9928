"""Stdout is data, stderr everything else: errors with hints, consoles, JSON."""

import json
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from finetune_planner.app.progress import printable
from planner.core.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, PlannerError

if TYPE_CHECKING:
    from reports.page import Sheet


MISSING = {
    "gpu": "name your card, for example --gpu rtx-4090 (`plan gpus` lists them); without one, "
    '`plan which-gpu "MODEL"` ranks those to buy or rent, with prices; plan --help lists the commands',
    "model": "name a model, for example meta-llama/Llama-3.1-8B (`plan models` lists them); "
    "`plan which-model --gpu GPU` says what a card can fine-tune; plan --help lists the commands",
}
"""What a beginner who left out a parameter can do next."""


def show_warning(message: Warning | str, category: type[Warning], *place: object, **named: object) -> None:
    """A warning as one line on stderr, without the place in the code that gave it."""
    print(f"warning: {printable(str(message))}", file=sys.stderr)


def fail(error: Exception) -> int:
    """Print an error with its hint on stderr; returns the exit code."""
    if isinstance(error, PlannerError):
        print(f"error: {printable(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {printable(error.hint)}", file=sys.stderr)
        return error.exit_code
    message = getattr(error, "format_message", lambda: str(error))()
    print(f"error: {printable(message)}", file=sys.stderr)
    missing = getattr(error, "param", None) if type(error).__name__ == "MissingParameter" else None
    hint = MISSING.get(getattr(missing, "name", ""), _option_of(getattr(error, "option_name", "")))
    print(f"hint: {hint or 'plan --help lists the commands, plan COMMAND --help their options'}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _option_of(word: str) -> str:
    """The option that has an unknown one's name as a value (--qlora: --method qlora), "" where none has."""
    from finetune_planner.cli.setup_flags import AIM, LAYOUT, SPACE  # late: seldom needed

    value = word.lstrip("-")
    return next((f"--{row.word} {value}" for row in (*SPACE, *LAYOUT, *AIM) if value in row.values), "")


def fail_environment(error: OSError) -> int:
    """An operating-system error (full disk, no permission) as a message; returns the exit code."""
    where = f" ({error.filename})" if error.filename else ""
    print(f"error: {printable(f'{error.strerror or error}{where}')}", file=sys.stderr)
    other = ", or choose another --out directory" if where else ""
    print(f"hint: check permissions and free space{other}", file=sys.stderr)
    return EXIT_ENVIRONMENT


FULL_WORD, BRIEF_WORD = "--json=full", "--json=brief"
"""`--json=brief` is `--json`, which once was the whole."""
INDENT = 2
FULL = ContextVar("full", default=False)
"""Whether a document is whole, not cut to what a reader pays for (`reports/brief_json.py`)."""


def print_json(document: Any, *, whole: bool = False) -> None:
    """One JSON document on stdout, and nothing else there; `whole`: another program's input, which is never cut."""
    if not (whole or FULL.get()):
        from reports.brief_json import brief

        document = brief(document, indent=INDENT)
    sys.stdout.write(json_text(document, indent=INDENT) + "\n")


def json_text(document: Any, *, indent: int | None = None) -> str:
    """JSON for stdout: characters that it cannot hold (another encoding, undecodable file names) as escapes."""
    text = json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=True)
    return text


def write_text(path: Path, text: str, *, inside: Path | None = None, keep: bool = False) -> None:
    """Write a file beside and rename it, so that a crash or a full disk leaves the old one.

    Args:
        inside: the folder that the person named: nothing below it leads elsewhere (`outputs.write_whole`).
        keep: a file of that name that says something else is kept as NAME.orig, and said.

    Raises:
        EnvironmentProblem: the directory cannot be written.
    """
    from finetune_planner.app.folders import cannot_write, encoded, say_kept
    from planner.core.outputs import write_whole

    try:
        kept = write_whole(path, encoded(text), inside=inside, replaceable=() if keep else None)
    except OSError as error:
        raise cannot_write(path, error) from error
    if kept is not None:
        say_kept(path, kept)


def show_table(out: Path | None, as_json: bool, sheet: "Sheet") -> None:
    """A command's table: report.md where a folder is named, then JSON, or on a console."""
    if out is not None:
        from finetune_planner.app.folders import write_files

        write_files(out, {"report.md": sheet.markdown()})
        print(f"wrote {out / 'report.md'}", file=sys.stderr)
    if as_json:
        print_json(sheet.document())
    else:
        sheet.render(console())


def console(*, stderr: bool = False, width: int | None = None, file: TextIO | None = None) -> Any:
    """A rich console for people; NO_COLOR and pipes are respected by rich itself.

    A reader that went away is a BrokenPipeError, as with any other output; rich would exit with 1, "nothing fits".
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    shown = PlainConsole(stderr=stderr, highlight=False, soft_wrap=False, width=width, file=file)
    if not shown.width:  # COLUMNS=0, which says nothing
        from shutil import get_terminal_size

        shown.width = get_terminal_size().columns
    return shown


def tell(document: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """An answer as JSON, or as lines for people."""
    if as_json:
        print_json(document)
    else:
        print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    """Lines for people on stdout, whatever a config puts into them and whatever the output can hold."""
    from reports.plain import clean, to_ascii

    out = console()
    for line in lines:
        shown = clean(line)
        out.print(to_ascii(shown) if out.options.ascii_only else shown, markup=False, soft_wrap=True)
