"""What the belief learns and which probe it asks for next."""

from dataclasses import replace
from math import erf, exp, log, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from search_cases import all_candidates, exact, measurement, out_of_memory, problem, scenario, small_candidates

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.outcome import FailureKind, ProbeFailure, Rung
from search.optuna_samplers import SAMPLERS, make_sampler
from search.problem import Problem, Result
from search.sampler import MIN_PROBABILITY, WORTH, Belief, ResidualSampler, acquisition, expected_improvement
from search.stopping import _correlated, probability_of_better


def best_fitting(belief: Belief) -> int:
    fits = belief.log_memory <= belief.log_budget
    return int(np.argmax(np.where(fits & belief.open, belief.log_speed, -np.inf)))


def failure(kind: FailureKind, message: str) -> ProbeFailure:
    return ProbeFailure(rung=Rung.PROBE, kind=kind, message=message)


def test_one_probe_moves_all_predictions_by_most_of_its_error() -> None:
    belief = Belief(problem())
    index = best_fitting(belief)
    belief.tell(Result(index=index, evidence=exact(belief.problem.candidates[index], speed_error=-0.2)))
    assert belief.speed.mean[index] == pytest.approx(-0.2, abs=0.01)
    assert belief.speed.mean[: belief.num].max() < -0.02
    assert belief.best is not None


def test_same_results_give_the_same_belief_and_choice() -> None:
    gpu = SyntheticGpu.of(scenario(), 3)
    choices = []
    for _ in range(2):
        belief = Belief(problem())
        for _ in range(4):
            index = ResidualSampler().propose(belief, (), seed=0)
            assert index is not None
            choices.append(index)
            belief.tell(Result(index=index, evidence=gpu(belief.problem.candidates[index].setup)))
    assert choices[:4] == choices[4:]
    assert len(set(choices[:4])) == 4


def test_larger_micro_batches_of_a_setup_that_ran_out_of_memory_are_closed() -> None:
    belief = Belief(problem())
    index = best_fitting(belief)
    setup = belief.problem.candidates[index].setup
    belief.tell(Result(index=index, evidence=out_of_memory()))
    for candidate, open_ in zip(belief.problem.candidates, belief.open, strict=True):
        larger = candidate.setup.with_(micro_batch_seqs=1, accumulation_steps=1) == setup.with_(
            micro_batch_seqs=1, accumulation_steps=1
        )
        if larger and candidate.setup.micro_batch_seqs >= setup.micro_batch_seqs:
            assert not open_
    assert belief.best is None
    assert belief.open.any()


def test_out_of_memory_lowers_the_chance_of_alike_setups() -> None:
    belief = Belief(problem())
    before = belief.probability_fits()
    belief.tell(Result(index=best_fitting(belief), evidence=out_of_memory()))
    assert (belief.probability_fits() <= before + 1e-9).mean() > 0.9


def test_a_failure_that_names_its_cause_closes_the_way_for_that_value_only() -> None:
    belief = Belief(problem())
    flash = [c.setup.attention == "flash-attention-2" for c in belief.problem.candidates]
    index = int(np.argmax(np.where(np.array(flash) & belief.open, belief.log_speed, -np.inf)))
    belief.tell(Result(index=index, evidence=failure(FailureKind.UNSUPPORTED, "flash_attention_2 is not installed")))
    chance = belief.probability_runs()
    assert chance[np.array(flash)].max() < 0.15
    assert chance[~np.array(flash)].min() > 0.85


def test_a_failure_that_names_two_accuses_them_together() -> None:
    """Compiled and quantized crashed: compiled without quantization, and quantized without compiling, may still run."""
    whole = Problem(candidates=all_candidates("8b-80g"))
    belief = Belief(whole)
    setups = [candidate.setup for candidate in whole.candidates]
    compiled = np.array([setup.compile for setup in setups])
    quantized = np.array([setup.quantization == "nf4" for setup in setups])
    index = int(np.argmax(np.where(compiled & quantized & belief.open, belief.log_speed, -np.inf)))
    message = "torch.compile crashed in a quantized matrix multiplication"
    belief.tell(Result(index=index, evidence=failure(FailureKind.CRASHED, message)))
    chance = belief.probability_runs()
    assert chance[compiled & quantized].max() < 0.1
    assert chance[compiled ^ quantized].min() > 0.8


def test_running_out_of_memory_against_all_expectation_is_blamed_on_a_pair() -> None:
    """A fallback kernel's cliff is no smooth error: what shares no more than single values still fits."""
    belief = Belief(problem())
    certain = np.array([c.setup.attention == "sdpa" for c in belief.problem.candidates]) & belief.open
    index = int(np.argmax(np.where(certain, belief.probability_fits() - 1e-3 * belief.log_memory, -np.inf)))
    setup = belief.problem.candidates[index].setup
    other = np.array([c.setup.attention != setup.attention for c in belief.problem.candidates])
    sure = other & (belief.probability_fits() > 0.999)
    chance = belief.probability_fits()[sure]
    belief.tell(Result(index=index, evidence=out_of_memory()))
    assert belief.probability_fits()[sure].mean() > 0.95 * chance.mean()
    same_pair = ~other & np.array([c.setup.precision == setup.precision for c in belief.problem.candidates])
    assert belief.probability_runs()[same_pair].mean() < belief.probability_runs()[other].mean() - 0.1


def test_a_good_run_clears_what_it_shares_with_a_failure() -> None:
    belief = Belief(problem())
    first = best_fitting(belief)
    belief.tell(Result(index=first, evidence=failure(FailureKind.CRASHED, "illegal instruction")))
    setup = belief.problem.candidates[first].setup
    same = np.array([c.setup.attention == setup.attention for c in belief.problem.candidates])
    before = belief.probability_runs()[same].mean()
    other = next(
        i
        for i, c in enumerate(belief.problem.candidates)
        if same[i] and belief.open[i] and c.setup.precision != setup.precision and c.setup.method != setup.method
    )
    belief.tell(Result(index=other, evidence=exact(belief.problem.candidates[other])))
    assert belief.probability_runs()[same].mean() > before


def test_expected_improvement_matches_a_sample() -> None:
    """Monte Carlo with 400,000 draws: standard error below 0.0005."""
    random = np.random.default_rng(0)
    draws = random.normal(0.05, 0.2, size=400_000)
    sampled = np.maximum(draws - 0.1, 0.0).mean()
    value = expected_improvement(np.array([0.05]), np.array([0.2]), 0.1)[0]
    assert value == pytest.approx(sampled, abs=0.002)


def test_closed_and_running_candidates_are_never_proposed() -> None:
    belief = Belief(problem())
    sampler = ResidualSampler()
    first = sampler.propose(belief, (), 0)
    assert first is not None
    second = sampler.propose(belief, (first,), 0)
    assert second is not None
    assert second != first
    belief.open[:] = False
    assert sampler.propose(belief, (), 0) is None


def test_acquisition_is_negative_exactly_where_nothing_is_open() -> None:
    belief = Belief(problem())
    assert ((acquisition(belief, belief.open) < 0) == ~belief.open).all()


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler_proposes_open_candidates_only_and_deterministically(name: str) -> None:
    """The conformance test of the seam: what a sampler must do, whatever its idea."""
    belief = Belief(problem())
    gpu = SyntheticGpu.of(scenario(), 1)
    for _ in range(3):
        index = make_sampler(name).propose(belief, (), seed=5)
        assert index is not None
        assert belief.open[index]
        assert make_sampler(name).propose(belief, (), seed=5) == index
        assert make_sampler(name).propose(belief, (index,), seed=5) != index
        belief.tell(Result(index=index, evidence=gpu(belief.problem.candidates[index].setup)))
    belief.open[:] = False
    assert make_sampler(name).propose(belief, (), seed=5) is None


def test_probability_of_better_agrees_with_a_full_joint_sample() -> None:
    """Independent computation over all open candidates with its own draws: within 5 points."""
    belief = Belief(problem())
    for step in range(6):
        index = ResidualSampler().propose(belief, (), 0)
        assert index is not None
        error = -0.1 + 0.01 * step
        belief.tell(Result(index=index, evidence=exact(belief.problem.candidates[index], speed_error=error)))
    rows = np.flatnonzero(belief.open)
    random = np.random.default_rng(9)
    mean, _ = belief.score_moments()

    def draw(which: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(rows)))
        return which[rows] + random.standard_normal((3000, len(rows))) @ root.T

    score = draw(mean, belief.speed.covariance(rows))
    memory = draw(belief.log_memory + belief.memory.mean[: belief.num], belief.memory.covariance(rows))
    better = (score > belief.best_score + log(1.01)) & (memory <= belief.log_budget)
    assert probability_of_better(belief) == pytest.approx(better.any(axis=1).mean(), abs=0.05)


def test_nothing_open_means_nothing_better() -> None:
    belief = Belief(problem())
    belief.open[:] = False
    assert probability_of_better(belief) == 0.0


def test_dry_run_exclusion_teaches_memory() -> None:
    belief = Belief(problem())
    index = best_fitting(belief)
    formula = belief.problem.candidates[index].formula
    larger = replace(formula, rung=Rung.DRY_RUN, peak_device_bytes=int(formula.peak_device_bytes * exp(0.1)))
    belief.tell_excluded(index, larger)
    assert belief.memory.mean[index] > 0.05
    assert not belief.open[index]
    assert belief.results == []


def test_memory_objective_prefers_the_smallest() -> None:
    smallest = Problem(candidates=small_candidates(), objective="memory")
    belief = Belief(smallest)
    for _ in range(3):
        index = ResidualSampler().propose(belief, (), 0)
        assert index is not None
        belief.tell(Result(index=index, evidence=exact(smallest.candidates[index])))
    assert belief.best is not None
    assert belief.log_memory[belief.best.index] == pytest.approx(belief.log_memory.min())


def test_a_setup_that_needs_more_than_the_budget_is_never_best() -> None:
    belief = Belief(problem())
    index = best_fitting(belief)
    candidate = belief.problem.candidates[index]
    belief.tell(Result(index=index, evidence=measurement(candidate.setup, 1e9, candidate.budget_bytes + 1)))
    assert belief.best is None
    belief.open[index] = True
    belief.tell(Result(index=index, evidence=measurement(candidate.setup, 1e9, candidate.budget_bytes)))
    assert belief.best is not None


def test_among_hopeless_candidates_the_likelier_improvement_decides() -> None:
    """Nothing fits, so that gains count for next to nothing: 1e-12 of the chance to beat the best is added."""
    mean, sd, best = np.array([9.4, 9.0]), np.array([0.5, 0.5]), 10.0
    nothing = np.zeros(2)
    belief: Any = SimpleNamespace(
        score_moments=lambda: (mean, sd), probability_fits=lambda: nothing, probability_runs=lambda: nothing,
        best_score=best,
    )  # fmt: skip
    added = acquisition(belief, np.array([True, True])) - MIN_PROBABILITY * expected_improvement(mean, sd, best + WORTH)
    likely = [0.5 * (1 + erf((one - best) / 0.5 / sqrt(2))) for one in mean]
    assert added / 1e-12 == pytest.approx(likely, rel=1e-3)


def test_two_setups_with_one_error_are_drawn_alike() -> None:
    """Their covariance is singular: without a little on its diagonal it has no root."""
    drawn = _correlated(np.random.default_rng(0).standard_normal((100, 2)), np.ones((2, 2)))
    assert drawn[:, 0] == pytest.approx(drawn[:, 1], abs=0.01)
    assert drawn[:, 0].std() > 0.5
