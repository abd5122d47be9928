"""The whole search on synthetic machines: budget, order, resumption, requests, properties."""

from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from search_cases import (
    empty_study,
    exact,
    observations_of,
    out_of_memory,
    problem,
    scenario,
    small_candidates,
    with_budget,
)

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.outcome import (
    SPEED_SPOILING_FLAGS,
    Candidate,
    Evidence,
    Fidelity,
    Measurement,
    Prediction,
    ProbeFailure,
)
from search import run
from search.dimensions import key_of
from search.problem import Problem
from search.run import search
from search.stopping import Budget
from search.storage import MAX_RETRIES, close_storage, open_storage
from search.study import Study, TrialRecord
from tests.whole import WHOLE

FEW = Budget(max_probes=4)


class Counting:
    """An evaluator that remembers what it was asked."""

    def __init__(self, evaluate: Callable[[TrainSetup], Evidence]) -> None:
        self.calls: list[TrainSetup] = []
        self._evaluate = evaluate

    def __call__(self, setup: TrainSetup) -> Evidence:
        self.calls.append(setup)
        return self._evaluate(setup)


def truth(candidates: tuple[Candidate, ...], **errors: float) -> Callable[[TrainSetup], Evidence]:
    """An evaluator for which the formula is exact, or off by these logarithms."""
    by_setup = {candidate.setup: candidate for candidate in candidates}
    return lambda setup: exact(by_setup[setup], **errors)


def gpu(seed: int = 1, name: str = "8b-80g") -> SyntheticGpu:
    return SyntheticGpu.of(scenario(name), seed)


def test_an_exact_formula_needs_few_probes_and_says_why_it_stops() -> None:
    candidates = small_candidates()
    result = search(problem(), truth(candidates))
    fitting = [c for c in candidates if c.fits]
    assert result.best.tokens_per_s >= max(c.tokens_per_s for c in fitting) / 1.01
    assert result.num_probes <= 8
    assert "nothing left can plausibly beat the best by more than 1 %" in result.reason


@pytest.mark.parametrize("flag", sorted(SPEED_SPOILING_FLAGS))
def test_a_spoiled_speed_never_wins_and_teaches_nothing(flag: str) -> None:
    """Before: a setup measured at four times its speed with a stand-in for its loss won, and fed the corrections."""
    candidates = small_candidates()
    plan = next(c.setup for c in candidates if c.fits)

    def evaluate(setup: TrainSetup) -> Evidence:
        measured = truth(candidates)(setup)
        assert isinstance(measured, Measurement)
        faster = replace(measured, step_times_s=tuple(time / 4 for time in measured.step_times_s), flags=(flag,))
        return faster if setup == plan else measured

    result = search(problem(), evaluate, plan=plan, budget=FEW)
    assert result.best.setup != plan
    spoiled = next(candidate for candidate in result.candidates if candidate.setup == plan)
    assert spoiled.tokens_per_s == spoiled.formula.tokens_per_s
    assert spoiled.fits
    (learned,) = observations_of([spoiled], model="m")
    assert learned.speed_error is None
    assert learned.memory_error == pytest.approx(0.0)


def test_a_fault_of_the_machine_ends_the_search_and_blames_no_setup(tmp_path: Path) -> None:
    candidates = small_candidates()
    plan = next(c.setup for c in candidates if c.fits)
    empty_study(tmp_path)

    def broken(setup: TrainSetup) -> Evidence:
        raise EnvironmentProblem("this machine cannot measure")

    for _ in range(MAX_RETRIES + 2):
        with pytest.raises(EnvironmentProblem):
            search(problem(), broken, storage=tmp_path, plan=plan, budget=FEW)
    counting = Counting(truth(candidates))
    result = search(problem(), counting, storage=tmp_path, plan=plan, budget=FEW)
    assert counting.calls[0] == plan
    assert not [trial for trial in result.trials if isinstance(trial.evidence, ProbeFailure)]


def test_the_plan_is_tried_first_and_the_best_ranked_without_one() -> None:
    candidates = small_candidates()
    plan = next(c.setup for c in candidates[100:] if c.fits)
    counting = Counting(gpu())
    search(problem(), counting, plan=plan, budget=Budget(max_probes=1))
    search(problem(), counting, budget=Budget(max_probes=1))
    assert counting.calls == [plan, max((c for c in candidates if c.fits), key=lambda c: c.tokens_per_s).setup]


def test_it_keeps_the_budget_and_repeats_nothing(tmp_path: Path) -> None:
    counting = Counting(gpu())
    result = search(problem(), counting, storage=empty_study(tmp_path), budget=FEW)
    assert len(counting.calls) == result.num_probes == 4
    assert len(set(counting.calls)) == 4
    assert result.reason == "the budget of 4 probes is spent"
    assert result.best.fits
    replay = Counting(gpu())
    resumed = search(problem(), replay, storage=tmp_path, budget=FEW)
    assert replay.calls == []
    assert resumed.best == result.best


def test_resumed_search_goes_on_as_an_undisturbed_one(tmp_path: Path) -> None:
    whole = Counting(gpu())
    search(problem(), whole, storage=empty_study(tmp_path / "whole"), budget=Budget(max_probes=5))
    parts: list[TrainSetup] = []
    folder = empty_study(tmp_path / "parts")
    for limit in (1, 5):
        part = Counting(gpu())
        search(problem(), part, storage=folder, budget=Budget(max_probes=limit))
        parts += part.calls
    assert parts == whole.calls


def test_time_budget_stops_before_a_probe_that_would_end_too_late() -> None:
    budget = Budget(seconds=10.0)
    assert not budget.spent(num_probes=0, elapsed_s=9.0, durations_s=[])
    assert not budget.spent(num_probes=3, elapsed_s=5.0, durations_s=[4.0, 4.0, 4.0])
    assert "would end after" in budget.spent(num_probes=3, elapsed_s=7.0, durations_s=[4.0, 4.0, 4.0])
    assert "is spent" in budget.spent(num_probes=3, elapsed_s=10.5, durations_s=[0.1])
    result = search(problem(), gpu(), budget=Budget(seconds=1e-9))
    assert result.best is None
    assert "is spent" in result.reason
    assert result.num_probes == 0


def test_formula_exclusions_are_recorded_with_reasons() -> None:
    records: list[TrialRecord] = []
    result = search(problem(), gpu(), budget=FEW, on_trial=lambda record, posterior: records.append(record))
    excluded = [trial for trial in result.trials if trial.excluded]
    assert len(excluded) == run.MAX_RECORDED_EXCLUSIONS
    assert all(trial.excluded.startswith("formula: needs ") for trial in excluded)
    assert [record.number for record in records] == [trial.number for trial in result.trials if trial.probed]


def test_a_worker_whose_trial_was_given_up_for_lost_goes_on(tmp_path: Path) -> None:
    """After an outage that outlasts the grace period, others have taken the trial out while its probe still ran."""
    target = f"sqlite:///{empty_study(tmp_path)}/study.db"
    shown: list[int] = []

    def evaluate(setup: TrainSetup) -> Evidence:
        if not shown and not taken:
            study = optuna.load_study(storage=target, study_name="plan")
            taken.extend(study.get_trials(states=(TrialState.RUNNING,)))
            study._storage.set_trial_state_values(taken[0]._trial_id, TrialState.FAIL)
            close_storage(study._storage)
        return measure(setup)

    taken: list[optuna.trial.FrozenTrial] = []
    measure = truth(small_candidates())
    result = search(
        problem(), evaluate, storage=target, budget=FEW, on_trial=lambda record, posterior: shown.append(record.number)
    )
    assert result.best is not None
    assert taken[0].number not in shown
    assert shown


def test_a_trial_that_another_planner_holds_is_told_as_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.run.POLL_S", 0.0)
    storage, candidate = open_storage(empty_study(tmp_path)), problem().candidates[0]
    other = Study(problem(), storage, "plan")
    other.enqueue(candidate, "plan")
    claimed = other.claim()
    assert claimed is not None
    measure, told = truth(small_candidates()), []

    def on_wait(text: str, waited_s: float) -> None:
        told.append(text)
        assert other.tell(claimed[0], exact(candidate))

    late = search(problem(), measure, storage=tmp_path, budget=Budget(max_probes=1, seconds=0.0))
    assert "is spent, waiting for a trial that another planner holds; it is taken over 60 s" in late.reason
    result = search(problem(), measure, storage=tmp_path, budget=Budget(max_probes=1), on_wait=on_wait)
    close_storage(storage)
    assert [text.partition(";")[0] for text in told] == ["waiting for a trial that another planner holds"]
    assert result.num_probes == 1
    assert result.reason == "the budget of 1 probes is spent"


def test_the_dry_run_excludes_without_a_probe() -> None:
    candidates = small_candidates()
    by_setup = {c.setup: c for c in candidates}
    checked: list[TrainSetup] = []

    def check(setup: TrainSetup) -> Prediction | ProbeFailure:
        """Everything above 40 GiB by formula does not fit by the dry run."""
        checked.append(setup)
        formula = by_setup[setup].formula
        factor = 10 if formula.peak_device_bytes > 40 * GIB else 1
        return replace(
            formula,
            level=Fidelity.DRY_RUN,
            peak_device_bytes=formula.peak_device_bytes * factor,
            memory_band_fraction=0.02,
            tokens_per_s=None,
        )

    counting = Counting(truth(candidates))
    result = search(problem(), counting, check=check)
    assert result.best.formula.peak_device_bytes <= 40 * GIB
    assert all(by_setup[setup].formula.peak_device_bytes <= 40 * GIB for setup in counting.calls)
    out = [trial for trial in result.trials if trial.excluded.startswith("dry_run: needs ")]
    assert out
    assert len(counting.calls) + len(out) == len(checked) == len(set(checked))
    assert result.num_probes == len(counting.calls)


def test_without_a_gpu_the_dry_run_is_the_evaluator() -> None:
    candidates = small_candidates()
    by_setup = {c.setup: c for c in candidates}

    def dry_run(setup: TrainSetup) -> Prediction:
        formula = by_setup[setup].formula
        return replace(
            formula, level=Fidelity.DRY_RUN, peak_device_bytes=int(1.05 * formula.peak_device_bytes), tokens_per_s=None
        )

    result = search(problem(), dry_run)
    assert isinstance(result.best.dry_run, Prediction)
    assert result.best.dry_run.peak_device_bytes <= result.best.budget_bytes
    fastest = max(c.tokens_per_s for c in candidates if int(1.05 * c.formula.peak_device_bytes) <= c.budget_bytes)
    assert result.best.tokens_per_s >= fastest / 1.01


def test_when_nothing_fits_there_is_no_recommendation() -> None:
    result = search(problem(), lambda setup: out_of_memory(), budget=Budget(max_probes=5))
    assert result.best is None
    assert result.pareto == ()
    assert result.num_probes == 5


def test_an_empty_space_after_exclusions_ends_at_once() -> None:
    tiny = Problem(candidates=with_budget(small_candidates(), 0.5))
    counting = Counting(gpu())
    result = search(tiny, counting)
    assert counting.calls == []
    assert result.best is None
    assert "excluded" in result.reason


def test_contradictory_problems_are_refused() -> None:
    candidates = small_candidates()
    with pytest.raises(UsageError, match="no candidates"):
        Problem(candidates=())
    with pytest.raises(UsageError, match="goal"):
        Problem(candidates=candidates, objective="speed")  # type: ignore[arg-type]
    mixed = (candidates[0], replace(candidates[1], budget_bytes=1))
    with pytest.raises(UsageError, match="one memory budget"):
        Problem(candidates=mixed)
    longer = candidates[0].setup.replace(accumulation_steps=1000)
    with pytest.raises(UsageError, match="one tokens per optimizer step"):
        Problem(candidates=(candidates[0], replace(candidates[1], setup=longer)))


# Properties

SLOW_OK = settings(
    max_examples=100 if WHOLE else 1, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@SLOW_OK
@given(seed=st.integers(0, 10_000), low=st.floats(20, 60), more=st.floats(0, 40))
def test_adding_memory_never_gives_a_slower_plan(seed: int, low: float, more: float, tmp_path_factory: object) -> None:
    """What was measured under the smaller budget is known under the larger one and still fits: in one study, always."""
    directory = empty_study(tmp_path_factory.mktemp("study"))  # type: ignore[attr-defined]
    machine = gpu(seed)
    sized = [Problem(candidates=with_budget(small_candidates(), size)) for size in (low, low + more)]
    small = search(sized[0], machine, storage=directory, budget=Budget(max_probes=3))
    large = search(sized[1], machine, storage=directory, budget=Budget(max_probes=5))
    if small.best is not None:
        assert large.best.tokens_per_s >= small.best.tokens_per_s


@SLOW_OK
@given(seed=st.integers(0, 10_000), keep=st.sampled_from(["lora", "qlora", "sdpa", "bf16-pure"]))
def test_narrowing_the_space_never_gives_a_faster_plan(seed: int, keep: str, tmp_path_factory: object) -> None:
    """The wide search, in a study that knows the narrow one's probes, is at least as fast."""
    directory = empty_study(tmp_path_factory.mktemp("study"))  # type: ignore[attr-defined]
    candidates = small_candidates()
    narrow = tuple(c for c in candidates if keep in (c.setup.method, c.setup.attention, c.setup.precision))
    machine = gpu(seed)
    first = search(Problem(candidates=narrow), machine, storage=directory, budget=Budget(max_probes=3))
    wide = search(Problem(candidates=candidates), machine, storage=directory, budget=Budget(max_probes=5))
    if first.best is not None:
        assert wide.best.tokens_per_s >= first.best.tokens_per_s


@SLOW_OK
@given(
    seed=st.integers(0, 10_000),
    methods=st.sets(st.sampled_from(["full", "lora", "qlora"]), min_size=1),
    precision=st.sampled_from([("bf16-pure",), ("bf16-autocast",), ("bf16-pure", "bf16-autocast")]),
    min_rank=st.sampled_from([1, 16, 32]),
    objective=st.sampled_from(["tokens", "memory"]),
    budget_gib=st.sampled_from([24.0, 40.0, 76.7]),
    memory_error=st.floats(-0.1, 0.2),
    num_probes=st.sampled_from([1, 4]),
)
def test_the_recommendation_meets_every_wish(
    seed: int,
    methods: set[str],
    precision: tuple[str, ...],
    min_rank: int,
    objective: str,
    budget_gib: float,
    memory_error: float,
    num_probes: int,
) -> None:
    """And no probe is spent on a setup that breaks one, whatever the budget and the objective.

    The machine has memory enough for everything, but needs up to 22 % more of it than the formula says; the plan is the
    setup that by formula fits most tightly.
    """
    fixed = {"method": tuple(sorted(methods)), "precision": precision}
    wished = Problem(
        candidates=with_budget(small_candidates(), budget_gib),
        fixed=fixed,
        min_rank=min_rank,
        objective=objective,  # type: ignore[arg-type]
    )
    random = np.random.default_rng(seed)
    errors = random.normal(0, 0.1, len(small_candidates()))
    speed_errors = dict(zip((c.setup for c in small_candidates()), errors, strict=True))
    by_setup = {candidate.setup: candidate for candidate in wished.candidates}
    counting = Counting(
        lambda setup: exact(by_setup[setup], speed_error=speed_errors[setup], memory_error=memory_error)
    )
    fitting = [c for c in wished.candidates if c.fits and not wished.exclusion(c)]
    plan = max(fitting, key=lambda c: c.formula.peak_device_bytes).setup if fitting else None
    result = search(wished, counting, plan=plan, budget=Budget(max_probes=num_probes))
    for setup in counting.calls + ([result.best.setup] if result.best else []):
        assert setup.method in methods
        assert setup.precision in precision
        assert setup.method == "full" or setup.lora_rank >= min_rank
        assert setup.tokens_per_step == small_candidates()[0].setup.tokens_per_step
    if result.best is not None:
        assert isinstance(result.best.probe, Measurement)
        assert result.best.probe.peak_device_bytes <= int(budget_gib * GIB)
        assert key_of(result.best.setup) in {key_of(setup) for setup in counting.calls}
    probed_keys = {key_of(setup) for setup in counting.calls}
    finished = [trial for trial in result.trials if trial.state.is_finished()]
    assert all(trial.excluded for trial in finished if key_of(trial.setup) not in probed_keys)


@pytest.mark.parametrize("excess", [0.001, 0.05])
def test_what_ran_but_needs_more_than_the_budget_is_not_recommended(excess: float) -> None:
    """The machine has memory for all of it; the fastest that by formula fits needs more than the budget."""
    tight = max((c for c in small_candidates() if c.fits), key=lambda c: c.formula.peak_device_bytes)
    memory_error = log(tight.budget_bytes / tight.formula.peak_device_bytes) + excess
    over = truth(small_candidates(), memory_error=memory_error)
    alone = search(problem(), over, plan=tight.setup, budget=Budget(max_probes=1))
    assert [trial.setup for trial in alone.trials if trial.probed] == [tight.setup]
    assert alone.best is None
    assert alone.pareto == ()
    more = search(problem(), over, plan=tight.setup, budget=Budget(max_probes=6))
    assert isinstance(more.best.probe, Measurement)
    assert more.best.probe.peak_device_bytes <= tight.budget_bytes
