"""The walk's figures are `predict_memory`'s: the space shares parts, it has no memory model of its own."""

import random

import pytest

from planner.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.walk import walk
from planner.workload import Workload

ROUNDING = 1e-6
"""Whole bytes in the walk's straight lines; every candidate for the peak is extended by itself, so nothing else."""


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("qwen/qwen2.5-1.5b", "rtx-4090"),
        ("meta-llama/llama-3.1-8b", "a100-80gb"),
        ("microsoft/phi-2", "t4"),
        ("qwen/qwen3.5-4b", "h100-sxm"),
        ("allenai/olmoe-1b-7b-0924", "h100-sxm"),
    ],
)
def test_walk_peak_equals_predict_memory(name: str, gpu: str) -> None:
    model, card = catalogue.load(name), find_gpu(gpu)
    assert model is not None
    workload = Workload(
        model=model,
        gpu=card,
        memory_bytes=card.memory_bytes,
        headroom_bytes=0,
        seq_len_tokens=1024,
        global_batch_seqs=16,
    )
    points = list(walk(workload))
    draw = random.Random(0)
    for point in draw.sample(points, 120):
        exact = predict_memory(model, card, point.setup).peak_device_bytes
        error = point.peak_device_bytes / exact - 1.0
        assert abs(error) <= ROUNDING, (error, point.setup)
