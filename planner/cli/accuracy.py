"""`plan accuracy`: every recorded measurement against what a rung predicts for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.output import console, print_json, write_text
from planner.cli.rivals import compare, markdown
from planner.errors import EnvironmentProblem, UsageError
from planner.evidence.measured import MeasuredRow, Quantity, load_rows, newest_versions
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.install import install_command
from planner.models import catalogue
from planner.models.adapters import spec_from_config
from planner.models.spec import ModelSpec
from planner.outcome import Prediction, ProbeFailure
from planner.predict import predict
from planner.setup import TrainSetup
from reports.accuracy import AccuracyTable, accuracy_table
from reports.accuracy_charts import scatter_svg
from reports.accuracy_text import accuracy_csv, accuracy_json, accuracy_markdown, render_accuracy

Predict = Callable[[ModelSpec, GpuSpec, TrainSetup], Prediction | ProbeFailure | None]

RUNGS = {"formula": "formula", "dry_run": "dry run", "dry-run": "dry run"}
QUANTITIES: dict[str, tuple[Quantity, ...]] = {
    "memory": ("allocated", "reserved", "device"),
    "allocated": ("allocated",),
    "reserved": ("reserved",),
    "device": ("device",),
    "speed": ("tokens_per_s",),
    "all": ("allocated", "reserved", "device", "tokens_per_s"),
}


def accuracy(
    rung: Annotated[str, typer.Option(help="formula, or dry_run (needs torch; minutes).")] = "formula",
    what: Annotated[str, typer.Option(help="memory, allocated, reserved, device, speed or all.")] = "all",
    group: Annotated[str | None, typer.Option(help="Only this source.")] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Each configuration once, under its newest versions.")
    ] = False,
    rivals: Annotated[
        list[Path] | None,
        typer.Option(help="Python that has canifinetune, fitcheck-llm or fitscout: their errors; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for Markdown, CSV and SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Predicted against measured, per source: median, 90th and 95th percentile, worst."""
    quantities = _quantities(rung, what)
    rows = _rows(group, newest)
    if rivals:
        _against_rivals(rows, rivals, out)
        return
    ask = _remembered(predict if rung == "formula" else dry_run_setup())
    tables = [accuracy_table(rows, ask, what=one, lookup=_lookup, rung=RUNGS[rung]) for one in quantities]
    if out is not None:
        asked = (
            f"--rung {rung} --what {what}" + (f" --group {group}" if group else "") + (" --newest" if newest else "")
        )
        _write(out, rung, tables, f"plan accuracy {asked} --out DIR")
    if as_json:
        print_json(accuracy_json(tables))
        return
    render_accuracy(tables, console())


def _quantities(rung: str, what: str) -> tuple[Quantity, ...]:
    """What is compared.

    Raises:
        UsageError: unknown words, or what the rung does not predict.
    """
    if rung not in RUNGS:
        raise UsageError(f"--rung must be formula or dry_run, got {rung!r}", hint="use --rung formula")
    if what not in QUANTITIES:
        raise UsageError(f"--what must be one of {', '.join(QUANTITIES)}; got {what!r}", hint="use --what all")
    found = tuple(one for one in QUANTITIES[what] if rung == "formula" or one != "tokens_per_s")
    if not found:
        raise UsageError("the dry run predicts memory only", hint="use --what memory, or --rung formula")
    return found


def _against_rivals(rows: Sequence[MeasuredRow], rivals: Sequence[Path], out: Path | None) -> None:
    table = markdown(compare(rows, rivals, _lookup))
    if out is not None:
        write_text(out / "rivals.md", f"# Other estimators on the recorded runs\n\n{table}")
    console().print(table, markup=False, soft_wrap=True)


def _rows(group: str | None, newest: bool) -> Sequence[MeasuredRow]:
    rows = load_rows()
    if group is not None:
        known = sorted({row.group for row in rows})
        if group not in known:
            raise UsageError(f"no recorded measurements of {group!r}", hint=f"sources: {', '.join(known)}")
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
    answers: dict[tuple[str, str, TrainSetup], Prediction | ProbeFailure | None] = {}

    def ask(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Prediction | ProbeFailure | None:
        key = (model.model_id, gpu.key, setup)
        if key not in answers:
            answers[key] = predict(model, gpu, setup)
        return answers[key]

    return ask


def _lookup(row: MeasuredRow) -> tuple[ModelSpec, GpuSpec]:
    assert row.gpu is not None  # comparable rows have a card
    if row.model is None:
        assert row.config is not None
        return spec_from_config(row.config, model_id=row.model_name, source=row.source), find_gpu(row.gpu)
    spec = catalogue.load(row.model)
    assert spec is not None, row.model  # the recorded rows name catalogue entries only; a test checks
    return spec, find_gpu(row.gpu)


def _write(directory: Path, rung: str, tables: Sequence[AccuracyTable], command: str) -> None:
    """The rung's page, and per quantity a CSV of all cases and a scatter plot."""
    name = rung.replace("_", "-")
    text = accuracy_markdown(tables, title=f"Accuracy of the {RUNGS[rung]}", command=command)
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
