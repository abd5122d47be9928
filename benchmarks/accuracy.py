"""Every recorded measurement against what a level predicts for it.

python -m benchmarks.accuracy [--level formula] [--what all] [--group SOURCE] [--out docs/accuracy] [--json]
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.accuracy_table import AccuracyTable, Predict, accuracy_table
from benchmarks.accuracy_text import accuracy_csv, accuracy_json, accuracy_markdown, render_accuracy, scatter_svg
from benchmarks.measured import MeasuredRow, Quantity, load_rows, newest_versions
from benchmarks.shared import loaded
from finetune_planner.cli import options
from finetune_planner.cli.output import console, fail, print_json, write_text
from planner.core.errors import EnvironmentProblem, PlannerError, UsageError
from planner.core.install import install_command
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction, ProbeFailure

LEVELS = {"formula": "formula", "dry_run": "dry run", "dry-run": "dry run"}
QUANTITIES: dict[str, tuple[Quantity, ...]] = {
    "memory": ("allocated", "reserved", "device"),
    "allocated": ("allocated",),
    "reserved": ("reserved",),
    "device": ("device",),
    "speed": ("tokens_per_s",),
    "all": ("allocated", "reserved", "device", "tokens_per_s"),
}


def accuracy(
    level: Annotated[str, typer.Option("--level", help="formula, or dry_run (needs torch; minutes).")] = "formula",
    what: Annotated[str, typer.Option("--what", help="memory, allocated, reserved, device, speed or all.")] = "all",
    group: Annotated[str | None, typer.Option("--group", help="Only this source.")] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Each configuration once, under its newest versions.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for Markdown, CSV and SVG.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predicted against measured, per source: median, 90th and 95th percentile, worst."""
    quantities = _quantities(level, what)
    rows = _rows(group, newest)
    ask = _remembered(predict if level == "formula" else dry_run_setup())
    tables = [accuracy_table(rows, ask, what=quantity, lookup=_lookup, level=LEVELS[level]) for quantity in quantities]
    if out is not None:
        flags = (
            f"--level {level} --what {what}" + (f" --group {group}" if group else "") + (" --newest" if newest else "")
        )
        _write(out, level, tables, f"python -m benchmarks.accuracy {flags} --out DIR")
    if as_json:
        print_json(accuracy_json(tables), whole=True)
        return
    render_accuracy(tables, console())


def _quantities(level: str, what: str) -> tuple[Quantity, ...]:
    """What is compared.

    Raises:
        UsageError: unknown words, or what the level does not predict.
    """
    if level not in LEVELS:
        raise UsageError(f"--level must be formula or dry_run, got {level!r}", hint="use --level formula")
    if what not in QUANTITIES:
        raise UsageError(f"--what must be one of {', '.join(QUANTITIES)}; got {what!r}", hint="use --what all")
    quantities = tuple(quantity for quantity in QUANTITIES[what] if level == "formula" or quantity != "tokens_per_s")
    if not quantities:
        raise UsageError("the dry run predicts memory only", hint="use --what memory, or --level formula")
    return quantities


def _rows(group: str | None, newest: bool) -> Sequence[MeasuredRow]:
    rows = load_rows()
    if group is not None:
        groups = sorted({row.group for row in rows})
        if group not in groups:
            raise UsageError(f"no recorded measurements of {group!r}", hint=f"sources: {', '.join(groups)}")
        rows = tuple(row for row in rows if row.group == group)
    return newest_versions(rows) if newest else rows


def dry_run_setup() -> Predict:
    try:
        from probes.dryrun import dry_run
    except ImportError as error:
        raise EnvironmentProblem(
            f"the dry run needs torch, transformers and peft: {error}", hint=install_command("torch")
        ) from error

    return dry_run


def _remembered(predict: Predict) -> Predict:
    """Each setup asked once, whatever the number of tables it stands in."""
    asked: dict[tuple[str, str, TrainSetup], Prediction | ProbeFailure | None] = {}

    def ask(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Prediction | ProbeFailure | None:
        key = (model.model_id, gpu.key, setup)
        if key not in asked:
            asked[key] = predict(model, gpu, setup)
        return asked[key]

    return ask


def _lookup(row: MeasuredRow) -> tuple[ModelSpec, GpuSpec]:
    assert row.gpu is not None  # comparable rows have a card
    if row.model is None:
        assert row.config is not None
        return spec_from_config(row.config, model_id=row.model_name, source=row.source), find_gpu(row.gpu)
    return loaded(row.model), find_gpu(row.gpu)


def _write(directory: Path, level: str, tables: Sequence[AccuracyTable], command: str) -> None:
    """The level's page, and per quantity a CSV of all cases and a scatter plot."""
    name = level.replace("_", "-")
    text = accuracy_markdown(tables, title=f"Accuracy of the {LEVELS[level]}", command=command)
    write_text(directory / f"{name}.md", text)
    for table in tables:
        stem = f"{name}-{table.what.replace('_', '-')}"
        write_text(directory / f"{stem}.csv", accuracy_csv(table))
        try:
            scatter_svg(table, directory / f"{stem}.svg")
        except ImportError as error:
            raise EnvironmentProblem(
                f"scatter plots need matplotlib: {error}", hint=install_command("report")
            ) from error


def main(words: Sequence[str]) -> int:
    """The exit code of the command."""
    command = typer.Typer(add_completion=False)
    command.command()(accuracy)
    try:
        command(list(words), standalone_mode=False)
    except PlannerError as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
