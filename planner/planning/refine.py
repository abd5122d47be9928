"""A higher rung corrects a plan: dry-run what the formula chose, learn the ratio, plan again until the two agree.

Pure: planning and the dry run come in as callables.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from planner.notes import found
from planner.outcome import Candidate, Prediction, ProbeFailure
from planner.plan import Answer, NoPlan, Plan, with_trades
from planner.setup import TrainSetup
from planner.units import gib, percent

MAX_DRY_RUNS = 6

CorrectionKey = tuple[object, ...]
DryRun = Callable[[TrainSetup], Prediction | ProbeFailure]
PlanWith = Callable[[Mapping[CorrectionKey, float] | None], Plan | NoPlan]


def correction_key(setup: TrainSetup) -> CorrectionKey:
    """Setups that share the formula's error: what changes data types, kernels and what is kept."""
    return (
        setup.method,
        setup.precision,
        setup.quantization,
        setup.kbit_fp32_cast,
        setup.checkpointing,
        setup.kernels,
        setup.activation_offload,
        setup.selective_checkpointing,
        setup.quantize_experts,
        *((setup.num_gpus, setup.parallel, *setup.spread.items()) if setup.num_gpus > 1 else ()),
    )


def spread_correction_key(setup: TrainSetup) -> CorrectionKey:
    """On several GPUs: setups of one engine and split; unseen families of them err as the last one run."""
    return ("spread", setup.parallel, *setup.degrees, setup.offload)


ANY_SETUP: CorrectionKey = ()
"""Key of the correction for setups whose own family has none."""
CAREFUL_RUNS = 3
"""The last runs assume that every family errs as badly as the worst one seen."""


def refine(plan_with: PlanWith, dry_run: DryRun, *, max_runs: int = MAX_DRY_RUNS) -> Plan | NoPlan:
    """The plan on which formula and dry run agree, with the dry run beside the formula of all that was run.

    `plan_with(corrections)` plans with each family's formula peak multiplied by the ratio that its dry run showed. A
    setup that the dry run rejects thus falls out, and one that the formula rejected wrongly comes in. What only may fit
    by the formula is dry-run first where it is the fastest, and taken where the dry run's own, narrower band fits.
    Where the dry run cannot trace the model, the formula's plan alone (`plan_with(None)`) stands and says so.
    """
    runs: dict[TrainSetup, Prediction] = {}
    corrections: dict[CorrectionKey, float] = {}
    plan = plan_with(corrections)
    first = plan.chosen if isinstance(plan, Plan) else None
    while isinstance(plan, Plan) and plan.chosen.setup not in runs and len(runs) < max_runs:
        chosen = plan.chosen
        found = dry_run(chosen.setup)
        if isinstance(found, ProbeFailure):
            return _untraced(plan_with(None), found)
        runs[chosen.setup] = found
        ratio = found.peak_device_bytes / chosen.formula.peak_device_bytes
        key = correction_key(chosen.setup)
        corrections[key] = max(ratio, corrections.get(key, 0.0)) if ratio > 1 else ratio
        if chosen.setup.num_gpus > 1 and ratio > 1:
            corrections[spread_correction_key(chosen.setup)] = ratio
        if len(runs) >= max_runs - CAREFUL_RUNS and not any(_fits(plan, runs[setup]) for setup in runs):
            corrections[ANY_SETUP] = max(corrections.values())
        plan = plan_with(corrections)
    if isinstance(plan, NoPlan):
        return replace(plan, nearest=_with_run(plan.nearest, runs), tree=(*plan.tree, *_answers(first, None, runs)))
    if plan.chosen.setup not in runs:  # out of runs: the fastest that a dry run has confirmed, if any
        plan = _confirmed(plan, runs)
    chosen = _with_run(plan.chosen, runs)
    others = [replace(each, candidate=_with_run(each.candidate, runs)) for each in plan.alternatives]
    others = [each for each in others if each.candidate.setup != chosen.setup]
    return replace(
        plan,
        chosen=chosen,
        ranked=(chosen, *(_with_run(each, runs) for each in plan.ranked if each.setup != chosen.setup)),
        alternatives=with_trades(chosen, others),
        tree=(*plan.tree, *_answers(first, chosen, runs)),
    )


def _with_run(candidate: Candidate, runs: Mapping[TrainSetup, Prediction]) -> Candidate:
    found = runs.get(candidate.setup)
    return candidate if found is None else replace(candidate, dry_run=found)


def _fits(plan: Plan, found: Prediction) -> bool:
    return found.peak_device_bytes * (1 + found.memory_band_fraction) <= plan.workload.budget_bytes


def _confirmed(plan: Plan, runs: Mapping[TrainSetup, Prediction]) -> Plan:
    ran = [_with_run(candidate, runs) for candidate in plan.ranked if candidate.setup in runs]
    for verdict in ("fits", "tight"):
        for candidate in ran:
            if candidate.verdict == verdict:
                return replace(plan, chosen=candidate)
    return replace(plan, notes=(*plan.notes, found("no dry run has confirmed this setup yet: give more --headroom")))


def _answers(
    first: Candidate | None, chosen: Candidate | None, runs: Mapping[TrainSetup, Prediction]
) -> tuple[Answer, ...]:
    if first is None or first.setup not in runs:
        return ()
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    question = f"Does the dry run of the real step agree ({count})?"
    peak = runs[first.setup].peak_device_bytes
    if chosen is None or chosen.setup not in runs:
        reason = f"the formula's choice needs {gib(peak)} in the dry run; nothing else fits"
        return (
            Answer(question=question, choice="no", reason=reason, needed_bytes=peak, budget_bytes=first.budget_bytes),
        )
    mine = runs[chosen.setup].peak_device_bytes
    if chosen.setup == first.setup:
        error = first.formula.peak_device_bytes / peak - 1
        side = "above" if error >= 0 else "below"
        choice, reason = "confirmed", f"it needs {gib(peak)}; the formula is {percent(abs(error), 1)} {side}"
    elif peak > first.budget_bytes:
        choice = "rejected, another taken"
        reason = f"the formula's first choice needs {gib(peak)} in the dry run; this one needs {gib(mine)}"
    elif mine <= peak:
        choice = "too tight, another taken"
        reason = f"the formula's first choice needs {gib(peak)} in the dry run, within its error of the budget"
    else:
        choice = "a faster one fits"
        reason = f"the formula was too careful: this one needs {gib(mine)} in the dry run"
    return (
        Answer(question=question, choice=choice, reason=reason, needed_bytes=mine, budget_bytes=chosen.budget_bytes),
    )


def _untraced(plan: Plan | NoPlan, failure: ProbeFailure) -> Plan | NoPlan:
    if isinstance(plan, NoPlan):
        return plan
    chosen = replace(plan.chosen, dry_run=failure)
    band = percent(chosen.formula.memory_band_fraction)
    note = found(f"no dry run: {failure.message}; the formula's band of {band} stands")
    return replace(plan, chosen=chosen, ranked=(chosen, *plan.ranked[1:]), notes=(*plan.notes, note))
