"""The study: claims, exclusions, rescue, constraints; on memory, journal and SQLite alike."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from search_cases import exact, measurement, out_of_memory, problem

from planner.core.errors import EnvironmentProblem, UsageError
from planner.setup.codec import evidence_to_dict
from planner.setup.interchange import setup_from_dict
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from search.dimensions import key_of
from search.heartbeat import AttributeHeartbeat, Heartbeat, HeartbeatTiming, LockHeartbeat
from search.journal import JOURNAL_NAME, FlockLock, repair_journal
from search.storage import close_storage, open_storage
from search.study import MAX_RETRIES, Study
from search.trials import ALIVE_ATTR, INTENT_ATTR, LOST_ATTR
from search.values import SPACE, constraint_values


class Lost(Heartbeat):
    """Every other worker's trial counts as lost."""

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.user_attrs.get("worker") != self.worker


OPENED: list[tuple[BaseStorage, Heartbeat]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Whatever a test opens is closed after it."""
    yield
    while OPENED:
        storage, heartbeat = OPENED.pop()
        heartbeat.close()
        close_storage(storage)


def study_in(target: str | Path | None, name: str = "plan") -> Study:
    storage, heartbeat = open_storage(target, HeartbeatTiming(heartbeat_s=1, grace_s=3))
    OPENED.append((storage, heartbeat))
    return Study(problem(), storage, heartbeat, name)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: making its tables takes longer than a test."""
    path = tmp_path_factory.mktemp("tables") / "study.db"
    storage, heartbeat = open_storage(f"sqlite:///{path}")
    heartbeat.close()
    close_storage(storage)
    return path


@pytest.fixture(params=["memory", "journal", "sqlite"])
def study(request: pytest.FixtureRequest, tmp_path: Path, tables: Path) -> Study:
    if request.param == "sqlite":
        shutil.copy(tables, tmp_path / "study.db")
    targets = {"memory": None, "journal": tmp_path, "sqlite": f"sqlite:///{tmp_path}/study.db"}
    return study_in(targets[request.param])


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
    crash = ProbeFailure(rung=Fidelity.PROBE, kind=FailureKind.CRASHED, message="boom")
    for candidate, evidence in zip(candidates, (too_large, out_of_memory(), crash, exact(candidates[3])), strict=False):
        study.enqueue(candidate, "test")
        claimed = study.claim()
        assert claimed is not None
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
    taken = [one for _ in range(3) if (one := study.claim()) is not None]
    assert [number for number, _ in taken] == [0, 1, 2]
    for place in order:
        number, setup = taken[place]
        study.tell(number, measurement(setup, 1000.0, 1e9))
    assert [record.number for record in study.answered()] == list(order)
    assert [record.number for record in study.records()] == [0, 1, 2]


def test_a_second_retry_is_over_when_the_budget_is_spent(study: Study) -> None:
    """Two workers added a lost trial again; the first retry is the last probe, so that nobody claims the second."""
    first, other = problem().candidates[:2]
    study.enqueue(first, "retry")
    study.enqueue(first, "retry")
    study.enqueue(other, "plan")
    taken = study.claim()
    assert taken is not None
    study.tell(taken[0], measurement(taken[1], 1000.0, 1e9))
    study.fail_duplicates()
    states = {trial.number: trial.state for trial in study.study.get_trials()}
    assert states == {0: TrialState.COMPLETE, 1: TrialState.FAIL, 2: TrialState.WAITING}


def test_claims_stop_at_the_probe_limit(study: Study) -> None:
    for candidate in problem().candidates[:5]:
        study.enqueue(candidate, "test")
    claimed = [study.claim(max_probes=2) for _ in range(4)]
    assert [claim is not None for claim in claimed] == [True, True, False, False]


def test_two_workers_never_hold_the_same_candidate(tmp_path: Path) -> None:
    one, two = study_in(tmp_path), study_in(tmp_path)
    for candidate in problem().candidates[:6]:
        one.enqueue(candidate, "a")
        two.enqueue(candidate, "b")
    keys = []
    while claimed := one.claim() or two.claim():
        keys.append(key_of(claimed[1]))
        other = two.claim()
        if other is not None:
            keys.append(key_of(other[1]))
    assert len(keys) == len(set(keys)) == 6


def test_a_lost_trial_is_retried_and_after_repeated_deaths_left_to_the_next_call() -> None:
    """A killed planner is no fault of a setup: no crash is recorded, whoever died how often."""
    storage, _ = open_storage(None)
    for attempt in range(MAX_RETRIES + 1):
        worker = Study(problem(), storage, Lost(), "plan")
        if attempt == 0:
            worker.enqueue(problem().candidates[0], "plan")
        assert worker.claim() is not None  # and then it dies
        assert Study(problem(), storage, Lost(), "plan").rescue() == 1
    survivor = Study(problem(), storage, Lost(), "plan")
    assert survivor.records() == []
    assert survivor.claim() is None
    assert survivor.given_up() == [problem().candidates[0].setup]
    called_again = Study(problem(), storage, Lost(), "plan")
    called_again.rescue(first=True)
    assert called_again.given_up() == []
    claimed = called_again.claim()
    assert claimed is not None
    assert claimed[1] == problem().candidates[0].setup


def test_three_kills_of_the_planner_during_the_first_probe_leave_the_answer_alone() -> None:
    storage, _ = open_storage(None)
    Study(problem(), storage, Lost(), "plan").enqueue(problem().candidates[0], "plan")
    for _ in range(MAX_RETRIES + 3):  # plan tune, killed, again
        worker = Study(problem(), storage, Lost(), "plan")
        worker.rescue(first=True)
        claimed = worker.claim()
        assert claimed is not None
        assert claimed[1] == problem().candidates[0].setup
    assert worker.tell(claimed[0], exact(problem().candidates[0]))
    (record,) = worker.answered()
    assert isinstance(record.evidence, Measurement)


def test_kills_that_a_database_shows_late_leave_the_answer_alone_too() -> None:
    """There a dead worker looks alive for the grace period: longer than the next call's first look."""

    class Later(Lost):
        waited = False

        def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
            return self.waited and super().is_lost(trial)

    storage, _ = open_storage(None)
    Study(problem(), storage, Later(), "plan").enqueue(problem().candidates[0], "plan")
    for _ in range(MAX_RETRIES + 3):
        heartbeat = Later()
        worker = Study(problem(), storage, heartbeat, "plan")
        worker.rescue(first=True)
        heartbeat.waited = True
        worker.rescue()
        claimed = worker.claim()
        assert claimed is not None
        assert worker.given_up() == []


def test_every_dimension_holds_its_least_value() -> None:
    low = {name: one.low for name, one in SPACE.items() if isinstance(one, optuna.distributions.IntDistribution)}
    none = dict.fromkeys(("lora_rank", "checkpointing", "shard_degree"), 0)
    one = ("micro_batch_seqs", "num_gpus", "tensor_degree", "context_degree", "expert_degree", "pipeline_degree")
    assert low == {**none, **dict.fromkeys(one, 1)}


def test_a_setup_of_another_call_that_failed_exceeds_no_memory() -> None:
    """It is none of this call's candidates; what it would have needed nobody knows."""
    crash = ProbeFailure(rung=Fidelity.PROBE, kind=FailureKind.CRASHED, message="x")
    setup = problem().candidates[0].setup
    assert constraint_values(problem(), None, setup, crash) == {"memory": 0.0, "runs": 1.0}


def test_a_trial_of_a_foreign_program_is_passed_over() -> None:
    storage, _ = open_storage(None)
    worker = Study(problem(), storage, Lost(), "plan")
    worker.study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING))
    for attrs in ({"setup": {"method": "hypnosis"}, "key": "x"}, {"setup": []}, {"setup": {}, "retries": "many"}):
        worker.study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING, user_attrs=attrs))
    worker.study.add_trial(optuna.trial.create_trial(state=TrialState.COMPLETE, value=1.0, user_attrs={"setup": 3}))
    worker.enqueue(problem().candidates[0], "plan")
    claimed = worker.claim()
    assert claimed is not None
    assert claimed[1] == problem().candidates[0].setup
    assert len(worker.records()) == 1


def test_a_probe_that_finished_before_its_worker_died_is_not_repeated() -> None:
    storage, _ = open_storage(None)
    worker = Study(problem(), storage, Lost(), "plan")
    candidate = problem().candidates[0]
    worker.enqueue(candidate, "plan")
    claimed = worker.claim()
    assert claimed is not None
    evidence = exact(candidate)
    storage.set_trial_user_attr(worker.trial_id(claimed[0]), "evidence", json.dumps(evidence_to_dict(evidence)))
    other = Study(problem(), storage, Lost(), "plan")
    assert other.rescue() == 1
    (record,) = other.records()
    assert record.evidence == evidence
    assert record.state is TrialState.COMPLETE
    assert not worker.tell(claimed[0], evidence)  # too late: the other one told it


def test_a_living_worker_is_not_robbed(tmp_path: Path) -> None:
    worker = study_in(tmp_path)
    worker.enqueue(problem().candidates[0], "plan")
    assert worker.claim() is not None
    assert study_in(tmp_path).rescue() == 0


def test_of_two_that_want_a_trial_the_slower_withdraws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quicker dies before it signs: once the slower has withdrawn its intent, nobody alive can have the trial."""
    one, two, watcher = study_in(tmp_path), study_in(tmp_path), study_in(tmp_path)
    one.enqueue(problem().candidates[0], "plan")
    (trial,) = watcher.study.get_trials()
    announce = two.heartbeat.announce

    def overtaken(trial_id: int) -> None:
        announce(trial_id)
        one._storage.set_trial_user_attr(trial_id, INTENT_ATTR + one.heartbeat.worker, True)
        assert one._storage.set_trial_state_values(trial_id, state=TrialState.RUNNING)
        assert watcher.rescue() == 0
        one.heartbeat._file.close()  # type: ignore[attr-defined]  # what the kernel does on kill -9
        assert watcher.rescue() == 0  # it may be the other who has it

    monkeypatch.setattr(two.heartbeat, "announce", overtaken)
    assert two.claim() is None
    assert watcher.rescue() == 1
    claimed = watcher.claim()
    assert claimed is not None
    assert claimed[1] == setup_from_dict(trial.user_attrs["setup"])


def test_a_retry_keeps_its_place_and_its_share_of_the_limit() -> None:
    storage, _ = open_storage(None)
    first = Study(problem(), storage, Lost(), "plan")
    candidates = problem().candidates[:3]
    for candidate in candidates:
        first.enqueue(candidate, "ranked")
    assert first.claim() is not None  # and then it dies
    second = Study(problem(), storage, Lost(), "plan")
    assert second.rescue() == 1
    claimed = [second.claim(2), second.claim(2), second.claim(2)]
    assert [claim[1] if claim else None for claim in claimed] == [candidates[0].setup, candidates[1].setup, None]


def test_a_lost_trial_that_its_rescuer_did_not_add_again_is_added_by_the_next() -> None:
    storage, _ = open_storage(None)
    worker = Study(problem(), storage, Lost(), "plan")
    worker.enqueue(problem().candidates[0], "plan")
    assert worker.claim() is not None
    (trial,) = worker.study.get_trials()
    storage.set_trial_user_attr(trial._trial_id, LOST_ATTR, True)
    storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)
    other = Study(problem(), storage, Lost(), "plan")
    assert other.rescue() == 0
    assert other.claim() is not None
    assert Study(problem(), storage, Heartbeat(), "plan").rescue() == 0
    assert len(other.study.get_trials()) == 2  # once, not again


def test_exclusions_are_completed_by_whoever_ends_and_counted_once(tmp_path: Path) -> None:
    excluded = [(c, reason) for c in problem().candidates if (reason := problem().exclusion(c))][:4]
    one, two = study_in(tmp_path), study_in(tmp_path)
    assert one.exclude(excluded[:2]) == 2  # and then it dies
    assert two.exclude(excluded) == 0
    assert two.exclude(excluded, by_now=True) == 2
    one.study.add_trial(one.study.get_trials()[0])  # what a second worker that began in the same moment wrote
    assert [record.setup for record in two.records()] == [candidate.setup for candidate, _ in excluded]


def test_a_candidate_that_the_dry_run_excluded_is_not_claimed_again(study: Study) -> None:
    candidate = next(c for c in problem().candidates if c.fits)
    too_large = replace(candidate.formula, rung=Fidelity.DRY_RUN, peak_device_bytes=2 * candidate.budget_bytes)
    for _ in range(2):
        study.enqueue(candidate, "test")
    claimed = study.claim()
    assert claimed is not None
    assert study.tell(claimed[0], too_large, excluded="dry_run: too large")
    assert study.claim() is None


def test_what_somebody_else_finished_is_told_in_vain(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Robbed before it tells, and robbed between its evidence and the state: no error, the first result stands."""
    for candidate in problem().candidates[:2]:
        study.enqueue(candidate, "test")
    evidence = exact(problem().candidates[0])
    number, _ = study.claim() or (-1, None)
    assert study.tell(number, evidence)
    assert not study.tell(number, out_of_memory())
    number, _ = study.claim() or (-1, None)
    finish = study._finish
    monkeypatch.setattr(study, "_finish", lambda *given: finish(*given) and finish(*given))
    assert not study.tell(number, exact(problem().candidates[1]))
    assert [record.state for record in study.records()] == [TrialState.COMPLETE, TrialState.COMPLETE]


def test_sqlite_transactions_lock_from_their_first_read(tmp_path: Path) -> None:
    """Else two workers would both read "waiting" and both take the trial."""
    import sqlalchemy.exc

    storage, heartbeat = open_storage(f"sqlite:///{tmp_path}/study.db")
    OPENED.append((storage, heartbeat))
    assert isinstance(storage, optuna.storages.RDBStorage)
    assert isinstance(heartbeat, LockHeartbeat)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study.db", "study.db.workers"]
    impatient = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/study.db", connect_args={"timeout": 0.0})
    with storage.engine.connect() as reader:
        reader.exec_driver_sql("SELECT * FROM trials")
        with impatient.connect() as writer, pytest.raises(sqlalchemy.exc.OperationalError, match="locked"):
            writer.exec_driver_sql("INSERT INTO studies (study_name) VALUES ('x')")
    impatient.dispose()


def test_locks_tell_the_living_from_the_dead(tmp_path: Path) -> None:
    living, dead = LockHeartbeat(tmp_path), LockHeartbeat(tmp_path)
    watcher = LockHeartbeat(tmp_path)
    OPENED.extend((optuna.storages.InMemoryStorage(), each) for each in (living, watcher))
    trials = {
        worker.worker: optuna.trial.create_trial(
            state=TrialState.RUNNING, user_attrs={"worker": worker.worker}, value=None
        )
        for worker in (living, dead)
    }
    dead._file.close()  # what the kernel does on kill -9
    assert not watcher.is_lost(trials[living.worker])
    assert watcher.is_lost(trials[dead.worker])


def test_attribute_heartbeat_beats_and_goes_stale() -> None:
    storage, _ = open_storage(None)
    study = Study(problem(), storage, Heartbeat(), "plan")
    study.enqueue(problem().candidates[0], "plan")
    claimed = study.claim()
    assert claimed is not None
    heartbeat = AttributeHeartbeat(storage, interval_s=0.01, grace_s=1000.0)

    def beat() -> float:
        return float(study.study.trials[0].user_attrs[ALIVE_ATTR])

    with heartbeat.keep_alive(study.trial_id(claimed[0])):
        first = beat()
        while beat() == first:  # the thread beats too, however late
            time.sleep(0.01)
    trial = study.study.trials[0]
    assert not heartbeat.is_lost(trial)
    storage.set_trial_user_attr(study.trial_id(claimed[0]), ALIVE_ATTR, beat() - 2000.0)
    assert not heartbeat.is_lost(study.study.trials[0])  # after an outage of the storage every beat looks like this
    while not heartbeat.is_lost(study.study.trials[0]):
        time.sleep(0.01)


def test_a_trial_is_announced_before_it_is_taken() -> None:
    """No running trial without a beat: else one whose worker died at once would never be found lost."""
    storage, _ = open_storage(None)
    study = Study(problem(), storage, AttributeHeartbeat(storage), "plan")
    study.enqueue(problem().candidates[0], "plan")
    (trial,) = study.study.trials
    study.heartbeat.announce(trial._trial_id)
    (trial,) = study.study.trials
    assert trial.state is TrialState.WAITING
    assert ALIVE_ATTR in trial.user_attrs


def test_a_torn_last_line_is_cut_and_the_study_goes_on(tmp_path: Path) -> None:
    one = study_in(tmp_path)
    one.enqueue(problem().candidates[0], "plan")
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 6, "worker_id"')
    two = study_in(tmp_path)
    assert path.read_bytes().startswith(whole)
    assert two.claim() is not None
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert repair_journal(path) == 0
    assert repair_journal(tmp_path / "nothing-here") == 0


def test_journal_lock_is_free_after_its_holder_is_gone(tmp_path: Path) -> None:
    lock = FlockLock(tmp_path / "lock")
    assert lock.acquire()
    lock._file.close()
    again = FlockLock(tmp_path / "lock")
    assert again.acquire()
    again.release()


def test_another_objective_in_the_same_study_is_refused(tmp_path: Path) -> None:
    study_in(tmp_path)
    storage, heartbeat = open_storage(tmp_path)
    OPENED.append((storage, heartbeat))
    with pytest.raises(UsageError, match="maximize"):
        Study(problem(objective="memory"), storage, heartbeat, "plan")


@pytest.mark.parametrize("url", ["redis://localhost", "ftp://x"])
def test_unknown_storage_is_an_error_with_a_hint(url: str) -> None:
    with pytest.raises(UsageError) as error:
        open_storage(url)
    assert "postgresql://" in error.value.hint


def test_unreachable_database_is_an_environment_problem() -> None:
    with pytest.raises(EnvironmentProblem, match="postgresql"):
        open_storage("postgresql://nobody@127.0.0.1:1/nothing")
