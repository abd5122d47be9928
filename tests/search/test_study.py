"""The study: claims, exclusions, rescue, constraints; in memory and in a folder alike."""

import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from search_cases import empty_study, exact, make_old, measurement, out_of_memory, problem

from planner.core.errors import EnvironmentProblem, UsageError
from planner.setup.outcome import FailureKind, Fidelity, ProbeFailure
from search.dimensions import key_of
from search.storage import MAX_RETRIES, STUDY_NAME, close_storage, open_storage
from search.study import Study, constraint_values

OPENED: list[BaseStorage] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Whatever a test opens is closed after it."""
    yield
    while OPENED:
        close_storage(OPENED.pop())


def study_in(target: str | Path | None, name: str = "plan") -> Study:
    OPENED.append(open_storage(target))
    return Study(problem(), OPENED[-1], name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return empty_study(tmp_path)


@pytest.fixture(params=["memory", "folder"])
def study(request: pytest.FixtureRequest, folder: Path) -> Study:
    return study_in(folder if request.param == "folder" else None)


def test_a_trial_carries_setup_prediction_and_evidence(study: Study) -> None:
    candidate = problem().candidates[0]
    study.enqueue(candidate, "plan")
    claimed = study.claim()
    assert claimed is not None
    number, setup = claimed
    assert setup == candidate.setup
    evidence = exact(candidate)
    assert study.tell(number, evidence, duration_s=1.5)
    (record,) = study.records()
    assert record.evidence == evidence
    assert record.probed
    assert record.duration_s == 1.5
    trial = study.study.trials[0]
    assert trial.params["micro_batch_seqs"] == setup.micro_batch_seqs
    assert trial.user_attrs["predicted_tokens_per_s"] == candidate.formula.tokens_per_s
    assert study.claim() is None


def test_what_does_not_fit_is_infeasible_and_never_scored_zero(study: Study) -> None:
    candidates = [c for c in problem().candidates if c.fits]
    too_large = measurement(candidates[0].setup, 1000.0, candidates[0].budget_bytes * 1.25)
    crash = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.CRASHED, message="boom")
    for candidate, evidence in zip(candidates, (too_large, out_of_memory(), crash, exact(candidates[3])), strict=False):
        study.enqueue(candidate, "test")
        claimed = study.claim()
        assert study.tell(claimed[0], evidence)
    trials = study.study.trials
    assert [trial.state for trial in trials] == [
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.PRUNED,
        TrialState.COMPLETE,
    ]
    assert trials[0].constraints["memory"] == pytest.approx(0.25, abs=1e-6)
    assert trials[1].constraints["memory"] > 0
    assert trials[2].constraints["runs"] > 0
    assert all(value <= 0 for value in trials[3].constraints.values())
    assert all(trial.value is None or trial.value > 0 for trial in trials)
    assert study.study.best_trial.number == 3


def test_exclusions_are_trials_with_a_reason_and_no_probe(study: Study) -> None:
    excluded = [(c, reason) for c in problem().candidates if (reason := problem().exclusion(c))][:5]
    assert study.exclude(excluded) == 5
    assert study.exclude(excluded) == 0
    for record, (candidate, reason) in zip(study.records(), excluded, strict=True):
        assert record.setup == candidate.setup
        assert record.excluded == reason
        assert not record.probed
    assert all(trial.state is TrialState.PRUNED for trial in study.study.trials)
    assert all(trial.constraints["memory"] > 0 for trial in study.study.trials)


def test_the_same_candidate_waiting_twice_runs_once(study: Study) -> None:
    candidate = problem().candidates[7]
    for _ in range(3):
        study.enqueue(candidate, "test")
    assert study.claim() is not None
    assert study.claim() is None
    states = [trial.state for trial in study.study.trials]
    assert states == [TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL]
    assert len(study.records()) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_answers_come_in_the_order_in_which_they_came(study: Study, order: tuple[int, ...]) -> None:
    """Of probes at the same time the last begun may be answered first; whoever resumes learns as the first did."""
    for candidate in problem().candidates[:3]:
        study.enqueue(candidate, "test")
    taken = [claimed for _ in range(3) if (claimed := study.claim()) is not None]
    assert [number for number, _ in taken] == [0, 1, 2]
    for place in order:
        number, setup = taken[place]
        study.tell(number, measurement(setup, 1000.0, 1e9))
    assert [record.number for record in study.answered()] == list(order)
    assert [record.number for record in study.records()] == [0, 1, 2]


def test_claims_stop_at_the_probe_limit(study: Study) -> None:
    for candidate in problem().candidates[:5]:
        study.enqueue(candidate, "test")
    claimed = [study.claim(max_probes=2) for _ in range(4)]
    assert [claim is not None for claim in claimed] == [True, True, False, False]


def test_two_workers_never_hold_the_same_candidate(folder: Path) -> None:
    first, two = study_in(folder), study_in(folder)
    for candidate in problem().candidates[:6]:
        first.enqueue(candidate, "a")
        two.enqueue(candidate, "b")
    keys = []
    while claimed := first.claim() or two.claim():
        keys.append(key_of(claimed[1]))
        other = two.claim()
        if other is not None:
            keys.append(key_of(other[1]))
    assert len(keys) == len(set(keys)) == 6


def test_a_lost_trial_is_retried_and_after_repeated_deaths_left_to_the_next_call(folder: Path) -> None:
    """A killed planner is no fault of a setup: no crash is recorded, whoever died how often."""
    survivor = study_in(folder)
    survivor.enqueue(problem().candidates[0], "plan")
    for attempt in range(MAX_RETRIES + 1):
        claimed = study_in(folder).claim()  # and then it dies
        assert claimed is not None, attempt
        assert claimed[1] == problem().candidates[0].setup
        survivor.rescue()
        assert survivor.claim() is None  # it lives, as far as anybody knows
        assert make_old(folder) == attempt + 1
        survivor.rescue()
    assert survivor.records() == []
    assert survivor.claim() is None
    assert survivor.given_up() == [problem().candidates[0].setup]
    assert study_in(folder).given_up() == []


def test_a_retry_keeps_its_share_of_the_limit(folder: Path) -> None:
    first, second = study_in(folder), study_in(folder)
    for candidate in problem().candidates[:3]:
        first.enqueue(candidate, "ranked")
    assert first.claim() is not None  # and then it dies
    make_old(folder)
    second.rescue()
    assert [second.claim(2) is not None for _ in range(3)] == [True, True, False]


def test_a_trial_that_is_worked_on_beats_from_before_it_is_taken(folder: Path) -> None:
    """No running trial without a beat: else one whose worker died at once would never be found lost."""
    study = study_in(folder)
    study.enqueue(problem().candidates[0], "plan")
    number, _ = study.claim() or (-1, None)
    assert make_old(folder) == 1
    with study.keep_alive(number), sqlite3.connect(folder / STUDY_NAME) as database:
        deadline = time.monotonic() + 60
        old = "SELECT max(heartbeat) < datetime('now', '-1 minute') FROM trial_heartbeats"
        while database.execute(old).fetchone()[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    study.rescue()
    assert [record.state for record in study.records()] == [TrialState.RUNNING]


def test_what_this_call_cannot_measure_waits_and_counts_no_try(study: Study) -> None:
    study.enqueue(problem().candidates[0], "plan")
    for _ in range(MAX_RETRIES + 2):
        number, _ = study.claim() or (-1, None)
        study.set_aside(number)
    assert study.given_up() == []
    (record,) = study.records()
    assert (record.state, record.origin) == (TrialState.WAITING, "plan")


def test_exclusions_are_completed_by_whoever_ends_and_counted_once(folder: Path) -> None:
    excluded = [(c, reason) for c in problem().candidates if (reason := problem().exclusion(c))][:4]
    first, two = study_in(folder), study_in(folder)
    assert first.exclude(excluded[:2]) == 2  # and then it dies
    assert two.exclude(excluded) == 2
    first.study.add_trial(first.study.get_trials()[0])  # what a second worker that began in the same moment wrote
    assert [record.setup for record in two.records()] == [candidate.setup for candidate, _ in excluded]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_storage_folder_from_a_stranger_leads_nowhere(kind: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"")
    path = tmp_path / "study.db"
    {"link": lambda: path.symlink_to(tmp_path / "victim"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    with pytest.raises(EnvironmentProblem, match="not a regular file"):
        open_storage(tmp_path)
    assert (tmp_path / "victim").read_bytes() == b""


def test_a_file_that_is_no_study_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda s: None)
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(EnvironmentProblem, match=r"study\.db .*not a database") as caught:
        open_storage(tmp_path)
    assert f"move {tmp_path / 'study.db'} away" in caught.value.hint


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql://u:p@h:x/d", "mysql://u:p@[::1"])
def test_a_storage_that_cannot_be_meant_is_an_error_without_the_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert "u:p@" not in caught.value.message


def test_a_setup_of_another_call_that_failed_exceeds_no_memory() -> None:
    """It is none of this call's candidates; what it would have needed nobody knows."""
    crash = ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.CRASHED, message="x")
    setup = problem().candidates[0].setup
    assert constraint_values(problem(), None, setup, crash) == {"memory": 0.0, "runs": 1.0}


def test_a_trial_of_a_foreign_program_is_passed_over() -> None:
    worker = study_in(None)
    worker.study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING))
    for attrs in ({"setup": {"method": "hypnosis"}, "key": "x"}, {"setup": []}):
        worker.study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING, user_attrs=attrs))
    worker.study.add_trial(optuna.trial.create_trial(state=TrialState.COMPLETE, value=1.0, user_attrs={"setup": 3}))
    worker.enqueue(problem().candidates[0], "plan")
    claimed = worker.claim()
    assert claimed[1] == problem().candidates[0].setup
    assert len(worker.records()) == 1


def test_a_candidate_that_the_dry_run_excluded_is_not_claimed_again(study: Study) -> None:
    candidate = next(c for c in problem().candidates if c.fits)
    too_large = replace(candidate.formula, level=Fidelity.DRY_RUN, peak_device_bytes=2 * candidate.budget_bytes)
    for _ in range(2):
        study.enqueue(candidate, "test")
    claimed = study.claim()
    assert study.tell(claimed[0], too_large, excluded="dry_run: too large")
    assert study.claim() is None


def test_what_somebody_else_finished_is_told_in_vain(study: Study) -> None:
    study.enqueue(problem().candidates[0], "test")
    number, _ = study.claim() or (-1, None)
    assert study.tell(number, exact(problem().candidates[0]))
    assert not study.tell(number, out_of_memory())
    assert [record.state for record in study.records()] == [TrialState.COMPLETE]


def test_sqlite_transactions_lock_from_their_first_read(folder: Path) -> None:
    """Else two workers would both read "waiting" and both take the trial."""
    import sqlalchemy.exc

    storage = open_storage(f"sqlite:///{folder}/study.db")
    OPENED.append(storage)
    assert isinstance(storage, optuna.storages.RDBStorage)
    impatient = sqlalchemy.create_engine(f"sqlite:///{folder}/study.db", connect_args={"timeout": 0.0})
    with storage.engine.connect() as reader:
        reader.exec_driver_sql("SELECT * FROM trials")
        with impatient.connect() as writer, pytest.raises(sqlalchemy.exc.OperationalError, match="locked"):
            writer.exec_driver_sql("INSERT INTO studies (study_name) VALUES ('x')")
    impatient.dispose()


def test_another_objective_in_the_same_study_is_refused(folder: Path) -> None:
    study_in(folder)
    with pytest.raises(UsageError, match="maximize"):
        Study(problem(objective="memory"), OPENED[0], "plan")


@pytest.mark.parametrize("url", ["redis://localhost", "grpc://localhost:13000"])
def test_unknown_storage_is_an_error_with_a_hint(url: str) -> None:
    with pytest.raises(UsageError) as error:
        open_storage(url)
    assert "postgresql://" in error.value.hint


def test_unreachable_database_is_an_environment_problem() -> None:
    with pytest.raises(EnvironmentProblem, match="postgresql"):
        open_storage("postgresql://nobody@127.0.0.1:1/nothing")
