"""A worker dies at every write to the study in turn; resumed, the search is the undisturbed one.

Between two writes a death leaves the same storage as a death right before the second, so that trying every write is
trying every point. In one process: the write raises, and every later one of that worker too.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from search_cases import problem, scenario, small_candidates
from sqlalchemy import Engine, event
from workers import ENDLESS

import search.run
from benchmarks.synthetic_gpu import SyntheticGpu
from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.outcome import Evidence, Fidelity, Prediction, ProbeFailure
from search.dimensions import key_of
from search.heartbeat import LockHeartbeat
from search.journal import JOURNAL_NAME
from search.problem import Problem
from search.run import SearchResult, Strategy
from search.run import search as run_search
from search.stopping import Budget
from search.storage import close_storage, open_storage
from tests.whole import WHOLE, some

NUM_RANKED = 2
NUM_EXCLUSIONS = 2
DRY_RUN_LIMIT = 30 * GIB
WRITES = (
    "create_new_study",
    "set_study_user_attr",
    "set_study_system_attr",
    "create_new_trial",
    "set_trial_state_values",
    "set_trial_user_attr",
    "set_trial_system_attr",
)


class Died(BaseException):
    """The worker is gone: nothing may catch this."""


@dataclass(kw_only=True)
class Death:
    """When a worker dies: at its write number `at` (0: the first); `torn`: half of that write reaches the file."""

    at: int = 10**9
    torn: bool = False
    num_writes: int = 0

    def strikes(self) -> bool:
        """Counts one write; whether the worker is dead by it."""
        self.num_writes += 1
        return self.num_writes > self.at


@contextmanager
def mortal(death: Death, kind: str) -> Iterator[None]:
    """Inside, every write to a storage of that kind counts, and none happens from the fatal one on."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "journal":
            append = JournalFileBackend.append_logs

            def append_logs(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
                if death.strikes():
                    if death.torn and death.num_writes == death.at + 1:
                        text = json.dumps(logs[0])
                        with open(self._file_path, "a") as file:
                            file.write(text[: len(text) // 2])
                    raise Died
                append(self, logs)

            patch.setattr(JournalFileBackend, "append_logs", append_logs)
        else:
            for name in WRITES:
                patch.setattr(RDBStorage, name, counted(getattr(RDBStorage, name), death))
        # What the kernel does: the lock falls, its file stays.
        patch.setattr(LockHeartbeat, "close", lambda self: self._file.close())
        yield


def counted(write: Callable[..., Any], death: Death) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if death.strikes():
            raise Died
        return write(*arguments, **named)

    return wrapped


@cache
def few() -> Problem:
    """Two dozen candidates, of which many fit, some are excluded by the formula and some by the dry run."""
    excluded = [c for c in small_candidates() if problem().exclusion(c)][:5]
    fitting = sorted((c for c in small_candidates() if c.fits), key=lambda c: -(c.formula.tokens_per_s or 0))[:110:6]
    return Problem(candidates=(*fitting, *excluded))


class Worker:
    """Calls the search and remembers what it probed."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.probed: list[str] = []
        self._gpu = SyntheticGpu.of(scenario(), 3)

    def evaluate(self, setup: TrainSetup) -> Evidence:
        self.probed.append(key_of(setup))
        return self._gpu(setup)

    def check(self, setup: TrainSetup) -> Prediction | ProbeFailure:
        """A dry run that finds every third candidate too large."""
        formula = few().candidates[few().index[key_of(setup)]].formula
        factor = 3 if few().index[key_of(setup)] % 3 == 2 else 1
        return replace(
            formula,
            rung=Fidelity.DRY_RUN,
            peak_device_bytes=formula.peak_device_bytes * factor,
            memory_band_fraction=0.02,
            tokens_per_s=None,
        )

    def run(self, death: Death) -> SearchResult | None:
        """The result; None when it died."""
        kind = "journal" if "://" not in self.storage else "database"
        try:
            with mortal(death, kind):
                return run_search(
                    few(),
                    self.evaluate,
                    storage=self.storage,
                    strategy=Strategy(num_ranked=NUM_RANKED, margin=ENDLESS),
                    check=self.check,
                    budget=Budget(max_probes=5),
                )
        except Died:
            return None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few exclusions, and nothing waits for the disk: processes die here, not the machine."""

    def unsafe(connection: Any, record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    monkeypatch.setattr(search.run, "MAX_RECORDED_EXCLUSIONS", NUM_EXCLUSIONS)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    event.listen(Engine, "connect", unsafe)
    yield
    event.remove(Engine, "connect", unsafe)


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes new empty storages of the kind that the test is run for."""
    kind = request.param
    empty = tmp_path / "empty.db"
    if kind == "sqlite":  # tables are made once and copied: that takes longer than the search
        opened, heartbeat = open_storage(f"sqlite:///{empty}")
        close_storage(opened)
        heartbeat.close()
    number = 0

    def place() -> str:
        nonlocal number
        number += 1
        if kind == "journal":
            return str(tmp_path / str(number))
        shutil.copy(empty, tmp_path / f"{number}.db")
        return f"sqlite:///{tmp_path}/{number}.db"

    return place


def summary(result: SearchResult) -> tuple[object, ...]:
    """All that must be the same, however often workers died."""
    assert all(trial.state.is_finished() for trial in result.trials)
    best = key_of(result.best.setup) if result.best else None
    trials = sorted((key_of(t.setup), t.state is TrialState.COMPLETE, t.excluded, t.probed) for t in result.trials)
    return best, result.num_probes, result.reason, trials


def check(worker: Worker, result: SearchResult | None, undisturbed: tuple[object, ...], order: list[str]) -> None:
    assert result is not None
    assert list(dict.fromkeys(worker.probed)) == order
    assert summary(result) == undisturbed


def undisturbed_search(storage: str) -> tuple[tuple[object, ...], list[str], int]:
    """Summary, probes in order, number of writes."""
    calm, count = Worker(storage), Death()
    result = calm.run(count)
    assert result is not None
    assert result.best is not None
    assert len(calm.probed) == result.num_probes == 5
    assert sum(bool(trial.excluded) for trial in result.trials) > NUM_EXCLUSIONS  # by the dry run too
    return summary(result), calm.probed, count.num_writes


@pytest.mark.parametrize(
    ("places", "torn", "step"),
    [
        (kind, torn, 1 if WHOLE else step)
        for kind, torn, step in (("journal", 0, 2), ("journal", 1, 9), ("sqlite", 0, 41))
    ],
    indirect=["places"],
    ids=["journal", "torn journal", "sqlite"],
)
def test_death_at_any_write_and_resumption_is_the_undisturbed_search(
    places: Callable[[], str], torn: bool, step: int
) -> None:
    """At every second write, torn at every ninth, on SQLite, where a search takes ten times as long, at every 41st;
    with TESTS_WHOLE=1 at every one."""
    undisturbed, order, num_writes = undisturbed_search(places())
    assert num_writes > 50
    for at in range(0, num_writes, step):
        worker = Worker(places())
        assert worker.run(Death(at=at, torn=torn)) is None
        before = len(worker.probed)
        check(worker, worker.run(Death()), undisturbed, order)
        # Only the probe in flight: the last one before the death, and only as the first after it.
        repeated = len(worker.probed) - len(order)
        assert repeated in (0, 1)
        if repeated:
            assert worker.probed[before] == worker.probed[before - 1]


@pytest.mark.parametrize("places", ["journal"], indirect=True)
def test_the_rescuer_may_die_too(places: Callable[[], str]) -> None:
    """The first dies in a trial's writes, the second in those of the rescue and of the claim after it."""
    undisturbed, order, num_writes = undisturbed_search(places())
    for first in some(range(num_writes // 2, num_writes // 2 + 12), 2):  # the writes of one trial
        for second in range(1, 5):
            worker = Worker(places())
            assert worker.run(Death(at=first)) is None
            if worker.run(Death(at=second)) is not None:
                break  # it had fewer writes left
            check(worker, worker.run(Death()), undisturbed, order)


@pytest.mark.parametrize("places", ["journal"], indirect=True)
def test_the_sweep_counts_the_writes_of_the_real_storage(places: Callable[[], str]) -> None:
    """As many lines in the journal as writes counted: no write escapes the sweep."""
    place = places()
    _, _, num_writes = undisturbed_search(place)
    assert len((Path(place) / JOURNAL_NAME).read_text().splitlines()) == num_writes
    storage, heartbeat = open_storage(place)
    heartbeat.close()
    assert isinstance(storage, JournalStorage)
