"""report.md: golden pages, figures equal to plan.json's, hostile text stays text."""

import re
from collections.abc import Callable

import pytest

from planner.memory.workload import Data
from planner.setup.outcome import Fidelity
from reports.extras import Extras, LaunchFile, LaunchTarget, sensitivity
from reports.html import plan_markdown
from reports.markdown import escape, fenced
from reports.plan_json import plan_from_dict, plan_to_dict
from tests.reports.factories import make_candidate, make_gpu, make_model, make_no_plan, make_plan, make_workload
from tests.reports.golden import assert_golden


def full_extras() -> Extras:
    return Extras(
        planner_version="0.1.0",
        created="2026-11-21T07:00:00Z",
        command="plan Qwen/Qwen2.5-7B --gpu rtx-4090 --out my-plan",
        environment={"python": "3.11.2", "torch": "2.13.0"},
        launch=(
            LaunchTarget(
                target="trl",
                command="trl sft --config launch/trl.yaml",
                run="bash launch/run.sh install trl && bash launch/run.sh trl",
                files=(LaunchFile(path="launch/trl.yaml", text="model: x\n"),),
                notes=("packing: planned on, runs as off (reason)",),
            ),
            LaunchTarget(target="mlx", notes=("written for Apple's GPUs",)),
        ),
        sensitivity=sensitivity(make_candidate(), make_candidate),
    )


PAGES: dict[str, Callable[[], str]] = {
    "plan_formula.md": lambda: plan_markdown(make_plan()),
    "plan_probe_extras.md": lambda: plan_markdown(
        make_plan(make_workload(data=Data(epoch_tokens=12_000_000), price_per_hour=0.69), level=Fidelity.PROBE),
        full_extras(),
    ),
    "no_plan.md": lambda: plan_markdown(make_no_plan()),
}


@pytest.mark.parametrize("name", PAGES)
def test_markdown_golden(name: str) -> None:
    assert_golden(name, PAGES[name]())


def test_markdown_is_the_same_from_plan_json() -> None:
    plan = make_plan(level=Fidelity.DRY_RUN)
    assert plan_markdown(plan_from_dict(plan_to_dict(plan))) == plan_markdown(plan)


def test_markdown_hostile_names_stay_text() -> None:
    model = make_model("evil/<script>alert(1)</script>|`x`\n# head")
    gpu = make_gpu(name="**GPU** [x](javascript:alert(1))")
    page = plan_markdown(make_plan(make_workload(model=model, gpu=gpu)))
    assert "<script>" not in page.replace("\\<script\\>", "")
    assert "\n# head" not in page
    assert not re.search(r"(?<!\\)\[x", page)


def test_fenced_cannot_be_closed_by_its_content() -> None:
    assert fenced("a\n````\nb").startswith("`````\n")


@pytest.mark.parametrize("text", ["plain", "a|b", "a_b*c", "<b>", "\\"])
def test_escape_keeps_every_character(text: str) -> None:
    assert re.sub(r"\\(.)", r"\1", escape(text)) == text
