"""The runner: whatever a child does, the outcome has the right name and nothing stays behind."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from moved_clock import PATIENCE_S, Clock, alive, becomes, clock

from planner.core.errors import EnvironmentProblem, UsageError
from planner.frameworks.exporters.common import environment
from planner.setup import TrainSetup
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure
from probes.gpu import device, runner, watch
from probes.gpu.environment import DeviceStatus, read_environment
from probes.gpu.evaluate import record_of
from probes.gpu.request import Limits, ProbeRequest
from probes.store import Store

pytestmark = pytest.mark.processes

__all__ = ["clock"]  # a fixture

WORKER = Path(__file__).with_name("fault_worker.py")
ARGV = (sys.executable, str(WORKER))


def request(fault: str = "ok", *, time_s: float = PATIENCE_S, **config: object) -> ProbeRequest:
    return ProbeRequest(
        model_id="tiny",
        config={"fault": fault, **config},
        setup=TrainSetup(),
        device="cpu",
        limits=Limits(time_s=time_s),
    )


def failure(
    fault: str, tmp_path: Path, *, on_progress: watch.OnProgress | None = None, **config: object
) -> ProbeFailure:
    outcome = runner.run_probe(request(fault, **config), work_dir=tmp_path, argv=ARGV, on_progress=on_progress)
    assert isinstance(outcome, ProbeFailure)
    return outcome


def gone(pid: int) -> bool:
    return becomes(lambda: not alive(pid))


def wait_for_pid(path: Path) -> int:
    assert becomes(lambda: path.exists() and bool(path.read_text())), f"no pid in {path}"
    return int(path.read_text())


def test_run_probe_returns_measurement_and_leaves_no_file(tmp_path: Path) -> None:
    seen: list[str] = []
    outcome = runner.run_probe(
        request(seconds=0.2), work_dir=tmp_path, argv=ARGV, on_progress=lambda text, elapsed_s: seen.append(text)
    )
    assert isinstance(outcome, Measurement)
    assert outcome.phase_peaks_bytes["loss"] == 3_000
    assert "about to ok" in seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("segv", FailureKind.CRASHED, "SIGSEGV"),
        ("abort", FailureKind.CRASHED, "SIGABRT"),
        ("killed", FailureKind.CRASHED, "SIGKILL"),
        ("exit", FailureKind.CRASHED, "exit status 3"),
        ("silent", FailureKind.CRASHED, "without writing a result"),
        ("garbage", FailureKind.CRASHED, "cannot be read"),
        ("wrong-schema", FailureKind.CRASHED, "schema"),
        ("bug", FailureKind.CRASHED, "KeyError"),
        ("illegal", FailureKind.CRASHED, "illegal memory access"),
        ("memory", FailureKind.OUT_OF_MEMORY, "MemoryError"),
        ("bitsandbytes-oom", FailureKind.OUT_OF_MEMORY, "out of memory"),
        ("unsupported", FailureKind.UNSUPPORTED, "no such kernel"),
        ("no-driver", FailureKind.MACHINE, "no usable driver"),
    ],
)
def test_run_probe_names_every_ending(fault: str, kind: FailureKind, words: str, tmp_path: Path) -> None:
    outcome = failure(fault, tmp_path)
    assert outcome.kind is kind
    assert words in outcome.message
    assert outcome.log_path is not None
    assert f"fault {fault}" in Path(outcome.log_path).read_text()


def test_the_end_of_a_log_travels_with_the_store(tmp_path: Path) -> None:
    """The log itself stays on the machine that was lent."""
    outcome = failure("bug", tmp_path / "there")
    store = Store(tmp_path / "store.jsonl")
    store.append(record_of(request(), read_environment("cpu", None), outcome))
    shutil.rmtree(tmp_path / "there")
    (record,) = Store(tmp_path / "store.jsonl").records()
    assert isinstance(record.outcome, ProbeFailure)
    assert "fault bug" in record.outcome.log_tail
    assert "KeyError" in record.outcome.log_tail
    assert len(record.outcome.log_tail) <= runner.KEPT_TAIL_CHARS


@pytest.mark.parametrize("fault", ["hang", "hang-in-c"])
def test_run_probe_kills_a_hanging_child_at_its_limit(fault: str, tmp_path: Path, clock: Clock) -> None:
    pid_file = tmp_path / "pid"
    over = clock.over_once(
        lambda text: text == f"about to {fault}" and pid_file.exists() and bool(pid_file.read_text())
    )
    outcome = failure(fault, tmp_path, on_progress=over, pid_file=str(pid_file))
    assert outcome.kind is FailureKind.TIMEOUT
    assert f"no result within {PATIENCE_S:g} s; last seen about to {fault}" in outcome.message
    assert gone(int(pid_file.read_text()))


def test_run_probe_counts_a_result_delivered_before_a_hang_or_crash_at_exit(tmp_path: Path, clock: Clock) -> None:
    def delivered(text: str) -> bool:
        return bool(list(tmp_path.glob("probe-*/result.json")))

    hung = runner.run_probe(
        request("hang-at-exit"), work_dir=tmp_path, argv=ARGV, on_progress=clock.over_once(delivered)
    )
    assert isinstance(hung, Measurement)
    crashed = runner.run_probe(request("crash-after-result"), work_dir=tmp_path, argv=ARGV)
    assert isinstance(crashed, Measurement)


def test_run_probe_sweeps_grandchildren(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    outcome = runner.run_probe(request("grandchild", pid_file=str(pid_file)), work_dir=tmp_path, argv=ARGV)
    assert isinstance(outcome, Measurement)
    assert gone(int(pid_file.read_text()))


def test_run_probe_stops_a_child_that_floods_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_LOG_BYTES", 4 << 20)
    outcome = failure("chatter", tmp_path)
    assert outcome.kind is FailureKind.CRASHED
    assert "printed more than" in outcome.message


@pytest.mark.parametrize("seed", range(2))
def test_child_killed_at_a_random_moment_is_a_crash_and_loses_nothing_else(seed: int, tmp_path: Path) -> None:
    """SIGKILL from outside at a random moment of the child's life: an outcome every time, whole or CRASHED."""
    delay_s = random.Random(seed).uniform(0.0, 0.6)
    pid_file = tmp_path / "pid"

    def kill() -> None:
        pid = wait_for_pid(pid_file)
        time.sleep(delay_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = runner.run_probe(request(seconds=0.5, pid_file=str(pid_file)), work_dir=tmp_path, argv=ARGV)
    killer.join()
    if isinstance(outcome, ProbeFailure):
        assert outcome.kind is FailureKind.CRASHED
        assert "SIGKILL" in outcome.message
    else:
        assert outcome.peak_allocated_bytes == 3_000


def runner_process(tmp_path: Path, pid_file: Path) -> "subprocess.Popen[bytes]":
    """A runner of its own, in the middle of a hanging probe."""
    script = textwrap.dedent(f"""
        import signal, sys
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignore"
        from planner.setup import TrainSetup
        from probes.gpu.request import Limits, ProbeRequest
        from probes.gpu.runner import run_probe
        request = ProbeRequest(
            model_id="tiny",
            config={{"fault": "hang", "pid_file": {str(pid_file)!r}}},
            setup=TrainSetup(),
            device="cpu",
            limits=Limits(time_s={PATIENCE_S}),
        )
        try:
            run_probe(request, work_dir=Path({str(tmp_path)!r}), argv=({sys.executable!r}, {str(WORKER)!r}))
        except KeyboardInterrupt:
            sys.exit(42)
    """)
    return subprocess.Popen([sys.executable, "-c", script])


def test_killed_runner_takes_its_child_along(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = runner_process(tmp_path, pid_file)
    child = wait_for_pid(pid_file)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(PATIENCE_S)
    assert gone(child)


def test_interrupted_runner_kills_its_child_and_passes_the_interrupt_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = runner_process(tmp_path, pid_file)
    child = wait_for_pid(pid_file)
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait(PATIENCE_S) == 42
    assert gone(child)


def test_timeouts_do_not_follow_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps a day back with every look changes neither a measurement nor a timeout."""
    clock = [1_800_000_000.0]

    def backwards() -> float:
        clock[0] -= 86_400.0
        return clock[0]

    monkeypatch.setattr(time, "time", backwards)
    assert isinstance(runner.run_probe(request(), work_dir=tmp_path, argv=ARGV), Measurement)
    assert failure("hang", tmp_path, time_s=0.5).message.startswith("no result within 0.5 s")


def test_full_disk_result_comes_through_the_pipe(tmp_path: Path) -> None:
    """The child may write no file at all (RLIMIT_FSIZE 0, a disk without room): the result still arrives."""
    script = tmp_path / "no_room.py"
    script.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"sys.path.insert(0, {str(WORKER.parent)!r})\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    )
    work = tmp_path / "work"
    outcome = runner.run_probe(request(), work_dir=work, argv=(sys.executable, str(script)))
    assert isinstance(outcome, Measurement)
    assert outcome.step_times_s == (0.5, 0.5, 0.5)


def test_request_that_cannot_be_written_is_an_environment_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(blocked)])
    for folder in (blocked / "below", None):
        with pytest.raises(EnvironmentProblem, match="cannot make a directory"):
            runner.run_probe(request(), work_dir=folder, argv=ARGV)


def test_worker_that_cannot_start_is_an_environment_problem(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot start"):
        runner.run_probe(request(), work_dir=tmp_path, argv=("/does/not/exist",))


def descriptors() -> set[tuple[str, str]]:
    """What this process holds open of the kinds that the runner opens. Sockets may be another test's threads'."""
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith(("socket:", "anon_inode:[event")):
                opened.add((number, target))
    return opened


def test_runner_leaks_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    for fault in ("ok", "exit", "segv"):
        runner.run_probe(request(fault), work_dir=tmp_path, argv=ARGV)
    assert descriptors() - before == set()


def status(used_bytes: int) -> DeviceStatus:
    return DeviceStatus(name="GPU", uuid="GPU-1", used_bytes=used_bytes, total_bytes=1 << 34, process_ids=())


def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock of `probes.gpu.device`: only sleeping moves it. The moments at which it slept."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(sum(slept[-1:]) + seconds)

    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: sum(slept[-1:]), sleep=sleep))
    return slept


def test_wait_until_clean_waits_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = looks(monkeypatch)
    readings = iter([status(9 << 30), status(5 << 30), status(2 << 30), status(0)])
    assert device.wait_until_clean("cuda:0", resting_bytes=0, read=lambda device: next(readings)) == status(0)
    assert len(slept) == 3


def test_wait_until_clean_does_not_wait_for_a_neighbour_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = looks(monkeypatch)
    assert device.wait_until_clean("cuda:0", read=lambda device: status(3 << 30)) == status(3 << 30)
    assert device.STABLE_S <= slept[-1] < device.STABLE_S + 2 * device.POLL_S


def test_wait_until_clean_gives_up_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process holds grows and shrinks for ever."""
    slept = looks(monkeypatch)
    sizes = itertools.count(9 << 30, -1)
    last_status = device.wait_until_clean("cuda:0", read=lambda device: status(next(sizes)))
    assert last_status.used_bytes > 8 << 30
    assert device.CLEAN_WAIT_S <= slept[-1] < device.CLEAN_WAIT_S + 2 * device.POLL_S


def test_take_turn_is_exclusive_and_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    waits: list[bool] = []
    first = device.lease_device("cuda:0", waits.append, read=lambda device: status(2 << 30))
    assert first.shared_bytes == 2 << 30
    assert waits == [True, False]
    holder = (
        "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDWR)\n"
        "try: fcntl.flock(d, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(7)"
    )
    command = [sys.executable, "-c", holder, str(device.lock_path("GPU-1"))]
    assert subprocess.run(command, check=False).returncode == 7
    assert first.descriptor is not None
    os.close(first.descriptor)
    assert subprocess.run(command, check=False).returncode == 0


def test_waiting_for_the_device_does_not_count_against_the_limit(tmp_path: Path, clock: Clock) -> None:
    """The child waits for its turn for longer than its whole limit, then measures."""
    marker = tmp_path / "turn"

    def wait_long(text: str, elapsed_s: float) -> None:
        if text == "waiting" and not marker.exists():
            clock.now_s += 2 * PATIENCE_S
            marker.touch()

    probe_request = request("wait-for-turn", turn=str(marker))
    outcome = runner.run_probe(probe_request, work_dir=tmp_path / "w", argv=ARGV, on_progress=wait_long)
    assert isinstance(outcome, Measurement), outcome
    assert marker.exists()


def test_child_runs_with_the_allocator_of_the_launch_files(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    written = environment(None)
    assert {name: runner.probe_environment()[name] for name in names} == written
    monkeypatch.setenv(names[1], "backend:native")
    assert {runner.probe_environment()[name] for name in names} == {"backend:native"}


def test_starting_has_a_limit_of_its_own_and_is_the_machines_fault(tmp_path: Path, clock: Clock) -> None:
    """A cold disk: the imports alone take longer than the whole limit of the probe, then it measures. Where they never
    end, no setup is to blame."""
    go = tmp_path / "go"

    def slow_imports(text: str, elapsed_s: float) -> None:
        if text == "importing" and not go.exists():
            clock.now_s += watch.START_LIMIT_S - 1
            go.touch()

    probe_request = request("starting", time_s=10.0, go=str(go))
    assert isinstance(
        runner.run_probe(probe_request, work_dir=tmp_path, argv=ARGV, on_progress=slow_imports), Measurement
    )

    def never(text: str, elapsed_s: float) -> None:
        clock.now_s += watch.START_LIMIT_S if text == "importing" and elapsed_s < watch.START_LIMIT_S else 0.0

    outcome = failure("starting", tmp_path, on_progress=never, time_s=10.0, go=str(tmp_path / "never"))
    assert outcome.kind is FailureKind.MACHINE
    assert f"no result within {watch.START_LIMIT_S:g} s; last seen importing" in outcome.message


def test_stopped_probe_kills_its_child(tmp_path: Path) -> None:
    pid_file, stop = tmp_path / "pid", threading.Event()
    threading.Thread(target=lambda: (wait_for_pid(pid_file), stop.set())).start()
    with pytest.raises(runner.ProbeStopped):
        runner.run_probe(request("hang", pid_file=str(pid_file)), work_dir=tmp_path / "w", argv=ARGV, stop=stop)
    assert gone(int(pid_file.read_text()))
    assert list((tmp_path / "w").iterdir()) == []


def test_request_survives_json_and_refuses_nonsense() -> None:
    single = ProbeRequest(
        model_id="m", config={"a": [1]}, setup=TrainSetup(), device="cuda:1", depths=(2, 4), limits=Limits(time_s=9)
    )
    assert ProbeRequest.from_dict(single.to_dict()) == single
    with pytest.raises(UsageError, match="device"):
        ProbeRequest(model_id="m", config={}, setup=TrainSetup(), device="tpu")
    two = ProbeRequest(model_id="m", config={}, setup=TrainSetup(num_gpus=2, parallel="ddp"), device="cuda:2")
    assert (two.num_ranks, two.devices) == (2, ("cuda:2", "cuda:3"))
    with pytest.raises(UsageError, match="max_steps"):
        Limits(max_steps=5)
