"""`plan compare-targets`: one row per launch target, each what `plan --target` proposes, the fastest first."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.app.levels import answered
from finetune_planner.cli.app import run
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models.resolve import resolve_model
from planner.planning.answer import plan_workload
from planner.planning.decision.policy import left_out
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup


def test_each_target_has_its_own_plan_and_the_fastest_is_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan_request = ["smollm2-135m", "--gpu", "rtx-3060", "--method", "lora", "--seq-len", "512"]
    assert run(["compare-targets", *plan_request, "--json=full", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    planned = [row for row in rows if row["candidate"]]
    assert {row["target"] for row in planned} == {"trl", "hf", "axolotl", "llamafactory", "unsloth"}
    speeds = [row["tokens_per_s"] for row in planned]
    assert speeds == sorted(speeds, reverse=True)
    stacks = {row["target"]: row["candidate"]["setup"].get("stack", "trl") for row in planned}
    assert stacks == {name: name for name in stacks}
    (refused,) = [row for row in rows if row["refused"]]
    assert (refused["target"], refused["refused"]) == (
        "torchtitan",
        "the torchtitan config is written for several GPUs",
    )
    options = ["--target", "unsloth", "--out", str(tmp_path / "unsloth"), "--no-dry-run", "--no-history", "--json=full"]
    assert run([*plan_request, *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    (unsloth,) = [row for row in rows if row["target"] == "unsloth"]
    assert unsloth["candidate"]["setup"] == plan["chosen"]["setup"]
    report = (tmp_path / "report.md").read_text()
    assert f"--target {rows[0]['target']}" in report
    assert "torchtitan: the torchtitan config" in report


def request_of(**plan_request: Any) -> Workload:
    return PlanRequest(seq_len=512, global_batch=4, **plan_request).workload(
        resolve_model("smollm2-135m"), find_gpu("rtx-3060")
    )


def test_a_plan_is_of_the_program_that_is_faster_and_says_what_trl_would_do() -> None:
    plan_request = PlanRequest().workload(resolve_model("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090"))
    plan = answered(plan_request, dry_run=False, history=False)
    others = [plan_workload(replace(plan_request, targets=(name,))) for name in ("axolotl", "trl")]
    axolotl, trl = (other.chosen for other in others if isinstance(other, Plan))
    assert isinstance(plan, Plan)
    assert plan.chosen.setup == axolotl.setup
    assert (axolotl.formula.tokens_per_s or 0.0) > 1.03 * (trl.formula.tokens_per_s or 0.0) > 0.0
    trl_alternative = next(alternative for alternative in plan.alternatives if alternative.label == "by TRL")
    assert trl_alternative.candidate.formula.tokens_per_s == trl.formula.tokens_per_s


def test_what_is_left_out_says_what_it_would_give_and_why() -> None:
    plan_request = request_of(fixed={"method": ("lora",)})
    assert "no published run of Unsloth" in left_out(plan_request, TrainSetup(stack="unsloth"))
    assert not left_out(replace(plan_request, targets=("unsloth",)), TrainSetup(stack="unsloth"))
    assert not left_out(plan_request, TrainSetup(stack="axolotl"))


@pytest.mark.parametrize(
    "plan_request",
    [
        {"fixed": {"method": ("full",)}},
        {"fixed": {"method": ("lora",)}, "targets": ("trl",)},
        {"fixed": {"method": ("lora",), "kernels": ("eager",)}},
        {"fixed": {"method": ("qlora",), "quantization": ("int8",)}},
    ],
    ids=["full", "target", "kernels", "int8"],
)
def test_no_engine_is_named_where_none_trains_the_same(plan_request: dict[str, Any]) -> None:
    """Fused LoRA is for adapters, and not over 8 bits; a named target or kernel family was asked for."""
    plan = answered(request_of(**plan_request), dry_run=False, history=False)
    assert isinstance(plan, Plan)
    assert not any("plan compare-targets" in note for note in plan.notes)
