"""`plan compare-targets`, `compare-adapters`, `which-model`: every row of the table is what `plan` itself proposes."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.app.cores import on_cores
from finetune_planner.app.levels import answered
from finetune_planner.cli.app import run
from finetune_planner.cli.tables import models_rows
from planner.core.errors import EnvironmentProblem
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.resolve import resolve_model
from planner.options.adapters import ADAPTERS
from planner.planning.answer import plan_workload
from planner.planning.decision.alternatives import STEP_TOKENS, longest_tokens
from planner.planning.decision.policy import left_out
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from tests.whole import some


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
    assert plan.chosen.setup == axolotl.setup
    assert (axolotl.formula.tokens_per_s or 0.0) > 1.03 * (trl.formula.tokens_per_s or 0.0) > 0.0
    trl_alternative = next(alternative for alternative in plan.alternatives if alternative.label == "by TRL")
    assert trl_alternative.candidate.formula.tokens_per_s == trl.formula.tokens_per_s


def test_what_is_left_out_says_what_it_would_give_and_why() -> None:
    plan_request = request_of(fixed={"method": ("lora",)})
    assert "Unsloth is planned when asked for" in left_out(plan_request, TrainSetup(stack="unsloth"))
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


def test_every_kind_has_a_row_and_lora_is_the_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    card = ["smollm2-360m", "--gpu", "rtx-3060", "--seq-len", "1024", "--objective", "classification"]
    assert run(["compare-adapters", *card, "--json=full", "--out", str(tmp_path)]) == 0
    rows = {row["adapter"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ADAPTERS)
    alike = ["--method", "lora", "--method", "qlora", "--kernels", "liger,eager"]  # which run with every kind
    assert run([*card, *alike, "--no-dry-run", "--no-history", "--json=full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert rows["lora"]["candidate"]["setup"] == plan["chosen"]["setup"]
    assert rows["lora"]["predicted_peak_device_bytes"] == rows["rslora"]["predicted_peak_device_bytes"]
    assert rows["dora"]["num_trained_params"] > rows["lora"]["num_trained_params"] > rows["ia3"]["num_trained_params"]
    assert rows["dora"]["tokens_per_s"] < rows["lora"]["tokens_per_s"]
    assert rows["dora"]["time_band_fraction"] > rows["lora"]["time_band_fraction"]
    assert "quantization" in rows["loftq"]["refused"]
    report = (tmp_path / "report.md").read_text()
    assert "2402.09353" in report
    assert "nothing is cited here" in report


def test_one_kind_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare-adapters", "smollm2-360m", "--gpu", "t4", "--adapter", "dora"]) == 2
    assert "compares all of them" in capsys.readouterr().err
    assert run(["smollm2-360m", "--gpu", "t4", "--adapter", "boft"]) == 2
    assert "oft" in capsys.readouterr().err


def test_a_kind_that_does_not_fit_in_loras_place_may_fit_in_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """DoRA beside LoRA without checkpointing: the table says what to ask, and asking finds it."""
    plan_request = ["Qwen/Qwen2.5-3B", "--gpu", "l4", "--seq-len", "3072", "--method", "lora"]
    assert run(["compare-adapters", *plan_request, "--json=full"]) == 0
    rows = {row["adapter"]: row for row in json.loads(capsys.readouterr().out)}
    assert not rows["dora"]["fits"]
    assert run(["compare-adapters", *plan_request]) == 0
    assert "plan --adapter KIND looks for a setup of its own" in " ".join(capsys.readouterr().out.split())
    assert run([*plan_request, "--adapter", "dora", "--no-dry-run"]) == 0


@pytest.mark.parametrize(
    ("model", "gpu"),
    some([("Qwen/Qwen3-4B", "t4"), ("meta-llama/Llama-3.1-8B", "rtx-4090"), ("google/gemma-3-12b-pt", "l4")], 3),
)
def test_a_plan_reaches_the_longest_sequence_and_no_longer_one(model: str, gpu: str) -> None:
    spec, card = catalogue.load(model), find_gpu(gpu)
    reach = longest_tokens(PlanRequest().workload(spec, card))
    assert set(reach) == {"full", "lora", "qlora"}
    limit = spec.max_position_embeddings or 0
    for method, tokens in reach.items():
        # 8-bit weights are larger than 4-bit ones: the plan of a method looks at both
        for length, kind in ((tokens, "plan"), (tokens + STEP_TOKENS, "no_plan")):
            if not 0 < length <= limit:
                continue
            plan_request = PlanRequest(fixed={"method": (method,)}, seq_len=length, global_batch=1).workload(spec, card)
            assert plan_workload(plan_request).kind == kind, (method, length)


def test_the_table_says_what_plan_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--gpu", "rtx-3060", "--seq-len", "1024", "--method", "lora", "--objective", "dpo"]
    words = ["which-model", "smollm2", *options]
    assert run([*words, "--json=full", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= 3
    assert [row["num_params"] for row in rows] == sorted((row["num_params"] for row in rows), reverse=True)
    assert run([rows[0]["model"], *options, "--no-dry-run", "--no-history", "--json=full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert rows[0]["candidate"]["setup"] == plan["chosen"]["setup"]
    assert rows[0]["tokens_per_s"] == plan["chosen"]["formula"]["tokens_per_s"]
    assert rows[0]["model"] in (tmp_path / "report.md").read_text()


def test_what_fits_with_its_experts_in_4_bits_alone_can_be_fine_tuned() -> None:
    ((row,), workload) = models_rows(PlanRequest(), "rtx-3060", "Qwen/Qwen3-30B-A3B")
    plan = plan_workload(workload, explained=False)
    assert row.answer.chosen == plan.chosen
    assert row.longest_tokens["qlora"] >= workload.seq_len_tokens > row.longest_tokens["lora"] == 0


@pytest.mark.parametrize(
    "command", ["which-gpu", "which-model", "which-cluster", "compare-adapters", "compare-targets"]
)
def test_a_table_of_the_formula_takes_the_words_that_plan_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--no-dry-run", "--batch-size", "--objective"):
        assert option in shown


def test_nothing_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["which-model", "llama-3.1-70b", "--gpu", "t4"]) == 1
    assert "0 of 1 model can be fine-tuned" in capsys.readouterr().out
    assert run(["which-model", "no-such-model", "--gpu", "t4"]) == 2
    assert "hint: `plan models`" in capsys.readouterr().err


@pytest.mark.processes
def test_a_fork_that_the_system_ends_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(EnvironmentProblem, match="ended by the system"):
        list(on_cores(lambda number: os.kill(os.getpid(), signal.SIGKILL), [1, 2, 3]))
    assert sorted(on_cores(lambda number: number * number, [1, 2, 3])) == [1, 4, 9]
