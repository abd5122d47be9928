"""Chart data: plain values in base units, taken from the plan without rounding.

Each chart is a dictionary that templates/report.js turns into a picture; the same dictionary fills the table of numbers
under the picture, so that both equal plan.json. `kind` picks the picture.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner.core.units import gib, seconds
from planner.planning.plan import NoPlan, Plan
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Measurement, Prediction
from reports.extras import Extras, Timeline
from reports.plain import clean
from reports.rows import CATEGORY_WORDS, best_terms, category_bytes, chosen_and_alternatives
from reports.setup_text import setup_difference
from reports.text import FIT_WORDS, memory_mark, parameter_words, rate

MAX_BARS = 14
PHASE_WORDS = {"load": "load", "forward": "forward", "loss": "loss", "backward": "backward", "step": "optimizer step"}

Chart = dict[str, Any]


def table_of(header: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = True) -> dict[str, Any]:
    """A table for a template, the numbers under a chart for example; `figures` align all but the first column right."""
    return {"header": list(header), "rows": [list(row) for row in rows], "figures": figures}


def memory_bars(
    candidates: Sequence[tuple[str, Candidate]], memory_bytes: int, budget_bytes: int, *, limit: int = MAX_BARS
) -> Chart:
    """Stacked bars by category against the card's capacity.

    Each bar is the answer of one level alone (terms, allocator gap and context of the same prediction); where a probe
    measured the device peak, it is a mark beside the bar.
    """
    shown = list(candidates)[:limit]
    evidence = [best_terms(candidate) for _, candidate in shown]
    stacks = [_stack(prediction) for prediction in evidence]
    names = [name for name in CATEGORY_WORDS if any(stack.get(name) for stack in stacks)]
    measured = [
        candidate.probe.peak_device_bytes if isinstance(candidate.probe, Measurement) else None
        for _, candidate in shown
    ]
    labels = [clean(label) for label, _ in shown]
    # The numbers under the bars.
    header = ("candidate", "level", *(CATEGORY_WORDS[name] for name in names), "device peak by this level", "measured")
    rows = [
        (
            label,
            memory_mark(prediction),
            *(gib(stack.get(name, 0)) for name in names),
            gib(prediction.peak_device_bytes),
            "" if probe is None else gib(probe),
        )
        for label, prediction, stack, probe in zip(labels, evidence, stacks, measured, strict=True)
    ]
    return {
        "kind": "memory-bars",
        "title": "Memory of the candidates, by term, against the card",
        "labels": labels,
        "series": [
            {"name": CATEGORY_WORDS[name], "category": name, "bytes": [stack.get(name, 0) for stack in stacks]}
            for name in names
        ],
        "device_bytes": [prediction.peak_device_bytes for prediction in evidence],
        "measured_bytes": measured,
        "memory_bytes": memory_bytes,
        "budget_bytes": budget_bytes,
        "table": table_of(header, rows),
    }


def _stack(prediction: Prediction) -> dict[str, int]:
    stack = category_bytes(prediction.terms)
    residue = prediction.peak_allocated_bytes - sum(stack.values())
    stack["gap"] = prediction.peak_reserved_bytes - prediction.peak_allocated_bytes
    stack["context"] = prediction.peak_device_bytes - prediction.peak_reserved_bytes
    if residue > 0:
        stack["residue"] = residue
    return stack


def speed_memory(plan: Plan) -> Chart:
    """Tokens/s against device peak for every ranked candidate, with the Pareto front."""
    chosen = plan.chosen
    by_setup: dict[TrainSetup, Candidate] = {}
    for candidate in (chosen, *(each.candidate for each in plan.alternatives), *plan.ranked):
        by_setup.setdefault(candidate.setup, candidate)
    candidates = [candidate for candidate in by_setup.values() if candidate.tokens_per_s > 0]
    front = pareto_front([candidate for candidate in candidates if candidate.fits])
    points = [
        {
            "peak_device_bytes": candidate.memory_evidence.peak_device_bytes,
            "tokens_per_s": candidate.tokens_per_s,
            "method": candidate.setup.method,
            "verdict": candidate.verdict,
            "difference": "the plan" if candidate is chosen else setup_difference(chosen.setup, candidate.setup),
        }
        for candidate in candidates
    ]
    rows = [
        (
            "the plan" if candidate is chosen else setup_difference(chosen.setup, candidate.setup),
            gib(candidate.memory_evidence.peak_device_bytes),
            memory_mark(candidate.memory_evidence),
            rate(candidate.tokens_per_s),
        )
        for candidate in front
    ]
    return {
        "kind": "speed-memory",
        "title": "Speed against memory, with the Pareto front",
        "points": points,
        "front": [[candidate.memory_evidence.peak_device_bytes, candidate.tokens_per_s] for candidate in front],
        "memory_bytes": plan.workload.memory_bytes,
        "budget_bytes": plan.workload.budget_bytes,
        "table": table_of(("on the front", "peak", "from", "speed"), rows),
    }


def pareto_front(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both speed and memory, smallest memory first.

    Of candidates that tie in both, the first one given stays.
    """
    front: list[Candidate] = []
    fastest = 0.0
    for candidate in sorted(candidates, key=lambda each: (each.memory_evidence.peak_device_bytes, -each.tokens_per_s)):
        if candidate.tokens_per_s > fastest:
            front.append(candidate)
            fastest = candidate.tokens_per_s
    return tuple(front)


def phase_peaks(candidate: Candidate) -> Chart:
    """Allocated peak of each phase: the largest one decides, the sum means nothing."""
    evidence = best_terms(candidate)
    peaks = {PHASE_WORDS.get(name, clean(name)): size for name, size in evidence.phase_peaks_bytes.items() if size}
    return {
        "kind": "phase-peaks",
        "title": "Allocated peak of each phase",
        "labels": list(peaks),
        "bytes": list(peaks.values()),
        "peak": PHASE_WORDS.get(evidence.peak_phase, clean(evidence.peak_phase)),
        "table": table_of(("phase", "allocated peak"), ((name, gib(size)) for name, size in peaks.items())),
    }


def time_parts(candidate: Candidate) -> Chart:
    longest_first = sorted(candidate.formula.time_parts_s.items(), key=lambda item: -item[1])
    parts = {clean(name).replace("_", " "): value for name, value in longest_first if value > 0}
    return {
        "kind": "time-parts",
        "title": "Where the time of a step goes (predicted)",
        "labels": list(parts),
        "seconds": list(parts.values()),
        "table": table_of(("part", "time"), ((name, seconds(value)) for name, value in parts.items())),
    }


def timeline_chart(timeline: Timeline, memory_bytes: int) -> Chart:
    depth = f", {clean(timeline.depth)}" if timeline.depth else ""
    return {
        "kind": "timeline",
        "title": f"Allocated memory from loading through the traced steps (dry run{depth})",
        "points": [list(point) for point in timeline.points],
        "phases": [
            {"name": PHASE_WORDS.get(phase.name, clean(phase.name)), "start": phase.start, "end": phase.end}
            for phase in timeline.phases
        ],
        "peak": [timeline.peak_event, timeline.peak_bytes],
        "memory_bytes": memory_bytes,
        "table": table_of(
            ("alive at the peak", "kind", "size"),
            ((clean(tensor.name), CATEGORY_WORDS.get(tensor.category, clean(tensor.category)), gib(tensor.size_bytes))
             for tensor in timeline.tensors),
        ),
    }  # fmt: skip


def sensitivity_charts(extras: Extras, budget_bytes: int) -> list[Chart]:
    charts: list[Chart] = []
    for parameter in dict.fromkeys(point.parameter for point in extras.sensitivity):
        points = [point for point in extras.sensitivity if point.parameter == parameter]
        words = parameter_words(parameter)
        levels = ", ".join(dict.fromkeys(clean(point.level.replace("_", " ")) for point in points))
        charts.append(
            {
                "kind": "sensitivity",
                "title": f"If the {clean(words)} moved ({levels})",
                "parameter": clean(words),
                "values": [point.value for point in points],
                "bytes": [point.peak_device_bytes for point in points],
                "tokens_per_s": [point.tokens_per_s for point in points],
                "verdicts": [point.verdict for point in points],
                "chosen": next((index for index, point in enumerate(points) if point.chosen), None),
                "budget_bytes": budget_bytes,
                "table": table_of(
                    (clean(words), "peak", "fits", "speed", "from"),
                    (
                        (
                            f"{point.value:,}" + (" (planned)" if point.chosen else ""),
                            gib(point.peak_device_bytes),
                            FIT_WORDS[point.verdict],
                            rate(point.tokens_per_s),
                            clean(point.level.replace("_", " ")),
                        )
                        for point in points
                    ),
                ),
            }
        )
    return charts


def search_history(search: Mapping[str, Any]) -> Chart | None:
    """What the search tried, in order: `search["trials"]` is a list of {"tokens_per_s", "feasible", "level", ...}."""
    trials = search.get("trials")
    if not isinstance(trials, (list, tuple)) or not all(isinstance(trial, Mapping) for trial in trials) or not trials:
        return None
    best, points, rows = 0.0, [], []
    for number, trial in enumerate(trials):
        speed = trial.get("tokens_per_s")
        speed = float(speed) if isinstance(speed, (int, float)) and not isinstance(speed, bool) else None
        feasible = trial.get("feasible", speed is not None)  # None: not measured
        if feasible and speed is not None:
            best = max(best, speed)
        level, reason = clean(str(trial.get("level") or "")), clean(str(trial.get("reason") or ""))
        points.append(
            {"tokens_per_s": speed, "feasible": feasible, "best": best or None, "reason": reason, "level": level}
        )
        fits = "" if feasible is None else "yes" if feasible else "no"
        rows.append((str(number + 1), rate(speed), fits, level.replace("_", " "), reason))
    return {
        "kind": "search-history",
        "title": "What the search tried",
        "points": points,
        "table": table_of(("trial", "speed", "fits", "from", "reason"), rows),
    }


def accuracy_rows(plan: Plan | NoPlan) -> list[dict[str, Any]]:
    """Predicted against measured for every candidate that a probe measured."""
    labelled = list(chosen_and_alternatives(plan)) if isinstance(plan, Plan) else [("nearest", plan.nearest, "")]
    labelled_setups = {candidate.setup for _, candidate, _ in labelled}
    if isinstance(plan, Plan):
        labelled += [
            (f"ranked {i}", candidate, "")
            for i, candidate in enumerate(plan.ranked, 1)
            if candidate.setup not in labelled_setups
        ]
    rows = []
    for label, candidate, _ in labelled:
        if not isinstance(candidate.probe, Measurement):
            continue
        for prediction in (candidate.formula, candidate.dry_run):
            if isinstance(prediction, Prediction):
                measured = candidate.probe
                speed = prediction.tokens_per_s
                rows.append(
                    {
                        "label": clean(label),
                        "level": memory_mark(prediction),
                        "predicted_bytes": prediction.peak_allocated_bytes,
                        "measured_bytes": measured.peak_allocated_bytes,
                        "memory_error_fraction": prediction.peak_allocated_bytes / measured.peak_allocated_bytes - 1,
                        "predicted_tokens_per_s": speed,
                        "measured_tokens_per_s": measured.tokens_per_s,
                        "speed_error_fraction": speed / measured.tokens_per_s - 1
                        if speed and measured.tokens_per_s
                        else None,
                    }
                )
    return rows


def accuracy_chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    return {
        "kind": "accuracy",
        "title": "Predicted against measured",
        "labels": [f"{row['label']} ({row['level']})" for row in rows],
        "memory_error_fraction": [row["memory_error_fraction"] for row in rows],
        "speed_error_fraction": [row["speed_error_fraction"] for row in rows],
        "table": table_of(
            ("candidate", "level", "predicted allocated", "measured", "error", "predicted speed", "measured", "error"),
            (
                (
                    row["label"],
                    row["level"],
                    gib(row["predicted_bytes"]),
                    gib(row["measured_bytes"]),
                    f"{100 * row['memory_error_fraction']:+.1f} %",
                    rate(row["predicted_tokens_per_s"]),
                    rate(row["measured_tokens_per_s"]),
                    "" if row["speed_error_fraction"] is None else f"{100 * row['speed_error_fraction']:+.1f} %",
                )
                for row in rows
            ),
        ),
    }
