"""The short answer: at most 18 lines at 80 columns, the verdict first, a reason for each other setup."""

from dataclasses import replace
from typing import Any

import pytest

from planner.core.notes import measured
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan, Plan
from planner.planning.plan_request import PlanRequest
from reports.plain import to_ascii
from reports.rows import compared, notes_of
from reports.terminal import MARKS, MAX_LINES, render_plan, why_not
from reports.text import band_words, memory_mark, sides_words, speed_mark, verdict_style
from tests.planner.test_codec import MEASUREMENT
from tests.reports.factories import make_plan, printed
from tests.whole import some

CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-sxm")


def shown(answer: Plan | NoPlan, width: int = 80, show: frozenset[str] = frozenset()) -> list[str]:
    return printed(lambda console: render_plan(answer, console, show=show), width).splitlines()


def height(answer: Plan | NoPlan, width: int = 80) -> int:
    """Rows of the screen: a command is not broken by us, but by the terminal."""
    return sum(max(1, -(-len(line) // width)) for line in shown(answer, width))


def planned(name: str, gpu: str, **plan_request: Any) -> Plan | NoPlan:
    cluster = plan_request.pop("cluster", None)
    return plan_workload(PlanRequest(**plan_request).workload(resolve_model(name), find_gpu(gpu), cluster))


@pytest.mark.parametrize("gpu", some(CARDS, 2))
def test_the_answer_has_at_most_18_lines(gpu: str) -> None:
    """Every 160th model of the catalogue on each card, refusals too; with TESTS_WHOLE=1 every one."""
    answers = [planned(name, gpu) for name in some(catalogue.names()[CARDS.index(gpu) :], 160)]
    assert any(isinstance(answer, Plan) for answer in answers)
    assert max(map(height, answers)) <= MAX_LINES


@pytest.mark.parametrize(
    "plan_request",
    [
        {"fixed": {"objective": ("dpo",)}},
        {"fixed": {"method": ("full",)}},
        {"cluster": make_cluster(find_gpu("rtx-4090"), 4)},
        {"data": Data(epoch_tokens=20_000_000), "price": 2.0},
    ],
    ids=["objective", "refusal", "several-gpus", "cost"],
)
def test_other_answers_have_at_most_18_lines_too(plan_request: dict[str, Any]) -> None:
    answer = planned("meta-llama/Llama-3.1-8B", "rtx-4090", **plan_request)
    assert height(answer) <= MAX_LINES
    assert height(answer, 120) <= MAX_LINES


@pytest.mark.parametrize(
    ("name", "card"), some([("meta-llama/Llama-3.1-8B", "rtx-4090"), ("Qwen/Qwen2.5-7B", "t4")], 2)
)
def test_a_refusal_begins_with_the_verdict_and_says_what_would_make_it_fit(name: str, card: str) -> None:
    lines = shown(planned(name, card, fixed={"method": ("full",)}))
    assert any(line.startswith("Nothing fits:") for line in lines[1:3])
    assert any(line.startswith("→ leave --method out") for line in lines)
    assert not any("decision tree, question by question" in line for line in lines)


def test_a_refusal_shows_three_ways_out_and_where_the_card_ends() -> None:
    refused = planned("Qwen/Qwen2.5-72B", "rtx-4090")
    lines = shown(refused)
    assert sum(line.startswith("→ ") for line in lines) == 3
    bar = next(line for line in lines if line.startswith("█"))
    workload = refused.workload
    assert bar.index("│") / len(bar) == pytest.approx(
        workload.memory_bytes / refused.subject.formula.peak_device_bytes, abs=0.02
    )


def test_what_only_should_fit_is_no_green() -> None:
    candidate = make_plan().chosen
    peak = candidate.formula.peak_device_bytes
    for room, style in ((1.5, "bold green"), (1.001, "bold yellow"), (0.9, "bold red")):
        assert verdict_style(replace(candidate, budget_bytes=int(room * peak))) == style


def test_risks_stand_before_what_holds_of_every_plan() -> None:
    plan = planned("tiiuae/falcon-7b", "rx-7900-xtx")
    notes = notes_of(plan)
    assert notes[0].startswith("SDPA falls back to its math kernel")
    assert notes[-1].startswith("merging the adapter")
    learned = replace(
        plan, notes=(*plan.notes, measured("measured on this GPU: 3 measurements correct its prediction"))
    )
    assert notes_of(learned)[0].startswith("measured on this GPU")
    assert any("SDPA falls back" in line for line in shown(plan))


@pytest.mark.parametrize("gpu", ["rtx-4090", "h100-sxm"])
def test_every_other_setup_has_its_reason(gpu: str) -> None:
    plan = planned("meta-llama/Llama-3.1-8B", gpu)
    assert isinstance(plan, Plan)
    chosen, *others = compared(plan)
    assert others
    for row in others:
        reason = why_not(chosen, row)
        assert chosen.speed.tokens_per_s
        assert row.speed.tokens_per_s
        if row.candidate.verdict == "tight":
            assert reason == "may run out of memory"
        elif row.speed.tokens_per_s > 1.01 * chosen.speed.tokens_per_s:
            assert "faster" in reason
            assert reason.partition("faster")[2], "faster and no word why it is not taken"
        else:
            assert "slower" in reason or reason == "as fast, not simpler or smaller"


def test_the_marks_of_the_groups_differ_in_ascii_too() -> None:
    marks = set(to_ascii("".join(MARKS.values())))
    assert len(marks) == len(MARKS)
    assert "?" not in marks


def test_the_rest_is_shown_when_asked_for() -> None:
    plan = make_plan()
    assert not any("decision tree, question by question" in line for line in shown(plan))
    assert any("decision tree, question by question" in line for line in shown(plan, show=frozenset({"why"})))
    assert any("Memory at the peak" in line for line in shown(plan, show=frozenset({"memory"})))
    everything = shown(plan, show=frozenset({"all"}))
    assert any("Beside it" in line for line in everything)
    assert len(everything) > MAX_LINES


def test_bands_above_a_hundred_percent_are_written_out() -> None:
    assert (band_words(0.08), band_words(0.996), band_words(1.203)) == ("±8 %", "±100 %", "±120 %")
    assert sides_words(0.049, 1.2) == "-4.9 to +120 %"


def test_a_probes_band_is_never_zero_and_knows_its_trainer() -> None:
    """On the H200 "probe ±0 %" stood beside a speed that the trainer missed by 6.4 %."""
    still = replace(MEASUREMENT, step_times_s=(1.0,) * 9, extrapolation_error_fraction=0.0, trainer_band_fraction=0.0)
    assert (memory_mark(still), speed_mark(still)) == ("probe, measured", "probe ±1 %")
    assert speed_mark(replace(still, trainer_band_fraction=0.019)) == "probe ±2.9 %"
    assert memory_mark(replace(still, extrapolation_error_fraction=-0.004)) == "probe ±0.4 %"
