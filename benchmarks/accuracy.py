"""Every recorded measurement against what a level predicts for it: errors per source, false fits, the worst cases.

    python -m benchmarks.accuracy [--level formula] [--group SOURCE] [--out docs/accuracy]

Without --out the page is printed; with it, a CSV of all cases and a scatter plot per quantity lie beside it. The dry
run (--level dry_run) predicts memory alone, needs torch and takes minutes.
"""

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measured import MeasuredRow, Quantity, load_rows, predicted_figure, version_noise
from benchmarks.shared import percentile
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction, ProbeFailure

Predict = Callable[[ModelSpec, GpuSpec, TrainSetup], Prediction | ProbeFailure | None]
NAMES: dict[Quantity, str] = {
    "allocated": "Peak allocated memory (max_memory_allocated)",
    "reserved": "Peak reserved memory (max_memory_reserved)",
    "device": "Peak device memory (nvidia-smi)",
    "tokens_per_s": "Tokens per second per GPU",
}
NUM_WORST = 3


@dataclass(frozen=True, kw_only=True)
class AccuracyCase:
    """One recorded run with what was predicted for it, in base units.

    Attributes:
        measured, predicted: bytes or tokens/s; `measured` is None of a run that went out of memory.
        predicted_fits: whether the prediction says that the card is large enough.
    """

    row: MeasuredRow
    setup: TrainSetup
    measured: float | None
    predicted: float
    predicted_fits: bool

    @property
    def ran(self) -> bool:
        return self.row.status == "ok"

    @property
    def error(self) -> float:
        """Predicted above measured, as a fraction of measured; negative when too low, NaN where none was measured."""
        return self.predicted / self.measured - 1.0 if self.measured is not None else math.nan


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Errors of one group of cases; all as fractions.

    `noise_median`, `noise_p90`: spread of the same configurations under other software versions, None without
    repeats: no prediction can be tested more tightly than that.
    """

    name: str
    num_cases: int
    num_configs: int
    bias: float
    median_error: float
    p90_error: float
    p95_error: float
    worst_error: float
    worst_id: str
    noise_median: float | None
    noise_p90: float | None


@dataclass(frozen=True, kw_only=True)
class AccuracyTable:
    """The accuracy of one level on one quantity.

    Attributes:
        groups: one per source, in order of name; `exact`: cases that the setup expresses fully against those with a
            known difference of the stack.
        not_predicted: row id and the level's reason, for rows it had no answer for.
    """

    level: str
    what: Quantity
    cases: tuple[AccuracyCase, ...]
    overall: GroupStats | None
    groups: tuple[GroupStats, ...]
    exact: tuple[GroupStats, ...]
    not_predicted: tuple[tuple[str, str], ...]

    @property
    def false_fits(self) -> tuple[int, int]:
        """(runs that went out of memory, those of them predicted to fit): the error that costs a person a night."""
        out_of_memory = [case for case in self.cases if not case.ran]
        return len(out_of_memory), sum(case.predicted_fits for case in out_of_memory)

    @property
    def false_rejects(self) -> tuple[int, int]:
        """(runs that ran, those of them predicted not to fit)."""
        ran = [case for case in self.cases if case.ran]
        return len(ran), sum(not case.predicted_fits for case in ran)

    @property
    def false_fit_fraction(self) -> float:
        return self.false_fits[1] / len(self.cases) if self.cases else 0.0

    def worst(self, num: int) -> tuple[AccuracyCase, ...]:
        """The cases with the largest errors, one per configuration, worst first."""
        worst_of: dict[tuple[str, str], AccuracyCase] = {}
        measured = (case for case in self.cases if case.measured is not None)
        for case in sorted(measured, key=lambda case: abs(case.error), reverse=True):
            worst_of.setdefault((case.row.group, case.row.config_id), case)
        return tuple(worst_of.values())[:num]


def accuracy_table(rows: Iterable[MeasuredRow], predict: Predict, *, what: Quantity, level: str) -> AccuracyTable:
    """Every comparable row through `predict`, and the statistics of its errors.

    Args:
        rows: recorded runs; those that cannot be compared on `what` are skipped.
        predict: one setup's prediction; None or a failure counts as not predicted.
        level: the name in the headline.
    """
    rows = tuple(rows)
    cases: list[AccuracyCase] = []
    missing: list[tuple[str, str]] = []
    for row in rows:
        setup = row.setup_for(what)
        if setup is None or not row.comparable(what) or (what == "tokens_per_s" and row.status != "ok"):
            continue
        try:
            model, gpu = row.model_and_gpu()
            answer = predict(model, gpu, setup)
        except PlannerError as error:  # a module tree, read where torch is
            missing.append((row.id, error.message))
            continue
        predicted = predicted_figure(answer, what) if isinstance(answer, Prediction) else None
        if not isinstance(answer, Prediction) or predicted is None:
            missing.append((row.id, answer.message if isinstance(answer, ProbeFailure) else "no prediction"))
            continue
        measured = row.measured(what) if row.status == "ok" else None
        fits = answer.peak_device_bytes <= gpu.memory_bytes
        cases.append(AccuracyCase(row=row, setup=setup, measured=measured, predicted=predicted, predicted_fits=fits))
    compared = [case for case in cases if case.measured is not None]
    by_group: dict[str, list[AccuracyCase]] = defaultdict(list)
    by_exact: dict[str, list[AccuracyCase]] = defaultdict(list)
    for case in compared:
        by_group[case.row.group].append(case)
        by_exact["known differences of the stack" if case.row.differs else "expressed fully"].append(case)
    return AccuracyTable(
        level=level,
        what=what,
        cases=tuple(cases),
        overall=_stats("all sources", compared, rows, what) if compared else None,
        groups=tuple(_stats(name, of_group, rows, what) for name, of_group in sorted(by_group.items())),
        exact=tuple(_stats(name, of_kind, rows, what) for name, of_kind in sorted(by_exact.items())),
        not_predicted=tuple(missing),
    )


def _stats(name: str, cases: Sequence[AccuracyCase], rows: Iterable[MeasuredRow], what: Quantity) -> GroupStats:
    """Per configuration first (its runs' median), then over configurations: a run repeated often counts once."""
    configs: dict[tuple[str, str], list[AccuracyCase]] = defaultdict(list)
    for case in cases:
        configs[case.row.group, case.row.config_id].append(case)
    signed = [median(case.error for case in repeats) for repeats in configs.values()]
    errors = [abs(error) for error in signed]
    worst = max(cases, key=lambda case: abs(case.error))
    noise = version_noise((row for row in rows if (row.group, row.config_id) in configs), what)
    return GroupStats(
        name=name,
        num_cases=len(cases),
        num_configs=len(configs),
        bias=median(signed),
        median_error=median(errors),
        p90_error=percentile(errors, 0.90),
        p95_error=percentile(errors, 0.95),
        worst_error=abs(worst.error),
        worst_id=worst.row.id,
        noise_median=median(noise) if noise else None,
        noise_p90=percentile(noise, 0.90) if noise else None,
    )


def page(tables: Sequence[AccuracyTable], *, title: str, command: str) -> str:
    """The whole report in Markdown: what was compared, errors per source, fits, worst cases."""
    lines = [f"# {title}", "", f"Written by `{command}`; do not edit by hand.", ""]
    lines += [
        "Errors are predicted above measured as a share of measured. A configuration that was measured under several",
        "software versions counts once (the median of its errors); *noise* is how far those runs lie apart themselves.",
        "*Bias* is the median with its sign. Rows and their sources: the CSV files beside this one.",
        "",
    ]
    for table in tables:
        lines += [f"## {NAMES[table.what]}, {table.level}", "", *_section(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(table: AccuracyTable) -> list[str]:
    if table.overall is None:
        return ["No recorded run could be compared."]
    lines = _stats_table((*table.groups, table.overall), first="source")
    if len(table.exact) > 1:
        lines += ["By how well a setup says what was run:", "", *_stats_table(table.exact, first="rows")]
    if table.what != "tokens_per_s":
        (out_of_memory, false_fits), (ran, false_rejects) = table.false_fits, table.false_rejects
        lines += [
            f"Fits: of {out_of_memory} runs that went out of memory, {false_fits} were predicted to "
            f"fit; of {ran} that ran, {false_rejects} were predicted not to fit. "
            f"False fits: {100 * table.false_fit_fraction:.1f} % of all judged.",
            "",
        ]
    if table.not_predicted:
        reasons = sorted({reason for _, reason in table.not_predicted})
        lines += [f"Not predicted: {len(table.not_predicted)} rows.", "", *(f"- {reason}" for reason in reasons), ""]
    lines += [f"The {NUM_WORST} worst configurations:", ""]
    lines += ["| run | setup | measured | predicted | error | known differences |", "|---|---|---:|---:|---:|---|"]
    for case in table.worst(NUM_WORST):
        figures = " | ".join(
            f"{value / GIB:.2f} GiB" if value > 1e7 else f"{value:.0f}"
            for value in (case.measured or 0, case.predicted)
        )
        differs = "; ".join(case.row.differs)
        lines.append(f"| {case.row.id} | {_words(case)} | {figures} | {_percent(case.error, '+')} | {differs} |")
    return lines


def _stats_table(groups: Sequence[GroupStats], *, first: str) -> list[str]:
    lines = [
        f"| {first} | runs | configurations | bias | median | 90th | 95th | worst | worst run "
        "| noise median | noise 90th |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in groups:
        errors = (row.median_error, row.p90_error, row.p95_error, row.worst_error)
        cells = [row.name, str(row.num_cases), str(row.num_configs), _percent(row.bias, "+"), *map(_percent, errors)]
        cells += [row.worst_id, _percent(row.noise_median), _percent(row.noise_p90)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _words(case: AccuracyCase) -> str:
    setup = case.setup
    parts = [case.row.model or case.row.model_name, case.row.gpu or "", setup.method, setup.precision]
    if setup.quantized:
        parts.append(setup.quantization + (" fp32-cast" if setup.kbit_fp32_cast else ""))
    if setup.lora_rank:
        parts.append(f"r{setup.lora_rank}")
    parts.append(f"{setup.micro_batch_seqs} x {setup.seq_len_tokens}")
    parts.append("checkpointing" if setup.checkpointing else "no checkpointing")
    return ", ".join(parts)


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f} %"


def write_csv(table: AccuracyTable, path: Path) -> None:
    """Every case as plain values; memory in bytes."""
    with path.open("w", encoding="utf-8", newline="") as file:
        records = [_record(case, table.what) for case in sorted(table.cases, key=lambda case: case.row.id)]
        writer = csv.DictWriter(file, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _record(case: AccuracyCase, what: Quantity) -> dict[str, Any]:
    setup, row = case.setup, case.row
    return {
        "id": row.id,
        "group": row.group,
        "stack": row.stack,
        "model": row.model or row.model_name,
        "gpu": row.gpu,
        "method": setup.method,
        "precision": setup.precision,
        "quantization": setup.quantization,
        "fp32_cast": setup.kbit_fp32_cast,
        "rank": setup.lora_rank,
        "checkpointing": setup.checkpointing,
        "attention": setup.attention,
        "micro_batch": setup.micro_batch_seqs,
        "seq_len": setup.seq_len_tokens,
        "measured": "" if case.measured is None else _plain(case.measured),
        "predicted": _plain(case.predicted),
        "unit": "tokens/s" if what == "tokens_per_s" else "bytes",
        "error_percent": "" if case.measured is None else round(100 * case.error, 2),
        "ran": case.ran,
        "predicted_fits": case.predicted_fits,
        "versions": " ".join(f"{name}={version}" for name, version in sorted(row.versions.items())),
        "assumed": "; ".join(row.assumed),
        "differs": "; ".join(row.differs),
        "source": row.source,
    }


def _plain(value: float) -> float | int:
    return round(value) if value >= 1000 else round(value, 2)


MARKERS = "osD^vPX*<>"  # sources differ by shape as well as by colour


def scatter_svg(table: AccuracyTable, path: Path) -> None:
    """Predicted over measured, one marker per source, with the diagonal and a band of 10 %: a file that does not change
    when nothing changed (needs matplotlib, the `report` extra)."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    scale, unit = (1.0, "tokens/s") if table.what == "tokens_per_s" else (float(GIB), "GiB")
    cases = [case for case in table.cases if case.measured is not None]
    with rc_context({"svg.hashsalt": "finetune-planner", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for number, group in enumerate(sorted({case.row.group for case in cases})):
            points = [case for case in cases if case.row.group == group]
            measured = [(case.measured or 0.0) / scale for case in points]
            predicted = [case.predicted / scale for case in points]
            marker = MARKERS[number % len(MARKERS)]
            axes.scatter(measured, predicted, s=22, alpha=0.7, marker=marker, label=f"{group} ({len(points)})")
        if cases:
            values = [value / scale for case in cases for value in (case.measured or 0.0, case.predicted)]
            ends = [0.8 * min(values), 1.25 * max(values)]
            axes.plot(ends, ends, color="0.3", linewidth=1.0, label="exact")
            axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.5", alpha=0.15)
            axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
            axes.legend(fontsize=8, frameon=False)
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted ({table.level}), {unit}")
        axes.set_title(NAMES[table.what], fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "finetune-planner"})


def level_tables(level: str, rows: Iterable[MeasuredRow]) -> list[AccuracyTable]:
    """The tables of a level, each setup predicted once."""
    if level == "formula":
        return [accuracy_table(rows, cache(predict), what=what, level=level) for what in NAMES]
    from probes.dryrun import dry_run

    ask = cache(dry_run)
    return [accuracy_table(rows, ask, what=what, level="dry run") for what in NAMES if what != "tokens_per_s"]


def write(level: str, tables: Sequence[AccuracyTable], directory: Path | None) -> str:
    """The level's page; into a directory it goes with a CSV of all cases and a scatter plot per quantity."""
    command = f"python -m benchmarks.accuracy --level {level} --out DIR"
    text = page(tables, title=f"Accuracy of the {level.replace('_', ' ')}", command=command)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        name = level.replace("_", "-")
        (directory / f"{name}.md").write_text(text, encoding="utf-8")
        for table in tables:
            stem = f"{name}-{table.what.replace('_', '-')}"
            write_csv(table, directory / f"{stem}.csv")
            scatter_svg(table, directory / f"{stem}.svg")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=("formula", "dry_run"), default="formula")
    parser.add_argument("--group", help="only this source", choices=sorted({row.group for row in load_rows()}))
    parser.add_argument("--out", type=Path, help="directory for Markdown, CSV and SVG")
    args = parser.parse_args()
    rows = [row for row in load_rows() if args.group in (None, row.group)]
    print(write(args.level, level_tables(args.level, rows), args.out), end="")


if __name__ == "__main__":
    main()
