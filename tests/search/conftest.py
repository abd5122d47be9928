"""Searches whose studies write little, among fewer setups."""

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event

import search.run
from finetune_planner.app import tuning
from finetune_planner.app.tuning import search_candidates
from planner.planning.plan import Plan
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate

_CANDIDATES: dict[Any, tuple[Plan, tuple[Candidate, ...]]] = {}


def _once(plan: Plan, unprobed: Callable[[TrainSetup], str]) -> tuple[Candidate, ...]:
    """What a search of a plan that tests share may choose from."""
    key = id(plan), unprobed if plan.workload.num_gpus > 1 else None
    if key not in _CANDIDATES:
        _CANDIDATES[key] = plan, search_candidates(plan, unprobed)
    return _CANDIDATES[key][1]


@pytest.fixture(autouse=True)
def _few_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A recorded exclusion is a trial like any other, with its writes (half of a search's time); nothing waits for the
    disk. Each setup that may be searched is predicted first."""

    def unsafe(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    monkeypatch.setattr(search.run, "MAX_RECORDED_EXCLUSIONS", 4)
    monkeypatch.setattr(tuning, "MAX_CANDIDATES", 200)
    monkeypatch.setattr(tuning, "search_candidates", _once)
    event.listen(Engine, "connect", unsafe)
    yield
    event.remove(Engine, "connect", unsafe)
