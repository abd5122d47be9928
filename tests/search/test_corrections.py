"""What one search learns about a GPU helps the next, for other models too; and the file that keeps it."""

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
from search_cases import BY_NAME, exact, problem, scenario, small_candidates

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.core.errors import ConfigError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from search.corrections import (
    MAX_PER_GPU,
    CorrectionStore,
    as_transfer_observations,
    corrected,
    corrections,
    observations_of,
    place_of,
)
from search.problem import with_evidence
from search.run import search
from search.stopping import Budget


def observed(num: int, *, speed_error: float, model: str = "other", name: str = "8b-24g") -> tuple:  # type: ignore[type-arg]
    """Observations of another scenario's fitting setups whose formula is off by one factor."""
    fitting = [c for c in small_candidates(name) if c.fits][:num]
    measured = [with_evidence(c, exact(c, speed_error=speed_error)) for c in fitting]
    return observations_of(measured, gpu="test", model=model, formula_version="1")


def test_observations_survive_the_file(tmp_path: Path) -> None:
    store = CorrectionStore(tmp_path / "deep" / "corrections.json")
    assert store.load("test") == ()
    written = observed(5, speed_error=-0.1)
    store.add(written)
    read = store.load("test")
    assert [item.setup for item in read] == [item.setup for item in written]
    assert [item.speed_error for item in read] == pytest.approx([-0.1] * 5)
    assert [item.memory_error for item in read] == pytest.approx([item.memory_error for item in written], abs=1e-9)
    assert store.load("another GPU") == ()
    assert store.load("test", formula_version="2") == ()


def test_a_setup_measured_again_replaces_its_old_observation(tmp_path: Path) -> None:
    store = CorrectionStore(tmp_path / "corrections.json")
    store.add(observed(4, speed_error=-0.1))
    store.add(observed(2, speed_error=0.3))
    read = store.load("test")
    assert len(read) == 4
    assert [item.speed_error for item in read] == pytest.approx([-0.1, -0.1, 0.3, 0.3])


def test_only_the_latest_observations_are_kept(tmp_path: Path) -> None:
    store = CorrectionStore(tmp_path / "corrections.json")
    fitting = [c for c in small_candidates("1b-24g") if c.fits]
    measured = [with_evidence(c, exact(c)) for c in fitting]
    for number in range(1 + MAX_PER_GPU // len(measured)):
        store.add(observations_of(measured, gpu="test", model=f"model {number}", formula_version="1"))
    assert len(store.load("test")) == MAX_PER_GPU


@pytest.mark.parametrize("text", ["not json", "[]", '{"schema": 99, "observations": []}', '{"schema": 1}'])
def test_a_file_that_makes_no_sense_is_an_error_with_a_hint(tmp_path: Path, text: str) -> None:
    path = tmp_path / "corrections.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        CorrectionStore(path).load("test")
    assert "move the file away" in error.value.hint


def test_another_models_errors_move_the_prediction_part_of_the_way() -> None:
    """Ten observations of one other model, all 20 % slower than predicted: shrunk, never beyond what was seen."""
    candidates = small_candidates()
    learned = corrections(candidates, observed(10, speed_error=log(0.8)), "mine")
    fitting = [correction for correction, candidate in zip(learned, candidates, strict=True) if candidate.fits]
    mean = sum(log(correction.speed_factor) for correction in fitting) / len(fitting)
    assert log(0.8) < mean < 0.2 * log(0.8)
    prior = corrections(candidates, (), "mine")
    assert all(correction.speed_factor == 1.0 and correction.memory_factor == 1.0 for correction in prior)


def test_several_gpus_learn_from_one_but_never_the_other_way_round(tmp_path: Path) -> None:
    card = find_gpu("a100-80gb")
    two, four = (place_of("test", make_cluster(card, num)) for num in (2, 4))
    assert place_of("test", None) == "test"
    assert place_of("test", make_cluster(card, 2, interconnect="pcie")) not in (two, four)
    store = CorrectionStore(tmp_path / "corrections.json")
    observations = observed(3, speed_error=-0.1, model="mine")
    store.add(observations)
    store.add([replace(item, gpu=two) for item in observed(2, speed_error=0.4, model="mine")])
    store.add([replace(item, gpu="test-2, 2 GPUs") for item in observed(1, speed_error=9.0)])  # another card
    assert [item.gpu for item in store.load("test")] == ["test"] * 3
    assert [item.gpu for item in store.load(two)] == ["test"] * 3 + [two] * 2
    assert [item.gpu for item in store.load(four)] == ["test"] * 3 + [two] * 2
    groups = [item.group for item in as_transfer_observations(store.load(two), "mine", two)]
    assert groups[3:] == [0, 0]  # this very machine and model
    assert set(groups[:3]) == {1}
    assert 0 not in {item.group for item in as_transfer_observations(store.load(four), "mine", four)}


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
        observations = observations_of(first.candidates, gpu="test", model="1b", formula_version="1")
        gpu = SyntheticGpu.of(BY_NAME["8b-24g"], seed)
        without += search(problem("8b-24g"), gpu, budget=Budget(max_probes=20)).num_probes
        transfer = as_transfer_observations(observations, "8b")
        with_knowledge += search(problem("8b-24g"), gpu, budget=Budget(max_probes=20), transfer=transfer).num_probes
    assert with_knowledge < without


def test_the_file_holds_plain_facts(tmp_path: Path) -> None:
    path = tmp_path / "corrections.json"
    CorrectionStore(path).add(observed(1, speed_error=0.1))
    (item,) = json.loads(path.read_text())["observations"]
    assert item["gpu"] == "test"
    assert item["measured_tokens_per_s"] > item["formula"]["tokens_per_s"]
    assert list(tmp_path.glob("corrections.json?*")) == [tmp_path / "corrections.json.lock"]


def test_a_file_of_corrections_above_64_mib_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "corrections.json"
    with open(path, "wb") as file:
        file.truncate(64 * 1024**2 + 1)
    with pytest.raises(ConfigError, match="more than the 67,108,864 bytes"):
        CorrectionStore(path).load("rtx-4090")
