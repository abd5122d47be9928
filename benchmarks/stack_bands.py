"""The bands of memory by stack: how far published runs lie from each level, fitted, left out source by source, written.

    python -m benchmarks.stack_bands                 # the formula anew, the dry run as recorded
    python -m benchmarks.stack_bands --dry-runs 20   # and so many dry runs that are not recorded yet

Writes `benchmarks/data/stack_errors.jsonl` (every comparison), `planner/data/bands.json` (what predictions carry) and
`docs/accuracy/bands.md`. A source is one published file, or the folder of files that hold one run each: a measurement
campaign under its own versions. It is left out whole; a stack without ten other rows then has the band of stacks that
nobody measured.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from benchmarks import gathered
from benchmarks.band_fit import COVERAGE, LEAST_ROWS, UNSEEN_STACK, as_row, fit_cell, holds, pooled_cell
from benchmarks.measured import MeasuredRow, Quantity, load_rows, predicted_figure
from benchmarks.shared import DATA, DOCS, rows_so_far, write_rows
from planner.core.errors import PlannerError
from planner.planning.evidence.bands import Cell, gpu_count_kind
from planner.planning.predict import predict
from planner.setup.outcome import Prediction

ERRORS, PAGE = DATA / "stack_errors.jsonl", DOCS / "accuracy" / "bands.md"
BANDS = DOCS.parent / "planner" / "data" / "bands.json"
METRICS = gathered.METRICS[:3]
VARYING = frozenset({"ms_swift_benchmark"})
"""Runs whose lengths vary up to the one that their setup says, on fixed segments: their reserved peak is no setup's."""
TARGET = (0.85, 0.95)

GATHERED = frozenset(row.group for row in gathered.rows())

Error = dict[str, Any]


def comparable_rows() -> list[MeasuredRow]:
    """Published runs that a prediction can be held against: one GPU and several."""
    rows = (*load_rows(), *load_rows("multi"), *gathered.rows())
    return [row for row in rows if row.status == "ok" and row.setup is not None and row.group not in VARYING]


def _said(row: MeasuredRow) -> bool:
    """Whether a figure says enough to be compared; the other files hold no others."""
    return row.group not in GATHERED or row.memory_confidence in ("A", "B")


def sources(rows: Iterable[MeasuredRow]) -> dict[str, str]:
    """Row id -> source."""
    files: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        files[row.source.partition("#")[0].partition(" ")[0]].add(row.id)
    return {row_id: file if len(ids) > 1 else file.rpartition("/")[0] for file, ids in files.items() for row_id in ids}


def error_of(row: MeasuredRow, what: Quantity, prediction: Prediction, level: str, source: str) -> Error | None:
    """Measured over predicted of one figure, None where it cannot be compared."""
    predicted, measured = predicted_figure(prediction, what, row.untimed), row.measured(what)
    setup = row.setup_for(what)
    if predicted is None or measured is None or not _said(row):
        return None
    assert setup is not None
    return {
        "id": row.id,
        "level": level,
        "metric": what,
        "stack": setup.stack,
        "gpus": gpu_count_kind(setup),
        "gpu": row.gpu,
        "source": source,
        "config": f"{row.group}|{row.config_id}",
        "ratio": round(measured / predicted, 5),
        **({"kept": True} if row.group in GATHERED and gathered.kept_out(row) else {}),
        **({"otherwise": True} if gathered.otherwise(row, what) else {}),
    }


def formula_errors(rows: Sequence[MeasuredRow]) -> list[Error]:
    """Every figure against the formula."""
    of, ask, errors = sources(rows), cache(predict), list[Error | None]()
    for row in rows:
        for what in METRICS:
            setup = row.setup_for(what)
            if setup is None or not row.comparable(what):
                continue
            with suppress(PlannerError):
                errors.append(error_of(row, what, ask(*row.model_and_gpu(), setup), "formula", of[row.id]))
    return [error for error in errors if error is not None]


def dry_run_errors(rows: Sequence[MeasuredRow], recorded: Sequence[Error], num: int) -> list[Error]:
    """Up to `num` dry runs of one-GPU rows that are not recorded; rows of one setup share one."""
    from probes.dryrun import dry_run

    of, done = sources(rows), {error["id"] for error in recorded}
    answers: dict[tuple[str, str, object], Prediction | None] = {}
    errors: list[Error | None] = []
    for row in rows:
        figures = [what for what in METRICS if row.comparable(what)]
        if row.num_gpus > 1 or row.id in done or not figures:
            continue
        model, gpu = row.model_and_gpu()
        key = (model.model_id, gpu.key, row.setup)
        if key not in answers:
            if len(answers) >= num:
                continue
            assert row.setup is not None
            answer = dry_run(model, gpu, row.setup)
            answers[key] = answer if isinstance(answer, Prediction) else None
        prediction = answers[key]
        if prediction is not None:
            errors += [error_of(row, what, prediction, "dry_run", of[row.id]) for what in figures]
    return [error for error in errors if error is not None]


def fitted(errors: Sequence[Error]) -> dict[tuple[str, str, str, str], Cell]:
    """A cell for every (level, metric, one or several GPUs, stack) with enough rows, and "" for any other stack.

    Rows that `benchmarks/gathered.py` keeps out are not fitted on; they are judged all the same (`left_out`). Figures
    that hold what no setup says are not fitted on either, and are judged apart.
    """
    groups: dict[tuple[str, str, str], dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        if error.get("kept") or error.get("otherwise"):
            continue
        groups[error["level"], error["metric"], error["gpus"]][error["stack"]].append(error)
    cells = {}
    for (level, metric, gpus), by_stack in groups.items():
        ratios = {stack: [error["ratio"] for error in rows] for stack, rows in by_stack.items()}
        for stack, rows in by_stack.items():
            if len(rows) >= LEAST_ROWS:
                cells[level, metric, gpus, stack] = fit_cell(
                    ratios[stack],
                    others=[group for other, group in ratios.items() if other != stack],
                    num_sources=len({error["source"] for error in rows}),
                    cards=sorted({error["gpu"] for error in rows}),
                )
        if sum(map(len, by_stack.values())) >= LEAST_ROWS:
            cells[level, metric, gpus, ""] = pooled_cell([*ratios.values()])
    return cells


Key = tuple[str, str, str, str]


def judged(errors: Sequence[Error]) -> list[tuple[Error, Key, bool]]:
    """Every comparison with the band of the other sources: (it, whose band, whether inside).

    A row whose stack has no ten others left is judged by the band of stacks that nobody measured, and counts there.
    """
    comparisons = []
    for source in sorted({error["source"] for error in errors}):
        cells = fitted([error for error in errors if error["source"] != source])
        for error in errors:
            if error["source"] != source:
                continue
            place = (error["level"], error["metric"], error["gpus"])
            stack = error["stack"] if (*place, error["stack"]) in cells else ""
            cell = cells.get((*place, stack))
            if cell is not None:
                comparisons.append((error, (*place, stack), holds(cell, error["ratio"])))
    return comparisons


def left_out(errors: Sequence[Error]) -> dict[Key, tuple[int, int]]:
    """(rows, those inside), each source left out in turn, for every band."""
    return _counted((key, inside) for error, key, inside in judged(errors) if not error.get("otherwise"))


Of = TypeVar("Of")


def _counted(flags: Iterable[tuple[Of, bool]]) -> dict[Of, tuple[int, int]]:
    counts: dict[Of, tuple[int, int]] = {}
    for of, inside in flags:
        rows, num_inside = counts.get(of, (0, 0))
        counts[of] = rows + 1, num_inside + inside
    return counts


def by_chance(rows: int, share: float = COVERAGE) -> tuple[int, int]:
    """Fewest and most of so many rows that a band holding `share` of all holds in 95 of 100 draws of them: the central
    interval of the binomial distribution. Rows of one campaign are alike, so that truly it is wider."""
    tail, fewest, most = 0.025, 0, rows
    chances = [math.comb(rows, k) * share**k * (1 - share) ** (rows - k) for k in range(rows + 1)]
    while sum(chances[: fewest + 1]) <= tail:
        fewest += 1
    while sum(chances[most:]) <= tail:
        most -= 1
    return fewest, most


HEAD = """# Error bands, by stack

Written by `python -m benchmarks.stack_bands`; do not edit by hand. A band says: in 9 of 10 runs like this
the measured figure lies within it, as a share of the predicted one. *Left out*: the share of rows inside the
band that the other sources give (a source is one published file, or a folder of files of one run each). A
row whose stack has no ten others left is judged by the band of a stack that nobody measured, and counts
there. *By chance*: the shares between which a band that holds 90 % of all runs holds of so many, in 95 of 100
draws (binomial; rows of one campaign are alike, so that truly it is wider). ms-swift's 57 runs of varying
lengths on fixed segments stand apart: they reserve up to twice what batches of the longest length would
(README.md beside this page). Half of the gathered rows ([gathered.md](gathered.md)) is never fitted on, and
judged like the rest.

One rule for all stacks: each end is exceeded by 5 % of the stack's rows, with room for the next one (the k-th
of n rows is exceeded with k / (n + 1), as in split conformal prediction: Hyndman and Fan 1996, definition 6;
Lei et al. 2018, section 2.2). Fewer than 19 rows have no such end: beyond the outermost the tail is that of the
other stacks' rows beyond it, each stack weighing alike. Figures that hold what no setup says (a row's
`differs`, beginning with "tokens/s:" or "memory:") are not fitted on and counted apart: PEFT's LoRA-FA and MiCA,
which freeze one matrix of each pair (README.md beside this page). Bands of speeds: [speed bands](speed-bands.md).

| level | metric | GPUs, attention | stack | rows | sources | band | left out: inside | of | by chance |
|---|---|---|---|---:|---:|---|---:|---:|---:|
"""


def page(errors: Sequence[Error]) -> str:
    cells, each = fitted(errors), judged(errors)
    verdicts = [verdict for verdict in each if not verdict[0].get("otherwise")]
    counts = _counted((key, inside) for _, key, inside in verdicts)
    lines = []
    for (level, metric, gpus, stack), cell in sorted(cells.items()):
        rows, inside = counts.get((level, metric, gpus, stack), (0, 0))
        share = f"{inside / rows:.0%}" if rows else ""
        lines.append(
            f"| {level.replace('_', ' ')} | {metric} | {gpus} | {stack or '*any other*'} | {cell.num_rows} | "
            f"{cell.num_sources or ''} | -{100 * cell.below:.1f} to +{100 * cell.above:.1f} % | "
            f"{share} | {rows or ''} | {_chance(rows)} |"
        )
    lines += [
        "",
        "## All rows",
        "",
        "| level | what | rows | inside, left out | by chance |",
        "|---|---|---:|---:|---:|",
    ]
    for level in ("formula", "dry_run"):
        picked = [count for key, count in counts.items() if key[0] == level]
        lines += _share(f"{level.replace('_', ' ')} | memory", sum(n for n, _ in picked), sum(n for _, n in picked))
    apart = _counted((_stack_of(error)[:2], inside) for error, _, inside in each if error.get("otherwise"))
    for (level, what), (rows, inside) in sorted(apart.items()):
        lines += _share(f"{level.replace('_', ' ')} | {what} that holds what no setup says, not above", rows, inside)
    return HEAD + "\n".join([*lines, *_by_stack(verdicts), *_outside(counts), *_unmeasured(errors)])


def _by_stack(verdicts: Sequence[tuple[Error, Key, bool]]) -> list[str]:
    """Rows of one stack together, whichever band judged each."""
    counts = _counted((_stack_of(error), inside) for error, _, inside in verdicts)
    files: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for error, _, _ in verdicts:
        files[_stack_of(error)].add(error["source"])
    head = "| level | what | stack | sources | rows | inside, left out | by chance |"
    lines = ["", "## By stack", "", head, "|---|---|---|---:|---:|---:|---:|"]
    for (level, what, stack), (rows, inside) in sorted(counts.items()):
        if rows >= LEAST_ROWS:
            num = len(files[level, what, stack])
            lines += _share(f"{level.replace('_', ' ')} | {what} | {stack} | {num}", rows, inside)
    return lines


def _stack_of(error: Error) -> tuple[str, str, str]:
    return error["level"], "memory", error["stack"]


def _unmeasured(errors: Sequence[Error]) -> list[str]:
    """How often a whole stack's rows lie in the band of a stack that nobody measured."""
    places: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        places[error["level"], error["metric"], error["gpus"]][error["stack"]].append(error["ratio"])
    shares: list[float] = []
    for by_stack in places.values():
        for stack, ratios in by_stack.items():
            others = [rows for other, rows in by_stack.items() if other != stack]
            if len(ratios) >= LEAST_ROWS <= sum(map(len, others)):
                cell = pooled_cell(others)
                shares.append(sum(holds(cell, ratio) for ratio in ratios) / len(ratios))
    return [
        f"A stack of ten rows or more judged as one that nobody measured (the others' rows, {UNSEEN_STACK} times as "
        f"wide), the mean share of its rows inside: {sum(shares) / len(shares):.0%} (of {len(shares)}, least "
        f"{min(shares):.0%}).",
        "",
    ]


def _share(name: str, rows: int, inside: int) -> list[str]:
    return [f"| {name} | {rows} | {inside / rows:.1%} | {_chance(rows)} |"] if rows else []


def _outside(counts: Mapping[Key, tuple[int, int]]) -> list[str]:
    """The cells outside the target, those first that chance does not explain."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for (level, metric, gpus, stack), (rows, inside) in sorted(counts.items()):
        if rows >= LEAST_ROWS and not TARGET[0] <= inside / rows <= TARGET[1]:
            fewest, most = by_chance(rows)
            name = f"{level.replace('_', ' ')}, {metric}, {gpus}, {stack or 'any other'}: {inside / rows:.0%} of {rows}"
            names[fewest <= inside <= most].append(name)
    return [
        "",
        f"Outside 85 to 95 %, and outside what chance gives: {'; '.join(names[False]) or 'none'}.",
        "",
        f"Outside 85 to 95 %, as chance may give: {'; '.join(names[True]) or 'none'}.",
        "",
    ]


def _chance(rows: int) -> str:
    if rows < LEAST_ROWS:
        return ""
    fewest, most = by_chance(rows)
    return f"{fewest / rows:.0%} to {most / rows:.0%}"


def timed_cards(rows: Iterable[MeasuredRow]) -> dict[tuple[str, str], set[str]]:
    """(GPUs, stack) -> cards on which a run's speed alone is known: none of its runs was elsewhere."""
    cards: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        sure = row.tokens_per_s and row.speed_confidence in ("A", "B") and not gathered.otherwise(row, "tokens_per_s")
        if row.setup and row.gpu and sure and not (row.group in GATHERED and gathered.kept_out(row)):
            cards[gpu_count_kind(row.setup), row.setup.stack].add(row.gpu)
    return cards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-runs", type=int, default=0, help="so many dry runs that are not recorded yet")
    args = parser.parse_args()
    rows = comparable_rows()
    recorded = rows_so_far(ERRORS)
    today = {
        row.id: {"gpus": gpu_count_kind(row.setup), "stack": row.setup.stack} for row in rows if row.setup is not None
    }
    excluded = {row.id for row in rows if gathered.otherwise(row, "reserved")}
    dry = [
        error for error in recorded if error["level"] == "dry_run" and {**error, **today.get(error["id"], {})} == error
    ]
    dry = [error | ({"otherwise": True} if error["id"] in excluded else {}) for error in dry]
    if args.dry_runs:
        dry += dry_run_errors(rows, dry, args.dry_runs)
    errors = formula_errors(rows) + dry
    write_rows(ERRORS, errors)
    cells, speeds = fitted(errors), [cell for cell in json.loads(BANDS.read_text()) if cell["metric"] == "tokens_per_s"]
    names = ("level", "metric", "gpus", "stack")
    values = [{**dict(zip(names, key, strict=True)), **as_row(cell)} for key, cell in sorted(cells.items())]
    timed = timed_cards(rows)
    for value in values:
        if value["level"] == "formula" and value["stack"]:
            value["cards"] = sorted({*value["cards"], *timed.get((value["gpus"], value["stack"]), ())})
    BANDS.write_text(json.dumps(values + speeds, indent=1) + "\n", encoding="utf-8")
    text = page(errors)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
