"""kill -9 of real worker processes: nothing lost, nothing repeated but the probe in flight.

Probes wait at gates, so that what is in flight at each kill does not depend on the machine's load. Deaths between any
two writes of the study are in `test_death.py`.
"""

import json
import sqlite3
from pathlib import Path

import pytest
from search_cases import empty_study, make_old
from workers import ENDLESS, Workers, all_workers

from search.storage import STUDY_NAME

pytestmark = pytest.mark.processes

__all__ = ["all_workers"]  # a fixture


@pytest.mark.slow
def test_kill_nine_in_probes_and_resumption_lose_nothing(tmp_path: Path, all_workers: list[Workers]) -> None:
    """Killed in the first probe, the third, the fourth and the fourth again."""
    folder = empty_study(tmp_path / "study")
    killed = Workers(tmp_path / "killed", str(folder))
    all_workers.append(killed)
    fatal = (1, 4, 6, 7)  # numbers of starts, repeated ones included
    killed.hold(*fatal)
    in_flight = []
    for number in fatal:
        process = killed.start(max_probes=6, margin=ENDLESS)
        killed.wait_for_starts(number)
        in_flight.append(killed.keys("start")[-1])
        killed.kill(process)
        assert make_old(folder)
    assert killed.answer(killed.start(max_probes=6, margin=ENDLESS))[1] == 6
    assert len(killed.keys()) == len(set(killed.keys())) == 6
    assert killed.repeated() == {key: 1 + in_flight.count(key) for key in in_flight}


@pytest.mark.slow
def test_several_workers_share_a_folder_and_one_is_killed(tmp_path: Path, all_workers: list[Workers]) -> None:
    folder = tmp_path / "study"  # that several make at once
    workers = Workers(tmp_path / "workers", str(folder))
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(3)
    with sqlite3.connect(folder / STUDY_NAME) as database:
        (lost,) = database.execute(
            "SELECT trial_id FROM trials JOIN trial_user_attributes USING (trial_id) "
            "WHERE state = 'RUNNING' AND key = 'key' AND value_json = ?", (json.dumps(lost_key),)
        ).fetchone()  # fmt: skip
        database.execute(
            "UPDATE trial_heartbeats SET heartbeat = datetime('now', '-2 hour') WHERE trial_id = ?", (lost,)
        )
    workers.check_shared(lost_key)
