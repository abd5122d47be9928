"""The walk over layouts: peaks are `memory_of`' worst rank, speeds `spread_step_time`'s; one GPU stays apart."""

import random

import pytest

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import memory_of
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.planning.decision.layouts import STAGES, all_layouts
from planner.planning.space import dimension_values
from planner.planning.walk import walk
from planner.speed.several_gpus.speed import layout_step_time
from tests.whole import WHOLE, some

ROUNDING = 1e-6
"""Whole bytes in the walk's straight lines; every candidate for the peak is extended by itself, so nothing else."""


def _workload(name: str, gpu: str, num_gpus: int, **fixed: tuple[object, ...]) -> Workload:
    model, card = catalogue.load(name), find_gpu(gpu)
    assert model is not None
    return Workload(
        model=model,
        gpu=card,
        memory_bytes=card.memory_bytes,
        headroom_bytes=0,
        seq_len_tokens=1024,
        global_batch_seqs=32,
        cluster=make_cluster(card, num_gpus),
        fixed=fixed,
    )


@pytest.mark.parametrize(
    ("name", "gpu", "num_gpus"),
    some(
        [
            ("qwen/qwen2.5-1.5b", "rtx-4090", 2),
            ("meta-llama/llama-3.1-8b", "h100-sxm", 16),
            ("allenai/olmoe-1b-7b-0924", "h100-sxm", 8),
        ],
        2,
    ),
)
def test_walk_peak_equals_the_worst_rank_of_memory_of(name: str, gpu: str, num_gpus: int) -> None:
    workload = _workload(name, gpu, num_gpus)
    layouts = [layout for layout in all_layouts(workload) if not layout.reason]
    assert {layout.stage for layout in layouts} >= set(STAGES[:2])
    points = list(walk(workload, dimension_values(workload), some(layouts, 9)))
    draw = random.Random(0)
    for point in draw.sample(points, 200 if WHOLE else 30):
        exact = memory_of(workload.model, workload.gpu, point.setup)[0].breakdown.peak_device_bytes
        error = point.peak_device_bytes / exact - 1.0
        assert abs(error) <= ROUNDING, (error, point.setup)


@pytest.mark.parametrize("parallel", ["dp", "device-map"])
def test_walk_peak_of_spreads_that_are_only_taken_when_asked_for(parallel: str) -> None:
    workload = _workload("meta-llama/llama-3.1-8b", "a100-80gb", 4, parallel=(parallel,))
    layouts = [layout for layout in all_layouts(workload) if not layout.reason]
    points = list(walk(workload, dimension_values(workload), layouts))
    assert {point.shared.parallel for point in points} == {parallel}
    for point in random.Random(1).sample(points, 60):
        exact = memory_of(workload.model, workload.gpu, point.setup)[0].breakdown.peak_device_bytes
        assert point.peak_device_bytes == pytest.approx(exact, rel=ROUNDING)


def test_walk_keeps_the_global_batch_and_the_speed_of_all_gpus() -> None:
    workload = _workload("qwen/qwen2.5-1.5b", "a100-80gb", 8, attention=("sdpa",), loss=("chunked",))
    layouts = some([layout for layout in all_layouts(workload) if not layout.reason], 12)
    points = list(walk(workload, dimension_values(workload), layouts))
    assert workload.cluster is not None
    for point in random.Random(2).sample(points, 60):
        setup = point.setup
        assert setup.global_batch_seqs == 32
        assert setup.num_gpus == 8
        exact = layout_step_time(workload.model, workload.gpu, setup, workload.cluster).tokens_per_s
        assert point.tokens_per_s == pytest.approx(exact, rel=ROUNDING)


def test_walk_leaves_out_what_no_engine_runs() -> None:
    workload = _workload("qwen/qwen2.5-1.5b", "a100-80gb", 8, attention=("sdpa",), checkpointing=(0, 1))
    layouts = [layout for layout in all_layouts(workload) if not layout.reason and layout.fields["parallel"] == "fsdp2"]
    points = list(walk(workload, dimension_values(workload), layouts))
    assert points
    assert not [point for point in points if point.shared.quantization == "int8" or point.optimizer != "adamw-fused"]
