"""Dry runs correct a plan: what they reject falls out, what the formula rejected wrongly comes in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.core.errors import NotPlanned
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.planning.answer import plan_workload
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan, Plan, correction_key
from planner.planning.predict import predict
from planner.planning.refine import MAX_DRY_RUNS, DryRun, PlanWith, exact_bytes, refine
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Fidelity, Prediction, ProbeFailure
from tests.planner.helpers import plan_request, planned
from tests.whole import some


def with_peak(formula: Prediction, peak_device_bytes: int) -> Prediction:
    """A dry run that finds another peak than the formula."""
    dry = replace(formula, level=Fidelity.DRY_RUN, peak_device_bytes=peak_device_bytes)
    return replace(dry, tokens_per_s=None, step_time_s=None)


FAILURE = ProbeFailure(level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message="no such product")


def planning(workload: Workload) -> PlanWith:
    """Plans again and again, as `plan` does it: what a walk computed serves the next."""
    cache = WalkCache()
    return lambda corrections: plan_workload(workload, corrections, cache, helped=False)


def refined(workload: Workload, ratio: Callable[[TrainSetup], float]) -> tuple[Plan | NoPlan, list[TrainSetup]]:
    """The plan where dry runs find the formula off by a known ratio, and what was run."""
    log: list[TrainSetup] = []

    def run(setup: TrainSetup) -> Prediction:
        log.append(setup)
        formula = predict(workload.model, workload.gpu, setup)
        return with_peak(formula, int(formula.peak_device_bytes * ratio(setup)))

    return refine(planning(workload), run), log


def test_refine_confirms_an_exact_formula_with_one_run() -> None:
    plan, log = refined(plan_request("meta-llama/Llama-3.1-8B", memory_gib=22), lambda setup: 0.98)
    assert len(log) == 1
    assert plan.tree[-1].choice == "confirmed"
    assert plan.chosen.dry_run is not None


def test_refine_rejects_what_the_dry_run_cannot_fit() -> None:
    workload = plan_request("meta-llama/Llama-3.1-8B")
    plan, log = refined(workload, lambda setup: 1.3 if setup.checkpointing == 0 else 1.0)
    assert plan.chosen.fits
    assert isinstance(plan.chosen.dry_run, Prediction)
    assert plan.chosen.dry_run.peak_device_bytes <= workload.budget_bytes
    assert len(log) <= MAX_DRY_RUNS
    assert len(set(log)) == len(log)  # nothing is run twice


def test_refine_lets_in_what_the_formula_rejected_wrongly() -> None:
    workload = plan_request("meta-llama/Llama-3.1-8B", fixed={"method": ("lora",)})
    before = planned(workload)
    after, _ = refined(workload, lambda setup: 0.7)
    assert after.chosen.tokens_per_s >= before.chosen.tokens_per_s


def test_refine_ends_in_no_plan_where_nothing_fits() -> None:
    plan, _ = refined(plan_request("meta-llama/Llama-3.1-8B"), lambda setup: 50.0)
    assert isinstance(plan, NoPlan)


def test_refine_keeps_the_formulas_plan_where_the_model_cannot_be_traced() -> None:
    workload = plan_request()
    plan = refine(planning(workload), lambda setup: FAILURE)
    assert any("no such product" in note for note in plan.notes)
    assert plan.chosen.fits


def test_what_an_alternative_costs_is_compared_on_one_rung() -> None:
    """The chosen setup has a dry run and its neighbours have none: half the rank is no dearer for that."""
    plan, _ = refined(plan_request("meta-llama/Llama-3.1-8B"), lambda setup: 0.9)
    smaller = next(each for each in plan.alternatives if each.label == f"rank {plan.chosen.setup.lora_rank // 2}")
    assert smaller.candidate.dry_run is None
    assert smaller.candidate.memory_evidence.peak_device_bytes > plan.chosen.memory_evidence.peak_device_bytes
    assert ", -" in smaller.trade


def stranger(**fields: Any) -> Workload:
    """A model that only its module tree is known of, and no step profile."""
    workload = plan_request("Qwen/Qwen2.5-1.5B", **fields)
    config = {**workload.model.config, "bias_of_a_stranger": True, "tie_word_embeddings": 1}  # another structure's name
    return replace(workload, model=replace(workload.model, from_tree=True, config=config))


def running(
    workload: Workload, fails: Callable[[TrainSetup], bool], log: list[TrainSetup], *, keeps: int = 3
) -> DryRun:
    """A dry run that takes so many times what the formula says beside the weights, or stops with an error."""

    def run(setup: TrainSetup) -> Prediction | ProbeFailure:
        log.append(setup)
        if fails(setup):
            return FAILURE
        formula = predict(workload.model, workload.gpu, setup)
        exact = exact_bytes(workload.model, setup)
        return with_peak(formula, exact + keeps * (formula.peak_device_bytes - exact))

    return run


def test_what_a_strangers_layers_keep_is_corrected_and_its_weights_are_not() -> None:
    """One run is enough to know how much of a card that is mostly activations a smaller micro-batch takes."""
    workload, log = stranger(memory_gib=12), list[TrainSetup]()
    run = running(workload, lambda setup: False, log)
    plan = refine(planning(workload), run)
    assert plan.chosen.fits
    assert isinstance(plan.chosen.dry_run, Prediction)
    assert plan.alternatives
    beside = [alternative.candidate for alternative in plan.alternatives]
    assert all(isinstance(candidate.dry_run, Prediction) and candidate.fits for candidate in beside)


@pytest.mark.parametrize(
    ("memory_gib", "fixed", "fails"),
    some(
        [
            (5, {"method": ("lora", "qlora"), "kernels": ("liger", "eager")}, lambda setup: setup.quantized),
            (8, {"method": ("lora", "qlora")}, lambda setup: setup.checkpointing > 0),
        ],
        2,
    ),
)
def test_what_a_strangers_step_cannot_run_is_left_out_and_said(
    memory_gib: float, fixed: dict[str, Any], fails: Callable[[TrainSetup], bool]
) -> None:
    """What is alone at fault is found by one more run: its other values are not tried one after another."""
    workload = stranger(memory_gib=memory_gib, fixed=fixed, prefer="speed")
    first = planned(workload, {})
    assert fails(first.chosen.setup)
    run = running(workload, fails, [], keeps=1)
    plan = refine(planning(workload), run)
    assert isinstance(plan.chosen.dry_run, Prediction)
    assert not fails(plan.chosen.setup)
    reasons = [answer.reason for answer in plan.tree if answer.choice == "no, left out"]
    assert reasons == ["no such product"]


def test_where_nothing_that_fits_runs_there_is_no_plan() -> None:
    fixed = {"method": ("qlora", "lora"), "optimizer": ("adamw-fused",), "lora_targets": ("all-linear",)}
    workload = stranger(memory_gib=4, fixed=fixed)
    fits_packed = planned(workload)
    assert fits_packed.chosen.setup.quantized
    run = running(workload, lambda setup: setup.quantized, [])
    plan = refine(planning(workload), run)
    assert isinstance(plan, NoPlan)
    assert any("does not run: no such product" in note for note in plan.notes)
    quantized = [answer for answer in plan.tree if "4-bit" in answer.question]
    assert quantized[0].reason.startswith("its step stops in every 4-bit")
    assert quantized[0].needed_bytes is None  # a million times what it needs is no figure


def test_a_stranger_whose_own_class_trains_on_no_text_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLIP-2's forward requires pixel_values: a plan of text alone is none of what a person trains."""
    workload = stranger(memory_gib=24)
    model = replace(workload.model, config={**workload.model.config, "vision_config": {}})
    with pytest.raises(NotPlanned, match=r"run on text alone \(no such product"):
        refine(planning(replace(workload, model=model)), lambda setup: FAILURE)
    assert isinstance(refine(planning(workload), lambda setup: FAILURE), Plan)
    monkeypatch.setattr("planner.planning.refine.why_no_dry_run", lambda setup: "DeepSpeed's engine")
    assert isinstance(refine(planning(replace(workload, model=model)), lambda setup: FAILURE), Plan)


def test_a_stranger_that_its_formula_finds_a_little_too_large_is_run_before_nothing_is_said_to_fit() -> None:
    fixed = {"method": ("qlora",)}
    least = plan_workload(stranger(memory_gib=1.5, fixed=fixed), helped=False)
    memory_gib = least.nearest.formula.peak_device_bytes / 2**30  # of which a part is kept free
    log, workload = list[TrainSetup](), stranger(memory_gib=memory_gib, fixed=fixed)
    plan_with = planning(workload)
    assert isinstance(plan_with(None), NoPlan)

    assert isinstance(refined(workload, lambda setup: 0.8)[0], Plan)
    plan = refine(plan_with, running(workload, lambda setup: False, log))
    assert isinstance(plan.nearest.dry_run, Prediction)
    assert plan.missing_bytes == plan.nearest.dry_run.peak_device_bytes - workload.budget_bytes


def test_what_stands_beside_a_stranger_is_of_another_family() -> None:
    workload, log = stranger(memory_gib=24), list[TrainSetup]()
    plan = refine(planning(workload), running(workload, lambda setup: False, log, keeps=1))
    assert plan.alternatives
    key = correction_key(plan.chosen.setup)
    assert all(correction_key(each.candidate.setup) != key for each in plan.alternatives)
    assert len(log) == len({*log})


def test_what_no_dry_run_follows_is_not_taken_in_the_hope_of_one() -> None:
    """DDP beside ZeRO-1, which may fit: the wider request runs and takes what DDP alone does, and says nothing of
    DeepSpeed's engine."""

    def refined_among(*engines: str) -> tuple[Plan | NoPlan, list[TrainSetup]]:
        fixed = {"parallel": engines, "method": ("lora",), "kernels": ("fused",)}
        cluster = make_cluster(find_gpu("rtx-4090"), 4)
        return refined(plan_request("Qwen/Qwen2.5-7B", cluster=cluster, fixed=fixed), lambda setup: 1.0)

    (wide, wide_runs), (narrow, narrow_runs) = refined_among("ddp", "zero1"), refined_among("ddp")
    assert wide.chosen == narrow.chosen
    assert wide_runs == narrow_runs
    assert len(wide_runs) > 1
