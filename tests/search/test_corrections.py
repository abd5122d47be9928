"""What one search learns about a GPU helps the next, for other models too."""

from dataclasses import replace
from math import log

import pytest
from search_cases import BY_NAME, exact, observations_of, problem, scenario, small_candidates

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from search.corrections import as_transfer_observations, corrected, corrections, place_of
from search.problem import Observation, with_evidence
from search.run import search
from search.stopping import Budget


def observed(num: int, *, speed_error: float, model: str = "other", name: str = "8b-24g") -> tuple[Observation, ...]:
    """Observations of another scenario's fitting setups whose formula is off by one factor."""
    fitting = [c for c in small_candidates(name) if c.fits][:num]
    measured = [with_evidence(c, exact(c, speed_error=speed_error)) for c in fitting]
    return observations_of(measured, model=model)


def test_another_models_errors_move_the_prediction_part_of_the_way() -> None:
    """Ten observations of one other model, all 20 % slower than predicted: shrunk, never beyond what was seen."""
    candidates = small_candidates()
    learned = corrections(candidates, observed(10, speed_error=log(0.8)), "mine")
    fitting = [correction for correction, candidate in zip(learned, candidates, strict=True) if candidate.fits]
    mean = sum(log(correction.speed_factor) for correction in fitting) / len(fitting)
    assert log(0.8) < mean < 0.2 * log(0.8)
    prior = corrections(candidates, (), "mine")
    assert all(correction.speed_factor == 1.0 and correction.memory_factor == 1.0 for correction in prior)


def test_several_gpus_learn_from_one_as_from_another_model() -> None:
    card = find_gpu("a100-80gb")
    two, four = (place_of("test", make_cluster(card, num)) for num in (2, 4))
    assert place_of("test", None) == "test"
    assert place_of("test", make_cluster(card, 2, interconnect="pcie")) not in (two, four)
    seen = [
        *observed(3, speed_error=-0.1, model="mine"),
        *(replace(item, gpu=two) for item in observed(2, speed_error=0.4, model="mine")),
    ]
    groups = [item.group for item in as_transfer_observations(seen, "mine", two)]
    assert groups[3:] == [0, 0]  # this very machine and model
    assert set(groups[:3]) == {1}
    assert 0 not in {item.group for item in as_transfer_observations(seen, "mine", four)}


def test_corrected_candidate_says_so() -> None:
    candidates = small_candidates()
    learned = corrections(candidates, observed(10, speed_error=log(0.8)), "mine")
    after = corrected(candidates[0], learned[0])
    before = candidates[0]
    assert before.formula.tokens_per_s is not None
    assert after.formula.tokens_per_s == pytest.approx(before.formula.tokens_per_s * learned[0].speed_factor)
    assert "corrected by earlier probes" in after.formula.notes[-1]


def test_learned_corrections_save_probes_on_another_model() -> None:
    """Eight machines: the search of the 8B model that knows the 1B model's probes needs no more probes in all."""
    with_knowledge = without = 0
    for seed in range(8):
        first = search(problem("1b-24g"), SyntheticGpu.of(scenario("1b-24g"), seed), budget=Budget(max_probes=8))
        observations = observations_of(first.candidates, model="1b")
        gpu = SyntheticGpu.of(BY_NAME["8b-24g"], seed)
        without += search(problem("8b-24g"), gpu, budget=Budget(max_probes=20)).num_probes
        transfer = as_transfer_observations(observations, "8b")
        with_knowledge += search(problem("8b-24g"), gpu, budget=Budget(max_probes=20), transfer=transfer).num_probes
    assert with_knowledge < without
