"""Every recorded measurement against what a level predicts for it, or other estimators (--rivals).

python -m benchmarks.accuracy [--level formula] [--what all] [--group SOURCE] [--out docs/accuracy] [--json]
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.accuracy_table import AccuracyTable, Lookup, Predict, accuracy_table
from benchmarks.accuracy_text import accuracy_csv, accuracy_json, accuracy_markdown, render_accuracy, scatter_svg
from benchmarks.measured import MeasuredRow, Quantity, load_rows, newest_versions
from benchmarks.shared import loaded
from finetune_planner.cli import options
from finetune_planner.cli.output import console, fail, print_json, write_text
from planner.core.errors import EnvironmentProblem, PlannerError, UsageError
from planner.core.install import install_command
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
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
    rivals: Annotated[
        list[Path] | None,
        typer.Option(
            "--rivals", help="Python that has canifinetune, fitcheck-llm or fitscout: their errors; repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for Markdown, CSV and SVG.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predicted against measured, per source: median, 90th and 95th percentile, worst."""
    quantities = _quantities(level, what)
    rows = _rows(group, newest)
    if rivals:
        table = rivals_table(compare_rivals(rows, rivals, _lookup))
        if out is not None:
            write_text(out / "rivals.md", f"# Other estimators on the recorded runs\n\n{table}")
        console().print(table, markup=False, soft_wrap=True)
        return
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


TIMEOUT_S = 600


class RivalRow(NamedTuple):
    """One estimator on one source's runs, and the formula on the same; errors as fractions."""

    name: str
    group: str
    figure: Quantity
    num_configs: int
    num_unanswered: int
    median_error: float
    worst_error: float
    own_median_error: float
    own_worst_error: float


def compare_rivals(rows: Sequence[MeasuredRow], pythons: Sequence[Path], lookup: Lookup) -> list[RivalRow]:
    """Every rival that these Pythons have, source by source; of a configuration that was repeated the first run.

    Args:
        lookup: the model and the card of a row.

    Raises:
        EnvironmentProblem: a Python that does not start, or has none of them.
    """
    first_runs: dict[tuple[str, str], MeasuredRow] = {}
    for row in rows:
        if row.status == "ok" and row.num_gpus == 1 and (row.comparable("reserved") or row.comparable("device")):
            first_runs.setdefault((row.group, row.config_id), row)
    predictions = {
        row.id: predict_memory(*lookup(row), row.setup) for row in first_runs.values() if row.setup is not None
    }
    rival_rows: list[RivalRow] = []
    for python in pythons:
        answers = _ask(python, [_line(row, lookup) for row in first_runs.values()])
        errors: dict[tuple[str, str, Quantity], list[tuple[float | None, float]]] = defaultdict(list)
        for row, several in zip(first_runs.values(), answers, strict=True):
            for answer in several:
                measured = row.measured(answer["figure"])
                if measured is None:
                    continue
                off = None if answer["gib"] is None else answer["gib"] * GIB / measured - 1
                own: int = getattr(predictions[row.id], f"peak_{answer['figure']}_bytes")
                errors[answer["name"], row.group, answer["figure"]].append((off, own / measured - 1))
        for (name, group, figure), each in sorted(errors.items()):
            answered = [(abs(theirs), abs(ours)) for theirs, ours in each if theirs is not None]
            if answered:
                theirs, ours = zip(*answered, strict=True)
                figures = median(theirs), max(theirs), median(ours), max(ours)
                rival_rows.append(RivalRow(name, group, figure, len(answered), len(each) - len(answered), *figures))
    return rival_rows


def rivals_table(rows: Sequence[RivalRow]) -> str:
    """One table: the rival's error and the formula's, on the runs that the rival answers."""
    lines = [
        "| estimator | runs of | figure | configurations | not answered | median | worst | formula here | worst |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        words = " | ".join(f"{100 * share:.1f} %" for share in row[5:])
        lines.append(
            f"| {row.name} | {row.group} | {row.figure} | {row.num_configs} | {row.num_unanswered or ''} | {words} |"
        )
    return "\n".join(lines) + "\n"


def _line(row: MeasuredRow, lookup: Lookup) -> str:
    assert row.setup is not None  # comparable rows have one
    model, gpu = lookup(row)
    return json.dumps(
        {
            "model": row.model_name,
            "setup": setup_to_dict(row.setup),
            "shape": {"gpu": gpu.key, "memory_gib": gpu.memory_bytes / GIB, **_shape(model)},
        }
    )


def _shape(model: ModelSpec) -> dict[str, Any]:
    """A dense decoder in the words that every estimator has."""
    layer = next(kind for kind in model.layer_kinds if kind.attention is not None)
    assert layer.attention is not None
    return {
        "num_params": model.num_params,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "num_kv_heads": layer.attention.num_kv_heads,
        "head_dim": layer.attention.head_dim,
        "intermediate_size": layer.mlp.intermediate_size if layer.mlp is not None else 0,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
    }


def _ask(python: Path, lines: Sequence[str]) -> list[list[dict[str, Any]]]:
    code = Path(__file__).with_name("rival_child.py").read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", code],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(
            f"{python} did not answer: {error}", hint="give the Python of an environment"
        ) from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(lines) or not any(answers):
        raise EnvironmentProblem(
            f"{python} has none of canifinetune, fitcheck-llm and fitscout, or failed: {done.stderr[-200:]}",
            hint="install one there: PYTHON -m pip install canifinetune",
        )
    return answers


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
