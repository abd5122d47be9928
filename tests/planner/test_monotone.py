"""More memory, a longer batch, shorter sequences, more GPUs and a looser request never give a slower plan within a
class, beyond what the stated preferences may cost."""

from typing import Any

import pytest

from benchmarks.monotone_plans import ALONG, GIVEN_FRACTION, PAIRS, rising, slower
from planner.planning.decision.choosing import choose
from planner.planning.decision.layouts import ONE_GPU
from planner.planning.decision.node import node_of_setup
from planner.planning.decision.results import PREFERENCE_FRACTION, WalkResults
from planner.planning.groups import WalkCache
from planner.planning.space import dimension_values
from planner.setup.packages import PACKAGE_PRICES
from tests.planner.helpers import plan_request
from tests.whole import WHOLE, paired, some

NUM_BUDGETS = 20
SOME = (("meta-llama/Llama-3.1-8B", "rtx-4090"), ("google/gemma-3-12b-it", "t4"))


def check(model: str, gpu: str, num_budgets: int = NUM_BUDGETS, num_gpus: int = 1, **options: Any) -> None:
    steps = rising(model, gpu, num_budgets, num_gpus, **options)
    assert list(slower(steps)) == []
    assert min((step.share for step in steps), default=1.0) >= 1 - GIVEN_FRACTION


@pytest.mark.parametrize(("model", "gpu"), SOME)
def test_more_memory_is_never_a_slower_plan_of_the_same_class(model: str, gpu: str) -> None:
    check(model, gpu)


WISHES: list[tuple[str, str, dict[str, Any]]] = [
    ("Qwen/Qwen2.5-0.5B", "rtx-3060", {"method": ("lora",), "attention": ("sdpa",)}),
    ("meta-llama/Llama-3.2-1B", "rtx-3090", {"objective": ("dpo",), "method": ("full",)}),
]


@pytest.mark.parametrize(("along", "wish"), paired(ALONG, WISHES, 1))
def test_more_of_anything_is_never_a_slower_plan_of_the_same_class(
    along: str, wish: tuple[str, str, dict[str, Any]]
) -> None:
    check(*wish[:2], 4, along=along, fixed=wish[2])


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "objective"),
    [
        ("meta-llama/Llama-3.1-8B", "rtx-4090", 8, "sft"),  # DDP fits by Axolotl's kernels alone
        ("Qwen/Qwen2.5-14B", "a100-80gb", 1, "grpo"),  # by vLLM, and by transformers from 64 a step on
    ],
)
def test_a_larger_batch_does_not_lose_what_a_smaller_one_was_walked_with(
    model: str, gpu: str, num_gpus: int, objective: str
) -> None:
    check(model, gpu, 4, num_gpus, along="batch", fixed={"objective": (objective,), "method": ("lora",)})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), some([pair for pair in PAIRS if pair not in SOME], 28))
def test_more_memory_is_never_a_slower_plan_of_the_same_class_for_others_of_thirty_pairs(model: str, gpu: str) -> None:
    check(model, gpu, NUM_BUDGETS if WHOLE else 8)


def test_the_thirty_pairs_are_thirty() -> None:
    assert len(set(PAIRS)) == 30
    assert set(SOME) <= set(PAIRS)


def test_what_a_walk_computed_serves_wishes_that_differ_in_memory_alone() -> None:
    cache, runs = WalkCache(), []
    for gib in (20.0, 23.0):
        workload = plan_request("Qwen/Qwen2.5-7B", "rtx-4090", memory_gib=gib)
        values = dimension_values(workload)
        assert choose(workload, values, WalkResults()) == choose(workload, values, WalkResults(cache=cache))
        runs.append(cache.runs(workload, values, [ONE_GPU]))
    assert runs[0] is runs[1]
    other = plan_request("Qwen/Qwen2.5-7B", "rtx-4090", memory_gib=23.0, seq_len=1024)
    assert cache.runs(other, dimension_values(other), [ONE_GPU]) is not runs[0]


@pytest.mark.parametrize("name", ["optimizer", "attention", "checkpointing", "loss", "precision"])
def test_a_looser_wish_is_never_slower_in_the_same_class(name: str) -> None:
    free = plan_request("Qwen/Qwen2.5-1.5B", "rtx-3060", fixed={"method": ("lora",)})
    values = dimension_values(free)
    results = WalkResults()
    kind, best = choose(free, values, results)
    assert kind is not None
    assert best is not None
    speed = results.nodes()[kind].speed
    for value in values[name]:
        narrow = plan_request("Qwen/Qwen2.5-1.5B", "rtx-3060", fixed={"method": ("lora",), name: (value,)})
        node, point = choose(narrow, dimension_values(narrow), WalkResults())
        if point is not None:
            assert node == node_of_setup(best.shared)
            price = PACKAGE_PRICES.get(point.attention, 0.0)
            assert speed(best) >= speed(point) * (1 - PREFERENCE_FRACTION) * (1 - price)
