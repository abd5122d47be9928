"""A higher level corrects a plan: dry-run what the formula chose, learn the ratio, plan again until the two agree.

Pure: planning and the dry run come in as callables.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core import notes as noted
from planner.core.errors import NotPlanned, SetupError
from planner.core.units import gib, percent
from planner.models.encoders import MODALITIES
from planner.models.spec import ModelSpec
from planner.planning.evidence.followed import why_no_dry_run
from planner.planning.plan import Alternative, Answer, CorrectionKey, NoPlan, Plan, correction_key, with_trades
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Prediction, ProbeFailure

MAX_DRY_RUNS = 6

DryRun = Callable[[TrainSetup], Prediction | ProbeFailure]
PlanWith = Callable[[Mapping[CorrectionKey, float] | None], Plan | NoPlan]


def layout_correction_key(setup: TrainSetup) -> CorrectionKey:
    """On several GPUs: setups of one engine and split; unseen families of them err as the last one run."""
    return ("spread", setup.parallel, *setup.degrees, setup.offload)


def exact_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Of the formula's peak, what no dry run corrects: the weights of a model that only its module tree is known of.

    Its layers may keep several times what the formula assumes, and its weights are those that the tree holds.
    """
    if not model.from_tree or not setup.single_gpu:
        return 0
    from planner.memory.states import weight_bytes  # late: models with an adapter need it elsewhere alone

    return sum(weight_bytes(model, setup).values())


ANY_SETUP: CorrectionKey = ()
"""Key of the correction for setups whose own family has none."""
CANNOT_RUN = 1e6
"""The correction of a family whose step stopped with an error."""
CAUSES: Mapping[str, tuple[Callable[[TrainSetup], bool], Mapping[str, Any]]] = {
    "checkpointing": (
        lambda setup: setup.checkpointing > 0,
        {"checkpointing": 0, "activation_offload": False, "selective_checkpointing": False},
    ),
    "quantization": (
        lambda setup: setup.quantized,
        {"method": "lora", "quantization": "none", "kbit_fp32_cast": False, "quantize_experts": False},
    ),
}
"""What alone may stop a step of a model that no adapter knows: which setups have it, and how they are without it. Its
name is the key of the correction for all of them."""


def never_runs(peak_bytes: int, budget_bytes: int) -> bool:
    """Whether a corrected peak is that of a setup whose family stopped."""
    return peak_bytes > budget_bytes * CANNOT_RUN / 1000  # of 0.5 GiB at least, and no card has a thousand times that


def stopped(corrections: Mapping[CorrectionKey, float], setup: TrainSetup) -> bool:
    """Whether a setup has what stopped another one's step."""
    return any(has(setup) for name, (has, _) in CAUSES.items() if (name,) in corrections)


def _cause(setup: TrainSetup, dry_run: DryRun) -> CorrectionKey:
    """The key of what made a setup's step stop: what it has in common with others, where one sequence without it
    runs, else its own family."""
    for name, (has, without) in CAUSES.items():
        if has(setup):
            with suppress(SetupError):
                if isinstance(dry_run(setup.replace(micro_batch_seqs=1, **without)), Prediction):
                    return (name,)
    return correction_key(setup)


CAREFUL_RUNS = 3
"""The last runs assume that every family errs as badly as the worst one seen."""


def refine(plan_with: PlanWith, dry_run: DryRun) -> Plan | NoPlan:
    """The plan on which formula and dry run agree, with the dry run beside the formula of all that was run.

    `plan_with(corrections)` plans with each family's formula peak (beyond `exact_bytes`) multiplied by the ratio that
    its dry run showed. A
    setup that the dry run rejects thus falls out, and one that the formula rejected wrongly comes in. What only may fit
    by the formula is dry-run first where it is the fastest, and taken where the dry run's own, narrower band fits.
    Where the dry run cannot trace the model, the formula's plan alone (`plan_with(None)`) stands and says so; a setup
    that no dry run follows is taken where it surely fits without one.

    Raises:
        NotPlanned: a model of more than text, whose own class ran no step of text that was tried.
    """
    runs: dict[TrainSetup, Prediction] = {}
    failed: dict[TrainSetup, ProbeFailure] = {}
    corrections: dict[CorrectionKey, float] = {}
    plan = plan_with(corrections)
    first = plan.chosen if isinstance(plan, Plan) else None
    while (chosen := _unproven(plan)) and chosen.setup not in {**runs, **failed} and len(runs | failed) < MAX_DRY_RUNS:
        outcome = dry_run(chosen.setup)
        if isinstance(outcome, ProbeFailure):
            if not plan.workload.model.from_tree:
                of_it_alone = why_no_dry_run(chosen.setup)  # what was learned of others holds
                return _untraced(plan if of_it_alone else plan_with(None), outcome, runs)
            failed[chosen.setup] = outcome
            corrections[_cause(chosen.setup, dry_run)] = CANNOT_RUN
            plan = plan_with(corrections)
            continue
        first = first if runs else chosen
        runs[chosen.setup] = outcome
        exact = exact_bytes(plan.workload.model, chosen.setup)
        ratio = max(0.0, outcome.peak_device_bytes - exact) / (chosen.formula.peak_device_bytes - exact)
        key = correction_key(chosen.setup)
        corrections[key] = max(ratio, corrections.get(key, 0.0)) if ratio > 1 else ratio
        if chosen.setup.num_gpus > 1 and ratio > 1:
            corrections[layout_correction_key(chosen.setup)] = ratio
        peaks = [run.peak_device_bytes * (1 + run.memory_band_fraction) for run in runs.values()]
        if len(runs) >= MAX_DRY_RUNS - CAREFUL_RUNS and min(peaks) > plan.workload.budget_bytes:
            corrections[ANY_SETUP] = max(correction for correction in corrections.values() if correction < CANNOT_RUN)
        plan = plan_with(corrections)
    if failed and not runs and isinstance(plan, Plan):
        failure, model = next(iter(failed.values())), plan.workload.model
        ran = not all(map(why_no_dry_run, failed))  # else nothing was tried
        if ran and not MODALITIES.isdisjoint(model.config):
            reason = f"no step of {model.model_id} was seen to run on text alone ({failure.message[:300]})"
            raise NotPlanned(
                f"{reason}; what it makes of pictures or sound is not planned",
                hint="plan trace -- python FILE runs a program on a phantom GPU and says what it needs",
            )
        return _untraced(plan_with(None), failure, runs)
    plan = replace(plan, tree=(*plan.tree, *_refusals(failed)))
    if isinstance(plan, NoPlan):
        stops = [failure.message[:300] for failure in failed.values()][:1]
        notes = (*plan.notes, *(noted.measured(f"what fits by its size does not run: {why}") for why in stops))
        nearest, tree = _with_run(plan.nearest, runs), (*plan.tree, *_answers(first, None, runs))
        missing = max(1, nearest.memory_evidence.peak_device_bytes - plan.workload.budget_bytes)
        return replace(plan, nearest=nearest, missing_bytes=missing, notes=notes, tree=tree)
    if plan.chosen.setup not in runs:  # out of runs: the fastest that a dry run has confirmed, if any
        plan = _confirmed(plan, runs)
    chosen = _with_run(plan.chosen, runs)
    others = [replace(each, candidate=_with_run(each.candidate, runs)) for each in plan.alternatives]
    others = [each for each in others if each.candidate.setup != chosen.setup]
    if plan.workload.model.from_tree:
        chosen_key = correction_key(chosen.setup)
        others = [each for each in others if correction_key(each.candidate.setup) != chosen_key]
        others = [*_that_ran(others, runs, failed, dry_run)]
    return replace(
        plan,
        chosen=chosen,
        ranked=(chosen, *(_with_run(each, runs) for each in plan.ranked if each.setup != chosen.setup)),
        alternatives=with_trades(chosen, others),
        tree=(*plan.tree, *_answers(first, chosen, runs)),
    )


def _unproven(plan: Plan | NoPlan) -> Candidate | None:
    """What a dry run is to say more of: the chosen setup; where nothing fits of a model that no adapter knows, the
    nearest, if it is over by less than the formula errs."""
    if isinstance(plan, Plan):
        return plan.chosen
    formula, model, budget = plan.nearest.formula, plan.workload.model, plan.workload.budget_bytes
    near = formula.peak_device_bytes * (1 - formula.memory_band_fraction) <= budget
    return plan.nearest if model.from_tree and near and exact_bytes(model, plan.nearest.setup) < budget else None


def _refusals(failed: Mapping[TrainSetup, ProbeFailure]) -> Iterator[Answer]:
    """What the real step would not run of a model that no adapter knows, which the plan therefore leaves out."""
    for setup, failure in failed.items():
        checkpointed = f", checkpointing every {setup.checkpointing}" if setup.checkpointing else ""
        stored = f" ({setup.quantization})" if setup.quantized else ""
        question = f"Does the real step run {setup.method}{stored} in {setup.precision}{checkpointed}?"
        yield Answer(question, "no, left out", failure.message[:300])


def _that_ran(
    others: Sequence[Alternative], runs: Mapping[TrainSetup, Prediction], failed: Container[TrainSetup], dry_run: DryRun
) -> Iterator[Alternative]:
    """The alternatives with a dry run of their own: of a model that no adapter knows the formula says little. What does
    not run or fit is none. Those of the chosen one's family, which differ by a rank or a micro-batch, are not worth
    two thirds of the time of a first plan: the caller leaves them out."""
    for each in others:
        setup = each.candidate.setup
        outcome = runs.get(setup) or (None if setup in failed else dry_run(setup))
        if isinstance(outcome, Prediction):
            candidate = replace(each.candidate, dry_run=outcome)
            if candidate.fits:
                yield replace(each, candidate=candidate)


def _with_run(candidate: Candidate, runs: Mapping[TrainSetup, Prediction]) -> Candidate:
    prediction = runs.get(candidate.setup)
    return candidate if prediction is None else replace(candidate, dry_run=prediction)


def _confirmed(plan: Plan, runs: Mapping[TrainSetup, Prediction]) -> Plan:
    ran = [_with_run(candidate, runs) for candidate in plan.ranked if candidate.setup in runs]
    for candidate in sorted(ran, key=lambda candidate: candidate.verdict != "fits"):
        if candidate.verdict != "over":
            return replace(plan, chosen=candidate)
    note = noted.measured("no dry run has confirmed this setup yet: give more --headroom")
    return replace(plan, notes=(*plan.notes, note))


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
        return (Answer(question, "no", reason, peak, first.budget_bytes),)
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
    return (Answer(question, choice, reason, mine, chosen.budget_bytes),)


def _untraced(plan: Plan | NoPlan, failure: ProbeFailure, runs: Mapping[TrainSetup, Prediction]) -> Plan | NoPlan:
    if isinstance(plan, NoPlan):
        return plan
    chosen = replace(plan.chosen, dry_run=failure)
    band = percent(chosen.formula.memory_band_fraction)
    note = noted.measured(f"no dry run: {failure.message}; the formula's band of {band} stands")
    ranked = (chosen, *(_with_run(each, runs) for each in plan.ranked[1:]))
    return replace(plan, chosen=chosen, ranked=ranked, notes=(*plan.notes, note))
