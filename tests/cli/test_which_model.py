"""`plan which-model`: lengths that are really the longest, rows that say what `plan` says."""

import json
import os
import signal
from pathlib import Path

import pytest

from finetune_planner.app.cores import on_cores
from finetune_planner.cli.app import run
from planner.core.errors import EnvironmentProblem
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.decision.alternatives import STEP_TOKENS, longest_tokens
from planner.planning.plan_request import PlanRequest
from tests.whole import some


@pytest.mark.parametrize(
    ("model", "gpu"),
    some([("Qwen/Qwen3-4B", "t4"), ("meta-llama/Llama-3.1-8B", "rtx-4090"), ("google/gemma-3-12b-pt", "l4")], 3),
)
def test_a_plan_reaches_the_longest_sequence_and_no_longer_one(model: str, gpu: str) -> None:
    spec, card = catalogue.load(model), find_gpu(gpu)
    assert spec is not None
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
    options = ["--gpu", "rtx-3060", "--seq-len", "1024", "--method", "lora"]
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
