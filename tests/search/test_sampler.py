"""What the posterior learns and which probe it asks for next."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from search_cases import all_candidates, exact, measurement, out_of_memory, problem, scenario, small_candidates

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.setup.outcome import FailureKind, Fidelity, ProbeFailure
from search.problem import Problem, Result
from search.sampler import Posterior, propose
from search.stopping import _correlated, probability_of_better


def best_fitting(posterior: Posterior) -> int:
    fits = posterior.log_memory <= posterior.log_budget
    return int(np.argmax(np.where(fits & posterior.open, posterior.log_speed, -np.inf)))


def failure(kind: FailureKind, message: str) -> ProbeFailure:
    return ProbeFailure(level=Fidelity.PROBE, kind=kind, message=message)


def test_one_probe_moves_all_predictions_by_most_of_its_error() -> None:
    posterior = Posterior(problem())
    index = best_fitting(posterior)
    posterior.tell(Result(index=index, evidence=exact(posterior.problem.candidates[index], speed_error=-0.2)))
    assert posterior.speed.mean[index] == pytest.approx(-0.2, abs=0.01)
    assert posterior.speed.mean[: posterior.num].max() < -0.02
    assert posterior.best is not None


def test_larger_micro_batches_of_a_setup_that_ran_out_of_memory_are_closed() -> None:
    posterior = Posterior(problem())
    index = best_fitting(posterior)
    setup = posterior.problem.candidates[index].setup
    posterior.tell(Result(index=index, evidence=out_of_memory()))
    for candidate, open_ in zip(posterior.problem.candidates, posterior.open, strict=True):
        larger = candidate.setup.replace(micro_batch_seqs=1, accumulation_steps=1) == setup.replace(
            micro_batch_seqs=1, accumulation_steps=1
        )
        if larger and candidate.setup.micro_batch_seqs >= setup.micro_batch_seqs:
            assert not open_
    assert posterior.best is None
    assert posterior.open.any()


def test_out_of_memory_lowers_the_chance_of_alike_setups() -> None:
    posterior = Posterior(problem())
    before = posterior.probability_fits()
    posterior.tell(Result(index=best_fitting(posterior), evidence=out_of_memory()))
    assert (posterior.probability_fits() <= before + 1e-9).mean() > 0.9


def test_a_failure_that_names_its_cause_closes_the_way_for_that_value_only() -> None:
    posterior = Posterior(problem())
    flash = [c.setup.attention == "flash-attention-2" for c in posterior.problem.candidates]
    index = int(np.argmax(np.where(np.array(flash) & posterior.open, posterior.log_speed, -np.inf)))
    posterior.tell(Result(index=index, evidence=failure(FailureKind.UNSUPPORTED, "flash_attention_2 is not installed")))
    chance = posterior.probability_runs()
    assert chance[np.array(flash)].max() < 0.15
    assert chance[~np.array(flash)].min() > 0.85


def test_a_failure_that_names_two_accuses_them_together() -> None:
    """Compiled and quantized crashed: compiled without quantization, and quantized without compiling, may still run."""
    whole = Problem(candidates=all_candidates("8b-80g"))
    posterior = Posterior(whole)
    setups = [candidate.setup for candidate in whole.candidates]
    compiled = np.array([setup.compile for setup in setups])
    quantized = np.array([setup.quantization == "nf4" for setup in setups])
    index = int(np.argmax(np.where(compiled & quantized & posterior.open, posterior.log_speed, -np.inf)))
    message = "torch.compile crashed in a quantized matrix multiplication"
    posterior.tell(Result(index=index, evidence=failure(FailureKind.CRASHED, message)))
    chance = posterior.probability_runs()
    assert chance[compiled & quantized].max() < 0.1
    assert chance[compiled ^ quantized].min() > 0.8


def test_running_out_of_memory_against_all_expectation_is_blamed_on_a_pair() -> None:
    """A fallback kernel's cliff is no smooth error: what shares no more than single values still fits."""
    posterior = Posterior(problem())
    certain = np.array([c.setup.attention == "sdpa" for c in posterior.problem.candidates]) & posterior.open
    index = int(np.argmax(np.where(certain, posterior.probability_fits() - 1e-3 * posterior.log_memory, -np.inf)))
    setup = posterior.problem.candidates[index].setup
    other = np.array([c.setup.attention != setup.attention for c in posterior.problem.candidates])
    sure = other & (posterior.probability_fits() > 0.999)
    chance = posterior.probability_fits()[sure]
    posterior.tell(Result(index=index, evidence=out_of_memory()))
    assert posterior.probability_fits()[sure].mean() > 0.95 * chance.mean()
    same_pair = ~other & np.array([c.setup.precision == setup.precision for c in posterior.problem.candidates])
    assert posterior.probability_runs()[same_pair].mean() < posterior.probability_runs()[other].mean() - 0.1


def test_a_good_run_clears_what_it_shares_with_a_failure() -> None:
    posterior = Posterior(problem())
    first = best_fitting(posterior)
    posterior.tell(Result(index=first, evidence=failure(FailureKind.CRASHED, "illegal instruction")))
    setup = posterior.problem.candidates[first].setup
    same = np.array([c.setup.attention == setup.attention for c in posterior.problem.candidates])
    before = posterior.probability_runs()[same].mean()
    other = next(
        i
        for i, c in enumerate(posterior.problem.candidates)
        if same[i] and posterior.open[i] and c.setup.precision != setup.precision and c.setup.method != setup.method
    )
    posterior.tell(Result(index=other, evidence=exact(posterior.problem.candidates[other])))
    assert posterior.probability_runs()[same].mean() > before


def test_open_candidates_only_are_proposed_and_deterministically() -> None:
    posterior = Posterior(problem())
    gpu = SyntheticGpu.of(scenario(), 1)
    for _ in range(3):
        index = propose(posterior, ())
        assert index is not None
        assert posterior.open[index]
        assert propose(posterior, ()) == index
        assert propose(posterior, (index,)) != index
        posterior.tell(Result(index=index, evidence=gpu(posterior.problem.candidates[index].setup)))
    posterior.open[:] = False
    assert propose(posterior, ()) is None


def test_probability_of_better_agrees_with_a_full_joint_sample() -> None:
    """Independent computation over all open candidates with its own draws: within 5 points."""
    posterior = Posterior(problem())
    for step in range(6):
        index = propose(posterior, ())
        assert index is not None
        error = -0.1 + 0.01 * step
        posterior.tell(Result(index=index, evidence=exact(posterior.problem.candidates[index], speed_error=error)))
    rows = np.flatnonzero(posterior.open)
    random = np.random.default_rng(9)
    mean, _ = posterior.score_moments()

    def draw(which: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(rows)))
        return which[rows] + random.standard_normal((3000, len(rows))) @ root.T

    score = draw(mean, posterior.speed.covariance(rows))
    memory = draw(posterior.log_memory + posterior.memory.mean[: posterior.num], posterior.memory.covariance(rows))
    better = (score > posterior.best_score + log(1.01)) & (memory <= posterior.log_budget)
    assert probability_of_better(posterior) == pytest.approx(better.any(axis=1).mean(), abs=0.05)


def test_nothing_open_means_nothing_better() -> None:
    posterior = Posterior(problem())
    posterior.open[:] = False
    assert probability_of_better(posterior) == 0.0


def test_dry_run_exclusion_teaches_memory() -> None:
    posterior = Posterior(problem())
    index = best_fitting(posterior)
    formula = posterior.problem.candidates[index].formula
    larger = replace(formula, level=Fidelity.DRY_RUN, peak_device_bytes=int(formula.peak_device_bytes * exp(0.1)))
    posterior.tell_excluded(index, larger)
    assert posterior.memory.mean[index] > 0.05
    assert not posterior.open[index]
    assert posterior.results == []


def test_memory_objective_prefers_the_smallest() -> None:
    smallest = Problem(candidates=small_candidates(), objective="memory")
    posterior = Posterior(smallest)
    for _ in range(3):
        index = propose(posterior, ())
        assert index is not None
        posterior.tell(Result(index=index, evidence=exact(smallest.candidates[index])))
    assert posterior.log_memory[posterior.best.index] == pytest.approx(posterior.log_memory.min())


def test_a_setup_that_needs_more_than_the_budget_is_never_best() -> None:
    posterior = Posterior(problem())
    index = best_fitting(posterior)
    candidate = posterior.problem.candidates[index]
    posterior.tell(Result(index=index, evidence=measurement(candidate.setup, 1e9, candidate.budget_bytes + 1)))
    assert posterior.best is None
    posterior.open[index] = True
    posterior.tell(Result(index=index, evidence=measurement(candidate.setup, 1e9, candidate.budget_bytes)))
    assert posterior.best is not None


def test_two_setups_with_one_error_are_drawn_alike() -> None:
    """Their covariance is singular: without a little on its diagonal it has no root."""
    drawn = _correlated(np.random.default_rng(0).standard_normal((100, 2)), np.ones((2, 2)))
    assert drawn[:, 0] == pytest.approx(drawn[:, 1], abs=0.01)
    assert drawn[:, 0].std() > 0.5
