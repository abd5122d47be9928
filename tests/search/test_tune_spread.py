"""`tune_plan` on several GPUs: the layout is searched beside the rest; the real space and formula, a stand-in for the
GPUs. Real ranks are in `test_tune_ranks.py`."""

import json
import random
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from search_cases import measurement

from finetune_planner.app import levels
from finetune_planner.app.tuning import (
    Tuning,
    on_this_machine,
    refine_by_probe,
    search_candidates,
    study_name,
    trial_line,
    tune_plan,
)
from planner.core.errors import UsageError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import Evidence, FailureKind, Fidelity, Measurement, ProbeFailure
from search.dimensions import key_of
from search.stopping import Budget
from search.storage import close_storage, open_storage
from search.study import TrialRecord

GPU = find_gpu("rtx-4090")
NUM_GPUS = 4


def no_deepspeed(setup: TrainSetup) -> str:
    """What this machine cannot probe, whatever is installed where the test runs."""
    if setup.parallel.startswith("zero"):
        return "DeepSpeed is not installed"
    return "not probed" if setup.tensor_degree * setup.pipeline_degree > 1 else ""


@cache
def made_plan() -> Plan:
    model = catalogue.load("meta-llama/Llama-3.2-1B")
    fixed = {"method": ("full",), "attention": ("sdpa",), "optimizer": ("adamw-fused",), "loss": ("liger",)}
    plan_request = PlanRequest(fixed=fixed, seq_len=1024, global_batch=32).workload(
        model, GPU, make_cluster(GPU, NUM_GPUS)
    )
    plan = plan_workload(plan_request)
    assert isinstance(plan, Plan)
    return plan


def stand_in(setup: TrainSetup) -> Evidence:
    """GPUs on which FSDP2 is 20 % faster than the formula says and DDP 10 % slower; rank 1 dies wherever gathered
    weights are kept."""
    plan_request = made_plan().workload
    prediction = predict(plan_request.model, plan_request.gpu, setup, plan_request.cluster)
    assert prediction.tokens_per_s is not None
    if not setup.reshard_after_forward:
        return ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.CRASHED, message="rank 1 of 4: killed by SIGKILL")
    if prediction.peak_device_bytes > plan_request.memory_bytes:
        return ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="rank 0 of 4: out of memory")
    error = {"ddp": -0.10, "fsdp2": 0.20}[setup.parallel] + random.Random(key_of(setup)).gauss(0, 0.005)
    return measurement(setup, prediction.tokens_per_s * exp(error), 1.0 * prediction.peak_device_bytes)


def tuned_plan(folder: Path, **changes: Any) -> Plan:
    values: dict[str, Any] = {"evaluate": stand_in, "dry_run": False, "unprobed": no_deepspeed, "storage": folder}
    values["budget"] = Budget(max_probes=8)
    given = {**values, **changes}
    stands_in = {name: given.pop(name) for name in ("evaluate", "unprobed") if name in given}
    return tune_plan(made_plan(), Tuning(**given), **stands_in)


def trials_of(folder: Path, name: str) -> list[Any]:
    import optuna

    storage = open_storage(folder)
    try:
        return optuna.load_study(study_name=name, storage=storage).get_trials()
    finally:
        close_storage(storage)


def test_every_spread_that_a_probe_can_run_is_searched_and_of_the_others_one_setup_is_told() -> None:
    plan = made_plan()
    candidates = search_candidates(plan, no_deepspeed)
    setups = [candidate.setup for candidate in candidates]
    probed = [setup for setup in setups if not no_deepspeed(setup)]
    assert plan.chosen.setup in setups
    assert {setup.num_gpus for setup in setups} == {NUM_GPUS}
    assert len({setup.tokens_per_step for setup in setups}) == 1
    assert {setup.method for setup in setups} == {"full"}
    assert {(setup.parallel, setup.reshard_after_forward) for setup in probed} >= {("fsdp2", True), ("fsdp2", False)}
    unprobed = [setup for setup in setups if no_deepspeed(setup) and setup != plan.chosen.setup]
    names = [(setup.parallel, setup.tensor_degree, setup.pipeline_degree) for setup in unprobed]
    assert {"zero1", "zero2", "zero3"} <= {name for name, _, _ in names}
    assert len(names) == len(set(names))
    assert not any(setup.offload != "none" for setup in setups)


def test_without_a_reason_against_it_every_spread_is_probed() -> None:
    setups = [candidate.setup for candidate in search_candidates(made_plan())]
    assert sum(setup.parallel == "zero3" for setup in setups) > 10


def test_tuned_on_several_gpus_is_measured_and_what_no_probe_runs_is_only_predicted(tmp_path: Path) -> None:
    plan = made_plan()
    tuned = tuned_plan(tmp_path)
    assert isinstance(tuned.chosen.probe, Measurement)
    chosen = tuned.chosen.setup
    assert chosen.parallel in ("ddp", "fsdp2")
    assert chosen.parallel == "ddp" or chosen.reshard_after_forward  # there a rank dies: failed trials, not the end
    assert tuned.chosen.probe.peak_device_bytes <= plan.workload.budget_bytes
    rows = tuned.search["trials"]
    assert isinstance(rows, list)
    assert any("killed by SIGKILL" in row["reason"] for row in rows if row["level"] == "probe")
    not_probed = tuned.search["not_probed"]
    assert isinstance(not_probed, list)
    assert {"ZeRO-1", "ZeRO-2", "ZeRO-3"} <= {row["spread"] for row in not_probed}
    for row in not_probed:
        assert row["reason"] in ("DeepSpeed is not installed", "not probed")
        assert row["predicted_tokens_per_s"] > 0
        (trial,) = [each for each in rows if each["setup"] == row["setup"]]
        assert (trial["level"], trial["tokens_per_s"], trial["feasible"]) == ("formula", None, False)
        assert trial["reason"] == row["reason"]
    note = next(note for note in tuned.notes if "ZeRO-3" in note)
    assert "not measured" in note
    assert "predict" in note
    assert not any("ZeRO" in note for note in plan.notes)


def test_study_of_several_gpus_keeps_predictions_of_what_it_cannot_probe(tmp_path: Path) -> None:
    tuned_plan(tmp_path, budget=Budget(max_probes=1))
    trials = trials_of(tmp_path, f"plan-{NUM_GPUS}-gpus")
    (zero3,) = [trial for trial in trials if trial.user_attrs["setup"]["parallel"] == "zero3"]
    assert zero3.state is TrialState.PRUNED
    assert zero3.values is None
    assert zero3.user_attrs["excluded"] == "DeepSpeed is not installed"
    assert zero3.user_attrs["predicted_tokens_per_s"] > 0
    assert "evidence" not in zero3.user_attrs
    assert zero3.constraints["runs"] > 0


def test_what_could_not_be_probed_is_open_again_once_it_can(tmp_path: Path) -> None:
    """DeepSpeed is installed between two calls: the resumed study probes ZeRO, without repeating what is known."""
    first = tuned_plan(tmp_path, budget=Budget(max_probes=2))

    def faster_zero3(setup: TrainSetup) -> Evidence:
        prediction = predict(first.workload.model, GPU, setup, first.workload.cluster)
        assert prediction.tokens_per_s is not None
        factor = 1.5 if setup.parallel.startswith("zero") else 0.9
        return measurement(setup, factor * prediction.tokens_per_s, prediction.peak_device_bytes)

    second = tuned_plan(tmp_path, evaluate=faster_zero3, unprobed=lambda setup: "", budget=Budget(max_probes=16))
    assert second.chosen.setup.parallel.startswith("zero")
    assert isinstance(second.chosen.probe, Measurement)
    assert not second.search["not_probed"]
    probed = [json.dumps(row["setup"]) for row in second.search["trials"] if row["level"] == "probe"]  # type: ignore[attr-defined]
    assert len(probed) == len(set(probed)) <= 16


def test_one_gpus_study_knows_nothing_of_several(tmp_path: Path) -> None:
    tuned_plan(tmp_path, budget=Budget(max_probes=3))
    assert study_name(made_plan().workload) != "plan"
    with pytest.raises(KeyError):
        trials_of(tmp_path, "plan")


def test_a_search_on_several_nodes_is_refused_and_a_plan_goes_on_without(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    plan = made_plan()
    plan_request = replace(plan.workload, cluster=make_cluster(GPU, NUM_GPUS, num_nodes=2))
    with pytest.raises(UsageError, match="one machine"):
        on_this_machine(plan_request)
    assert refine_by_probe(replace(plan, workload=plan_request)).chosen == plan.chosen
    assert "no probes" in capsys.readouterr().err


def test_a_plan_for_more_gpus_than_here_goes_on_without_probes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("probes.gpu.executors.local_devices", lambda: ("cuda:0",))
    assert refine_by_probe(made_plan()) == made_plan()
    assert "no probes: --gpus 4: this machine has 1 GPU" in capsys.readouterr().err


def test_trial_lines_name_the_spread() -> None:
    setup = TrainSetup(num_gpus=2, parallel="fsdp2", accumulation_steps=3)
    record = TrialRecord(number=0, setup=setup, state=TrialState.COMPLETE, origin="plan")
    assert "FSDP2, LoRA rank 16" in trial_line(record)


def test_dry_run_that_breaks_or_does_not_follow_leaves_the_answer_to_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spreads: list[str] = []

    def dry_run(model: object, gpu: object, setup: TrainSetup, **options: object) -> ProbeFailure:
        spreads.append(setup.parallel)
        if len(spreads) == 1:
            raise ZeroDivisionError("float division by zero")
        return ProbeFailure(
            level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message="it does not follow this spread"
        )

    monkeypatch.setattr(levels, "dry_run_setup", dry_run)
    monkeypatch.setattr(levels, "dry_run_possible", lambda: "")
    tuned = tuned_plan(tmp_path, dry_run=True, budget=Budget(max_probes=3))
    assert len(spreads) == 3
    rows = tuned.search["trials"]
    assert isinstance(rows, list)
    assert sum(row["level"] == "probe" for row in rows) == 3
    assert "dry run failed, the probe decides: ZeroDivisionError" in capsys.readouterr().err
