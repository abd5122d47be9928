"""Two workers as each scheduler would start them: the command lines of docs/search.md in two shells on one storage."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from search_cases import LLAMA

from tests.whole import WHOLE

pytest.importorskip("optuna")
pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tools" / "faults.py"
PATIENCE_S = 600.0
FIXED = "--device cpu --method full --precision fp32 --no-checkpointing --optimizer adamw --optimizer adamw-fused"
FIXED += " --attention sdpa --attention eager --loss full --loss chunked --seq-len 64 --global-batch 4 --no-dry-run"
FIXED += " --max-probes 5 --budget 10h --json=full"
"""Eight setups; tools/faults.py answers their probes from a table."""


def workers_of(scheduler: str) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that start its two workers, each with what the scheduler adds to its environment."""
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8").partition("## Workers as jobs")[2]
    sky, dstack, kubernetes = map(yaml.safe_load, re.findall(r"(?s)```yaml\n(.*?)```", page)[:3])
    if scheduler == "submitit":  # starts both by itself
        return [([sys.executable, "-P", "-c", page.split("```python")[1].split("```")[0]], {})]
    assert [sky["num_nodes"], dstack["nodes"], kubernetes["spec"]["parallelism"]] == [2, 2, 2]
    (container,) = kubernetes["spec"]["template"]["spec"]["containers"]
    lines, rank = {
        "skypilot": (sky["run"], "SKYPILOT_NODE_RANK"),
        "dstack": ("\n".join(dstack["commands"][1:]), "DSTACK_NODE_RANK"),  # the first one installs
        "kubernetes": (container["args"][0], "JOB_COMPLETION_INDEX"),
    }[scheduler]
    return [(["bash", "-ec", lines], {rank: number}) for number in "01"]


@pytest.mark.skipif(not WHOLE, reason="5 CPU seconds; test_kill.py shares a study among three (TESTS_WHOLE=1)")
@pytest.mark.parametrize("scheduler", ["submitit", "skypilot", "kubernetes", "dstack"])
def test_two_workers_share_a_search(scheduler: str, tmp_path: Path) -> None:
    """Nothing is measured twice, both give one answer, and it holds what either measured."""
    pytest.importorskip("submitit")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    plan = tmp_path / "plan"
    plan.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -P {FAULTS} --tune "$@" {FIXED}\n')
    plan.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "FAULTS_LOG": str(tmp_path / "log"),
        "MODEL": str(tmp_path / "model"), "GPU": "rtx-4090", "STUDY": f"sqlite:///{tmp_path}/study.db",
        "STORE": str(tmp_path / "store.jsonl"), "XDG_DATA_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    with ExitStack() as workers:
        started = []
        for words, more in workers_of(scheduler):
            output = workers.enter_context((tmp_path / f"said-{len(started)}").open("w"))
            given = {**environment, **more}
            worker = subprocess.Popen(
                words, cwd=tmp_path, env=given, stdout=output, stderr=output, start_new_session=True
            )
            workers.callback(_end, worker)
            started.append(worker)
        codes = [worker.wait(PATIENCE_S) for worker in started]
    assert set(codes) == {0}, "".join(path.read_text()[-1500:] for path in tmp_path.glob("said-*"))
    log = (tmp_path / "log").read_text().splitlines()
    begun, ended = ([line for line in log if line.startswith(word)] for word in ("start", "end"))
    assert len(begun) == len(ended) == len(set(ended)) == 5
    plans: list[dict[str, Any]] = [json.loads((tmp_path / f"worker-{rank}" / "plan.json").read_text()) for rank in "01"]
    assert plans[0]["chosen"]["setup"] == plans[1]["chosen"]["setup"]


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
