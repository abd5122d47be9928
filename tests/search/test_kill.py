"""kill -9 of any worker at any point: nothing lost, nothing repeated but the probe in flight, the same answer."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("search_worker.py")
ROOT = Path(__file__).parents[2]
PROBE_S = 0.1
NUM_SHARED = 7  # fewer than the stop rule needs, so that the budget ends the search for all workers alike
START_S = 60.0  # importing optuna on a busy two-core machine


def start(
    storage: str, log: Path, *, max_probes: int, seed: int = 1, probe_s: float = PROBE_S
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    arguments = [storage, str(log), "1", str(probe_s), str(max_probes)]
    process = subprocess.Popen(
        [sys.executable, str(WORKER), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """No worker outlives its test."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Best setup and number of probes that a worker reports when it ends."""
    output, errors = process.communicate(timeout=180)
    STARTED.remove(process)
    assert process.returncode == 0, errors
    best, num_probes, _ = output.strip().splitlines()[-1].split("\t")
    return best, int(num_probes)


def events(log: Path) -> list[tuple[str, str, str]]:
    """(word, process id, setup key) of every line."""
    if not log.exists():
        return []
    return [tuple(line.split(" ", 2)) for line in log.read_text().splitlines()]  # type: ignore[misc]


def wait_for(log: Path, num: int, word: str = "start") -> None:
    """Until `num` events of a kind are in the log."""
    deadline = time.monotonic() + START_S
    while sum(event[0] == word for event in events(log)) < num:
        ended = [process for process in STARTED if process.poll() not in (None, 0, -signal.SIGKILL)]
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < deadline, f"no {num} {word} events in {START_S} s"
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    STARTED.remove(process)


def in_order(log: Path, word: str = "end") -> list[str]:
    """Setup keys of all events of a kind, in order."""
    return [key for kind, _, key in events(log) if kind == word]


def check_no_repeats(log: Path, num_killed: int) -> None:
    """Only probes in flight when a worker died were started again: at most one start more for each death.

    A probe is in flight until its result is written: one may have returned, and still be run again.
    """
    starts = Counter(in_order(log, "start"))
    assert sum(starts.values()) - len(starts) <= num_killed


@pytest.mark.slow
def test_kill_nine_at_any_point_and_resume_gives_the_undisturbed_search(tmp_path: Path) -> None:
    """Killed in the first probe, between probes, within probes, at the fourth: the same probes in the same order."""
    calm = tmp_path / "calm.log"
    undisturbed = answer(start(str(tmp_path / "calm"), calm, max_probes=8))
    log, storage = tmp_path / "killed.log", str(tmp_path / "killed")
    for started, delay_s in ((1, 0.0), (3, PROBE_S + 0.01), (5, PROBE_S / 2), (6, PROBE_S)):
        process = start(storage, log, max_probes=8)
        wait_for(log, started)
        time.sleep(delay_s)
        kill(process)
    disturbed = answer(start(storage, log, max_probes=8))
    assert disturbed == undisturbed
    check_no_repeats(log, num_killed=4)
    assert list(dict.fromkeys(in_order(log))) == in_order(calm)


@pytest.mark.slow
def test_several_workers_share_a_journal_and_one_is_killed(tmp_path: Path) -> None:
    log, storage = tmp_path / "log", str(tmp_path / "study")
    workers = [start(storage, log, max_probes=NUM_SHARED, probe_s=0.3) for _ in range(3)]
    wait_for(log, 3)
    victim = next(w for w in workers if str(w.pid) == events(log)[-1][1])
    kill(victim)
    answers = {answer(worker) for worker in workers if worker is not victim}
    assert len(answers) == 1  # the survivors agree, and waited for each other's last probes
    assert next(iter(answers))[1] == NUM_SHARED
    check_no_repeats(log, num_killed=1)
    assert len(set(in_order(log))) == NUM_SHARED
    assert len({pid for _, pid, _ in events(log)}) > 1
