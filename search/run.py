"""`search`: the loop. Claim a candidate, dry-run it, probe it, learn, until nothing left is worth a probe."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from planner.core.errors import EnvironmentProblem
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, FailureKind, Prediction, ProbeFailure
from search.dimensions import key_of
from search.problem import Evaluate, Observation, Problem, Result, pareto_set, with_evidence
from search.sampler import Posterior, propose
from search.stopping import MARGIN, Budget, converged
from search.storage import GRACE_S, close_storage, first_line, open_storage, place, what_to_do
from search.study import Study, TrialRecord, describe_problem, still_excluded

POLL_S = 0.2
GO_ON = "once it is mended, call it again to go on with what the store of measurements holds"
WAITS = f"waiting for a trial that another planner holds; it is taken over {GRACE_S} s after that planner's last sign"
MAX_RECORDED_EXCLUSIONS = 20
"""Of the candidates that the formula excludes, the fastest this many become trials, and of those that no probe here
runs as many; the number of all is recorded."""

Check = Callable[[TrainSetup], Prediction | ProbeFailure | None]
"""The dry run, asked before a probe: what does not fit by its memory is excluded without one. None: it cannot tell."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What the search found.

    Attributes:
        best: the best candidate shown to fit and to meet every request, with its evidence; None when none was.
        candidates: every candidate with evidence, with that evidence in place, best first.
        pareto: those of them that nothing beats in tokens/s, peak memory and rank.
        num_probes: how many probes they have cost so far, earlier calls included.
        given_up: without an answer, because every planner that measured them was killed; the next call tries again.
    """

    best: Candidate | None
    trials: tuple[TrialRecord, ...]
    candidates: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    reason: str
    num_probes: int
    given_up: tuple[TrainSetup, ...] = ()


def search(
    problem: Problem,
    evaluate: Evaluate,
    *,
    storage: str | Path | None = None,
    study_name: str = "plan",
    margin: float = MARGIN,
    budget: Budget | None = None,
    plan: TrainSetup | None = None,
    check: Check | None = None,
    transfer: Sequence[Observation] = (),
    on_trial: Callable[[TrialRecord, Posterior], None] | None = None,
    on_wait: Callable[[str, float], None] = lambda text, waited_s: None,
) -> SearchResult:
    """The best candidate that fits, in few probes; resumes the study that it finds in `storage`.

    Args:
        evaluate: the probe (or the dry run where there is no GPU); must return, not raise, what went wrong with the
            setup. Text (no time is left for it) or an `EnvironmentProblem` ends the search; the setup waits for the
            next call.
        storage: None (memory), a directory (an SQLite file in it) or a URL (`storage.open_storage`).
        margin: it stops when nothing left can plausibly be better by more than this fraction.
        plan: the decision tree's setup, tried first; default: the best that the formula says fits.
        on_trial: called after each trial that this worker finished.
        on_wait: told what this worker waits for, and for how many seconds, as long as it does.

    Raises:
        UsageError: the study holds another objective, or an argument makes no sense.
        EnvironmentProblem: the storage does not answer.
    """
    worker = _Worker(problem, margin, Posterior(problem, transfer), budget or Budget(), evaluate, check)
    opened = open_storage(storage)
    try:
        study = Study(problem, opened, study_name)
        study.rescue()  # before anything is enqueued: what a dead worker left is tried first
        worker.begin(study, plan)
        for record in worker.trials(study, on_wait):
            if on_trial is not None:
                on_trial(record, worker.posterior)
        return worker.result(study)
    except StorageInternalError as error:
        where = place(storage)
        raise EnvironmentProblem(
            f"the study's storage {where} does not work: {first_line(error)}", hint=what_to_do(error, where, GO_ON)
        ) from error
    finally:
        close_storage(opened)


@dataclass
class _Worker:
    """The state of one call of `search`."""

    _problem: Problem
    _margin: float
    posterior: Posterior
    _budget: Budget
    _evaluate: Evaluate
    _check: Check | None
    _observed: set[int] = field(default_factory=set)
    _converged: tuple[int, str] = (-1, "")
    _excluded: list[tuple[Candidate, str]] = field(default_factory=list)
    _reason: str = ""

    def __post_init__(self) -> None:
        self._started = time.monotonic() if self._budget.since_s is None else self._budget.since_s

    def begin(self, study: Study, plan: TrainSetup | None) -> None:
        """Records what the formula excludes, and enqueues the plan (else the best-ranked survivor), once per study."""
        problem = self._problem
        excluded = [(c, reason) for c in problem.candidates if (reason := problem.exclusion(c))]
        study.describe(describe_problem(problem, len(excluded)))
        excluded.sort(key=lambda pair: -(pair[0].formula.tokens_per_s or 0.0))
        unprobed = [pair for pair in excluded if problem.unprobed(pair[0].setup)]
        predicted = [pair for pair in excluded if not problem.unprobed(pair[0].setup)]
        self._excluded = unprobed[:MAX_RECORDED_EXCLUSIONS] + predicted[:MAX_RECORDED_EXCLUSIONS]
        recorded = {key_of(r.setup) for r in study.records() if not r.excluded or still_excluded(problem, r)}
        # Open candidates that the formula says fit, best predicted score first; all open ones if none fits.
        mean, _ = self.posterior.score_moments()
        fits = self.posterior.log_memory + self.posterior.memory.mean[: self.posterior.num] <= self.posterior.log_budget
        still_open = [int(i) for i in np.flatnonzero(self.posterior.open)]
        chosen = [i for i in still_open if fits[i]]
        order = mean if chosen else self.posterior.probability_fits()
        first = max(chosen or still_open, key=lambda i: order[i], default=None)
        if plan is not None and key_of(plan) in problem.index:
            first = problem.index[key_of(plan)]
        candidate = problem.candidates[first] if first is not None and self.posterior.open[first] else None
        if candidate is not None and key_of(candidate.setup) not in recorded:
            study.enqueue(candidate, "plan")
        study.exclude(self._excluded)

    def trials(self, study: Study, on_wait: Callable[[str, float], None]) -> Iterator[TrialRecord]:
        """Claims and works one trial after another, until there is a reason to stop; each as it ended, but those that
        others gave up for lost meanwhile: their measurement is in the store."""
        waits_since: float | None = None
        while not self._reason:
            study.rescue()
            claimed = self.next(study)
            if isinstance(claimed, str):
                self._reason = claimed
            elif claimed is None:
                waits_since = time.monotonic() if waits_since is None else waits_since
                on_wait(WAITS, time.monotonic() - waits_since)
                time.sleep(POLL_S)
            else:
                waits_since = None
                number, setup = claimed
                with study.keep_alive(number):
                    self.work(study, number, setup)
                self.catch_up(study)
                if not self._reason:
                    yield from (record for record in study.records() if record.number == number)

    def catch_up(self, study: Study) -> list[TrialRecord]:
        """Tells the posterior what is new in the study; returns trials that are waiting or running."""
        for record in study.answered():
            if record.number in self._observed:
                continue
            self._observed.add(record.number)
            if record.evidence is None:
                continue
            index = self._problem.index[key_of(record.setup)]
            if record.excluded:
                self.posterior.tell_excluded(index, record.evidence, close=still_excluded(self._problem, record))
            else:
                self.posterior.tell(Result(index=index, evidence=record.evidence))
        return [r for r in study.records() if r.state in (TrialState.RUNNING, TrialState.WAITING)]

    def next(self, study: Study) -> tuple[int, TrainSetup] | str | None:
        """A claimed trial; the reason to stop (text); None: wait for other workers."""
        pending = self.catch_up(study)
        running = [r for r in pending if r.state is TrialState.RUNNING]
        probed = [r for r in study.records() if r.probed]
        durations_s = [r.duration_s for r in probed if r.state.is_finished()]
        spent = self._budget.spent(
            num_probes=len(durations_s), elapsed_s=time.monotonic() - self._started, durations_s=durations_s
        )
        if spent:
            return f"{spent}, {WAITS}" if running else spent
        claimed = study.claim(self._budget.max_probes)
        if claimed is not None:
            return claimed
        limit = self._budget.max_probes
        if limit is not None and len(probed) + len(running) >= limit:
            return None  # the last probes are running elsewhere: their results belong to the answer
        if self._converged[0] != len(self._observed):  # the stop rule, computed once per state of knowledge
            reason = converged(self._problem, self.posterior, margin=self._margin)
            self._converged = (len(self._observed), reason)
        if self._converged[1]:
            return None if running else self._converged[1]
        taken = [*(r.setup for r in running), *study.given_up()]
        indices = [self._problem.index[key_of(setup)] for setup in taken]
        proposal = propose(self.posterior, indices)
        if proposal is None:
            return None if running else f"all {self.posterior.num} candidates are answered or excluded"
        study.enqueue(self._problem.candidates[proposal], "residual")
        return study.claim(self._budget.max_probes)

    def work(self, study: Study, number: int, setup: TrainSetup) -> None:
        started = time.monotonic()
        candidate = self._problem.candidates[self._problem.index[key_of(setup)]]
        prediction = None if self._check is None else self._check(setup)
        reason = ""
        if isinstance(prediction, Prediction):
            reason = self._problem.too_large(replace(candidate, dry_run=prediction))
        elif prediction is not None and prediction.kind is FailureKind.UNSUPPORTED:
            reason = prediction.message
        if prediction is not None and reason:
            study.tell(number, prediction, duration_s=time.monotonic() - started, excluded=reason)
            return
        try:
            evidence = self._evaluate(setup)
        except BaseException:  # a machine that cannot measure, Ctrl-C
            study.set_aside(number)
            raise
        if isinstance(evidence, str):
            study.set_aside(number)
            self._reason = evidence
            return
        study.tell(number, evidence, duration_s=time.monotonic() - started)

    def result(self, study: Study) -> SearchResult:
        self.catch_up(study)
        study.exclude(self._excluded)
        problem, trials = self._problem, study.records()
        by_key: dict[str, Candidate] = {}
        for record in trials:
            if record.evidence is not None and record.state.is_finished():
                key = key_of(record.setup)
                by_key[key] = with_evidence(problem.candidates[problem.index[key]], record.evidence)
        best = self.posterior.best
        chosen = with_evidence(problem.candidates[best.index], best.evidence) if best is not None else None
        ordered = sorted(by_key.values(), key=lambda c: (not c.fits, -c.tokens_per_s))
        usable = [c for c in ordered if problem.feasible(c.setup, c.probe or c.dry_run)]
        return SearchResult(
            best=chosen,
            trials=tuple(trials),
            candidates=tuple(ordered),
            pareto=pareto_set(usable),
            reason=self._reason,
            num_probes=sum(record.probed for record in trials),
            given_up=tuple(study.given_up()),
        )
