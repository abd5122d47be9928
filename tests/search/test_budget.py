"""A budget is a promise: whatever a probe's child or a dry run does, a search ends with what it has."""

import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from search_cases import measurement

from finetune_planner.app.time_left import TimeIsUp, least_probe_s, until
from finetune_planner.app.tuning import Tuning, tune_plan
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from planner.setup.codec import Outcome
from planner.setup.outcome import Evidence
from probes.gpu import executors
from probes.gpu.evaluate import Prober
from search.stopping import Budget
from tests.whole import some

pytestmark = pytest.mark.processes

SLACK_S, LONG_S = 10.0, 600.0
FIXED = {"method": ("full",), "precision": ("bf16-mixed",), "optimizer": ("adamw",), "attention": ("sdpa",)}
CHILDREN = {
    "hangs": "import time; time.sleep(600)",
    "is deaf": "import signal, time; [signal.signal(one, signal.SIG_IGN) for one in (1, 2, 15)]; time.sleep(600)",
    "talks": "while True: print('still here' * 1000, flush=True)",
    "never starts": "import os, sys, time; os.write(int(sys.argv[sys.argv.index('--status-fd') + 1]), "
    "b'{\"starting\": true}\\n'); time.sleep(600)",
    "waits for its device": "import os, sys, time; os.write(int(sys.argv[sys.argv.index('--status-fd') + 1]), "
    "b'{\"waiting\": true}\\n'); time.sleep(600)",
    "has a child": "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)'], start_new_session=True); time.sleep(600)",
}


@cache
def made_plan() -> Plan:
    plan = plan_workload(
        PlanRequest(fixed=FIXED, seq_len=64, global_batch=1)
        .probed(("axolotl",))
        .workload(catalogue.load("HuggingFaceTB/SmolLM2-135M"), find_gpu("rtx-4090"))
    )
    assert isinstance(plan, Plan)
    return plan


def tuned(folder: Path, seconds: float, **changes: object) -> tuple[Plan, float]:
    """(the plan after a search on the CPU, how long it took)."""
    begun = time.monotonic()
    how = Tuning(
        dry_run=False,
        device="cpu",
        store=folder / "store.jsonl",
        storage=folder,
        budget=Budget(max_probes=1, seconds=seconds),
    )
    plan = tune_plan(made_plan(), replace(how, **changes))
    return plan, time.monotonic() - begun


@pytest.mark.parametrize("child", some([*CHILDREN], 2))
def test_a_search_ends_with_its_budget_whatever_a_child_does(
    child: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (sys.executable, "-c", CHILDREN[child])
    monkeypatch.setattr(executors, "LocalExecutor", partial(executors.LocalExecutor, argv=argv))
    monkeypatch.setattr("finetune_planner.app.tuning.least_probe_s", lambda *args, **values: 0.0)
    submit = Prober.submit

    def with_little_left(self: Prober, setup: TrainSetup) -> "Future[Outcome]":
        self.ends_at = time.monotonic() + 0.4
        return submit(self, setup)

    monkeypatch.setattr(Prober, "submit", with_little_left)
    plan, took_s = tuned(tmp_path, LONG_S)
    assert took_s < SLACK_S
    assert plan.chosen == made_plan().chosen
    assert "no probe was measured (the budget ended in a probe" in plan.notes[-1]
    assert not (tmp_path / "store.jsonl").exists()  # it says nothing of the setup
    measured, _ = tuned_again(tmp_path)
    assert measured == [plan.chosen.setup]  # the next call begins with it


def tuned_again(folder: Path) -> tuple[list[TrainSetup], Plan]:
    """(what the next call of a study measures, its plan)."""
    measured: list[TrainSetup] = []

    def evaluate(setup: TrainSetup) -> Evidence:
        measured.append(setup)
        return measurement(setup, 1000.0, 2**30)

    how = Tuning(dry_run=False, storage=folder, budget=Budget(max_probes=1))
    return measured, tune_plan(made_plan(), how, evaluate=evaluate)


def test_what_cannot_end_in_the_time_that_is_left_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also no dry run goes before it."""
    for name in ("probes.gpu.executors.run_probe", "finetune_planner.app.levels.dry_run_setup"):
        monkeypatch.setattr(name, lambda *args, **values: pytest.fail("begun"))
    monkeypatch.setattr("finetune_planner.app.tuning.least_probe_s", lambda *args, **values: 1e6)
    plan, _ = tuned(tmp_path, 20.0, dry_run=True)
    assert "no probe was measured (a probe takes " in plan.notes[-1]
    assert "probes run on this CPU, which is slow" in capsys.readouterr().err


def test_the_least_time_of_a_probe_grows_with_its_work() -> None:
    """Two depths of 135 M parameters in 30 layers, 4 steps each: the head (576 x 49,152) in both, 6 of 30 layers."""
    plan = made_plan()
    model, gpu = plan.workload.model, plan.workload.gpu
    setup = TrainSetup(method="full", lora_rank=0, micro_batch_seqs=1, accumulation_steps=1, seq_len_tokens=64)
    least_s = [least_probe_s(model, gpu, setup.replace(micro_batch_seqs=micro_batch), 1e9) for micro_batch in (1, 2, 4)]
    assert least_s[1] - least_s[0] == pytest.approx((least_s[2] - least_s[1]) / 2)
    products = 6 * 64 * (106.2e6 * 6 / 30 + 2 * 576 * 49152)
    assert least_s[1] - least_s[0] == pytest.approx(4 * products / 1e9, rel=0.03)  # attention is beside it
    many = setup.replace(accumulation_steps=64)
    assert least_probe_s(model, gpu, many, 1e9) == least_probe_s(model, gpu, setup.replace(accumulation_steps=3), 1e9)


def test_work_in_this_process_ends_when_time_is_up() -> None:
    def endless() -> None:
        while True:
            try:
                time.sleep(5)
            except Exception:
                pytest.fail("taken for an error of its own")

    with pytest.raises(TimeIsUp), until(time.monotonic() + 0.05):
        endless()
    with until(time.monotonic() + 60):
        pass
    time.sleep(0.01)  # nothing is left of either timer


def test_a_dry_run_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune_planner.app.levels.dry_run_setup", lambda *args, **options: time.sleep(LONG_S))
    monkeypatch.setattr("finetune_planner.app.tuning.least_probe_s", lambda *args, **values: 0.0)
    plan, took_s = tuned(tmp_path, 2.0, dry_run=True)
    assert took_s < 2.0 + SLACK_S
    assert "no probe was measured" in plan.notes[-1]


def test_a_rehearsal_on_the_cpu_chooses_nothing_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measured stands in the study and in a note; the plan is as predicted."""
    monkeypatch.setattr("probes.gpu.evaluate.Prober.__call__", lambda self, setup: measurement(setup, 12.0, 2**30))
    plan, _ = tuned(tmp_path, 60.0)
    assert plan.chosen == made_plan().chosen
    assert "rehearsed on this machine's CPU: 1 of 1 measured, the fastest at 12 tokens/s there" in plan.notes[-1]
    assert "the plan stands on prediction alone" in plan.notes[-1]
    assert [row["level"] for row in plan.search["trials"]] == ["probe"]
