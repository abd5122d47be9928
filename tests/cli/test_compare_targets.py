"""`plan compare-targets`: one row per launch target, each what `plan --target` proposes, the fastest first."""

import json
from pathlib import Path

import pytest

from planner.cli.app import run


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
