"""`plan compare-targets`: one row per launch target, each what `plan --target` proposes, the fastest first."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.app.climb import answered
from planner.cli.app import run
from planner.hardware.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning.answer import plan_workload
from planner.wish import Wish
from planner.workload import Workload


def test_each_target_has_its_own_plan_and_the_fastest_is_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wish = ["smollm2-135m", "--gpu", "rtx-3060", "--method", "lora", "--seq-len", "512"]
    assert run(["compare-targets", *wish, "--json", "--out", str(tmp_path)]) == 0
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
    one = ["--target", "unsloth", "--out", str(tmp_path / "unsloth"), "--no-dry-run", "--no-history", "--json"]
    assert run([*wish, *one]) == 0
    plan = json.loads(capsys.readouterr().out)
    (unsloth,) = [row for row in rows if row["target"] == "unsloth"]
    assert unsloth["candidate"]["setup"] == plan["chosen"]["setup"]
    report = (tmp_path / "report.md").read_text()
    assert f"--target {rows[0]['target']}" in report
    assert "torchtitan: the torchtitan config" in report


def wish_of(**wish: Any) -> Workload:
    return Wish(seq_len=512, global_batch=4, **wish).workload(resolve_model("smollm2-135m"), find_gpu("rtx-3060"))


def test_a_plan_names_the_engine_that_is_faster_with_the_figure_of_its_own_plan() -> None:
    wish = wish_of(fixed={"method": ("lora",)})
    plan, other = answered(wish, dry_run=False, history=False), plan_workload(replace(wish, targets=("axolotl",)))
    assert isinstance(plan, Plan)
    assert isinstance(other, Plan)
    speed, mine = (one.chosen.formula.tokens_per_s or 0.0 for one in (other, plan))
    assert speed > 1.03 * mine > 0.0
    (note,) = [one for one in plan.notes if one.endswith("plan compare-targets")]
    assert re.match(
        rf"Axolotl( or Unsloth)?: {speed:,.0f} tokens/s predicted \(±\d+ %\), {speed / mine:.1f} x this", note
    )


@pytest.mark.parametrize(
    "wish",
    [
        {"fixed": {"method": ("full",)}},
        {"fixed": {"method": ("lora",)}, "targets": ("trl",)},
        {"fixed": {"method": ("lora",), "kernels": ("eager",)}},
        {"fixed": {"method": ("qlora",), "quantization": ("int8",)}},
    ],
    ids=["full", "target", "kernels", "int8"],
)
def test_no_engine_is_named_where_none_trains_the_same(wish: dict[str, Any]) -> None:
    """Fused LoRA is for adapters, and not over 8 bits; a named target or kernel family was asked for."""
    plan = answered(wish_of(**wish), dry_run=False, history=False)
    assert isinstance(plan, Plan)
    assert not any("plan compare-targets" in note for note in plan.notes)
