"""`plan report` and `plan compare`: answers side by side, from plan.json alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from finetune_planner.app.folders import write_files
from finetune_planner.cli import options
from finetune_planner.cli.output import console, print_json
from planner.core.errors import EnvironmentProblem, UsageError
from reports.compare import render_comparison
from reports.html import Entry, entry_of, report_files, report_html
from reports.plan_json import plan_to_dict, read_plan_json

Directories = Annotated[
    list[Path],
    typer.Argument(help="Directories that `plan ... --out DIR` wrote, or plan.json files.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory for report.md and report.html.")]


def report(plans: Directories, out: Out = None) -> None:
    """Write report.html and report.md anew from plan.json; several directories give one report that compares them."""
    entries = _entries(plans)
    folder = out or (plans[0] if plans[0].is_dir() else plans[0].parent) if len(plans) == 1 else out or Path()
    _write_both(folder, entries)


def compare(plans: Directories, out: Out = None, as_json: options.Json = False) -> None:
    """Several plans side by side."""
    if any(path.is_file() and path.suffix != ".json" for path in plans):
        raise UsageError("plan compare takes plans", hint="training configs: plan race A.yaml B.yaml --gpu GPU")
    if len(plans) < 2:
        raise UsageError("plan compare needs at least two plans", hint="plan compare DIR DIR ...")
    entries = _entries(plans)
    if out is not None:
        _write_both(out, entries)
    if as_json:
        print_json([{"name": entry.name, **plan_to_dict(entry.plan)} for entry in entries])
    else:
        render_comparison([(entry.name, entry.plan) for entry in entries], console())


def _entries(plans: list[Path]) -> list[Entry]:
    return [entry_of(read_plan_json(path), name=path.resolve().name if path.is_dir() else path.stem) for path in plans]


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    write_files(folder, texts)
    for name in texts:
        typer.echo(f"wrote {folder / name}", err=True)


def _write_both(folder: Path, entries: list[Entry]) -> None:
    _write(folder, report_files(entries, html=False))
    write_html(folder, lambda: report_html(entries))


def write_html(folder: Path, page_of: Callable[[], str]) -> None:
    """report.html, or a word on stderr where jinja2 is missing: report.md is there in any case."""
    try:
        page = page_of()
    except EnvironmentProblem as error:
        typer.echo(f"report.html left out: {error.message} ({error.hint})", err=True)
        return
    _write(folder, {"report.html": page})
