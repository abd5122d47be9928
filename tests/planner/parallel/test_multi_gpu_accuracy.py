"""The predictions for several GPUs on the committed published runs: docs/accuracy/multi-gpu.md must not get worse.

Everything is computed here; the bounds leave room for small changes of the formulas.
"""

import json
from collections import defaultdict
from math import exp
from statistics import median
from typing import Any

import pytest

from benchmarks.multi_gpu_accuracy import log_error, memory_errors, out_of_memory, percentile
from benchmarks.multi_gpu_points import _cluster, _gpu, load_points
from benchmarks.multi_gpu_scaling import PUBLISHED, weak_scaling
from benchmarks.shared import DATA
from planner.core.units import GIB
from planner.memory.model import predict_memory
from planner.models.catalogue import load
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import DATA_FILE, load_calibration
from planner.speed.roofline.types import Conditions
from planner.speed.several_gpus.speed import layout_step_time

POINTS = load_points()
FIRM = [point for point in POINTS if point.tokens_per_s is not None and not point.loose_speed]
CALIBRATION = load_calibration(str(DATA_FILE))
SPEED = [exp(log_error(point, CALIBRATION)) - 1.0 for point in FIRM]
MEMORY = [comparison for comparison in memory_errors(POINTS) if not comparison.point.loose_memory]

SPEED_LIMITS = {
    "fms_acceleration": 0.057, "llm_foundry": 0.06, "torchtitan": 0.07, "ml_engineering": 0.08, "xtuner": 0.08,
    "fsdp_qlora": 0.17,
}  # fmt: skip


def size(errors: list[float]) -> list[float]:
    return [abs(error) for error in errors]


def test_points_are_many_and_name_their_source() -> None:
    assert len(FIRM) >= 480
    assert len(MEMORY) >= 100
    assert {point.setup.num_gpus for point in FIRM} >= {2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {point.strategy for point in FIRM} >= {"DDP", "FSDP", "ZeRO-2", "ZeRO-3", "ZeRO-3, offloaded"}
    assert all(point.at and point.cluster.num_gpus == point.setup.num_gpus for point in POINTS)
    assert all(point.assumed for point in POINTS if point.loose_speed or point.loose_memory)
    assert all(
        row["reason"] and row["rows"] > 0
        for row in json.loads((DATA / "multi_gpu_left_out.json").read_text(encoding="utf-8"))
    )


def test_speed_on_all_published_runs() -> None:
    assert median(size(SPEED)) <= 0.06
    assert percentile(size(SPEED), 0.9) <= 0.15


@pytest.mark.parametrize("source", SPEED_LIMITS)
def test_speed_by_source(source: str) -> None:
    errors = [error for point, error in zip(FIRM, SPEED, strict=True) if point.source == source]
    assert len(errors) >= 4
    assert median(size(errors)) <= SPEED_LIMITS[source]


def test_speed_does_not_drift_with_the_number_of_gpus() -> None:
    """llm_foundry's H100 runs: what 512 GPUs lose against 8 is predicted, so the bias is the same."""
    biases = defaultdict(list)
    for point, error in zip(FIRM, SPEED, strict=True):
        if point.source == "llm_foundry" and point.gpu.key == "h100-sxm":
            biases[point.setup.num_gpus].append(error)
    medians = [median(errors) for _, errors in sorted(biases.items())]
    assert len(medians) == 7
    assert max(medians) - min(medians) <= 0.06


def test_memory_of_the_worst_rank() -> None:
    assert median(size([comparison.error for comparison in MEMORY])) <= 0.08
    assert median(size([comparison.other for comparison in MEMORY])) <= 0.16  # without what FSDP 1 keeps


def test_sharded_full_training_memory_is_nearly_exact() -> None:
    errors = [
        comparison.error
        for comparison in MEMORY
        if comparison.point.source == "fms_acceleration" and comparison.point.setup.method == "full"
    ]
    assert len(errors) >= 8
    assert max(size(errors)) <= 0.03


def test_runs_that_went_out_of_memory_are_mostly_foreseen() -> None:
    gone = out_of_memory(POINTS)
    assert len(gone) >= 30
    assert sum(comparison.error > 0.0 for comparison in gone) >= 0.75 * len(gone)


def test_fsdp_1_keeps_inputs_of_frozen_layers() -> None:
    """Adding them explains LoRA and QLoRA of dense models: what was 14 to 31 % too low is within a few percent."""
    dense = [
        comparison
        for comparison in MEMORY
        if comparison.point.source == "fms_acceleration" and "Llama-2-70b" in comparison.point.labels["model"]
    ]
    assert len(dense) >= 10
    assert median(size([comparison.error for comparison in dense])) <= 0.04
    assert median(size([comparison.other for comparison in dense])) >= 0.15


def test_tensor_parallelism_scales_as_megatron_measured() -> None:
    predicted = weak_scaling()
    assert set(predicted) == set(PUBLISHED)
    assert all(abs(predicted[gpus] - PUBLISHED[gpus]) <= 0.08 for gpus in PUBLISHED)


TITAN = {
    "stack": "torchtitan", "method": "full", "lora_rank": 0, "precision": "bf16-mixed", "parallel": "fsdp2",
    "loss": "full", "packing": True, "seq_len_tokens": 8192,
}  # fmt: skip
BY_OPERATION = {"checkpointing": 1, "selective_checkpointing": True}
TITAN_RUNS = [
    ("8B", BY_OPERATION | {"num_gpus": 8, "micro_batch_seqs": 2}, 5762, 82.4),
    ("8B", BY_OPERATION | {"num_gpus": 128, "micro_batch_seqs": 2}, 5605, 67.0),
    ("8B", BY_OPERATION | {"num_gpus": 64, "tensor_degree": 8, "micro_batch_seqs": 12, "compile": True}, 4378, None),
    ("70B", {"num_gpus": 256, "tensor_degree": 8, "micro_batch_seqs": 16, "compile": True}, 597.3, 71.9),
]


@pytest.mark.parametrize(("size_name", "fields", "tokens_per_s", "reserved_gib"), TITAN_RUNS)
def test_torchtitan_cuts_the_stream_and_the_logits(
    size_name: str, fields: dict[str, Any], tokens_per_s: float, reserved_gib: float | None
) -> None:
    """torchtitan's Llama 3.1 on H100s of 2.4 TB/s and 500 W: as transformers splits it the 70B would need 410 GiB.

    Source: pytorch/torchtitan b5bcd76c benchmarks/llama3_h100_202412_torchtitan.md (the 70B's memory is that of float8,
    which takes 0.2 GiB less than bf16 in its tables 1 and 3), asyncTP_llama3_h100_2025-06_torchtitan.md (speeds with a
    tensor degree).
    """
    setup = TrainSetup(**(TITAN | fields))
    model, gpu = load(f"meta-llama/Llama-3.1-{size_name}"), _gpu("h100-96gb-500w")
    cluster = _cluster("h100-96gb-500w", setup.num_gpus, None, "ib-3200" if setup.num_gpus > 8 else None)
    predicted = layout_step_time(model, gpu, setup, cluster, conditions=Conditions(fp32_reduction=True)).tokens_per_s
    assert predicted / setup.num_gpus == pytest.approx(tokens_per_s, rel=0.18)
    memory = predict_memory(model, gpu, setup)
    assert not any("mask" in term.name for term in memory.terms)
    if reserved_gib is not None:
        assert memory.peak_reserved_bytes / GIB == pytest.approx(reserved_gib, rel=0.13)
