"""A plan after its search: what was measured is chosen, its rivals ranked, and what no probe could run told."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.decision.candidates import candidate
from planner.decision.spreads import spread_name
from planner.interchange import setup_to_dict
from planner.notes import found
from planner.outcome import Candidate, Measurement
from planner.plan import Plan, with_trades
from planner.units import gib
from reports.extras import search_values
from reports.setup_text import trial_words

if TYPE_CHECKING:
    from search.problem import Unprobed
    from search.run import SearchResult

MEASURED_GAIN_FRACTION = 0.05
"""A quantized base replaces a LoRA that fits where it was measured faster by more than this."""


def tuned(plan: Plan, result: "SearchResult", unprobed: "Unprobed" = lambda setup: "") -> Plan:
    """The plan with the search's answer chosen, its rivals ranked by measured speed, and the search's history.

    What no probe can run stands beside it with its prediction and the reason, never among what was measured.
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
    if result.best is None:
        note = f"no probe showed a setup that fits ({result.reason}): the plan stands on prediction alone"
        return replace(plan, search=values, notes=(*plan.notes, found(note)))
    chosen = result.best
    if plan.workload.objective == "tokens" and chosen.setup.method == "qlora":
        chosen = _unquantized(chosen, result.candidates, MEASURED_GAIN_FRACTION)
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


def _predicted_only(plan: Plan, result: "SearchResult", unprobed: "Unprobed") -> list[dict[str, Any]]:
    """Of every spread that no probe here can run: its setup in the study, why, and what the formula says of it."""
    rows = []
    for setup in dict.fromkeys(record.setup for record in result.trials if unprobed(record.setup)):
        formula = candidate(plan.workload, setup).formula
        row = {
            "spread": spread_name(setup),
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


def _unquantized(best: Candidate, candidates: Sequence[Candidate], gain_fraction: float) -> Candidate:
    """A measured 16-bit LoRA nearly as fast goes before QLoRA: quantize to fit, or where the whole is faster."""
    for one in candidates:
        near = one.tokens_per_s * (1 + gain_fraction) >= best.tokens_per_s
        timed = isinstance(one.probe, Measurement) and one.probe.tokens_per_s is not None
        if one.setup.method == "lora" and timed and one.fits and near:
            return one
    return best


def _pareto_point(candidate: Candidate) -> dict[str, Any]:

    return {
        "setup": setup_to_dict(candidate.setup),
        "tokens_per_s": candidate.tokens_per_s,
        "peak_device_bytes": candidate.memory_evidence.peak_device_bytes,
        "lora_rank": candidate.setup.lora_rank,
    }
