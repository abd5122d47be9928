"""A job of two ranks: whatever becomes of one of them, the outcome has the right name and no process is left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from moved_clock import PATIENCE_S, Clock, alive, becomes, clock

from planner.core.locks import try_lock
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure
from probes.gpu import device, runner, watch
from probes.gpu.environment import DeviceStatus
from probes.gpu.ranks import RankInfo, RankReport, rank_info_of, why_not_probed
from probes.gpu.request import Limits, ProbeRequest

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("rank_worker.py")
ARGV = (sys.executable, str(WORKER))
__all__ = ["clock"]  # a fixture


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is over when torchrun ends, however late a busy machine lets it tell which rank died of what."""
    monkeypatch.setattr(watch, "RANK_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(runner, "KILL_WAIT_S", PATIENCE_S)


def request(pids: Path, *, time_s: float = PATIENCE_S, **faults: str) -> ProbeRequest:
    """`faults`: what each rank does, as rank0=..., rank1=...; a rank that is not named ends well."""
    pids.mkdir(parents=True, exist_ok=True)
    by_rank = {name.removeprefix("rank"): fault for name, fault in faults.items()}
    return ProbeRequest(
        model_id="tiny",
        config={"faults": by_rank, "pids": str(pids)},
        setup=TrainSetup(num_gpus=2, parallel="ddp"),
        device="cpu",
        limits=Limits(time_s=time_s),
    )


def pids_in(folder: Path) -> set[int]:
    """Every rank's process and its agent's."""
    return {int(pid) for path in folder.glob("[0-9]*") for pid in path.read_text().split()}


def all_gone(pids: set[int]) -> bool:
    return becomes(lambda: not any(alive(pid) for pid in pids))


def failure(tmp_path: Path, **changes: Any) -> ProbeFailure:
    folder = tmp_path / "pids"
    outcome = runner.run_probe(request(folder, **changes), work_dir=tmp_path / "work", argv=ARGV)
    assert isinstance(outcome, ProbeFailure), outcome
    assert outcome.log_path is not None
    pids = pids_in(folder)
    assert len(pids) >= 2  # an agent and at least the rank at fault; the other may be ended before it wrote its own
    assert not any(alive(pid) for pid in pids), outcome  # the sweep is over when the outcome is there
    assert runner.job_processes(str(Path(outcome.log_path).parent)) == []
    return outcome


@pytest.mark.usefixtures("warm_children")
def test_two_ranks_bring_one_measurement_and_leave_nothing(tmp_path: Path) -> None:
    seen: list[str] = []
    outcome = runner.run_probe(
        request(tmp_path / "pids"), work_dir=tmp_path / "work", argv=ARGV, on_progress=lambda text, _: seen.append(text)
    )
    assert isinstance(outcome, Measurement), outcome
    assert outcome.tokens_per_step == 2 * 2048  # of both ranks
    assert "about to ok" in seen
    assert not any(alive(pid) for pid in pids_in(tmp_path / "pids"))
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("faults", "kind", "words"),
    [
        ({"rank0": "waits", "rank1": "memory"}, FailureKind.OUT_OF_MEMORY, "rank 1 of 2: MemoryError"),
        ({"rank0": "silent", "rank1": "ok"}, FailureKind.CRASHED, "without writing a result"),
    ],
    ids=["memory", "silent"],
)
def test_one_bad_rank_ends_the_job_under_its_right_name(
    faults: dict[str, str], kind: FailureKind, words: str, tmp_path: Path
) -> None:
    """The other rank would wait for ten minutes: the job ends because of the bad one, not at its limit."""
    outcome = failure(tmp_path, **faults)
    assert outcome.kind is kind, outcome
    assert words in outcome.message


@pytest.mark.usefixtures("warm_children")
def test_ranks_that_never_end_are_a_timeout_at_the_limit(tmp_path: Path, clock: Clock) -> None:
    """Nobody fails, nobody goes on: the runner's own limit ends the job."""
    folder = tmp_path / "pids"
    both = clock.over_once(lambda text: len(list(folder.glob("[0-9]*"))) == 2)
    probe_request = request(folder, rank0="waits", rank1="waits")
    outcome = runner.run_probe(probe_request, work_dir=tmp_path / "work", argv=ARGV, on_progress=both)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.TIMEOUT, outcome
    assert f"no result within {PATIENCE_S:g} s; last seen " in outcome.message
    assert outcome.log_path is not None
    assert runner.job_processes(str(Path(outcome.log_path).parent)) == []
    assert len(pids_in(folder)) == 3
    assert all_gone(pids_in(folder))  # a killed process lives until the kernel has taken it apart


@pytest.mark.usefixtures("warm_children")
def test_hung_collective_is_a_timeout_that_names_what_the_ranks_did(tmp_path: Path) -> None:
    """Rank 1 sleeps instead of coming to an exchange over gloo: rank 0's time-out ends the job, before the limit."""
    outcome = failure(tmp_path, rank0="meets", rank1="meets-and-sleeps")
    assert outcome.kind is FailureKind.TIMEOUT, outcome
    assert "a collective did not end in time: rank 0 of 2" in outcome.message
    assert "rank 1 'about to meets-and-sleeps'" in outcome.message


def test_killed_agent_takes_the_ranks_along(tmp_path: Path) -> None:
    folder, killed = tmp_path / "pids", set()

    def kill(text: str, elapsed_s: float) -> None:
        agents = {int(path.read_text().split()[1]) for path in folder.glob("[0-9]*")}
        for agent in agents - killed:
            os.kill(agent, signal.SIGKILL)
        killed.update(agents)

    probe_request = request(folder, rank0="waits", rank1="waits")
    outcome = runner.run_probe(probe_request, work_dir=tmp_path / "work", argv=ARGV, on_progress=kill)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.CRASHED, outcome
    assert "killed by SIGKILL" in outcome.message
    assert not any(alive(pid) for pid in pids_in(folder))


def test_killed_runner_takes_agent_and_ranks_along(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    request_path = tmp_path / "request.json"
    request_path.write_text(json.dumps(request(folder, rank0="waits", rank1="waits").to_dict()))
    script = textwrap.dedent(f"""
        import json
        from pathlib import Path
        from probes.gpu.request import ProbeRequest
        from probes.gpu.runner import run_probe
        request = ProbeRequest.from_dict(json.loads(Path({str(request_path)!r}).read_text()))
        run_probe(request, work_dir=Path({str(tmp_path / "work")!r}), argv={ARGV!r})
    """)
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert becomes(lambda: len(pids_in(folder)) == 3 or parent.poll() is not None)
        assert parent.poll() is None
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(PATIENCE_S)
    assert all_gone(pids_in(folder))


# Who is to blame, without processes


def test_progress_of_a_job_names_who_does_something_else() -> None:
    heard = RankReport()
    assert heard.doing(3) == ""
    heard.hear({"progress": "importing", "rank": 1})
    assert heard.doing(3) == "starting (rank 1: importing)"
    for rank in (0, 2):
        heard.hear({"progress": "importing", "rank": rank})
    assert heard.doing(3) == "importing"
    heard.hear({"progress": "building", "rank": 0})
    assert heard.doing(3) == "building (rank 1, 2: importing)"


def report(*events: dict[str, Any]) -> RankReport:
    heard = RankReport()
    for event in events:
        heard.hear(event)
    return heard


def told(rank: int, kind: str, message: str) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message}, "rank": rank}


GONE = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:5555"
LATE = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([told(0, "crashed", GONE), {"exit": -9, "rank": 1}], FailureKind.CRASHED, "rank 1 of 2: killed by SIGKILL"),
        ([told(0, "crashed", GONE), told(1, "out_of_memory", "OutOfMemoryError: CUDA out of memory")],
         FailureKind.OUT_OF_MEMORY, "rank 1"),
        ([told(0, "timeout", LATE), {"progress": "building 2 layers", "rank": 1}], FailureKind.TIMEOUT, "building 2"),
        ([told(1, "crashed", "KeyError: 'x'"), told(0, "crashed", GONE)], FailureKind.CRASHED, "rank 1 of 2: KeyError"),
        ([told(0, "crashed", GONE), {"exit": 72, "rank": 0}], FailureKind.CRASHED, "rank 0 of 2: RuntimeError"),
        ([told(0, "crashed", GONE), {"exit": 72, "rank": 0}, {"exit": 3, "rank": 1}], FailureKind.CRASHED, "status 3"),
        ([told(0, "timeout", LATE), {"exit": 72, "rank": 0}, {"exit": -15, "rank": 1}], FailureKind.TIMEOUT, "30000ms"),
        ([{"exit": -15, "rank": 1}], FailureKind.CRASHED, "rank 1 of 2: killed by SIGTERM"),
    ],
    ids=["killed", "memory", "late", "bug", "nobody-else", "exit", "ended-by-the-agent", "ended-from-outside"],
)  # fmt: skip
def test_verdict_names_the_cause_and_not_what_it_did_to_the_others(
    events: list[dict[str, Any]], kind: FailureKind, words: str
) -> None:
    verdict = report(*events).verdict("", size=2, oom_killed=False)
    assert verdict[0] is kind
    assert words in verdict[1]


def test_verdict_of_the_kernels_killer_and_of_a_watchdog() -> None:
    killed = report({"exit": -9, "rank": 1}).verdict("", size=2, oom_killed=True)
    assert killed[0] is FailureKind.OUT_OF_MEMORY
    log = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 90000 milliseconds\n"
    aborted = report({"exit": -6, "rank": 0}).verdict(log, size=2, oom_killed=False)
    assert aborted[0] is FailureKind.TIMEOUT
    assert report({"progress": "timing 2 layers", "rank": 0}).verdict("", size=2, oom_killed=False) is None


def test_seat_and_processes_of_a_setup() -> None:
    assert rank_info_of({}) == RankInfo()
    assert rank_info_of({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == RankInfo(rank=3, size=8, local_rank=1)
    assert TrainSetup(num_gpus=4, parallel="fsdp2").num_processes == 4
    assert TrainSetup(num_gpus=4, parallel="device-map").num_processes == 1
    for changes in ({"parallel": "dp"}, {"parallel": "device-map"}, {"tensor_degree": 2}, {"pipeline_degree": 2}):
        assert why_not_probed(TrainSetup(num_gpus=2, **changes))
    assert why_not_probed(TrainSetup(num_gpus=2, parallel="ddp")) == ""


def test_zero_without_deepspeed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install deepspeed" in why_not_probed(TrainSetup(num_gpus=2, parallel="zero2"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert why_not_probed(TrainSetup(num_gpus=2, parallel="zero2")) == ""


def test_a_job_takes_all_its_devices_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that lock the same GPUs in opposite orders would wait for each other for ever."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    uuids = {"cuda:0": "GPU-b", "cuda:1": "GPU-a"}
    taken: list[str] = []
    plain = device._open_lock

    def open_lock(name: str) -> int | None:
        taken.append(name)
        return plain(name)

    def status(name: str) -> DeviceStatus:
        return DeviceStatus(name="GPU", uuid=uuids[name], used_bytes=0, total_bytes=1 << 34, process_ids=())

    monkeypatch.setattr(device, "_open_lock", open_lock)
    waits: list[bool] = []
    with device.lease_all(("cuda:0", "cuda:1"), waits.append, read=status):
        assert taken == ["GPU-a", "GPU-b"]
        assert waits == [True, False] * 2
        assert [_is_free(device.lock_path(name)) for name in taken] == [False, False]
    assert [_is_free(device.lock_path(name)) for name in taken] == [True, True]
    with device.lease_all(("cpu", "cpu"), waits.append):
        assert len(taken) == 2


def _is_free(path: Path) -> bool:
    with open(path, "rb") as file:
        return try_lock(file.fileno())
