"""The predictions for several GPUs on the committed published runs: docs/accuracy/multi-gpu.md must not get worse.

Everything is computed here; the bounds leave room for small changes of the formulas.
"""

from collections import defaultdict
from math import exp
from statistics import median

import pytest

from benchmarks.multi_gpu_accuracy import log_error, memory_errors, out_of_memory, percentile
from benchmarks.multi_gpu_points import left_out, load_points
from benchmarks.multi_gpu_scaling import PUBLISHED, weak_scaling
from planner.speed.roofline.calibration import DATA_FILE, load_calibration

POINTS = load_points()
FIRM = [point for point in POINTS if point.tokens_per_s is not None and not point.loose_speed]
CALIBRATION = load_calibration(str(DATA_FILE))
SPEED = [exp(log_error(point, CALIBRATION)) - 1.0 for point in FIRM]
MEMORY = [comparison for comparison in memory_errors(POINTS) if not comparison.point.loose_memory]

SPEED_LIMITS = {
    "fms_acceleration": 0.057,
    "llm_foundry": 0.06,
    "torchtitan": 0.07,
    "ml_engineering": 0.08,
    "xtuner": 0.08,
    "fsdp_qlora": 0.17,
}


def size(errors: list[float]) -> list[float]:
    return [abs(error) for error in errors]


def test_points_are_many_and_name_their_source() -> None:
    assert len(FIRM) >= 480
    assert len(MEMORY) >= 100
    assert {point.setup.num_gpus for point in FIRM} >= {2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {point.strategy for point in FIRM} >= {"DDP", "FSDP", "ZeRO-2", "ZeRO-3", "ZeRO-3, offloaded"}
    assert all(point.at and point.cluster.num_gpus == point.setup.num_gpus for point in POINTS)
    assert all(point.assumed for point in POINTS if point.loose_speed or point.loose_memory)
    assert all(row["reason"] and row["rows"] > 0 for row in left_out())


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


def test_the_band_of_several_gpus_is_at_least_that_of_one() -> None:
    assert CALIBRATION.bands["spread"] >= CALIBRATION.bands["gpu"]
