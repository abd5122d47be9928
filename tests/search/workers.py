"""Worker processes of the tests of shared studies: started, watched, killed.

They are forks of a process that has imported what a search needs (tests/warm): half of a worker's time is Optuna and
SQLAlchemy being imported. Those of one study, which says so, start as a user starts them.
"""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial

from search.stopping import MARGIN
from tests.conftest import WARM

PROGRAM = Path(__file__).with_name("search_worker.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
"""A worker that shows nothing for this long hangs; on an idle machine all of it takes seconds."""
NUM_SHARED = 7
ENDLESS = -0.5
"""A margin by which everything left always counts as better: only the number of probes ends the search."""


class Workers:
    """The workers of one study, their log and the gates at which their probes wait."""

    def __init__(self, directory: Path, storage: str, *, python: str | Path = WARM / "python") -> None:
        self._python, self.storage = str(python), storage
        self.log = directory / "log"
        self.gates = directory / "gates"
        self.gates.mkdir(parents=True)
        self._running: list[subprocess.Popen[str]] = []
        self._num_started = 0

    def start(self, *, max_probes: int, margin: float = MARGIN) -> "subprocess.Popen[str]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self._num_started += 1
        name = str(self._num_started)
        process = subprocess.Popen(
            [self._python, *map(str, (PROGRAM, name, self.storage, self.log, self.gates, max_probes, margin))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def hold(self, *starts: int) -> None:
        """The n-th probe of the log, for each n, waits until `release`."""
        for number in starts:
            (self.gates / f"hold-{number}").touch()

    def release(self) -> None:
        for gate in self.gates.iterdir():
            gate.unlink()

    def wait_for_starts(self, num: int) -> None:
        """Until so many probes have started."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.keys("start")) < num:
            ended = [process for process in self._running if process.poll() is not None]
            assert not ended, ended[0].communicate()
            assert time.monotonic() < deadline, f"no {num} probes started in {PATIENCE_S} s"
            time.sleep(0.01)

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """SIGKILL, and waits until the kernel has cleaned up."""
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self._running.remove(process)

    def answer(self, process: "subprocess.Popen[str]") -> tuple[str, int]:
        """Best setup and number of probes that a worker reports when it ends."""
        output, errors = process.communicate(timeout=PATIENCE_S)
        self._running.remove(process)
        assert process.returncode == 0, errors
        best, num_probes, _ = output.strip().splitlines()[-1].split("\t")
        return best, int(num_probes)

    def events(self) -> list[tuple[str, str, str]]:
        """(word, worker's name, setup key) of every line of the log."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        parts = [line.split(" ", 2) for line in lines]
        return [(word, name, key) for word, name, key in parts]

    def keys(self, word: str = "end") -> list[str]:
        """Setup keys of all events of a kind, in order."""
        return [key for kind, _, key in self.events() if kind == word]

    def repeated(self) -> dict[str, int]:
        """Setups whose probe was started more than once -> how often."""
        return {key: num for key, num in Counter(self.keys("start")).items() if num > 1}

    def share_and_lose_one(self, num_workers: int) -> str:
        """Starts workers that each hold one probe, and kills one of them: its setup's key."""
        self.hold(*range(1, num_workers + 1))
        workers = {
            str(number): self.start(max_probes=NUM_SHARED, margin=ENDLESS) for number in range(1, num_workers + 1)
        }
        self.wait_for_starts(num_workers)
        started = {name: key for _, name, key in self.events()}
        assert started.keys() == workers.keys()  # every worker took one
        assert len(set(started.values())) == num_workers  # and no two the same
        victim = str(1 + num_workers // 2)
        self.kill(workers[victim])
        return started[victim]

    def check_trials(self, trials: Sequence[FrozenTrial], lost_key: str) -> None:
        """The study when all have ended: every trial is over, every probe told once, the lost one by its retry."""
        open_ = [(t.number, t.state.name, t.user_attrs) for t in trials if not t.state.is_finished()]
        assert not open_, open_
        answered = [trial for trial in trials if "evidence" in trial.user_attrs]
        assert sorted(trial.user_attrs["key"] for trial in answered) == sorted(self.keys())
        (retry,) = [trial for trial in answered if trial.system_attrs.get("retry_history")]
        assert retry.user_attrs["key"] == lost_key

    def check_shared(self, lost_key: str) -> None:
        """Releases the survivors: all agree, nothing is lost, nothing is repeated but the dead worker's probe."""
        self.release()
        answers = {self.answer(worker) for worker in list(self._running)}
        assert len(answers) == 1
        assert next(iter(answers))[1] == NUM_SHARED
        assert self.repeated() == {lost_key: 2}
        assert len(self.keys()) == len(set(self.keys())) == NUM_SHARED
        assert set(self.keys("start")) == set(self.keys())

    def end(self) -> None:
        """No worker outlives its test."""
        while self._running:
            process = self._running.pop()
            process.kill()
            process.communicate()


@pytest.fixture
def all_workers() -> Iterator[list[Workers]]:
    """Where a test puts its workers, so that they end with it."""
    made: list[Workers] = []
    yield made
    for workers in made:
        workers.end()
