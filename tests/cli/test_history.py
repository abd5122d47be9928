"""A plan for a GPU that has measurements uses them, and says so; the store is where they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_planner.app import machine
from finetune_planner.app.history import QUESTION, history_of, outcomes, with_history
from finetune_planner.app.tuning import Tuning, tune_plan
from finetune_planner.cli.app import run
from planner.hardware.cluster import make_cluster
from planner.memory.workload import Workload
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from probes.gpu.evaluate import record_of
from probes.gpu.request import ProbeRequest
from probes.store import Store
from search.corrections import as_transfer_observations, place_of
from search.problem import Observation
from search.stopping import Budget
from tests.planner.helpers import plan_request
from tests.reports.factories import make_environment

MODEL = "meta-llama/Llama-3.2-1B"
OTHER = "Qwen/Qwen2.5-0.5B"


def measured(
    store: Path, workload: Workload, setup: TrainSetup, *, speed: float, device: str = "cuda:0", link: str = ""
) -> None:
    """A measurement `speed` times as fast as the formula says, with its memory."""
    formula = predict(workload.model, workload.gpu, setup, workload.cluster)
    environment = replace(make_environment(), gpu_name=workload.gpu.key, gpu_key=workload.gpu.key, device=device)
    outcome = Measurement(
        level=Fidelity.PROBE,
        peak_allocated_bytes=formula.peak_allocated_bytes,
        peak_reserved_bytes=formula.peak_reserved_bytes,
        peak_device_bytes=formula.peak_device_bytes,
        phase_peaks_bytes={},
        step_times_s=(formula.step_time_s / speed,),
        tokens_per_step=setup.tokens_per_step,
        layers_measured=(2, 4),
        environment=environment,
    )
    request = ProbeRequest(
        model_id=workload.model.model_id,
        config=workload.model.config,
        setup=setup,
        gpu_key=workload.gpu.key,
        device=device,
    )
    Store(store).append(record_of(request, environment, outcome, link))


def planned(workload: Workload) -> Plan:
    plan = plan_workload(workload)
    assert isinstance(plan, Plan)
    return plan


def test_a_slower_card_than_predicted_lowers_the_plans_speed_and_says_so(tmp_path: Path) -> None:
    workload, store = plan_request(MODEL), tmp_path / "store.jsonl"
    before = planned(workload)
    for candidate in before.ranked[:4]:
        measured(store, workload, candidate.setup, speed=0.7)
    history = history_of(workload, outcomes(store))
    assert [observation.setup for observation in history] == [candidate.setup for candidate in before.ranked[:4]]
    after = with_history(before, history)
    assert 0.65 < after.chosen.tokens_per_s / before.chosen.tokens_per_s < 0.95
    (answer,) = [step for step in after.tree if step.question == QUESTION]
    assert "4 measurements (4 of this model)" in answer.reason
    assert "--no-history" in answer.reason
    assert any("corrected by earlier probes" in note for note in after.chosen.formula.notes)
    assert {candidate.setup for candidate in after.ranked} == {candidate.setup for candidate in before.ranked}


def test_what_was_measured_slow_loses_to_a_rival(tmp_path: Path) -> None:
    workload, store = plan_request(MODEL), tmp_path / "store.jsonl"
    before = planned(workload)
    measured(store, workload, before.chosen.setup, speed=0.3)
    for candidate in before.ranked[1:6]:
        measured(store, workload, candidate.setup, speed=1.0)
    after = with_history(before, history_of(workload, outcomes(store)))
    assert after.chosen.setup != before.chosen.setup
    assert after.chosen.fits
    assert after.ranked[0] == after.chosen


def test_full_rows_that_were_measured_fast_do_not_displace_what_padding_leaves_faster(tmp_path: Path) -> None:
    """On an H100 cuDNN's kernels, by SDPA, beat flash attention 2 on full rows, and lose to it with padding's mask."""
    workload, store = plan_request(MODEL, "h100-sxm", fixed={"method": ("lora",)}), tmp_path / "store.jsonl"
    before = planned(workload)
    rivals = [each for each in before.ranked[1:] if each.setup.attention == "sdpa"]
    rival = next(each for each in rivals if each.tokens_per_s > 1.02 * before.chosen.tokens_per_s)
    for candidate in (before.chosen, rival):
        measured(store, workload, candidate.setup, speed=1.0)
    after = with_history(before, history_of(workload, outcomes(store)))
    assert (after.chosen.setup, after.chosen.setup.attention) == (before.chosen.setup, "flash-attention-2")


def test_only_this_gpus_measurements_of_known_models_count(tmp_path: Path) -> None:
    workload, store = plan_request(MODEL), tmp_path / "store.jsonl"
    setup = TrainSetup()
    measured(store, workload, setup, speed=0.5, device="cpu")
    other_workload = replace(workload, gpu=replace(workload.gpu, key="another"))
    measured(store, other_workload, setup, speed=0.5)
    changed = replace(workload.model, config={**workload.model.config, "hidden_size": 64})
    measured(store, replace(workload, model=changed), setup, speed=0.5)
    assert history_of(workload, outcomes(store)) == ()
    measured(store, plan_request(OTHER), setup, speed=0.5)
    (observation,) = history_of(workload, outcomes(store))
    assert observation.model == OTHER
    assert observation.speed_error == pytest.approx(-0.693, abs=0.001)


def test_a_job_on_several_gpus_counts_for_plans_of_several_where_its_link_is_known(tmp_path: Path) -> None:
    single, store = plan_request(MODEL), tmp_path / "store.jsonl"
    cluster = make_cluster(single.gpu, 4)
    several = plan_request(MODEL, cluster=cluster)
    setup = TrainSetup(num_gpus=4, parallel="ddp")
    measured(store, several, setup, speed=0.5)
    assert history_of(several, outcomes(store)) == ()
    measured(store, several, setup, speed=0.5, link=cluster.within.key)
    (observation,) = history_of(several, outcomes(store))
    assert observation.gpu == place_of(single.gpu.key, cluster)
    assert observation.speed_error == pytest.approx(-0.693, abs=0.001)
    assert history_of(single, outcomes(store)) == ()


def test_without_measurements_nothing_changes(tmp_path: Path) -> None:
    workload = plan_request(MODEL)
    plan = planned(workload)
    assert history_of(workload, outcomes(tmp_path / "none.jsonl")) == ()
    assert with_history(plan, ()) is plan


def test_the_plan_command_uses_the_store_and_can_leave_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, store = plan_request(MODEL), tmp_path / "store.jsonl"
    measured(store, workload, TrainSetup(), speed=0.5)
    monkeypatch.setenv("FINETUNE_PLANNER_STORE", str(store))
    opened: list[Path | None] = []
    open_store = machine.open_store
    monkeypatch.setattr(machine, "open_store", lambda path: opened.append(path) or open_store(path))

    def told(*more: str) -> str:
        assert run([MODEL, "--gpu", workload.gpu.key, "--no-dry-run", *more]) == 0
        return capsys.readouterr().out

    assert QUESTION in told("--json=full")
    assert opened == [store]  # 100,000 outcomes take 13 s to read and check
    assert QUESTION not in told("--json=full", "--no-history")
    assert "earlier probes" in told("--all")


def test_a_search_begins_with_what_the_store_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, store = plan_request(MODEL), tmp_path / "store.jsonl"
    measured(store, workload, TrainSetup(), speed=0.5)
    given: list[Observation] = []

    def seen(observations: Sequence[Observation], model: str, gpu: str | None = None) -> tuple[Observation, ...]:
        given.extend(observations)
        return as_transfer_observations(observations, model, gpu)

    monkeypatch.setattr("search.corrections.as_transfer_observations", seen)
    monkeypatch.setattr("finetune_planner.app.tuning.MAX_CANDIDATES", 50)
    failure = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.CRASHED, message="no GPU here")
    how = Tuning(store=store, dry_run=False, budget=Budget(max_probes=1))
    tune_plan(planned(workload), how, evaluate=lambda setup: failure)
    assert tuple(given) == history_of(workload, outcomes(store)) != ()
