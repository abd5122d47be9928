"""What a search with GPU probes chooses from (the walked space where it may fit and is not hopelessly slow), and the
plan after it: what was measured is chosen, its rivals ranked, and what no probe could run told."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.core.notes import found
from planner.core.units import gib
from planner.memory.workload import Workload
from planner.planning.decision.candidates import candidate
from planner.planning.decision.choosing import spaces
from planner.planning.decision.facts import PREFERENCE_FRACTION
from planner.planning.decision.layouts import STAGES, Layout, layout_key, layout_name, layouts, layouts_of_one
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.decision.policy import fewer_matrices, full_quality, lossiness, tie_break, worst_quality
from planner.planning.decision.tree import preferred_nodes
from planner.planning.plan import Plan, with_trades
from planner.planning.space import dimension_values
from planner.planning.walk import Point, walk
from planner.setup.interchange import setup_to_dict
from planner.setup.outcome import Candidate, Measurement, ProbeFailure
from reports.extras import search_values
from reports.setup_text import trial_words

if TYPE_CHECKING:
    from search.problem import Unprobed
    from search.run import SearchResult

MAX_CANDIDATES = 1500
"""Of the walked space, the fastest this many that may fit are searched: predicting one costs half a millisecond."""


NEAR_MISS_FRACTION = 0.15
"""A setup predicted this much above the budget may still fit: the formula errs by less in nearly all cases."""


SLOWEST_FRACTION = 0.5
"""What is predicted at less than this share of the best speed cannot become the best by any error seen so far."""


MIN_PER_LAYOUT = 60
"""With several GPUs so many of every layout are searched, even where another layout's fastest fill the list: how well
links are used is what the formula knows least."""


def search_candidates(plan: Plan, unprobed: "Unprobed" = lambda setup: "") -> tuple[Candidate, ...]:
    """What the search may choose from: the walked space where it may fit and is not hopelessly slow, fastest first.

    The class of the plan stands, as it does without a search (docs/choices.md): full fine-tuning is tuned among its
    own setups, a 16-bit adapter among those, a quantized base beside the 16-bit one that may fit after all. Where speed
    is preferred, or what the plan took may not fit, quantized bases are searched too. With several GPUs every way of
    spreading the job keeps its best, however fast the others are; of a way that no probe can run only the fastest that
    fits stays, told with its prediction.
    """
    workload = plan.workload
    nodes = _nodes(plan)
    limit_bytes = workload.budget_bytes * (1 + NEAR_MISS_FRACTION)
    points = [
        point
        for point in _walked(plan)
        if node_of_setup(point.family) in nodes and point.peak_device_bytes <= limit_bytes
    ]
    if workload.objective == "memory":
        points.sort(key=lambda point: point.peak_device_bytes)
    else:
        points.sort(key=lambda point: -point.tokens_per_s)
    told: list[Point] = []
    if workload.num_gpus > 1:
        points, told = _probed_and_told(points, unprobed, workload.budget_bytes)
    if workload.objective != "memory":
        fitting = [point.tokens_per_s for point in points if point.peak_device_bytes <= workload.budget_bytes]
        floor = SLOWEST_FRACTION * max(fitting, default=0.0)
        points = [point for point in points if point.tokens_per_s >= floor]
    kept = points[:MAX_CANDIDATES]
    if workload.num_gpus > 1:
        kept += _best_of_each(points, MIN_PER_LAYOUT)
    setups = dict.fromkeys([plan.chosen.setup, *(point.setup for point in (*kept, *told))])
    return tuple(candidate(workload, setup) for setup in setups)


def _nodes(plan: Plan) -> frozenset[Node]:
    """The classes that are searched."""
    mine = node_of_setup(plan.chosen.setup)
    if mine is Node.FULL:
        return frozenset({mine})
    spare = plan.workload.prefer == "speed" or plan.chosen.verdict != "fits"
    return frozenset({mine, Node.LORA, *([Node.FOUR_BIT] if spare else [])})


def _walked(plan: Plan) -> Iterator[Point]:
    """The spaces that the plan was chosen from, of one GPU or of every layout; states on the host only where the plan
    or the user wants them."""
    workload, values, taken = plan.workload, dimension_values(plan.workload), plan.chosen.setup
    fewer = fewer_matrices(workload, values, ()) if taken.lora_targets == "attention" or taken.quantized else {}
    if workload.num_gpus == 1:
        chosen: tuple[Layout, ...] = layouts_of_one(workload)
    else:
        hosted = taken.offload != "none" or "offload" in workload.fixed
        chosen = layouts(workload, [stage for stage in STAGES if hosted or stage != "offload"])
    for given in (values, fewer) if chosen else ():
        for space, own in spaces(workload, given):
            if space.targets == workload.targets:  # a probe runs no other program than the one that was named
                yield from walk(space, own, chosen)


def _probed_and_told(
    points: Sequence[Point], unprobed: "Unprobed", budget_bytes: int
) -> tuple[list[Point], list[Point]]:
    """(what a probe can run, of every layout that none can the first that fits)."""
    probed: list[Point] = []
    told: dict[Any, Point] = {}
    reasons: dict[Any, str] = {}
    for point in points:
        key = layout_key(point.shared)
        if key not in reasons:
            reasons[key] = unprobed(point.shared)
        if not reasons[key]:
            probed.append(point)
        elif key not in told and point.peak_device_bytes <= budget_bytes:
            told[key] = point
    return probed, list(told.values())


def _best_of_each(points: Sequence[Point], num: int) -> Iterator[Point]:
    """The first points of every layout."""
    counts: Counter[Any] = Counter()
    for point in points:
        key = layout_key(point.shared)
        counts[key] += 1
        if counts[key] <= num:
            yield point


def tuned(
    plan: Plan, result: "SearchResult", unprobed: "Unprobed" = lambda setup: "", *, rehearsed: bool = False
) -> Plan:
    """The plan with the search's answer chosen, its rivals ranked by measured speed, and the search's history.

    What no probe can run stands beside it with its prediction and the reason, never among what was measured.

    Args:
        rehearsed: probes ran on the CPU, which says nothing of the plan's GPU: the choice stands on prediction.
    """
    trials = [(record.setup, record.origin, record.evidence, record.excluded) for record in result.trials]
    values: Mapping[str, object] = {
        **search_values(trials, result.reason, plan.workload.budget_bytes),
        "num_probes": result.num_probes,
        "pareto": [_pareto_point(one) for one in result.pareto],
    }
    if plan.workload.num_gpus > 1:
        told = _predicted_only(plan, result, unprobed)
        values = {**values, "not_probed": told}
        plan = replace(plan, notes=(*plan.notes, *_unprobed_notes(told)))
    if result.given_up:
        words = "; ".join(trial_words(setup) for setup in result.given_up)
        note = f"not measured, the planner was killed each time: {words}; call plan tune again to try it anew"
        plan = replace(plan, notes=(*plan.notes, found(note)))
    if result.best is None or rehearsed:
        note = f"{_probes_said(plan, result, rehearsed)} ({result.reason}): the plan stands on prediction alone"
        return replace(plan, search=values, notes=(*plan.notes, found(note)))
    chosen = _preferred(plan.workload, result.best, result.candidates)
    rivals = [one for one in result.candidates if one.fits and one.setup != chosen.setup]
    known = {chosen.setup, *(one.setup for one in result.candidates)}
    ranked = (chosen, *rivals, *(one for one in plan.ranked if one.setup not in known))
    return replace(
        plan,
        chosen=chosen,
        ranked=ranked,
        search=values,
        alternatives=with_trades(chosen, [one for one in plan.alternatives if one.candidate.setup != chosen.setup]),
    )


def _probes_said(plan: Plan, result: "SearchResult", rehearsed: bool) -> str:
    """What the probes of a search showed that chooses nothing."""
    answers = [record.evidence for record in result.trials if record.probed]
    failures = Counter(one.kind.value.replace("_", " ") for one in answers if isinstance(one, ProbeFailure))
    failed = ", ".join(f"{num} {kind}" for kind, num in failures.items())
    measured = [one for one in answers if isinstance(one, Measurement)]
    if not answers:
        return "no probe was measured"
    if not rehearsed:
        return f"no probe showed a setup that fits: {len(measured)} of {len(answers)} measured{_beside(failed)}"
    fastest = max((one.tokens_per_s or 0.0 for one in measured), default=0.0)
    speed = f", the fastest at {fastest:,.0f} tokens/s there" if fastest else ""
    told = f"rehearsed on this machine's CPU: {len(measured)} of {len(answers)} measured{speed}{_beside(failed)}"
    return f"{told}, which says nothing of a {plan.workload.gpu.name}"


def _beside(failed: str) -> str:
    return f", {failed}" if failed else ""


def _predicted_only(plan: Plan, result: "SearchResult", unprobed: "Unprobed") -> list[dict[str, Any]]:
    """Of every layout that no probe here can run: its setup in the study, why, and what the formula says of it."""
    rows = []
    for setup in dict.fromkeys(record.setup for record in result.trials if unprobed(record.setup)):
        formula = candidate(plan.workload, setup).formula
        row = {
            "spread": layout_name(setup),
            "setup": setup_to_dict(setup),
            "reason": unprobed(setup),
            "predicted_tokens_per_s": formula.tokens_per_s,
            "predicted_peak_device_bytes": formula.peak_device_bytes,
        }
        rows.append(row)
    return rows


def _unprobed_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        speed = f"{row['predicted_tokens_per_s'] or 0:,.0f} tokens/s"
        words = f"{row['spread']} ({speed}, {gib(row['predicted_peak_device_bytes'])})"
        by_reason.setdefault(row["reason"], []).append(words)
    return [f"not measured, only predicted: {', '.join(words)}: {reason}" for reason, words in by_reason.items()]


def _preferred(workload: Workload, best: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The search's answer by the rules of a plan: the least approximate class that was measured to fit, in it the
    simplest of what is as fast; the fastest where speed is preferred."""
    timed = [one for one in candidates if one.fits and isinstance(one.probe, Measurement) and one.probe.tokens_per_s]
    if workload.objective != "tokens" or workload.prefer == "speed" or not timed:
        return best
    found = {node_of_setup(one.setup) for one in timed}
    node = next((node for node in preferred_nodes(workload) if node in found), None)
    own = [one for one in timed if node_of_setup(one.setup) is node]
    allowed = worst_quality((one.setup, one.tokens_per_s) for one in own)
    own = [one for one in own if full_quality(one.setup) <= allowed]
    own = [one for one in own if one.setup.lora_targets == "all-linear"] or own
    floor = (1 - PREFERENCE_FRACTION) * max(one.tokens_per_s for one in own)
    return min(
        (one for one in own if one.tokens_per_s >= floor),
        key=lambda one: (lossiness(one.setup), tie_break(one.setup), -one.tokens_per_s),
    )


def _pareto_point(candidate: Candidate) -> dict[str, Any]:
    return {
        "setup": setup_to_dict(candidate.setup),
        "tokens_per_s": candidate.tokens_per_s,
        "peak_device_bytes": candidate.memory_evidence.peak_device_bytes,
        "lora_rank": candidate.setup.lora_rank,
    }
