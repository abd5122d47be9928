"""The walk's figures are `predict_memory`'s: the space shares parts, it has no memory model of its own."""

import random

import pytest

from planner.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.space import walk
from planner.workload import Workload

AFFINE_TOLERANCE = 0.003
"""The walk extends the parts of micro-batches 1 and 2 linearly: a maximum of two lines and liger's chunk (a power of
two) are not quite affine."""


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
    points = list(walk(Workload(model=model, gpu=card, seq_len_tokens=1024, global_batch_seqs=16)))
    draw = random.Random(0)
    for point in draw.sample(points, 120):
        exact = predict_memory(model, card, point.setup).peak_device_bytes
        error = point.peak_device_bytes / exact - 1.0
        limit = 1e-9 if point.setup.micro_batch_seqs <= 2 else AFFINE_TOLERANCE
        if point.setup.loss == "liger" and point.setup.micro_batch_seqs > 2:
            limit = 0.03
        assert abs(error) <= limit, (error, point.setup)
