"""Predictions for several GPUs against published runs: docs/accuracy/multi-gpu.md and its JSON.

    python -m benchmarks.multi_gpu_accuracy                        (a few minutes; needs scipy)
    python -m benchmarks.multi_gpu_accuracy --write-calibration    (also writes `layout` and its band in planner/data)

Speed: the constants of communication are fitted on all sources but one and tested on that one, never on a random row;
the compute model under it is the shipped one. Memory has no fitted constant.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import exp, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.band_fit import passed_at
from benchmarks.multi_gpu_fit import fit_layout, log_error
from benchmarks.multi_gpu_points import LayoutPoint, load_points
from benchmarks.speed_accuracy import percentile
from planner.memory.model import rank_memories
from planner.setup import TrainSetup
from planner.setup.memory_terms import MemoryBreakdown
from planner.speed.roofline.calibration import DATA_FILE, Calibration, LayoutConstants, load_calibration

ROOT = Path(__file__).resolve().parent.parent
JSON_FILE = ROOT / "benchmarks" / "data" / "multi_gpu_accuracy.json"
DOC_FILE = ROOT / "docs" / "accuracy" / "multi-gpu.md"
BAND_LEVEL = 0.9


@dataclass(frozen=True, kw_only=True)
class Compared:
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


def _worst(point: LayoutPoint, setup: TrainSetup) -> MemoryBreakdown:
    return rank_memories(point.model, point.gpu, setup)[0].breakdown


def memory_errors(points: Iterable[LayoutPoint]) -> list[Compared]:
    """The worst rank's peak against the measured one."""
    found = []
    for point in points:
        if point.memory_bytes is None:
            continue
        breakdown, plain = (_worst(point, setup) for setup in (as_it_ran(point), point.setup))
        reserved = point.memory_what == "reserved"
        gap = plain.peak_reserved_bytes - plain.peak_allocated_bytes if reserved else 0
        found.append(
            Compared(
                point=point,
                error=(breakdown.peak_allocated_bytes + gap) / point.memory_bytes - 1.0,
                other=(plain.peak_allocated_bytes + gap) / point.memory_bytes - 1.0,
            )
        )
    return found


def out_of_memory(points: Iterable[LayoutPoint]) -> list[Compared]:
    """Runs that went out of memory: the worst rank's predicted device peak against what the card has."""
    found = []
    for point in points:
        if not point.oom:
            continue
        breakdown, plain = (_worst(point, setup) for setup in (as_it_ran(point), point.setup))
        found.append(
            Compared(
                point=point,
                error=breakdown.peak_device_bytes / point.gpu.memory_bytes - 1.0,
                other=plain.peak_device_bytes / point.gpu.memory_bytes - 1.0,
            )
        )
    return found


def speed_errors(points: Sequence[LayoutPoint], used: Calibration) -> list[Compared]:
    """Every speed under the constants in use, and under those fitted without its source."""
    known = [point for point in points if point.tokens_per_s is not None]
    firm = [point for point in known if not point.loose_speed]
    start = replace(used, spread={})
    found = []
    for source in sorted({point.source for point in known}):
        fitted = fit_layout([point for point in firm if point.source != source], start)
        for point in known:
            if point.source == source:
                here, held = (exp(log_error(point, one)) - 1.0 for one in (used, fitted))
                found.append(Compared(point=point, error=here, other=held))
        print(f"held out {source}", file=sys.stderr, flush=True)
    return found


def row(errors: Sequence[float]) -> dict[str, Any]:
    """The figures of one table row."""
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "median": median(sizes),
        "p90": percentile(sizes, 0.9),
        "worst": max(sizes),
        "bias": median(errors),
    }


def both(found: Sequence[Compared]) -> dict[str, Any]:
    """A row of `error` with `other` beside it."""
    return {**row([one.error for one in found]), "other": row([one.other for one in found])}


def table(found: Iterable[Compared], *labels: str) -> dict[str, dict[str, Any]]:
    """Rows by strategy, source or whatever else `labels` asks of a point."""
    groups: dict[str, list[Compared]] = {}
    for one in found:
        groups.setdefault(" | ".join(_label(one.point, label) for label in labels), []).append(one)
    return {key: both(groups[key]) for key in sorted(groups)}


def _label(point: LayoutPoint, label: str) -> str:
    if label == "gpus":
        return f"{point.setup.num_gpus:4d}"
    return {
        "strategy": point.strategy,
        "source": point.source,
        "method": point.setup.method,
        "what": point.memory_what,
        "card": point.gpu.key,
    }[label]


def band_of(found: Sequence[Compared]) -> float:
    """Half-width that held 90 % of the held-out errors of firm points, a source of n points counting sqrt(n)."""
    firm = [one for one in found if not one.point.loose_speed]
    sizes: dict[str, int] = {}
    for one in firm:
        sizes[one.point.source] = sizes.get(one.point.source, 0) + 1
    ordered = sorted(
        (max(one.other, 1.0 / (1.0 + one.other) - 1.0), 1.0 / sqrt(sizes[one.point.source])) for one in firm
    )
    return passed_at(ordered, BAND_LEVEL)


def report_of(points: Sequence[LayoutPoint], used: Calibration) -> dict[str, Any]:
    """All figures of the document."""
    speed, memory = speed_errors(points, used), memory_errors(points)
    firm = [one for one in speed if not one.point.loose_speed]
    firm_memory = [one for one in memory if not one.point.loose_memory]
    gone = out_of_memory(points)
    loose = [one for one in speed if one.point.loose_speed]
    loose_memory = [one for one in memory if one.point.loose_memory]
    return {
        "date": date.today().isoformat(),
        "points": len(points),
        "speed": both(firm),
        "speed_all": both(speed),
        "speed_by_source": table(firm, "source"),
        "speed_by_strategy": table(firm, "strategy"),
        "speed_by_strategy_source": table(firm, "strategy", "source", "card"),
        "speed_by_gpus": table([one for one in firm if one.point.source == "llm_foundry"], "card", "gpus"),
        "speed_loose": table(loose, "strategy", "source", "card"),
        "speed_worst": [_named(one) for one in sorted(firm, key=lambda one: -abs(one.error))[:8]],
        "memory": both(firm_memory),
        "memory_all": both(memory),
        "memory_by_strategy": table(firm_memory, "strategy"),
        "memory_by_strategy_source": table(firm_memory, "strategy", "source", "method", "what"),
        "memory_loose": table(loose_memory, "strategy", "source", "method", "what"),
        "memory_worst": [_named(one) for one in sorted(firm_memory, key=lambda one: -abs(one.error))[:8]],
        "out_of_memory": {
            "n": len(gone),
            "predicted": sum(one.error > 0.0 for one in gone),
            "predicted_as_fsdp2": sum(one.other > 0.0 for one in gone),
            "missed": [_named(one) for one in gone if one.error <= 0.0],
        },
        "band": band_of(speed),
        "constants": _constants(used),
    }


def _named(one: Compared) -> dict[str, Any]:
    point = one.point
    setup = point.setup
    shape = f"{setup.micro_batch_seqs} x {setup.seq_len_tokens} tokens"
    name = f"{point.labels['model']}, {setup.method}, {point.strategy}, {setup.num_gpus} x {point.gpu.key}, {shape}"
    return {"point": f"{name} ({point.source})", "error": one.error}


def _constants(used: Calibration) -> dict[str, dict[str, float]]:
    stated, now = LayoutConstants(), used.layout_constants
    return {name: {"stated": getattr(stated, name), "used": getattr(now, name)} for name in LayoutConstants.names()}


def write_calibration(points: Sequence[LayoutPoint]) -> Calibration:
    """Fits `layout` on every firm point and writes it into the shipped calibration."""
    firm = [point for point in points if point.tokens_per_s is not None and not point.loose_speed]
    fitted = fit_layout(firm, replace(load_calibration(str(DATA_FILE)), spread={}))
    values = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    values["spread"] = {name: float(f"{value:.4g}") for name, value in fitted.spread.items()}
    sizes: dict[str, int] = {}
    for point in firm:
        sizes[point.source] = sizes.get(point.source, 0) + 1
    values["points"]["spread"] = {
        "date": date.today().isoformat(),
        "sources": sizes,
        "file": "benchmarks/data/multi_gpu_points.jsonl",
    }
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return replace(fitted, spread=values["spread"])


def write_band(band: float) -> None:
    """The 90 % band of several GPUs, beside those of one."""
    values = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    values["bands"]["spread"] = round(band, 3)
    DATA_FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the comparison and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write-calibration", action="store_true")
    arguments = parser.parse_args()
    points = load_points()
    used = write_calibration(points) if arguments.write_calibration else load_calibration(str(DATA_FILE))
    report = report_of(points, used)
    if arguments.write_calibration:
        write_band(report["band"])
    JSON_FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    from benchmarks.multi_gpu_report import render

    DOC_FILE.write_text(render(report), encoding="utf-8")


if __name__ == "__main__":
    main()
