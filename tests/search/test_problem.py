"""What fits and what is out before any probe: the budget decides, not the card, and two bands of doubt."""

from dataclasses import replace
from math import log

import pytest
from search_cases import measurement, problem

from planner.setup.outcome import Candidate, Prediction
from search.problem import Problem

GIB = 1024**3


def changed(**formula: object) -> tuple[Problem, Candidate]:
    """A problem on a card that has far more memory than the budget, and a candidate with a prediction changed."""
    base = problem()
    candidate = base.candidates[0]
    return replace(base, memory_bytes=4 * base.budget_bytes), replace(
        candidate, formula=replace(candidate.formula, **formula), dry_run=None
    )


@pytest.mark.parametrize(("beyond_bytes", "feasible"), [(-1, True), (0, True), (1, False), (GIB, False)])
def test_feasible_is_within_the_budget_not_within_the_card(beyond_bytes: int, feasible: bool) -> None:
    search_problem, candidate = changed()
    evidence = measurement(candidate.setup, 1000.0, search_problem.budget_bytes + beyond_bytes)
    assert search_problem.feasible(candidate.setup, evidence) is feasible


@pytest.mark.parametrize(("share", "band", "out"), [(1.15, 0.1, False), (1.24, 0.1, False), (1.26, 0.1, True)])
def test_excluded_is_what_two_bands_below_its_prediction_still_does_not_fit(
    share: float, band: float, out: bool
) -> None:
    """Two bands of 10 %: 1.25 x 0.8 = 1."""
    search_problem, _ = changed()
    peak = int(share * search_problem.budget_bytes)
    search_problem, candidate = changed(peak_device_bytes=peak, memory_band_fraction=band)
    assert bool(search_problem.too_large(candidate)) is out
    assert bool(search_problem.exclusion(candidate)) is out


def test_a_dry_runs_band_counts_where_there_is_one() -> None:
    search_problem, candidate = changed(peak_device_bytes=problem().budget_bytes * 2, memory_band_fraction=0.0)
    assert search_problem.too_large(candidate)
    fits = replace(candidate.formula, peak_device_bytes=search_problem.budget_bytes)
    assert isinstance(fits, Prediction)
    assert not search_problem.too_large(replace(candidate, dry_run=fits))


SCORES = {"tokens": (0.0, log(2)), "cost": (-log(4), log(2)), "memory": (0.0, 0.0)}
"""What is best -> what four GPUs at the speed of one, and twice the speed, change of a score."""


@pytest.mark.parametrize("objective", SCORES)
def test_what_is_best_is_scored_by_its_own_figure(objective: str) -> None:
    search_problem, candidate = changed()
    search_problem, four = (
        replace(search_problem, objective=objective),
        candidate.setup.replace(num_gpus=4, parallel="ddp"),
    )
    evidence = measurement(candidate.setup, 1000.0, 1.0 * GIB)
    faster = measurement(candidate.setup, 2000.0, 1.0 * GIB)
    score = search_problem.score(candidate, evidence)
    on_four = search_problem.score(replace(candidate, setup=four), evidence)
    assert (on_four - score, search_problem.score(candidate, faster) - score) == pytest.approx(SCORES[objective])
