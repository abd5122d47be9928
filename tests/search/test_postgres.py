"""A real PostgreSQL server, several worker processes, one of them killed: none lost, none run twice."""

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from search_worker import GRACE_S
from workers import Workers, all_workers

from search.storage import close_storage, open_storage
from tests.servers import Postgres
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

__all__ = ["all_workers"]  # a fixture

pytest.importorskip("psycopg", reason="the PostgreSQL driver psycopg is not installed (extra `search`)")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    try:
        server = Postgres()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    yield server
    server.close()


def trials_of(url: str) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(url)
    try:
        return optuna.load_study(study_name="plan", storage=storage).get_trials()
    finally:
        close_storage(storage)


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="6 CPU seconds; test_kill.py shares a folder so (TESTS_WHOLE=1)")
def test_workers_on_postgres_lose_nothing_and_repeat_nothing(
    server: Postgres, tmp_path: Path, all_workers: list[Workers]
) -> None:
    """Four workers, one killed in its probe; that its heartbeat is an hour old is told to the server's clock."""
    url = server.fresh()  # for a second try too
    workers = Workers(tmp_path, url)
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(4)
    (lost,) = [
        trial for trial in trials_of(url) if trial.state is TrialState.RUNNING and trial.user_attrs["key"] == lost_key
    ]
    aged = f"UPDATE trial_heartbeats SET heartbeat = heartbeat - interval '{2 * GRACE_S} s' WHERE trial_id = "
    assert server.execute(url, f"{aged}{lost._trial_id}") == 1
    workers.check_shared(lost_key)
    workers.check_trials(trials_of(url), lost_key)
