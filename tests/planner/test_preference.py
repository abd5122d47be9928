"""The rule by which a method is chosen: quality first, then speed; each row of what was inconsistent before."""

import itertools

import pytest

from planner.cli.wish import workload
from planner.decision.facts import PREFERENCE_FRACTION, NodeFacts, collect_into, node_of_setup
from planner.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning import plan_workload
from planner.space import dimension_values, walk
from planner.workload import Workload


def wish(model: str, gpu: str, **options: object) -> Workload:
    fixed = options.pop("fixed", {})
    return workload(resolve_model(model), find_gpu(gpu), fixed=fixed, **options)  # type: ignore[arg-type]


def chosen(model: str, gpu: str, **options: object) -> Plan:
    plan = plan_workload(wish(model, gpu, **options))
    assert isinstance(plan, Plan)
    return plan


def fastest_of(asked: Workload, node: str) -> float:
    """Tokens/s of the fastest setup of a class that fits, over the whole space."""
    known = NodeFacts()
    points = (point for point in walk(asked, dimension_values(asked)) if node_of_setup(point.shared) == node)
    collect_into(points, asked.budget_bytes, lambda _: known)
    return max(point.tokens_per_s for point in known.ranked())


@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        ("google/gemma-3-12b-it", "rtx-4090"),
        ("meta-llama/Llama-3.3-70B-Instruct", "h200"),
        ("meta-llama/Llama-3.1-8B", "rtx-4070-ti-super"),
    ],
)
def test_where_lora_does_not_fit_the_base_has_4_bits(model: str, gpu: str) -> None:
    plan = chosen(model, gpu)
    assert plan.chosen.setup.quantization == "nf4-double"
    answer = next(one for one in plan.walk if "8-bit" in one.question)
    assert "only when asked for" in answer.reason or answer.choice == "no"


def test_method_qlora_means_4_bits_unless_8_are_asked_for() -> None:
    asked = chosen("meta-llama/Llama-3.1-8B", "rtx-4090", fixed={"method": ("qlora",)})
    assert asked.chosen.setup.quantization == "nf4-double"
    eight = chosen("meta-llama/Llama-3.1-8B", "rtx-4090", fixed={"method": ("qlora",), "quantization": ("int8",)})
    assert eight.chosen.setup.quantization == "int8"


def test_a_lora_that_fits_is_not_quantized_for_a_prediction() -> None:
    plan = chosen("meta-llama/Llama-3.1-8B", "rtx-4090")
    assert plan.chosen.setup.method == "lora"
    answer = next(one for one in plan.walk if "4-bit" in one.question)
    assert "times the speed (--prefer speed" in answer.reason
    faster = chosen("meta-llama/Llama-3.1-8B", "rtx-4090", prefer="speed")
    assert faster.chosen.setup.quantization == "nf4-double"
    assert faster.chosen.tokens_per_s > plan.chosen.tokens_per_s * 1.05


@pytest.mark.parametrize(
    ("model", "gpu"), [("meta-llama/Llama-3.1-8B", "h200"), ("meta-llama/Llama-3.2-1B", "rtx-4070-ti-super")]
)
def test_full_fine_tuning_is_for_who_asks_or_whose_data_needs_it(model: str, gpu: str) -> None:
    assert chosen(model, gpu).chosen.setup.method == "lora"
    assert chosen(model, gpu, fixed={"method": ("full",)}).chosen.setup.method == "full"
    assert chosen(model, gpu, dataset_tokens=20_000_000_000).chosen.setup.method == "full"


def test_standard_precision_wins_where_the_gain_cannot_be_known() -> None:
    for gpu in ("rtx-4090", "h100-sxm"):
        assert chosen("meta-llama/Llama-3.1-8B", gpu).chosen.setup.precision == "bf16-autocast"


def test_rank_is_never_below_16_for_small_data() -> None:
    assert wish("meta-llama/Llama-3.1-8B", "rtx-4090", dataset_tokens=86_000).min_rank == 16


@pytest.mark.parametrize(
    ("model", "gpu"), [("meta-llama/Llama-3.1-8B", "rtx-4090"), ("meta-llama/Llama-3.2-1B", "rtx-3060")]
)
def test_within_a_class_more_memory_is_never_slower_than_what_a_preference_costs(model: str, gpu: str) -> None:
    """All of 30 pairs x 20 limits: benchmarks/monotone_plans.py."""
    best: dict[str, float] = {}
    card = find_gpu(gpu)
    for index in range(3, 13):
        limit = card.memory_bytes / 2**30 * index / 12
        plan = plan_workload(wish(model, gpu, memory_gib=limit))
        if not isinstance(plan, Plan):
            continue
        node, speed = node_of_setup(plan.chosen.setup), plan.chosen.tokens_per_s
        assert speed is not None
        assert speed >= best.get(node, 0.0) * (1 - PREFERENCE_FRACTION)
        best[node] = max(best.get(node, 0.0), speed)
    assert len(best) >= 2  # the limits cross a class


def test_the_choice_is_nearly_the_fastest_of_its_class() -> None:
    for model, gpu in itertools.product(("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"), ("t4", "a100-80gb")):
        asked = wish(model, gpu)
        plan = plan_workload(asked)
        assert isinstance(plan, Plan)
        fastest = fastest_of(asked, node_of_setup(plan.chosen.setup))
        assert plan.chosen.tokens_per_s >= fastest * (1 - PREFERENCE_FRACTION)
