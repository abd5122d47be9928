"""Reports of real plans: everything that the planner says survives plan.json, and every report is the same from it."""

import json
from functools import partial

import pytest

from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.decision.candidates import candidate
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from reports.extras import Extras, sensitivity
from reports.html import entry_of, plan_files, report_files
from reports.plan_json import plan_from_dict
from reports.terminal import render_plan
from tests.reports.factories import printed

SAME_TERMS_BYTES = 1024**2  # terms are named to the byte, the peak of a phase is rounded in its parts


@pytest.mark.parametrize(
    ("name", "gpu", "fits"),
    [
        ("Qwen/Qwen2.5-1.5B", "t4", True),
        ("mistralai/Mixtral-8x7B-v0.1", "h200", True),
        ("google/gemma-2-27b", "t4", False),
    ],
)
def test_reports_of_a_real_plan_are_the_same_from_plan_json(name: str, gpu: str, fits: bool) -> None:
    model = catalogue.load(name)
    plan_request = PlanRequest(fixed={"method": ("lora", "qlora")}, seq_len=1024, global_batch=8).workload(
        model, find_gpu(gpu)
    )
    plan = plan_workload(plan_request)
    assert isinstance(plan, Plan) is fits
    extras = Extras()
    if isinstance(plan, Plan):
        extras = Extras(sensitivity=sensitivity(plan.chosen, partial(candidate, plan_request)))
    texts = plan_files(plan, extras)
    document = json.loads(texts["plan.json"])
    back = plan_from_dict(document)
    assert back.workload == plan_request
    assert back.workload.model.num_params == model.num_params
    rewritten = report_files([entry_of(document)])
    assert rewritten["report.md"] == texts["report.md"]
    assert rewritten["report.html"] == texts["report.html"]
    shown = printed(partial(render_plan, plan))
    if isinstance(plan, Plan):
        terms = sum(term.size_bytes for term in plan.chosen.formula.terms)
        assert abs(terms - plan.chosen.formula.peak_allocated_bytes) < SAME_TERMS_BYTES
    assert all(len(line) <= 80 or line.startswith("  plan ") for line in shown.splitlines())
