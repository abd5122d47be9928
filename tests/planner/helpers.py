"""Workloads for tests, from catalogue facts."""

from typing import Any

from planner.cli.wish import workload
from planner.gpus import find_gpu
from planner.models import catalogue
from planner.workload import Workload


def wish(model: str = "Qwen/Qwen2.5-1.5B", gpu: str = "rtx-4090", **options: Any) -> Workload:
    """A workload as the command line would make it."""
    spec = catalogue.load(model)
    assert spec is not None
    fixed = options.pop("fixed", {})
    return workload(spec, find_gpu(gpu), fixed=fixed, **options)
