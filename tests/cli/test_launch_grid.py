"""Over the catalogue and five cards: no file is written that its own prediction calls out of memory, and every place
that names the number names the same one.

A fixed stride through the grid by default; all of it with `LAUNCH_GRID_STRIDE=1 pytest tests/cli/test_launch_grid.py`
(`-k t4`: one card).
"""

import io
import json
import os
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from finetune_planner.cli.writing import launch_files, launch_sentences, write_out
from planner.core.units import gib
from planner.frameworks.exporters import TARGETS
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.expressed import as_run
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import device_peak_bytes
from planner.planning.targets import own_choice
from planner.setup import TrainSetup
from reports.plan_json import plan_to_dict
from reports.terminal import render_plan

CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-sxm")
STRIDE = int(os.environ.get("LAUNCH_GRID_STRIDE", "211"))
LOADED = [model for name in catalogue.names() if (model := catalogue.load(name)) is not None]
MODELS = sorted({model.model_id for model in LOADED if not model.reads_both_ways})
GRID = list(product(MODELS, CARDS))[::STRIDE]
TWO = [("meta-llama/Llama-3.1-8B", "rtx-4090"), ("Qwen/Qwen2.5-1.5B", "rtx-3060")]


def own_setup(plan: Plan, target: str) -> TrainSetup | None:
    """What a target's file says: the plan's setup as the target runs it, or, where that does not run or fit, what the
    target would best run of the same training."""
    workload = plan.workload
    runs = as_run(target, plan.chosen.setup, workload)
    if not isinstance(runs, str) and device_peak_bytes(workload.model, workload.gpu, runs) <= workload.budget_bytes:
        return runs
    choice = own_choice(workload, plan.chosen.setup, target)
    return choice.setup if choice is not None else None


@pytest.mark.parametrize(("name", "card"), GRID)
def test_no_written_file_is_predicted_to_run_out(name: str, card: str, tmp_path: Path) -> None:
    model, gpu = catalogue.load(name), find_gpu(card)
    fixed = {"objective": ("classification",)} if model.reads_both_ways else {}
    plan = plan_workload(PlanRequest(fixed=fixed).workload(model, gpu))
    if not isinstance(plan, Plan):
        return
    written, refused = 0, {}
    for launch in launch_files(plan, None, tmp_path):
        if launch.target not in TARGETS or not launch.files:
            assert launch.refused or launch.target == "launch"
            refused[launch.target] = launch.refused
            continue
        written += 1
        runs = own_setup(plan, launch.target)
        assert runs is not None
        assert launch.peak_device_bytes == device_peak_bytes(model, gpu, runs) <= plan.workload.budget_bytes
        words = f"peak {gib(launch.peak_device_bytes)} of {gib(gpu.memory_bytes)} ({launch.level})"
        text = " ".join(launch.files[0].text.replace("\n#", " ").split())
        assert words in text
    assert written, refused


@pytest.mark.parametrize(("name", "card"), GRID if STRIDE == 1 else TWO)
def test_every_place_names_the_same_numbers(name: str, card: str, tmp_path: Path) -> None:
    model, gpu = catalogue.load(name), find_gpu(card)
    plan = plan_workload(PlanRequest().workload(model, gpu))
    if not isinstance(plan, Plan):
        assert (name, card) not in TWO
        return
    launches = write_out(plan, tmp_path, targets=None, command=["x"])
    document = json.loads((tmp_path / "plan.json").read_text())
    printed = json.loads(json.dumps(plan_to_dict(plan)))
    assert {key: document[key] for key in printed} == printed  # `--json` is the plan.json without what is written
    screen = io.StringIO()
    render_plan(plan, Console(file=screen, width=100), launches=launch_sentences(launches, named=False))
    pages = {name: (tmp_path / name).read_text() for name in ("report.md", "report.html")}
    pages["terminal"] = " ".join(screen.getvalue().split())
    chosen = document["chosen"]
    peak, speed = chosen["formula"]["peak_device_bytes"], chosen["formula"]["tokens_per_s"]
    for page, text in pages.items():
        assert f"{gib(peak)} of the {gib(chosen['budget_bytes'])} budget" in text, page
        assert f"{speed:,.0f} tokens/s" in text, page
    readme = (tmp_path / "launch" / "README.md").read_text()
    for launch in document["launch"]:
        if launch.get("files"):
            words = f"peak {gib(launch['peak_device_bytes'])} of {gib(gpu.memory_bytes)} ({launch['level']})"
            assert words in readme
            assert any(words in note for note in launch["notes"])
            assert gib(launch["peak_device_bytes"]) in pages["report.md"]
            assert gib(launch["peak_device_bytes"]) in pages["report.html"]
            head = (tmp_path / launch["files"][0]["path"]).read_text().replace("\n#", " ")
            assert words in " ".join(head.split())
    for alternative in document["alternatives"]:
        delta = alternative["candidate"]["formula"]["peak_device_bytes"] - peak
        assert alternative["trade"].count(gib(abs(delta))) == 1 or delta == 0
