"""Over the catalogue and five cards: no file is written that its own prediction calls out of memory, and every place
that names the number names the same one.

A fixed stride through the grid by default; all of it with `LAUNCH_GRID_STRIDE=1 pytest tests/cli/test_launch_grid.py`
(`-k t4`: one card).
"""

import os
from itertools import product
from pathlib import Path

import pytest

from finetune_planner.cli.writing import launch_files
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

CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-sxm")
STRIDE = int(os.environ.get("LAUNCH_GRID_STRIDE", "211"))
LOADED = [model for name in catalogue.names() if (model := catalogue.load(name)) is not None]
MODELS = sorted({model.model_id for model in LOADED if not model.reads_both_ways})
GRID = list(product(MODELS, CARDS))[::STRIDE]


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
