"""The accuracy report on the terminal (one table per quantity, whole within 80 columns), as Markdown, CSV and JSON, and
as scatter plots: SVG files that do not change when nothing changed."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy_table import AccuracyCase, AccuracyTable, GroupStats
from benchmarks.measured import Quantity
from planner.core.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

NAMES: dict[Quantity, str] = {
    "allocated": "peak allocated memory (max_memory_allocated)",
    "reserved": "peak reserved memory (max_memory_reserved)",
    "device": "peak device memory (nvidia-smi)",
    "tokens_per_s": "tokens per second per GPU",
}
NUM_WORST = 10
COLUMNS = (
    "id", "group", "stack", "model", "gpu", "method", "precision", "quantization", "fp32_cast", "rank", "checkpointing",
    "attention", "micro_batch", "seq_len", "measured", "predicted", "unit", "error_percent", "ran", "predicted_fits",
    "versions", "assumed", "differs", "source",
)  # fmt: skip


def render_accuracy(tables: Sequence[AccuracyTable], console: "Console") -> None:
    """Errors per source, then what was said and seen about fitting."""
    from rich.table import Table

    for table in tables:
        title = f"{NAMES[table.what].capitalize()}, {table.level}: error of the prediction"
        if table.overall is None:
            console.print(f"{title}: no recorded run could be compared")
            continue
        view = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
        view.add_column("source", no_wrap=True)
        for name in ("configs", "bias", "median", "90th", "95th", "worst", "noise"):
            view.add_column(name, justify="right", no_wrap=True)
        for group in (*table.groups, table.overall, *(table.exact if len(table.exact) > 1 else ())):
            view.add_row(*_cells(group), style="bold" if group is table.overall else None)
        console.print(view)
        if table.what != "tokens_per_s":
            fit = table.fit
            console.print(
                f"{fit.num_out_of_memory} runs went out of memory, {fit.num_false_fits} of them predicted to fit; "
                f"{fit.num_ran} ran, {fit.num_false_rejects} of them predicted not to fit."
            )
        if table.not_predicted:
            console.print(f"{len(table.not_predicted)} rows have no prediction (reasons: --json or --out).")
        console.print()


def _cells(stats: GroupStats) -> tuple[str, ...]:
    figures = (stats.median_error, stats.p90_error, stats.p95_error, stats.worst_error, stats.noise_median)
    name = stats.name.replace("known differences of the stack", "known differences")
    return name, str(stats.num_configs), _percent(stats.bias, "+"), *map(_percent, figures)


def accuracy_markdown(tables: Sequence[AccuracyTable], *, title: str, command: str) -> str:
    """The whole report: what was compared, errors per source, fits, worst cases."""
    lines = [f"# {title}", "", f"Written by `{command}`; do not edit by hand.", ""]
    lines += [
        "Errors are predicted above measured as a share of measured. A configuration that was measured under several",
        "software versions counts once (the median of its errors); *noise* is how far those runs lie apart themselves.",
        "*Bias* is the median with its sign. Rows and their sources: the CSV files beside this one.",
        "",
    ]
    for table in tables:
        lines += _section(table)
    return "\n".join(lines).rstrip() + "\n"


def _section(table: AccuracyTable) -> list[str]:
    lines = [f"## {NAMES[table.what].capitalize()}, {table.level}", ""]
    if table.overall is None:
        return [*lines, "No recorded run could be compared.", ""]
    lines += _stats_table((*table.groups, table.overall), first="source")
    if len(table.exact) > 1:
        lines += ["By how well a setup says what was run:", ""]
        lines += _stats_table(table.exact, first="rows")
    if table.what != "tokens_per_s":
        fit = table.fit
        lines += [
            f"Fits: of {fit.num_out_of_memory} runs that went out of memory, {fit.num_false_fits} were predicted to "
            f"fit; of {fit.num_ran} that ran, {fit.num_false_rejects} were predicted not to fit. "
            f"False fits: {100 * fit.false_fit_fraction:.1f} % of all judged.",
            "",
        ]
    if table.not_predicted:
        lines += [f"Not predicted: {len(table.not_predicted)} rows.", ""]
        reasons = sorted({reason for _, reason in table.not_predicted})
        lines += [f"- {reason}" for reason in reasons] + [""]
    lines += [f"The {NUM_WORST} worst configurations:", "", *_worst_table(table.worst(NUM_WORST)), ""]
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


def _worst_table(cases: Sequence[AccuracyCase]) -> list[str]:
    lines = ["| run | setup | measured | predicted | error | known differences |", "|---|---|---:|---:|---:|---|"]
    for case in cases:
        lines.append(
            f"| {case.row.id} | {describe(case)} | {_figure(case.measured or 0.0)} | {_figure(case.predicted)} | "
            f"{_percent(case.error_fraction, '+')} | {'; '.join(case.row.differs)} |"
        )
    return lines


def describe(case: AccuracyCase) -> str:
    setup = case.setup
    parts = [case.row.model or case.row.model_name, case.row.gpu or "", setup.method, setup.precision]
    if setup.quantized:
        parts.append(setup.quantization + (" fp32-cast" if setup.kbit_fp32_cast else ""))
    if setup.lora_rank:
        parts.append(f"r{setup.lora_rank}")
    parts.append(f"{setup.micro_batch_seqs} x {setup.seq_len_tokens}")
    parts.append("checkpointing" if setup.checkpointing else "no checkpointing")
    return ", ".join(parts)


def accuracy_csv(table: AccuracyTable) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in sorted(table.cases, key=lambda entry: entry.row.id):
        record = case_record(case, table.what)
        writer.writerow([record[name] for name in COLUMNS])
    return out.getvalue()


def case_record(case: AccuracyCase, what: Quantity) -> dict[str, Any]:
    """One case as plain values; memory in bytes."""
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
        "error_percent": "" if case.measured is None else round(100 * case.error_fraction, 2),
        "ran": case.ran,
        "predicted_fits": case.predicted_fits,
        "versions": " ".join(f"{name}={version}" for name, version in sorted(row.versions.items())),
        "assumed": "; ".join(row.assumed),
        "differs": "; ".join(row.differs),
        "source": row.source,
    }


def accuracy_json(tables: Sequence[AccuracyTable]) -> list[dict[str, Any]]:
    """The tables as JSON values, cases included."""
    return [
        {
            "level": table.level,
            "what": table.what,
            "overall": None if table.overall is None else asdict(table.overall),
            "groups": [asdict(stats) for stats in table.groups],
            "exact": [asdict(stats) for stats in table.exact],
            "fit": {**asdict(table.fit), "false_fit_fraction": table.fit.false_fit_fraction},
            "not_predicted": [{"id": row_id, "reason": reason} for row_id, reason in table.not_predicted],
            "cases": [case_record(case, table.what) for case in sorted(table.cases, key=lambda entry: entry.row.id)],
        }
        for table in tables
    ]


def _plain(value: float) -> float | int:
    return round(value) if value >= 1000 else round(value, 2)


def _figure(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value > 1e7 else f"{value:.0f}"


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f} %"


MARKERS = "osD^vPX*<>"  # sources differ by shape as well as by colour


def scatter_svg(table: AccuracyTable, path: Path) -> None:
    """Write predicted over measured, one marker per source, with the diagonal and a band of 10 %.

    Raises:
        ImportError: matplotlib is not installed (the `report` extra).
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    scale = 1.0 if table.what == "tokens_per_s" else float(GIB)
    unit = "tokens/s" if table.what == "tokens_per_s" else "GiB"
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
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(*ends)
            axes.set_ylim(*ends)
            axes.legend(fontsize=8, frameon=False)
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted ({table.level}), {unit}")
        axes.set_title(NAMES[table.what].capitalize(), fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "finetune-planner"})
