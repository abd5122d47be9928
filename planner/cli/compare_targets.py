"""`plan compare-targets MODEL --gpu GPU`: which program runs the wish fastest."""

from pathlib import Path
from typing import Annotated

import typer

from planner.app.targets import compare_targets as compare
from planner.cli import options
from planner.cli.answer import workload_for
from planner.cli.flags import takes_options
from planner.cli.output import show_table
from planner.cli.wish_options import WishOptions
from planner.errors import EXIT_NOTHING_FITS
from reports.targets import TargetsSheet


@takes_options
def compare_targets(
    model: options.Model,
    gpu: options.Gpu,
    *,
    wish: WishOptions,
    lookup: options.Lookup,
    out: Annotated[Path | None, typer.Option(help="Write the table to this directory.")] = None,
    as_json: options.Json = False,
) -> None:
    """The fastest plan of every launch target: TRL, the Trainer, Axolotl, LLaMA-Factory, Unsloth, torchtitan.

    Formula rung: plan MODEL --gpu GPU --target NAME --out DIR then plans one of them, dry-runs it, writes its files.
    """
    asked = workload_for(model, gpu, wish, lookup=lookup)
    rows = compare(asked)
    show_table(out, as_json, TargetsSheet(rows, asked))
    if rows[0].candidate is None:
        raise typer.Exit(EXIT_NOTHING_FITS)
