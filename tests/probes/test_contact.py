"""First contact: what a call runs, how it ends, what comes back; and the clock that plays GPU times."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contact import calls as contact
from benchmarks.contact import compile as contact_compile
from benchmarks.contact import plan as contact_plan
from benchmarks.contact import readings as contact_readings
from benchmarks.contact.calls import Job, Kept, deliver, jobs_of, run_call
from planner.outcome import FailureKind
from planner.units import GIB, MIB
from probes.campaign_spec import read_spec
from probes.gpu.request import Limits
from tests.fake_nvml import Card, nvml_module

CALLS = (1, 2, 3, 4)


class Clock:
    """Moves by what each job takes."""

    def __init__(self, job_s: float) -> None:
        self.now_s, self.job_s = 0.0, job_s
        self.ran: list[tuple[str, float]] = []
        self.status = 0

    def run(self, job: Job, limit_s: float, kept: Kept) -> int:
        self.ran.append((job.name, limit_s))
        self.now_s += min(self.job_s, limit_s)
        return self.status

    def call(self, number: int, folder: Path, budget_s: float = 540.0) -> int:
        return run_call(
            number, Kept(folder), budget_s=budget_s, run=self.run, clock=lambda: self.now_s, say=lambda text: None
        )


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "guard", lambda rehearse: "")


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_within_ten_minutes_whatever_its_jobs_take(call: int, tmp_path: Path, fit: None) -> None:
    clock = Clock(job_s=10_000.0)
    assert clock.call(call, tmp_path) == 0
    assert clock.now_s <= 540.0
    assert clock.ran
    assert all(limit_s >= contact.GIVE_UP_S for _, limit_s in clock.ran)


def test_what_is_done_is_not_done_again_and_campaigns_go_on(tmp_path: Path, fit: None) -> None:
    first, second = Clock(job_s=20.0), Clock(job_s=20.0)
    first.call(4, tmp_path, budget_s=45.0)
    names = [job.name for job in jobs_of(4, Kept(tmp_path))]
    assert [name for name, _ in first.ran] == names[:2]  # with 45 s no third begins
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "plan.json").write_text("{}")
    second.call(4, tmp_path)
    assert [name for name, _ in second.ran] == names[2:]
    for _ in range(2):
        campaign = Clock(job_s=20.0)
        campaign.call(2, tmp_path)
        assert [name for name, _ in campaign.ran] == ["models"]  # the store knows what it holds


def test_readings_that_ended_well_are_not_taken_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    whole = jobs_of(1, kept)[0]
    assert whole.words[2].split(",") == list(contact.READINGS)
    kept.readings.write_text(
        "".join(
            json.dumps({"reading": name, "ended": status}) + "\n" for name, status in (("known", 0), ("rates", 124))
        )
    )
    left = jobs_of(1, kept)[0]
    assert "known" not in left.words[2]
    assert "rates" in left.words[2]
    assert left.limit_s == whole.limit_s - contact_readings.LIMITS_S["known"]
    for name in (*contact.READINGS, "compile"):
        with kept.readings.open("a") as file:
            file.write(json.dumps({"reading": name, "ended": 0}) + "\n")
    assert [job.name for job in jobs_of(1, kept)] == ["smoke"]
    assert [job.name for job in jobs_of(3, kept)] == ["axes"]


FORKS = """
import os, sys, time
from benchmarks.contact.forks import run_each

def good():
    yield {"step": "here", "parent": os.getppid()}

def broken():
    yield {"step": "before"}
    raise RuntimeError("no such library")

def hangs():
    yield {"step": "begun"}
    time.sleep(600)

found = run_each({"aside": good, "good": good, "broken": broken, "hangs": hangs}, dict(
    aside=60, good=60, broken=60, hangs=float(sys.argv[1])), frozenset({"aside"}))
sys.exit(10 + found)
"""


def test_readings_are_forks_that_end_alone() -> None:
    """One that breaks or hangs loses its own later lines and nothing else."""
    run = subprocess.run(
        [sys.executable, "-c", FORKS, "3"], capture_output=True, text=True, timeout=600, cwd=contact.ROOT, check=False
    )
    assert run.returncode == 11, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    ended = {one["reading"]: one["ended"] for one in lines if "ended" in one}
    assert ended == {"aside": 0, "good": 0, "broken": 1, "hangs": 124}
    assert {one["reading"]: one["step"] for one in lines if "step" in one} == {
        "aside": "here", "good": "here", "broken": "before", "hangs": "begun",
    }  # fmt: skip
    assert len({one["parent"] for one in lines if "parent" in one}) == 1
    assert "no such library" in run.stderr


def test_what_cannot_be_compiled_leaves_the_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(config: Any, setup: Any, device: str, *, compiled: bool) -> dict[str, Any]:
        if compiled:
            raise RuntimeError("Failed to find C compiler")
        return {"step_seconds": [0.1]}

    monkeypatch.setattr(contact_compile, "_timed", timed)
    found = list(contact_compile.compared(contact_readings.TINY, "cpu"))
    assert [(one["step"], one["compiled"]) for one in found] == list(
        itertools.product(contact_compile.SETUPS, (False, True))
    )
    assert ["problem" in one for one in found] == [False, True, False, True]


def test_a_job_that_failed_is_tried_again(tmp_path: Path, fit: None) -> None:
    broken = Clock(job_s=1.0)
    broken.status = 124
    broken.call(4, tmp_path)
    again = Clock(job_s=1.0)
    again.call(4, tmp_path)
    assert [name for name, _ in again.ran] == ["tune", "confirm", "launched"]


def test_a_search_whose_folder_stayed_on_another_machine_is_made_again(tmp_path: Path, fit: None) -> None:
    here, there = Clock(job_s=1.0), Clock(job_s=1.0)
    here.call(4, tmp_path / "here")
    contact.bring(Kept(tmp_path / "there"), tmp_path / "here")
    there.call(4, tmp_path / "there")
    assert [name for name, _ in there.ran] == ["tune"]  # the search; what follows it is done
    (tmp_path / "there" / "tuned").mkdir()
    (tmp_path / "there" / "tuned" / "plan.json").write_text("{}")
    again = Clock(job_s=1.0)
    again.call(4, tmp_path / "there")
    assert again.ran == []


def test_a_machine_that_cannot_measure_is_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"gpus": [], "problems": {}, "driver_says": "too old"}
    monkeypatch.setattr("probes.doctor.ask_torch", lambda: facts)
    clock = Clock(job_s=1.0)
    assert clock.call(2, tmp_path) == 3
    assert clock.ran == []
    assert "gpus: too old" in contact.guard(rehearse=False)
    facts.update(gpus=[{"name": "x"}], triton=True, nf4=True)
    assert contact.guard(rehearse=False) == ""
    facts.update(triton=None, problems={"triton": "RuntimeError: Failed to find C compiler"})
    assert "C compiler" in contact.guard(rehearse=False)


def test_a_campaign_that_meets_a_machine_fault_ends_the_call(tmp_path: Path, fit: None) -> None:
    clock = Clock(job_s=1.0)
    clock.status = 3
    assert clock.call(2, tmp_path) == 3


def test_at_most_eight_files_come_back_and_go_on_elsewhere(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "work")
    kept.folder.mkdir()
    for path in kept.all():
        path.write_text("x\n")
    kept.log.write_bytes(b"a" * (contact.LOG_BYTES + 5))
    sent = deliver(kept, tmp_path / "out")
    assert len(sent) <= 8
    assert (tmp_path / "out" / "log.txt").stat().st_size == contact.LOG_BYTES
    other = Kept(tmp_path / "elsewhere")
    contact.bring(other, tmp_path / "out")
    assert other.store.read_text() == "x\n"
    other.store.write_text("newer\n")
    contact.bring(other, tmp_path / "out")
    assert other.store.read_text() == "newer\n"


def test_a_job_is_ended_at_its_limit_and_its_answer_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    hang = Job(name="hang", words=("-c", "import time; time.sleep(600)"), limit_s=0.3)
    assert contact.run_job(hang, 0.3, kept) == 124
    said = Job(name="said", words=("-c", "print('hello')"), limit_s=600.0)
    assert contact.run_job(said, 600.0, kept) == 0
    assert "hello" in kept.log.read_text()


@pytest.mark.parametrize("name", ["smoke", "models", "axes"])
def test_every_combination_of_the_campaigns_can_exist(name: str, tmp_path: Path) -> None:
    spec = read_spec(contact.CAMPAIGNS / f"contact-{name}.yaml")
    assert spec.impossible == 0
    assert spec.chains
    rehearsed = read_spec(contact.rehearsed_spec(name, tmp_path))
    assert rehearsed.impossible == 0
    assert len({chain.setup for chain in rehearsed.chains}) == len({chain.setup for chain in spec.chains})
    assert {chain.model for chain in rehearsed.chains} == {"tiny"}
    lengths = [{chain.setup.seq_len_tokens for chain in one.chains} for one in (rehearsed, spec)]
    assert lengths[0] == {length // 16 for length in lengths[1]}


def test_the_axes_reach_what_the_issue_asks_for() -> None:
    chains = read_spec(contact.CAMPAIGNS / "contact-axes.yaml").chains
    setups = [chain.setup for chain in chains]
    assert {"full", "liger", "chunked"} <= {one.loss for one in setups}
    assert {"sdpa", "eager"} <= {one.attention for one in setups}
    assert {"adamw", "adamw-8bit", "paged-adamw-8bit", "lion-8bit", "adafactor"} <= {one.optimizer for one in setups}
    assert {"bf16-pure", "bf16-mixed", "fp16-mixed", "fp32"} <= {one.precision for one in setups}
    assert {512, 2048, 8192} <= {one.seq_len_tokens for one in setups}
    assert {0, 1, 2} <= {one.checkpointing for one in setups}
    assert {"eager", "liger"} <= {one.kernels for one in setups}
    assert {False, True} <= {one.activation_offload for one in setups}
    assert any(chain.limits.memory_bytes for chain in chains)
    assert {"Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B"} <= {chain.model for chain in chains}


def test_a_stand_in_card_holds_its_own_context() -> None:
    """Before: 0.17 of an H200 were the allocator's, and a 4090's 23.51 GiB include the context."""
    limits = Limits(memory_bytes=int(23.51 * GIB))
    assert limits.allocator_bytes == int(23.51 * GIB) - 512 * MIB
    assert Limits().allocator_bytes is None


@pytest.mark.parametrize("gpu", ["h200", "h100-sxm"])
def test_the_plan_of_every_call_stays_below_ten_minutes(gpu: str) -> None:
    lines = contact_plan.planned_lines(gpu)
    totals = [float(line.split("at most ")[1].split("*")[0]) for line in lines if "**all**" in line]
    assert len(totals) == len(CALLS)
    assert all(0 < minutes < 10 for minutes in totals)
    assert totals[0] <= 4


def test_timing_plays_the_rule_of_the_limits() -> None:
    limits = Limits(measure_s=4.0, max_steps=60)
    assert contact_plan.timing_s(0.05, limits) == pytest.approx(2.0)
    assert contact_plan.timing_s(0.01, limits) == pytest.approx(0.6)
    assert contact_plan.timing_s(1.5, limits) == pytest.approx(3.0)


# Readings


def test_known_allocations_stand_beside_the_drivers_view(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [0]

    def empty(size: int, **options: Any) -> Any:
        held[0] += size
        return SimpleNamespace()

    card = Card("NVIDIA H200", "GPU-1", 143771, used=lambda: held[0])
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml_module([card]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    matrix = SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: 0.0))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    one = type("M", (), {"__matmul__": lambda self, other: matrix})()
    monkeypatch.setattr(torch, "ones", lambda *_, **__: one)
    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: held[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (GIB, 2 * GIB))
    found = list(contact_readings.known())
    grown = [one for one in found if one["step"] == "allocated"]
    assert [one["asked_bytes"] for one in grown] == [64 * MIB, GIB, 5 * GIB]
    assert grown[-1]["v2_used_bytes"] == 64 * MIB + GIB + 5 * GIB
    assert grown[-1]["used_bytes"] - grown[-1]["v2_used_bytes"] == 600 * MIB
    assert json.loads(json.dumps(found)) == found


def test_a_refusal_is_recorded_with_what_the_classifier_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setitem(contact_readings.REFUSALS, "triton", refuse)
    (found,) = contact_readings.refusal("triton")
    assert found["kind"] == FailureKind.OUT_OF_MEMORY.value
    assert found["type"] == "builtins.RuntimeError"
    monkeypatch.setitem(contact_readings.REFUSALS, "triton", lambda: None)
    (found,) = contact_readings.refusal("triton")
    assert found["text"] == "it had enough"


def test_samples_keep_only_what_changed() -> None:
    samples = [[0.0, 5], [0.1, 5], [0.2, 3], [0.3, 3], [0.4, 3]]
    assert contact_readings.changes(samples) == [[0.0, 5], [0.2, 3], [0.4, 3]]
