"""Predictions for several GPUs against published runs: the tables of docs/accuracy/multi-gpu.md.

    python -m benchmarks.multi_gpu_accuracy                        (a few minutes; needs scipy)
    python -m benchmarks.multi_gpu_accuracy --write-calibration    (also writes `layout` and its band in planner/data)

Speed: the constants of communication (`LayoutConstants`) are fitted on all sources but one and tested on that one; the
compute model under it is the shipped one. A fit starts from the stated values and moves each only as far as the points
justify, errors are clipped softly, a source of n points counts sqrt(n) points, and every (source, card) may be off as
a whole: the compute model's own error there is not communication's to answer for. Memory has no fitted constant.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import date
from math import exp, log
from statistics import median
from typing import NamedTuple

from benchmarks.constants_fit import POINT_NOISE, fit_shift
from benchmarks.multi_gpu_points import LayoutPoint, load_points
from benchmarks.shared import DOCS, marked, percentile
from planner.memory.model import rank_memories
from planner.setup import TrainSetup
from planner.setup.memory_terms import MemoryBreakdown
from planner.speed.roofline.calibration import DATA_FILE, Calibration, LayoutConstants, load_calibration
from planner.speed.several_gpus.speed import layout_step_time

UNCERTAINTY = {
    "nvlink_share": 0.15,
    "pcie_share": 0.3,
    "network_share": 0.25,
    "host_copy_share": 0.2,
    "collective_s": 0.5,
    "overlap_cost": 0.7,
    "overlap_cost_fsdp_1": 0.4,
    "unit_host_s": 0.7,
    "cpu_adam_bytes_per_s": 0.4,
}
"""Standard deviation of each constant's logarithm before any point is seen; the others keep their value."""
CARD_NOISE = 0.08


def log_error(point: LayoutPoint, calibration: Calibration) -> float:
    """log(predicted / measured) tokens/s of one GPU.

    Raises:
        ValueError: a point without a speed.
    """
    if point.tokens_per_s is None:
        raise ValueError(f"{point.key} has no speed")
    of_point = (point.model, point.gpu, point.speed_setup, point.cluster)
    answer = layout_step_time(*of_point, calibration=calibration, conditions=point.conditions)
    return log(answer.tokens_per_s / point.speed_setup.num_gpus / point.tokens_per_s)


def fit_layout(points: Sequence[LayoutPoint], start: Calibration) -> Calibration:
    """The start's calibration with its `layout` constants moved to fit the points."""
    if not points:
        return start
    base = asdict(LayoutConstants(**start.spread))
    names = tuple(UNCERTAINTY)
    sizes = Counter(point.source for point in points)

    def moved(shift: Sequence[float]) -> Calibration:
        values = {name: base[name] * exp(UNCERTAINTY[name] * z) for name, z in zip(names, shift, strict=True)}
        values |= {name: min(value, 1.0) for name, value in values.items() if name.endswith("share") or "cost" in name}
        return replace(start, spread={**base, **values})

    def errors(shift: Sequence[float]) -> list[float]:
        calibration = moved(shift)
        return [log_error(point, calibration) for point in points]

    return moved(
        fit_shift(
            errors,
            len(names),
            weights=[sizes[point.source] ** -0.25 / POINT_NOISE for point in points],
            offsets_of=[(point.source, point.gpu.key) for point in points],
            offset_noise=CARD_NOISE,
            step=0.05,
            max_evaluations=10,
        )
    )


class Compared(NamedTuple):
    """One prediction beside its measurement, as a fraction: predicted / measured - 1.

    Attributes:
        error: with what is known of the run; for a speed, under the constants in use.
            For a run out of memory, predicted device peak / memory of the card - 1.
        other: a speed under the constants fitted without its source; a memory figure without what FSDP 1 keeps.
    """

    point: LayoutPoint
    error: float
    other: float


def as_it_ran(point: LayoutPoint) -> TrainSetup:
    """The point's setup, under FSDP 1 with reentrant checkpointing where it ran so."""
    setup = point.setup
    if not point.conditions.fsdp_1 or setup.parallel != "fsdp2":
        return setup
    return setup.replace(fsdp_version=1, reentrant_checkpointing=True)


def _worst(point: LayoutPoint) -> tuple[MemoryBreakdown, MemoryBreakdown]:
    """The worst rank, as it ran and as the setup says."""
    ran, plain = (
        rank_memories(point.model, point.gpu, setup)[0].breakdown for setup in (as_it_ran(point), point.setup)
    )
    return ran, plain


def memory_errors(points: Iterable[LayoutPoint]) -> list[Compared]:
    """The worst rank's peak against the measured one."""
    compared = []
    for point in points:
        if point.memory_bytes is not None:
            ran, plain = _worst(point)
            reserved = point.memory_what == "reserved"
            gap = plain.peak_reserved_bytes - plain.peak_allocated_bytes if reserved else 0
            errors = [(memory.peak_allocated_bytes + gap) / point.memory_bytes - 1.0 for memory in (ran, plain)]
            compared.append(Compared(point, *errors))
    return compared


def out_of_memory(points: Iterable[LayoutPoint]) -> list[Compared]:
    """Runs that went out of memory: the worst rank's predicted device peak against what the card has."""
    return [
        Compared(point, *(memory.peak_device_bytes / point.gpu.memory_bytes - 1.0 for memory in _worst(point)))
        for point in points
        if point.oom
    ]


def speed_errors(points: Sequence[LayoutPoint], used: Calibration) -> list[Compared]:
    """Every speed under the constants in use, and under those fitted without its source."""
    timed = [point for point in points if point.tokens_per_s is not None]
    firm = [point for point in timed if not point.loose_speed]
    start = replace(used, spread={})
    compared = []
    for source in sorted({point.source for point in timed}):
        fitted = fit_layout([point for point in firm if point.source != source], start)
        for point in timed:
            if point.source == source:
                here, held_out = (exp(log_error(point, calibration)) - 1.0 for calibration in (used, fitted))
                compared.append(Compared(point, here, held_out))
        print(f"held out {source}", file=sys.stderr, flush=True)
    return compared


def cells(errors: Sequence[float], *, worst: bool = True) -> list[str]:
    """Median and 90th percentile of the sizes; the worst and the bias."""
    sizes = [abs(error) for error in errors]
    figures = [f"{100 * value:.1f} %" for value in (median(sizes), percentile(sizes, 0.9))]
    return [*figures, f"{100 * max(sizes):.1f} %", f"{100 * median(errors):+.1f} %"] if worst else figures


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are text."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * words + "--:|" * (len(head) - words)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def grouped(
    compared: Sequence[Compared], labels: Sequence[str], of: Callable[[LayoutPoint], tuple[str, ...]], other: str
) -> str:
    """`cells` of every group of points, with median and 90th percentile of the other figure."""
    groups: dict[tuple[str, ...], list[Compared]] = {}
    for case in compared:
        groups.setdefault(of(case.point), []).append(case)
    head = [*labels, "n", "median", "90th pct.", "worst", "bias", f"{other}: median", f"{other}: 90th"]
    rows = []
    for name, cases in sorted(groups.items()):
        others = cells([case.other for case in cases], worst=False)
        rows.append([*name, str(len(cases)), *cells([case.error for case in cases]), *others])
    return table(head, rows, len(labels))


def worst(compared: Sequence[Compared]) -> str:
    rows = []
    for case in sorted(compared, key=lambda case: -abs(case.error))[:8]:
        point, setup = case.point, case.point.setup
        cards = f"{setup.num_gpus} x {point.gpu.key}, {setup.micro_batch_seqs} x {setup.seq_len_tokens} tokens"
        name = f"{point.labels['model']}, {setup.method}, {point.strategy}, {cards} ({point.source})"
        rows.append([name, f"{100 * case.error:+.1f} %"])
    return table(["run", "error"], rows)


def report(points: Sequence[LayoutPoint], speed: Sequence[Compared], used: Calibration) -> str:
    memory, gone = memory_errors(points), out_of_memory(points)
    loose, firm = [[case for case in speed if case.point.loose_speed == is_loose] for is_loose in (True, False)]
    loose_memory, firm_memory = [
        [case for case in memory if case.point.loose_memory == is_loose] for is_loose in (True, False)
    ]
    lines = (
        ("tokens/s, source held out", [case.other for case in firm], "12 %"),
        ("tokens/s, constants in use", [case.error for case in firm], ""),
        ("peak memory of the worst rank", [case.error for case in firm_memory], "8 %"),
        ("the same without what FSDP 1 is known to keep", [case.other for case in firm_memory], ""),
    )
    head = ["", "configurations", "median", "90th pct.", "worst", "aim for the median"]
    stated, now = LayoutConstants(), used.layout_constants
    constants = [
        [f"`{name}`", *(f"{getattr(values, name):.4g}" for values in (stated, now))] for name in stated.names()
    ]

    def speed_of(point: LayoutPoint) -> tuple[str, ...]:
        return point.strategy, point.source, point.gpu.key

    def memory_of(point: LayoutPoint) -> tuple[str, ...]:
        return point.strategy, point.source, point.setup.method, point.memory_what

    by_card, by_method = ("strategy", "source", "card"), ("strategy", "source", "method", "figure")
    return f"""{date.today().isoformat()}; {len(points)} configurations, of which {len(gone)} went out of memory:
{sum(case.error > 0.0 for case in gone)} of those are predicted to need more than the card has.

{table(head, [[name, str(len(errors)), *cells(errors)[:3], goal] for name, errors, goal in lines])}
### Tokens/s of a GPU

{grouped(firm, by_card, speed_of, "held out")}
{worst(firm)}
Shown apart:

{grouped(loose, by_card, speed_of, "held out")}
### Memory

{grouped(firm_memory, by_method, memory_of, "as FSDP2")}
{worst(firm_memory)}
Shown apart:

{grouped(loose_memory, by_method, memory_of, "as FSDP2")}
### Constants

{table(["constant", "stated", "in use"], constants)}
"""


def write_calibration(points: Sequence[LayoutPoint]) -> Calibration:
    """Fits `layout` on every firm point and writes it into the shipped calibration."""
    firm = [point for point in points if point.tokens_per_s is not None and not point.loose_speed]
    fitted = fit_layout(firm, replace(load_calibration(str(DATA_FILE)), spread={}))
    values = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    values["spread"] = {name: float(f"{value:.4g}") for name, value in fitted.spread.items()}
    values["points"]["spread"] = {
        "date": date.today().isoformat(),
        "sources": dict(Counter(point.source for point in firm)),
        "file": "benchmarks/data/multi_gpu_points.jsonl",
    }
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return replace(fitted, spread=values["spread"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-calibration", action="store_true")
    arguments = parser.parse_args()
    points = load_points()
    used = write_calibration(points) if arguments.write_calibration else load_calibration(str(DATA_FILE))
    speed = speed_errors(points, used)
    marked(DOCS / "accuracy" / "multi-gpu.md", "multi_gpu_accuracy", report(points, speed, used))


if __name__ == "__main__":
    main()
