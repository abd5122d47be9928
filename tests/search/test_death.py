"""A worker dies at every write to the study in turn; the next call loses nothing and repeats no told probe.

Between two writes a death leaves the same storage as a death right before the second, so that trying every write is
trying every point. In one process: the write raises, and every later one of that worker too.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from search_cases import empty_study, make_old, problem, scenario
from workers import ENDLESS

import search.run
import search.study
from benchmarks.synthetic_gpu import SyntheticGpu
from planner.setup import TrainSetup
from planner.setup.outcome import Evidence
from search.dimensions import key_of
from search.run import SearchResult
from search.run import search as run_search
from search.stopping import Budget
from tests.whole import WHOLE

NUM_PROBES = 4
STEP = 1 if WHOLE else 11
WRITES = (
    "create_new_study", "set_study_user_attr", "set_study_system_attr", "create_new_trial", "record_heartbeat",
    "set_trial_state_values", "set_trial_user_attr", "set_trial_system_attr",
)  # fmt: skip


class Died(BaseException):
    """The worker is gone: nothing may catch this."""


@dataclass
class Death:
    """When a worker dies: at its write number `at` (0: the first)."""

    at: int = 10**9
    num_writes: int = 0

    def strikes(self) -> bool:
        """Counts one write; whether the worker is dead by it."""
        self.num_writes += 1
        return self.num_writes > self.at


@contextmanager
def mortal(death: Death) -> Iterator[None]:
    """Inside, every write to a database counts, and none happens from the fatal one on."""

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if death.strikes():
                raise Died
            return write(*arguments, **named)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(RDBStorage, name, counted(getattr(RDBStorage, name)))
        yield


def run(folder: Path, death: Death, ended: list[str]) -> SearchResult | None:
    """The result; None when it died. `told`: the probes that ended, in order."""
    gpu = SyntheticGpu.of(scenario(), 3)

    def evaluate(setup: TrainSetup) -> Evidence:
        ended.append(key_of(setup))
        return gpu(setup)

    try:
        with mortal(death):
            budget = Budget(max_probes=NUM_PROBES)
            return run_search(problem(), evaluate, storage=folder, margin=ENDLESS, budget=budget)
    except Died:
        return None


def test_death_at_any_write_loses_nothing_and_repeats_only_what_was_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every eleventh write, with TESTS_WHOLE=1 at every one."""
    monkeypatch.setattr(search.run, "MAX_RECORDED_EXCLUSIONS", 2)
    monkeypatch.setattr(search.study, "get_heartbeat_thread", lambda trial_id, storage: nullcontext())
    calm, count = list[str](), Death()
    undisturbed = run(empty_study(tmp_path / "calm"), count, calm)
    assert undisturbed.best is not None
    assert count.num_writes > 30
    for at in range(0, count.num_writes, STEP):
        folder = empty_study(tmp_path / "study")
        ended: list[str] = []
        assert run(folder, Death(at=at), ended) is None
        make_old(folder)
        result = run(folder, Death(), ended)
        assert result.num_probes == NUM_PROBES
        assert len(ended) - len(set(ended)) <= 1  # only what the dead one had not told
        assert {key_of(t.setup) for t in result.trials if t.probed} == set(ended)
        assert not [trial for trial in result.trials if not trial.state.is_finished()]
        shutil.rmtree(folder)
