"""The error bands by stack: how far published runs lie from each rung, fitted, left out source by source, and written.

    python benchmarks/stack_bands.py                 # the formula anew, the dry run as recorded
    python benchmarks/stack_bands.py --dry-runs 20   # and so many dry runs that are not recorded yet

Writes `benchmarks/data/stack_errors.jsonl` (every comparison), `planner/data/bands.json` (what predictions carry) and
`docs/accuracy/bands.md`. A source is one published file, or the folder of files that hold one run each: a measurement
campaign under its own versions. It is left out whole; a stack without ten other rows then has the band of stacks that
nobody measured.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gathered
from planner.cli.accuracy import _lookup
from planner.errors import PlannerError
from planner.evidence.bands import LEAST_ROWS, Cell, fit_cell, metric_of, pooled_cell
from planner.evidence.measured import MeasuredRow, Quantity, load_rows
from planner.outcome import Prediction
from planner.predict import predict
from reports.accuracy import predicted_figure

ROOT = Path(__file__).resolve().parent.parent
ERRORS = ROOT / "benchmarks" / "data" / "stack_errors.jsonl"
BANDS = ROOT / "planner" / "data" / "bands.json"
PAGE = ROOT / "docs" / "accuracy" / "bands.md"
METRICS: tuple[Quantity, ...] = ("allocated", "reserved", "device", "tokens_per_s")
VARYING = frozenset({"ms_swift_benchmark"})
"""Runs whose lengths vary up to the one that their setup says, on fixed segments: their reserved peak is no setup's."""
TARGET = (0.85, 0.95)

GATHERED = frozenset(row.group for row in gathered.rows())

Error = dict[str, Any]


def comparable_rows() -> list[MeasuredRow]:
    """Published runs that a prediction can be held against: one GPU and several."""
    rows = (*load_rows(), *load_rows("multi"), *gathered.rows())
    return [row for row in rows if row.status == "ok" and row.setup is not None and row.group not in VARYING]


def _said(row: MeasuredRow, what: Quantity) -> bool:
    """Whether a gathered figure says enough to fit on; the other files hold no others."""
    if row.group not in GATHERED:
        return True
    if what == "tokens_per_s":
        return row.speed_confidence in ("A", "B")
    return row.memory_confidence in ("A", "B")


def sources(rows: Iterable[MeasuredRow]) -> dict[str, str]:
    """Row id -> source."""
    files: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        files[row.source.partition("#")[0].partition(" ")[0]].add(row.id)
    found = {}
    for file, ids in files.items():
        for one in ids:
            found[one] = file if len(ids) > 1 else file.rpartition("/")[0]
    return found


def errors_of(row: MeasuredRow, prediction: Prediction, rung: str, source: str) -> list[Error]:
    """Measured over predicted, for every figure that was measured."""
    found = []
    for what in METRICS:
        predicted = predicted_figure(prediction, what, row.untimed)
        measured = row.measured(what)
        if predicted is None or measured is None or not row.comparable(what) or not _said(row, what):
            continue
        setup = row.speed_setup if what == "tokens_per_s" else row.setup
        assert setup is not None
        found.append(
            {
                "id": row.id,
                "rung": rung,
                "metric": what,
                "stack": setup.stack,
                "gpus": metric_of(setup),
                "gpu": row.gpu,
                "source": source,
                "config": f"{row.group}|{row.config_id}",
                "ratio": round(measured / predicted, 5),
                **({"kept": True} if row.group in GATHERED and gathered.kept_out(row) else {}),
            }
        )
    return found


def formula_errors(rows: Sequence[MeasuredRow]) -> list[Error]:
    """Every figure against the formula; tokens/s at the mean length, of all GPUs together."""
    of = sources(rows)
    found: list[Error] = []
    for row in rows:
        if not any(row.comparable(what) for what in METRICS):
            continue
        model, gpu = _lookup(row)
        for setup, memory in ((row.setup, True), (row.speed_setup, False)):
            assert setup is not None
            try:
                answer = predict(model, gpu, setup)
            except PlannerError:
                continue
            each = errors_of(row, answer, "formula", of[row.id])
            found += [one for one in each if (one["metric"] != "tokens_per_s") == memory]
    for one in found:  # a recorded speed is that of one GPU
        if one["metric"] == "tokens_per_s" and one["gpus"] == "several":
            one["ratio"] = 0.0
    return [one for one in found if one["ratio"]]


def dry_run_errors(rows: Sequence[MeasuredRow], known: Sequence[Error], num: int) -> list[Error]:
    """Up to `num` dry runs of one-GPU rows that are not recorded; rows of one setup share one."""
    from probes.dryrun import dry_run

    of = sources(rows)
    done = {one["id"] for one in known}
    answers: dict[tuple[str, str, object], Prediction | None] = {}
    found: list[Error] = []
    for row in rows:
        if row.num_gpus > 1 or row.id in done or not any(row.comparable(what) for what in METRICS[:3]):
            continue
        model, gpu = _lookup(row)
        key = (model.model_id, gpu.key, row.setup)
        if key not in answers:
            if len(answers) >= num:
                continue
            assert row.setup is not None
            answer = dry_run(model, gpu, row.setup)
            answers[key] = answer if isinstance(answer, Prediction) else None
        prediction = answers[key]
        if prediction is not None:
            each = errors_of(row, prediction, "dry_run", of[row.id])
            found += [one for one in each if one["metric"] != "tokens_per_s"]
    return found


def fitted(errors: Sequence[Error]) -> dict[tuple[str, str, str, str], Cell]:
    """A cell for every (rung, metric, one or several GPUs, stack) with enough rows, and "" for any other stack.

    Rows that `benchmarks/gathered.py` keeps out are not fitted on; they are judged all the same (`left_out`).
    """
    groups: dict[tuple[str, str, str], dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for one in errors:
        if one.get("kept"):
            continue
        groups[one["rung"], one["metric"], one["gpus"]][one["stack"]].append(one)
    cells = {}
    for (rung, metric, gpus), by_stack in groups.items():
        for stack, rows in by_stack.items():
            if len(rows) >= LEAST_ROWS:
                cells[rung, metric, gpus, stack] = fit_cell(
                    [one["ratio"] for one in rows],
                    num_sources=len({one["source"] for one in rows}),
                    cards=sorted({one["gpu"] for one in rows}),
                )
        if sum(map(len, by_stack.values())) >= LEAST_ROWS:
            cells[rung, metric, gpus, ""] = pooled_cell([[one["ratio"] for one in rows] for rows in by_stack.values()])
    return cells


def left_out(errors: Sequence[Error]) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """(rows, those inside), each source left out in turn, for every band: a row whose stack has no ten others left is
    judged by the band of stacks that nobody measured, and counts there."""
    counts: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for source in sorted({one["source"] for one in errors}):
        cells = fitted([one for one in errors if one["source"] != source])
        for one in errors:
            if one["source"] != source:
                continue
            place = (one["rung"], one["metric"], one["gpus"])
            own = cells.get((*place, one["stack"]))
            cell = own or cells.get((*place, ""))
            if cell is None:
                continue
            count = counts[(*place, one["stack"] if own else "")]
            count[0] += 1
            count[1] += cell.holds(one["ratio"])
    return {key: (count[0], count[1]) for key, count in counts.items()}


def page(errors: Sequence[Error]) -> str:
    """The Markdown table."""
    cells, counts = fitted(errors), left_out(errors)
    lines = [
        "# Error bands, by stack",
        "",
        "Written by `python benchmarks/stack_bands.py`; do not edit by hand. A band says: in 9 of 10 runs like this",
        "the measured figure lies within it, as a share of the predicted one. *Left out*: the share of rows inside the",
        "band that the other sources give (a source is one published file, or a folder of files of one run each). A",
        "row whose stack has no ten others left is judged by the band of a stack that nobody measured, and counts",
        "there. ms-swift's 57 runs of varying lengths on fixed segments stand apart: they reserve up to twice what",
        "batches of the longest length would (README.md beside this page). Half of the gathered rows",
        "([gathered.md](gathered.md)) is never fitted on, and judged like the rest.",
        "",
        "| rung | metric | GPUs, attention | stack | rows | sources | band | left out: inside | of |",
        "|---|---|---|---|---:|---:|---|---:|---:|",
    ]
    for key in sorted(cells):
        rung, metric, gpus, stack = key
        cell = cells[key]
        name = stack or "*any other*"
        rows, inside = counts.get(key, (0, 0))
        share = f"{inside / rows:.0%}" if rows else ""
        lines.append(
            f"| {rung.replace('_', ' ')} | {metric} | {gpus} | {name} | {cell.num_rows} | {cell.num_sources or ''} | "
            f"-{100 * cell.below:.1f} to +{100 * cell.above:.1f} % | {share} | {rows or ''} |"
        )
    lines += ["", "## All rows", "", "| rung | what | rows | inside, left out |", "|---|---|---:|---:|"]
    for rung in ("formula", "dry_run"):
        for name, metrics in (("memory", METRICS[:3]), ("speed", METRICS[3:])):
            picked = [count for key, count in counts.items() if key[0] == rung and key[1] in metrics]
            rows = sum(count[0] for count in picked)
            if rows:
                inside = sum(count[1] for count in picked)
                lines.append(f"| {rung.replace('_', ' ')} | {name} | {rows} | {inside / rows:.1%} |")
    few = [
        f"{key[0].replace('_', ' ')}, {key[1]}, {key[2]}, {key[3] or 'any other'}: {inside / rows:.0%} of {rows}"
        for key, (rows, inside) in sorted(counts.items())
        if rows >= LEAST_ROWS and not TARGET[0] <= inside / rows <= TARGET[1]
    ]
    lines += ["", "Outside 85 to 95 %: " + ("; ".join(few) if few else "none") + ".", ""]
    return "\n".join(lines)


def main() -> None:
    """Compares, fits and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-runs", type=int, default=0, help="so many dry runs that are not recorded yet")
    asked = parser.parse_args()
    rows = comparable_rows()
    recorded = [json.loads(line) for line in ERRORS.read_text().splitlines()] if ERRORS.exists() else []
    kinds = {row.id: metric_of(row.setup) for row in rows if row.setup is not None}
    dry = [one | {"gpus": kinds[one["id"]]} for one in recorded if one["rung"] == "dry_run" and one["id"] in kinds]
    if asked.dry_runs:
        dry += dry_run_errors(rows, dry, asked.dry_runs)
    errors = formula_errors(rows) + dry
    ERRORS.write_text("\n".join(json.dumps(one) for one in errors) + "\n", encoding="utf-8")
    cells = fitted(errors)
    names = ("rung", "metric", "gpus", "stack")
    values = [{**dict(zip(names, key, strict=True)), **cell.to_dict()} for key, cell in sorted(cells.items())]
    BANDS.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(errors), encoding="utf-8")
    sys.stdout.write(page(errors))


if __name__ == "__main__":
    main()
