"""`plan compare-targets MODEL --gpu GPU`: which program runs the wish fastest."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import options
from planner.cli.answer import workload_for
from planner.cli.flags import takes_options
from planner.cli.output import console, print_json, write_text
from planner.cli.wish_options import WishOptions
from planner.errors import EXIT_NOTHING_FITS


@takes_options
def compare_targets(
    model: options.Model,
    gpu: options.Gpu,
    *,
    wish: WishOptions,
    lookup: options.Lookup,
    out: Annotated[Path | None, typer.Option("--out", help="Write the table to this directory.")] = None,
    as_json: options.Json = False,
) -> None:
    """The fastest plan of every launch target: TRL, the Trainer, Axolotl, LLaMA-Factory, Unsloth, torchtitan.

    Formula rung: plan MODEL --gpu GPU --target NAME --out DIR then plans one of them, dry-runs it, writes its files.
    """
    from planner.app.targets import compare_targets as compare
    from reports.targets import render_targets, targets_json, targets_markdown

    asked = workload_for(model, gpu, wish, lookup=lookup)
    rows = compare(asked)
    if out is not None:
        write_text(out / "report.md", targets_markdown(rows, asked))
        typer.echo(f"wrote {out / 'report.md'}", err=True)
    if as_json:
        print_json([targets_json(row, asked) for row in rows])
    else:
        render_targets(rows, asked, console())
    if rows[0].candidate is None:
        raise typer.Exit(EXIT_NOTHING_FITS)
