"""The Optuna study of one search: many workers, each candidate run once, nothing lost when one dies.

How a candidate is claimed, with nothing but what every Optuna storage guarantees:

1. A worker that wants candidate c adds a WAITING trial that carries c. Trial numbers are given in one order that all
   workers see.
2. Any worker takes the first WAITING trial by the storage's atomic WAITING -> RUNNING.
3. Before it runs, it looks at all trials with a smaller number. If one of them holds the same candidate and has not
   failed, its own is a duplicate: FAIL, no probe, next. The smallest number always wins, and it is always visible.

A worker that dies leaves a RUNNING trial. Whoever notices marks it lost, sets it to FAIL (one succeeds) and adds it
again as WAITING, in the lost one's place in the order. Every step leaves what the next worker needs to take it up, so
that a worker may die before any of its writes (tests/search/test_death.py tries them all).
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from planner.core.errors import UsageError
from planner.setup import TrainSetup
from planner.setup.codec import evidence_to_dict
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.outcome import Candidate, Evidence, Prediction
from search.dimensions import NAMES, key_of, value_of
from search.heartbeat import Heartbeat
from search.problem import Problem, memory_excess, with_evidence
from search.trials import (
    EXCLUDED,
    GIVEN_UP_ATTR,
    INTENT_ATTR,
    LOST_ATTR,
    ORDER_ATTR,
    RETRY_OF_ATTR,
    WORKER_ATTR,
    TrialRecord,
    marks_of,
    record_of,
)
from search.values import SPACE, constraint_values, objective_value, params_of, predicted_values

MAX_RETRIES = 2
"""A candidate whose worker died this often within one call, and once more, is left to the next call. A planner that is
killed says nothing about the setup: its probe is a process of its own, whose end would have been told."""


class Study:
    """One study, as seen by one worker."""

    def __init__(self, problem: Problem, storage: BaseStorage, heartbeat: Heartbeat, name: str) -> None:
        self._problem = problem
        self._storage = storage
        self.heartbeat = heartbeat
        direction: Literal["minimize", "maximize"] = (
            "minimize" if problem.objective in ("cost", "memory") else "maximize"
        )
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=direction,
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        if self.study.direction.name.lower() != direction:
            raise UsageError(
                f"study {name!r} was made to {self.study.direction.name.lower()}, objective {problem.objective!r} must "
                f"{direction}",
                hint="give another study name",
            )
        subject = self.study.user_attrs.get("subject", problem.subject)
        if subject != problem.subject:
            raise UsageError(
                f"study {name!r} there measured {subject!a:.200}, this search is about {problem.subject}",
                hint="give another --study name, or another --out or --storage",
            )
        heartbeat.join(self.study._study_id)
        self._records: dict[int, TrialRecord] = {}
        self._taken_before: set[int] = set()
        setups = [candidate.setup for candidate in problem.candidates]
        self._names = [name for name in NAMES if len({value_of(setup, name) for setup in setups}) > 1]
        """What varies becomes a parameter; what does not would only fill the dashboard."""
        self._space = {name: SPACE[name] for name in self._names}

    # Reading

    def records(self) -> list[TrialRecord]:
        """All trials that anyone made, in order; those of duplicates and lost workers left out."""
        result = []
        seen: set[str] = set()
        for trial in self.study.get_trials(deepcopy=False):
            record = self._records.get(trial.number) or record_of(trial)
            if record is None:
                continue
            if trial.number not in self._records and trial.state.is_finished():
                self._records[trial.number] = record
            if record.state is TrialState.FAIL:
                continue
            if record.origin == EXCLUDED:
                if (key := key_of(record.setup)) in seen:
                    continue  # two workers that started at once both wrote it
                seen.add(key)
            result.append(record)
        return result

    def answered(self) -> list[TrialRecord]:
        """Finished trials with evidence, in the order in which they finished."""
        done = [record for record in self.records() if record.evidence is not None and record.state.is_finished()]
        return sorted(done, key=lambda record: (record.completed_at_s, record.number))

    # Writing

    def enqueue(self, candidate: Candidate, origin: str, *, retry_of: TrialRecord | None = None) -> None:
        """One more candidate for whoever is free; `retry_of`: in the place of that lost trial."""
        retried = {} if retry_of is None else {RETRY_OF_ATTR: retry_of.number, ORDER_ATTR: retry_of.order}
        retries = 0 if retry_of is None else retry_of.retries + 1
        told = {"origin": origin, "retries": retries, **predicted_values(candidate), **retried}
        self._add(candidate.setup, TrialState.WAITING, told)

    def _add(
        self, setup: TrainSetup, state: TrialState, told: Mapping[str, Any], constraints: dict[str, float] | None = None
    ) -> None:
        """One more trial; `told` are its attributes beside the setup's own."""
        self.study.add_trial(
            create_trial(
                state=state,
                params=params_of(setup, self._names),
                distributions=self._space,
                user_attrs={"key": key_of(setup), "setup": setup_to_dict(setup), **told},
                constraints=constraints,
            )
        )

    def exclude(self, candidates: Iterable[tuple[Candidate, str]], *, by_now: bool = False) -> int:
        """Records candidates that are out before any probe, with the reason; returns how many were new.

        The first worker does it for all. It may die over it: `by_now` records what is missing, whoever began.
        """
        first = self.study.user_attrs.get("excluding")
        if first not in (None, self.heartbeat.worker) and not by_now:
            return 0
        if first is None:
            self.study.set_user_attr("excluding", self.heartbeat.worker)
        known = {marks_of(trial).key for trial in self.study.get_trials(deepcopy=False)}
        new = 0
        for candidate, reason in candidates:
            if key_of(candidate.setup) in known:
                continue
            new += 1
            excess = memory_excess(self._problem, candidate, candidate.memory_evidence)
            constraints = {"memory": max(excess, 0.0), "wishes": 0.0}
            if self._problem.broken_request(candidate.setup):
                constraints["wishes"] = 1.0
            predicted: dict[str, Any] = {}
            if self._problem.unprobed(candidate.setup):
                constraints["runs"] = 1.0
                predicted = predicted_values(candidate)  # all that will ever be known of it here
            told = {"origin": EXCLUDED, "excluded": reason, **predicted}
            self._add(candidate.setup, TrialState.PRUNED, told, constraints)
        return new

    def claim(self, max_probes: int | None = None) -> tuple[int, TrainSetup] | None:
        """Takes the first waiting trial that is no duplicate: its number and setup; None when none waits."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        for trial in sorted(waiting, key=lambda trial: (marks_of(trial).order, trial.number)):
            known = record_of(trial)
            if known is not None and key_of(known.setup) not in self._problem.index:
                continue  # another search's: it waits for who knows it
            if not self._take(trial):
                continue
            if known is None:  # of a foreign program
                self._fail(trial)
                continue
            records = self.records()
            before = [r for r in records if self._costs_probe(r) and (r.order, r.number) < (known.order, known.number)]
            over = max_probes is not None and len(before) >= max_probes
            if over or self._is_duplicate(known, records):
                self._fail(trial)
                continue
            return trial.number, known.setup
        return None

    def fail_duplicates(self) -> None:
        """Ends waiting trials of candidates that an earlier trial has: workers that look at the same time each add a
        lost trial again, and the budget may be spent before anybody claims the second."""
        records = self.records()
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            known = record_of(trial)
            if known is None or key_of(known.setup) not in self._problem.index:
                continue
            if self._is_duplicate(known, records):
                self._fail(trial)

    def _is_duplicate(self, record: TrialRecord, records: Sequence[TrialRecord]) -> bool:
        """Whether an earlier trial answers the candidate, or will. By number, not by place: of two with one candidate
        the same one must lose for everybody."""
        key = key_of(record.setup)
        same = [r for r in records if r.number < record.number and key_of(r.setup) == key]
        return any(self._costs_probe(r) or still_excluded(self._problem, r) for r in same)

    def _costs_probe(self, record: TrialRecord) -> bool:
        """Whether it cost a probe of this search, or will."""
        pending = record.state in (TrialState.RUNNING, TrialState.WAITING)
        return (pending or record.probed) and key_of(record.setup) in self._problem.index

    def _fail(self, trial: FrozenTrial) -> bool:
        """Takes a trial out of the search; False when somebody else had finished it."""
        try:
            return self._storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False

    def _take(self, trial: FrozenTrial) -> bool:
        """WAITING -> RUNNING by this worker and no other; its death between any two of the writes is noticed."""
        trial_id, worker = trial._trial_id, self.heartbeat.worker
        try:
            self._storage.set_trial_user_attr(trial_id, INTENT_ATTR + worker, True)
            self.heartbeat.announce(trial_id)
            if not self._storage.set_trial_state_values(trial_id, state=TrialState.RUNNING):
                self._storage.set_trial_user_attr(trial_id, INTENT_ATTR + worker, False)
                return False
            self._storage.set_trial_user_attr(trial_id, WORKER_ATTR, worker)
        except UpdateFinishedTrialError:
            return False
        return True

    def trial_id(self, number: int) -> int:
        """The storage's id of a trial."""
        return self._storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)

    def tell(self, number: int, evidence: Evidence, *, duration_s: float = 0.0, excluded: str = "") -> bool:
        """Finishes a trial with what came back; False when somebody else had given it up for lost."""
        trial_id = self.trial_id(number)
        try:
            if excluded:
                self._storage.set_trial_user_attr(trial_id, "excluded", excluded)
            if duration_s:
                self._storage.set_trial_user_attr(trial_id, "duration_s", round(duration_s, 3))
            # Written before the state: whoever finds this trial unfinished finishes it without another probe.
            self._storage.set_trial_user_attr(trial_id, "evidence", json.dumps(evidence_to_dict(evidence)))
        except UpdateFinishedTrialError:
            return False
        return self._finish(number, evidence)

    def _finish(self, number: int, evidence: Evidence) -> bool:
        """Constraints, value and state; False when somebody else had finished it."""
        problem = self._problem
        trial_id = self.trial_id(number)
        known = self._storage.get_trial(trial_id)
        setup = setup_from_dict(known.user_attrs["setup"])
        candidate = problem.candidates[problem.index[key_of(setup)]] if key_of(setup) in problem.index else None
        value = None if known.user_attrs.get("excluded") else objective_value(problem, candidate, setup, evidence)
        trial = optuna.trial.Trial(self.study, trial_id)
        try:
            for name, excess in constraint_values(problem, candidate, setup, evidence).items():
                if name not in (known.constraints or {}):
                    trial.set_constraint(name, excess)
            if value is None:
                return self._storage.set_trial_state_values(trial_id, state=TrialState.PRUNED)
            return self._storage.set_trial_state_values(trial_id, state=TrialState.COMPLETE, values=[value])
        except UpdateFinishedTrialError:
            return False

    def rescue(self, *, first: bool = False) -> int:
        """Gives trials of dead workers to the living; returns how many.

        Args:
            first: this is a new call's first look: a person (or a scheduler) asks again, so that what killed planners
                before is tried anew.
        """
        rescued = 0
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if first:
            self._taken_before = {trial.number for trial in running}
        for trial in running:
            if not self.heartbeat.is_lost(trial):
                continue
            record = record_of(trial)
            if record is not None and record.evidence is not None:  # the probe was finished, only not said so
                rescued += self._finish(trial.number, record.evidence)
                continue
            with contextlib.suppress(UpdateFinishedTrialError):
                if record is not None:
                    if trial.number in self._taken_before:  # an earlier call's, which a database shows late: tried anew
                        self._storage.set_trial_user_attr(trial._trial_id, "retries", -1)
                    again = trial.number in self._taken_before or record.retries < MAX_RETRIES
                    self._storage.set_trial_user_attr(trial._trial_id, LOST_ATTR if again else GIVEN_UP_ATTR, True)
                rescued += self._fail(trial)
        self._retry_lost(first=first)
        return rescued

    def set_aside(self, number: int) -> None:
        """The machine failed, not the setup: it waits again, and no try is counted."""
        trial_id = self.trial_id(number)
        record = record_of(self._storage.get_trial(trial_id))
        retries = record.retries if record is not None else 0
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(trial_id, LOST_ATTR, True)
            self._storage.set_trial_user_attr(trial_id, "retries", retries - 1)
            self._storage.set_trial_state_values(trial_id, state=TrialState.FAIL)
        self._retry_lost(first=False)

    def _retry_lost(self, *, first: bool) -> None:
        """Adds every lost trial again for which nobody has done so: who gave it up may have died right after."""
        trials = self.study.get_trials(deepcopy=False)
        marks = {trial.number: marks_of(trial) for trial in trials}
        retried = {one.retry_of for one in marks.values()}
        for trial in trials:
            mark = marks[trial.number]
            if trial.state is not TrialState.FAIL or not (mark.lost or (first and mark.given_up)):
                continue
            record = record_of(trial)
            position = self._problem.index.get(key_of(record.setup)) if record is not None else None
            if record is not None and trial.number not in retried and position is not None:
                retry_of = replace(record, retries=-1) if first else record
                self.enqueue(self._problem.candidates[position], "retry", retry_of=retry_of)

    def given_up(self) -> list[TrainSetup]:
        """Setups without an answer because every planner that measured them was killed."""
        marks = [(trial, marks_of(trial)) for trial in self.study.get_trials(deepcopy=False)]
        retried = {mark.retry_of for _, mark in marks}
        lost = [trial for trial, mark in marks if mark.given_up and trial.number not in retried]
        return [record.setup for trial in lost if (record := record_of(trial)) is not None]

    def describe(self, values: Mapping[str, Any]) -> None:
        """Facts about the search, for the dashboard and for a resumed run; unchanged ones are not written again."""
        known = self.study.user_attrs
        for name, value in values.items():
            if known.get(name) != value:
                self.study.set_user_attr(name, value)


def still_excluded(problem: Problem, record: TrialRecord) -> bool:
    """Whether a dry run's exclusion stands: an earlier call may have had less memory."""
    index = problem.index.get(key_of(record.setup))
    if not record.excluded or record.evidence is None or index is None:
        return False
    candidate = with_evidence(problem.candidates[index], record.evidence)
    return not isinstance(record.evidence, Prediction) or bool(problem.too_large(candidate))
