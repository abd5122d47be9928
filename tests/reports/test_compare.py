"""Several plans side by side, and which GPU: golden pages, places, and labels that tell plans apart."""

from dataclasses import replace
from typing import Any

import pytest

from planner.planning.answer import best_by_method
from planner.planning.decision.node import Node
from planner.planning.plan import Alternative, NoPlan, Plan
from planner.setup.outcome import Candidate
from reports.compare import comparison_markdown, plan_labels, render_comparison
from reports.which import GpusSheet, rank_gpus, which_gpu_sentences
from tests.reports.factories import make_gpu, make_no_plan, make_plan, make_workload, printed
from tests.reports.golden import assert_golden

CARDS = (("h200", "H200", 139.8, 3.59), ("rtx-4090", "RTX 4090", 23.51, 0.69), ("l40s", "L40S", 44.39, None))


def answers() -> list[Plan | NoPlan]:
    plans: list[Plan | NoPlan] = [
        make_plan(make_workload(gpu=make_gpu(key, name, memory), price_per_hour=price))
        for key, name, memory, price in CARDS
    ]
    return [*plans, make_no_plan()]


def named() -> list[tuple[str, Plan | NoPlan]]:
    return [(answer.workload.gpu.key, answer) for answer in answers()]


@pytest.mark.parametrize("width", [80, 140])
def test_comparison_and_which_gpu_golden(width: int) -> None:
    assert_golden(f"compare_{width}.txt", printed(lambda console: render_comparison(named(), console), width))
    choices = rank_gpus(answers())
    assert_golden(f"which_gpu_{width}.txt", printed(lambda console: GpusSheet(choices).render(console), width))


def test_comparison_and_which_gpu_markdown_golden() -> None:
    assert_golden("compare.md", comparison_markdown(named()))
    assert_golden("which_gpu.md", GpusSheet(rank_gpus(answers())).markdown())


def test_rank_gpus_smallest_that_fits_first_and_places() -> None:
    choices = rank_gpus(answers())
    assert [choice.gpu.key for choice in choices] == ["rtx-4090", "l40s", "h200", "t4"]
    assert sorted(choice.speed_place for choice in choices if choice.fits) == [1, 2, 3]
    assert {choice.gpu.key: choice.cost_place for choice in choices} == {
        "rtx-4090": 1,
        "h200": 2,
        "l40s": None,
        "t4": None,
    }


def test_rank_gpus_by_cost_puts_unpriced_cards_last_of_those_that_fit() -> None:
    assert [choice.gpu.key for choice in rank_gpus(answers(), sort="cost")] == ["rtx-4090", "h200", "l40s", "t4"]


def test_which_gpu_when_nothing_fits_names_the_nearest() -> None:
    (sentence,) = which_gpu_sentences(rank_gpus([make_no_plan()]))
    assert sentence.startswith("No card fits. Nearest: T4")


def test_which_gpu_names_a_card_that_surely_fits_before_one_that_may() -> None:
    plans = [answer for answer in answers() if isinstance(answer, Plan)]
    plans.sort(key=lambda plan: plan.workload.memory_bytes)
    tight = [
        replace(plan, chosen=replace(plan.chosen, budget_bytes=plan.chosen.formula.peak_device_bytes + 1))
        for plan in plans
    ]
    few, smallest, *_ = which_gpu_sentences(rank_gpus([tight[0], *plans[1:]]))
    assert few == "3 of 3 cards fit, 1 of them may run out of memory."
    assert smallest.startswith("Smallest: L40S")
    _, *named = which_gpu_sentences(rank_gpus(tight))
    assert all("may run out of memory" in words for words in named)
    assert named[0].startswith("Smallest: RTX 4090")


def test_plan_labels_name_only_what_differs_and_are_unique() -> None:
    same = make_plan()
    assert plan_labels([("a", same), ("b", same)]) == ["a", "b"]
    assert plan_labels([("a", same), ("a", same)]) == ["1. a", "2. a"]
    other = make_plan(make_workload(seq_len_tokens=4096))
    assert plan_labels([("a", same), ("b", other)]) == ["2,048 tokens", "4,096 tokens"]


def test_render_which_gpu_only_fitting_leaves_rows_out_but_counts_all() -> None:
    choices = rank_gpus(answers())
    shown = printed(lambda console: GpusSheet(choices, only_fitting=True).render(console), 80)
    assert "3 of 4 cards fit." in shown
    assert not any(line.startswith("t4 ") for line in shown.splitlines())
    nothing = rank_gpus([make_no_plan()])
    assert "t4 " in printed(lambda console: GpusSheet(nothing, only_fitting=True).render(console), 80)


def test_best_by_method_is_the_fastest_class_of_each_method_that_fits() -> None:
    plan = make_plan()

    def beside(label: str, tokens_per_s: float, **changes: Any) -> Alternative:
        formula = replace(plan.chosen.formula, tokens_per_s=tokens_per_s)
        candidate = Candidate(
            setup=plan.chosen.setup.replace(**changes), budget_bytes=plan.chosen.budget_bytes, formula=formula
        )
        return Alternative(label=label, candidate=candidate, trade="")

    lora = {"method": "lora", "quantization": "none"}
    others = (
        beside(Node.LORA.words, 200.0, **lora),
        beside("room to spare", 300.0, **lora),
        beside(Node.EIGHT_BIT.words, 1.0, quantization="int8"),
    )
    by_method = best_by_method(replace(plan, alternatives=others))
    assert by_method == {"qlora": plan.chosen, "lora": others[0].candidate}
    assert best_by_method(make_no_plan()) == {}
