"""`plan gpus` and `plan models`: the tables that come with the package."""

import typer

from planner.cli.output import console, print_json
from planner.errors import UsageError
from planner.hardware.gpus import all_gpus
from planner.interchange import to_jsonable
from planner.models import catalogue
from reports.lists import ModelRow, render_gpus, render_models


def gpus(as_json: bool = typer.Option(False, "--json", help="JSON on stdout.")) -> None:
    """The GPU table."""
    rows = all_gpus()
    if as_json:
        print_json([to_jsonable(row) for row in rows])
        return

    render_gpus(rows, console())


def models(
    match: str = typer.Argument("", help="Show only names that contain this."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout."),
) -> None:
    """The built-in model catalogue; every name works with no network."""
    rows = []
    for name in catalogue.names():
        if match.lower() not in name.lower():
            continue
        spec = catalogue.load(name)
        if spec is not None:
            rows.append(
                ModelRow(
                    model_id=spec.model_id,
                    model_type=spec.model_type,
                    num_params=spec.num_params,
                    max_position_embeddings=spec.max_position_embeddings,
                )
            )
    if as_json:
        print_json([to_jsonable(row) for row in rows])
        return
    if not rows:
        raise UsageError(
            f"no model of the catalogue has {match!r} in its name",
            hint="`plan models` lists all; other hub ids are looked up on the hub",
        )
    render_models(rows, console())
