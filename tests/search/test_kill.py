"""kill -9 of real worker processes: nothing lost, nothing repeated but the probe in flight, the same answer.

Probes wait at gates, so that what is in flight at each kill does not depend on the machine's load. Deaths between any
two writes of the study are in `test_death.py`.
"""

import sys
from pathlib import Path

import pytest
from workers import ENDLESS, Workers, all_workers

pytestmark = pytest.mark.processes

__all__ = ["all_workers"]  # a fixture


@pytest.mark.slow
def test_kill_nine_in_probes_and_resumption_give_the_undisturbed_search(
    tmp_path: Path, all_workers: list[Workers]
) -> None:
    """Killed in the first probe, the third, the fourth and the fourth again: the same probes in the same order."""
    calm = Workers(tmp_path / "calm", str(tmp_path / "calm" / "study"), python=sys.executable)
    killed = Workers(tmp_path / "killed", str(tmp_path / "killed" / "study"))
    all_workers += [calm, killed]
    undisturbed = calm.answer(calm.start(max_probes=6, margin=ENDLESS))
    fatal = (1, 4, 6, 7)  # numbers of starts, repeated ones included
    killed.hold(*fatal)
    in_flight = []
    for number in fatal:
        process = killed.start(max_probes=6, margin=ENDLESS)
        killed.wait_for_starts(number)
        in_flight.append(killed.keys("start")[-1])
        killed.kill(process)
    assert killed.answer(killed.start(max_probes=6, margin=ENDLESS)) == undisturbed
    assert killed.keys() == calm.keys()
    assert killed.repeated() == {key: 1 + in_flight.count(key) for key in in_flight}


@pytest.mark.slow
def test_several_workers_share_a_journal_and_one_is_killed(tmp_path: Path, all_workers: list[Workers]) -> None:
    workers = Workers(tmp_path, str(tmp_path / "study"))
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(3)
    workers.check_shared(lost_key)


@pytest.mark.slow
def test_several_workers_share_an_sqlite_file_and_one_is_killed(tmp_path: Path, all_workers: list[Workers]) -> None:
    workers = Workers(tmp_path, f"sqlite:///{tmp_path}/study.db")
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(3)
    workers.check_shared(lost_key)
