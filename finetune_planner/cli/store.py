"""`plan store`: what was measured: how much there is, exported, and taken in from elsewhere."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from finetune_planner.app import machine
from finetune_planner.cli import options
from finetune_planner.cli.output import print_json
from planner.core.errors import EnvironmentProblem
from planner.setup.outcome import Measurement

store_app = typer.Typer(
    help="The store of measurements.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


@store_app.command("export")
def export(
    target: Annotated[Path, typer.Argument(help="File to write (JSON lines).", show_default=False)],
    store: options.StorePath = None,
) -> None:
    """Write the last outcome of every setup as JSON lines."""
    opened = machine.open_store(store)
    print_json({"exported": opened.export(target), "to": str(target)})


@store_app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="File that `plan store export` wrote.", show_default=False)],
    store: options.StorePath = None,
) -> None:
    """Add another store's outcomes; what is here already is left alone."""
    opened = machine.open_store(store)
    added, duplicates = opened.merge(source)
    print_json({"added": added, "already_here": duplicates, "store": str(opened.path)})


@store_app.command("show")
def show(store: options.StorePath = None) -> None:
    """How much the store holds, and where it lies."""
    opened = machine.open_store(store)
    if store is not None and not store.exists():
        from probes.store import WHICH_STORE

        raise EnvironmentProblem(f"no such file: {store}", hint=WHICH_STORE)
    records = opened.latest()
    models = Counter(record.model_id for record in records)
    measured = sum(isinstance(record.outcome, Measurement) for record in records)
    print_json({"store": str(opened.path), "outcomes": len(records), "measurements": measured, "models": models})
