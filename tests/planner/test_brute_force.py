"""The choice against every setup of its class, each evaluated on its own."""

import pytest

from benchmarks.brute_force import PAIRS, search
from tests.whole import some

SOME = [pair for pair in PAIRS if pair in (("meta-llama/Llama-3.2-1B", "h200"), ("Qwen/Qwen3-4B", "t4"))]


def check(model: str, gpu: str) -> None:
    comparison = search(model, gpu, 32)
    assert comparison.evaluated >= 400
    assert not comparison.at_fault, (comparison.share, comparison.preferences, comparison.fastest)


@pytest.mark.parametrize(("model", "gpu"), SOME)
def test_the_choice_is_the_best_of_its_class_but_for_stated_preferences(model: str, gpu: str) -> None:
    check(model, gpu)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), some([pair for pair in PAIRS if pair not in SOME], 18))
def test_twenty_choices_are_the_best_of_their_classes(model: str, gpu: str) -> None:
    check(model, gpu)
