"""The short answer: at most 25 lines at 80 columns, the verdict last, nothing said twice; the rest when asked for."""

from io import StringIO

import pytest
from rich.console import Console

from planner.cli.wish import workload
from planner.gpus import find_gpu
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning import plan_workload
from reports.brief import MAX_LINES
from reports.terminal import render_plan
from tests.reports.factories import make_plan
from tests.whole import some

CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-sxm")


def shown(plan: Plan, width: int = 80, show: frozenset[str] = frozenset()) -> list[str]:
    text = StringIO()
    render_plan(plan, Console(file=text, width=width), show=show)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("gpu", CARDS)
def test_the_answer_has_at_most_25_lines(gpu: str) -> None:
    """Every 40th model of the catalogue on each card; with TESTS_WHOLE=1 every one."""
    names = some(catalogue.names()[CARDS.index(gpu) :], 40)
    plans = [plan_workload(workload(resolve_model(name), find_gpu(gpu), fixed={})) for name in names]
    heights = [len(shown(plan)) for plan in plans if isinstance(plan, Plan)]
    assert heights
    assert max(heights) <= MAX_LINES


def test_the_verdict_stands_last_and_the_command_before_it() -> None:
    lines = shown(make_plan(), width=200)
    assert lines[-1].startswith("It fits")
    assert lines[-2].strip().startswith("plan ")


def test_the_groups_and_what_is_free_add_up_to_the_card() -> None:
    plan = plan_workload(workload(resolve_model("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090"), fixed={}))
    assert isinstance(plan, Plan)
    bars = [line for line in shown(plan) if "█" in line or "░" in line]
    total = sum(float(line.split(" GiB")[-2].split()[-1]) for line in bars)
    assert total == pytest.approx(plan.workload.memory_bytes / 2**30, abs=0.05)


def test_the_rest_is_shown_when_asked_for() -> None:
    plan = make_plan()
    assert not any("decision tree, question by question" in line for line in shown(plan))
    assert any("decision tree, question by question" in line for line in shown(plan, show=frozenset({"why"})))
    assert any("Memory at the peak" in line for line in shown(plan, show=frozenset({"memory"})))
    everything = shown(plan, show=frozenset({"all"}))
    assert any("Beside it" in line for line in everything)
    assert len(everything) > MAX_LINES
