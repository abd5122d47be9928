"""`--job`: what a scheduler's file asks for is the plan's, and what a scheduler does not have is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_planner.cli.app import run
from planner.frameworks.exporters.jobs import SCHEDULERS
from planner.hardware.gpus import all_gpus, find_gpu

LLAMA = ["meta-llama/Llama-3.1-8B", "--no-dry-run", "--target", "trl"]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Scheduler -> its file, of one plan of 16 H100 on two nodes with the optimizer on the hosts."""
    out = tmp_path_factory.mktemp("jobs")
    words = [*LLAMA, "--gpu", "h100-sxm", "--gpus", "16", "--parallel", "zero2", "--offload", "optimizer"]
    words += ["--method", "full", "--out", str(out)]
    assert run([*words, *(word for name in ("skypilot", "dstack", "kubernetes") for word in ("--job", name))]) == 0
    readme = (out / "launch" / "README.md").read_text()
    files = {}
    for name in ("skypilot", "dstack", "kubernetes"):
        assert SCHEDULERS[name].command in readme
        files[name] = yaml.safe_load((out / "launch" / f"{name}.yaml").read_text())
    return files


def test_skypilot_asks_for_the_plans_nodes_cards_and_memory(two_nodes: dict[str, dict[str, Any]]) -> None:
    task = two_nodes["skypilot"]
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["setup"] == "bash launch/run.sh install trl\n"
    assert "NODE_RANK=$SKYPILOT_NODE_RANK" in task["run"]
    assert task["run"].endswith("bash launch/run.sh trl\n")
    # 18 bytes of each of 8.03e9 parameters (gradient, master, AdamW's moments) over two nodes, beside 16 GiB a card
    assert task["resources"]["memory"] == f"{128 + 68}+"
    assert task["secrets"] == {"HF_TOKEN": None}


def test_dstack_asks_for_the_same(two_nodes: dict[str, dict[str, Any]]) -> None:
    task = two_nodes["dstack"]
    assert (task["type"], task["nodes"], task["files"]) == ("task", 2, [".:launch"])
    assert task["resources"]["gpu"] == {"name": "H100", "count": 8}
    assert any("NODE_RANK=$DSTACK_NODE_RANK" in line for line in task["commands"])


def test_kubernetes_places_the_pods_on_the_card(two_nodes: dict[str, dict[str, Any]]) -> None:
    spec = two_nodes["kubernetes"]["spec"]
    assert spec["trainer"]["numNodes"] == 2
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    script = spec["trainer"]["command"][2]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    assert script.index("$PET_NODE_RANK") < script.index("unset ${!PET_@}") < script.index("run.sh trl")


def test_hf_itself_accepts_the_job(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    assert run([*LLAMA, "--gpu", "l40s", "--gpus", "4", "--job", "hf-jobs", "--out", str(out)]) == 0
    tool = tmp_path / "bin" / "hf"
    tool.parent.mkdir()
    # the hub's own command line, told to submit nothing
    tool.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m huggingface_hub.cli.hf jobs run --dry-run "$@"\n')
    tool.chmod(0o755)
    done = subprocess.run(
        ["bash", str(out / "launch" / "hf-jobs.sh")],
        env={**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "l40sx4" in done.stdout
    assert "python:3.12" in done.stdout
    assert "24h" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--gpu", "rtx-4090", "--job", "hf-jobs"], "no name for GeForce RTX 4090"),
        (["--gpu", "l40s", "--gpus", "2", "--job", "hf-jobs"], "no machine with 2 x L40S, but with 1, 4, 8"),
        (["--gpu", "h200", "--gpus", "16", "--job", "hf-jobs"], "has one machine, got 2 nodes"),
        (["--gpu", "mi300x", "--job", "kubernetes"], "no name for AMD Instinct MI300X"),
        (["--gpu", "h100-sxm", "--job", "pbs"], "--job must be one of slurm, skypilot"),
    ],
)
def test_what_a_scheduler_does_not_have_is_refused(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert run([*LLAMA, *words, "--dataset", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "plan")]) == 2
    errors = capsys.readouterr().err
    assert reason in errors
    assert "samples" not in errors  # reading them may take minutes
    assert "hint: " in errors
    assert not (tmp_path / "plan").exists()


def test_a_slurm_job_of_one_gpu_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    assert run([*LLAMA, "--gpu", "h100-sxm", "--job", "slurm", "--out", str(tmp_path)]) == 0
    assert "--gpus-per-node=1" in (tmp_path / "launch" / "trl" / "slurm.sbatch").read_text()
    assert "`sbatch launch/trl/slurm.sbatch`" in (tmp_path / "launch" / "README.md").read_text()


def test_a_job_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*LLAMA, "--gpu", "h100-sxm", "--job", "dstack"]) == 2
    assert "hint: add --out DIR" in capsys.readouterr().err


def test_names_are_of_cards_in_the_table_and_labels_are_labels() -> None:
    from planner.frameworks.exporters.jobs import scheduler_names

    assert {find_gpu(key).key for key in scheduler_names()} == set(scheduler_names())
    for gpu in all_gpus():
        label = SCHEDULERS["kubernetes"].card(gpu, 1)
        assert re.fullmatch(r"([\w.-]{1,63})?", label, re.ASCII), gpu.key
