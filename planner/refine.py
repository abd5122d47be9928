"""A higher rung re-ranks or rejects a plan's finalists. Pure: the rung comes in as a callable."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.outcome import Candidate, Prediction, ProbeFailure
from planner.plan import Answer, Plan
from planner.setup import TrainSetup
from planner.units import gib, percent

MAX_DRY_RUNS = 8
FASTER_FRACTION = 0.02
"""A near miss is tried only where it is predicted this much faster: less is within the speed model's noise."""

DryRun = Callable[[TrainSetup], Prediction | ProbeFailure]


def refine(plan: Plan, dry_run: DryRun, near_misses: Sequence[Candidate] = (), *, max_runs: int = MAX_DRY_RUNS) -> Plan:
    """The plan after dry runs of its finalists: the fastest whose dry run fits, the same setup's formula beside it.

    The chosen setup is run first. If it does not fit, slower ones follow, skipping those whose formula, corrected by
    the ratio just seen, cannot fit either. If it fits, faster setups that missed the budget by less than the formula's
    error get their chance. Where the dry run cannot trace a model the formula's plan stands, and says so.
    """
    runs: dict[TrainSetup, Candidate] = {}

    def run(candidate: Candidate) -> Candidate:
        if candidate.setup not in runs:
            runs[candidate.setup] = replace(candidate, dry_run=dry_run(candidate.setup))
        return runs[candidate.setup]

    first = run(plan.chosen)
    if isinstance(first.dry_run, ProbeFailure):
        return _untraced(plan, first)
    chosen = first if first.fits else _first_that_fits(plan, first, run, runs, max_runs)
    if chosen is first:
        chosen = _faster_near_miss(plan, first, near_misses, run, runs, max_runs)
    if chosen is None:
        return _nothing_fits(plan, first, len(runs))
    ranked = _ranked(plan, chosen, runs)
    return replace(
        plan,
        chosen=chosen,
        ranked=ranked,
        walk=(*plan.walk, _answer(plan, first, chosen, len(runs))),
        alternatives=tuple(each for each in plan.alternatives if each.candidate.setup != chosen.setup),
    )


def _ratio(candidate: Candidate) -> float:
    return candidate.memory_evidence.peak_device_bytes / candidate.formula.peak_device_bytes


def _first_that_fits(
    plan: Plan, first: Candidate, run: Callable[[Candidate], Candidate], runs: dict[TrainSetup, Candidate], limit: int
) -> Candidate | None:
    correction = _ratio(first)
    for candidate in sorted(
        plan.ranked, key=lambda each: -each.formula.tokens_per_s if each.formula.tokens_per_s else 0
    ):
        if candidate.setup in runs or candidate.formula.peak_device_bytes * correction > candidate.budget_bytes:
            continue
        if len(runs) >= limit:
            break
        tried = run(candidate)
        if not isinstance(tried.dry_run, ProbeFailure) and tried.fits:
            return tried
    return None


def _faster_near_miss(
    plan: Plan,
    first: Candidate,
    near_misses: Sequence[Candidate],
    run: Callable[[Candidate], Candidate],
    runs: dict[TrainSetup, Candidate],
    limit: int,
) -> Candidate:
    correction = _ratio(first)
    for candidate in sorted(near_misses, key=lambda each: -each.tokens_per_s):
        if candidate.tokens_per_s < first.tokens_per_s * (1 + FASTER_FRACTION) or len(runs) >= limit:
            break
        if candidate.formula.peak_device_bytes * correction > candidate.budget_bytes:
            continue
        tried = run(candidate)
        if not isinstance(tried.dry_run, ProbeFailure) and tried.fits:
            return tried
    return first


def _ranked(plan: Plan, chosen: Candidate, runs: dict[TrainSetup, Candidate]) -> tuple[Candidate, ...]:
    others = [runs.get(each.setup, each) for each in plan.ranked if each.setup != chosen.setup]
    known = {each.setup for each in plan.ranked}
    others += [each for setup, each in runs.items() if setup not in known and setup != chosen.setup]
    return (chosen, *others)


def _answer(plan: Plan, first: Candidate, chosen: Candidate, num_runs: int) -> Answer:
    peak = chosen.memory_evidence.peak_device_bytes
    error = first.formula.peak_device_bytes / first.memory_evidence.peak_device_bytes - 1
    if chosen.setup == plan.chosen.setup:
        choice = "confirmed"
        reason = f"the dry run needs {gib(peak)} (the formula is {percent(abs(error), 1)} {'above' if error >= 0 else 'below'})"
    elif not first.fits:
        choice = "rejected, next taken"
        reason = f"the formula's choice needs {gib(first.memory_evidence.peak_device_bytes)} in the dry run; this one {gib(peak)}"
    else:
        choice = "a faster one fits"
        reason = f"the dry run needs {gib(peak)} where the formula said {gib(chosen.formula.peak_device_bytes)}"
    return Answer(
        question=f"Does the dry run of the real step agree ({num_runs} run{'s' if num_runs > 1 else ''})?",
        choice=choice,
        reason=reason,
        needed_bytes=peak,
        budget_bytes=chosen.budget_bytes,
    )


def _untraced(plan: Plan, first: Candidate) -> Plan:
    assert isinstance(first.dry_run, ProbeFailure)
    note = f"no dry run: {first.dry_run.message}; the formula's band is {percent(first.formula.memory_band_fraction)}"
    return replace(plan, chosen=first, ranked=(first, *plan.ranked[1:]), notes=(*plan.notes, note))


def _nothing_fits(plan: Plan, first: Candidate, num_runs: int) -> Plan:
    """Every finalist failed in the dry run: the plan keeps its smallest one and says that it does not fit."""
    peak = first.memory_evidence.peak_device_bytes
    answer = Answer(
        question=f"Does the dry run of the real step agree ({num_runs} runs)?",
        choice="no finalist fits",
        reason=f"the formula's choice needs {gib(peak)} in the dry run; give more --headroom, so that smaller setups are chosen",
        needed_bytes=peak,
        budget_bytes=first.budget_bytes,
    )
    return replace(plan, chosen=first, walk=(*plan.walk, answer), notes=(*plan.notes, "the chosen setup does not fit"))
