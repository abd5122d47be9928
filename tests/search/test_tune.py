"""`tune_plan`: a finished plan goes through the search; the real space and formula, a stand-in for the GPU."""

import random
import signal
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from search_cases import empty_study, measurement

from finetune_planner.app import tuning
from finetune_planner.app.tuning import Tuning, search_candidates, trial_line, tune_plan
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.decision.results import PREFERENCE_FRACTION
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Evidence, FailureKind, Fidelity, Measurement, ProbeFailure
from search.dimensions import key_of
from search.stopping import Budget
from search.storage import close_storage, open_storage
from search.study import TrialRecord
from tests.whole import some


@cache
def made_plan() -> Plan:
    model = catalogue.load("meta-llama/Llama-3.2-1B")
    fixed = {
        "method": ("lora", "qlora"),
        "lora_rank": (16,),
        "optimizer": ("adamw-fused",),
        "lora_targets": ("all-linear",),
        "loss": ("liger", "chunked"),
    }
    request = PlanRequest(fixed=fixed, seq_len=1024, global_batch=16).probed(("axolotl",))
    plan_request = request.workload(model, find_gpu("rtx-4090"))
    plan = plan_workload(plan_request)
    assert isinstance(plan, Plan)
    return plan


@cache
def made_candidates() -> tuple[Candidate, ...]:
    return search_candidates(made_plan())


def stand_in(setup: TrainSetup) -> Evidence:
    """A GPU that is 12 % slower than the formula says, with SDPA 15 % faster than that and a jitter of 1 %."""
    plan_request = made_plan().workload
    prediction = predict(plan_request.model, plan_request.gpu, setup)
    assert prediction.tokens_per_s is not None
    if prediction.peak_device_bytes * 1.02 > plan_request.memory_bytes:
        return ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
    error = -0.12 + (0.15 if setup.attention == "sdpa" else 0.0) + random.Random(key_of(setup)).gauss(0, 0.01)
    return measurement(setup, prediction.tokens_per_s * exp(error), 1.02 * prediction.peak_device_bytes)


def test_candidates_keep_the_plans_kind_and_contain_it() -> None:
    plan = made_plan()
    candidates = made_candidates()
    assert plan.chosen.setup in {candidate.setup for candidate in candidates}
    assert plan.chosen.verdict == "fits"
    assert {candidate.setup.method for candidate in candidates} == {plan.chosen.setup.method} == {"lora"}
    faster = replace(plan, workload=replace(plan.workload, prefer="speed"))
    assert {candidate.setup.method for candidate in search_candidates(faster)} == {"lora", "qlora"}
    assert len({candidate.setup.tokens_per_step for candidate in candidates}) == 1
    assert 100 < len(candidates) <= 1 + tuning.MAX_CANDIDATES


@pytest.mark.slow
def test_tuned_plan_is_measured_fits_and_is_at_least_as_fast(tmp_path: Path) -> None:
    plan = made_plan()
    tuned = tune_plan(plan, Tuning(dry_run=False, storage=tmp_path, budget=Budget(max_probes=10)), evaluate=stand_in)
    assert isinstance(tuned.chosen.probe, Measurement)
    assert tuned.chosen.probe.peak_device_bytes <= plan.workload.budget_bytes
    first = stand_in(plan.chosen.setup)
    assert isinstance(first, Measurement)
    assert tuned.chosen.tokens_per_s >= first.tokens_per_s * (1 - PREFERENCE_FRACTION)
    assert tuned.chosen.setup.method == plan.chosen.setup.method == "lora"
    assert tuned.ranked[0] == tuned.chosen
    assert tuned.search["stop_reason"]
    trials = tuned.search["trials"]
    assert isinstance(trials, list)
    assert sum(row["level"] == "probe" for row in trials) <= 10
    assert (tmp_path / "study.db").exists()


def test_sigterm_gives_the_trial_back(tmp_path: Path) -> None:
    def cancelled(setup: TrainSetup) -> Evidence:
        signal.raise_signal(signal.SIGTERM)
        return stand_in(setup)

    with pytest.raises(SystemExit) as ended:
        tune_plan(made_plan(), Tuning(dry_run=False, storage=empty_study(tmp_path)), evaluate=cancelled)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    storage = open_storage(tmp_path)
    study = optuna.load_study(storage=storage, study_name="plan")
    assert [trial.state for trial in study.trials if trial.user_attrs["origin"] == "plan"] == [
        TrialState.FAIL,
        TrialState.WAITING,
    ]
    close_storage(storage)


def test_when_no_probe_fits_the_plan_stands_and_says_so(tmp_path: Path) -> None:
    plan = made_plan()
    failure = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
    tuned = tune_plan(plan, Tuning(dry_run=False, budget=Budget(max_probes=2)), evaluate=lambda setup: failure)
    assert tuned.chosen == plan.chosen
    assert "no probe showed a setup that fits" in tuned.notes[-1]


@pytest.mark.parametrize(
    ("model", "memory_gib", "fixed", "has"),
    some(
        [
            ("meta-llama/Llama-3.1-8B", 18.4, {}, {"lora_targets": "attention"}),
            ("Qwen/Qwen2.5-0.5B", 80, {"compile": (True, False)}, {"compile": True}),
            ("meta-llama/Llama-3.2-1B", 80, {"objective": ("grpo",)}, {"kernels": "liger"}),  # and vLLM generates
        ],
        2,
    ),
)
def test_a_search_walks_every_space_that_a_plan_is_chosen_from(
    model: str, memory_gib: float, fixed: dict[str, tuple[Any, ...]], has: dict[str, Any]
) -> None:
    request = PlanRequest(fixed=fixed, memory_gib=memory_gib).probed(("axolotl",))
    plan_request = request.workload(catalogue.load(model), find_gpu("h100-sxm"))
    plan = plan_workload(plan_request)
    mine = plan.chosen.setup
    assert {name: getattr(mine, name) for name in has} == has
    chosen_values = mine.attention, mine.loss, mine.optimizer, mine.micro_batch_seqs
    assert any(point[1:5] == chosen_values and point.setup == mine for point in tuning._walked(plan))


def test_trial_lines_say_what_happened() -> None:
    from optuna.trial import TrialState

    setup = TrainSetup(method="qlora", quantization="nf4", micro_batch_seqs=2, accumulation_steps=8)
    record = TrialRecord(number=0, setup=setup, state=TrialState.COMPLETE, origin="plan")
    done = replace(record, evidence=measurement(setup, 1234.0, 2**30))
    assert trial_line(done).startswith("  1,234 tokens/s, 1.00 GiB  QLoRA rank 16, nf4, bf16-autocast")
    failure = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="x")
    assert trial_line(replace(record, evidence=failure)).startswith("  out of memory  QLoRA")
    assert "excluded" in trial_line(replace(record, excluded="formula: needs 30 GiB, budget 20 GiB"))


def test_a_tuned_plan_takes_the_simplest_of_what_was_measured_as_fast() -> None:
    """Pure bf16 was measured 2 % faster: autocast is taken, as in a plan; 5 % faster is taken."""
    plan = made_plan()
    plain, pure = (plan.chosen.setup.replace(precision=name) for name in ("bf16-autocast", "bf16-pure"))
    made = {candidate.setup: candidate for candidate in made_candidates()}
    for faster, chosen in ((1.02, plain), (1.05, pure)):
        speeds = {plain: 1000.0, pure: 1000.0 * faster}
        probed = [replace(made[setup], probe=measurement(setup, speed, 8 * GIB)) for setup, speed in speeds.items()]
        assert tuning._preferred(plan.workload, probed[1], probed).setup == chosen
