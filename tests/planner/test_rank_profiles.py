"""Ranks that keep a part of the states: the profiles that ship beside each engine's closed forms, against frozen dry
runs, and a walk's figures beside a setup's own."""

import random
import statistics
from dataclasses import replace

import pytest

from benchmarks import frozen
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import memory_of, predict_memory
from planner.memory.profiles import GRADIENTS
from planner.memory.ranks import rank_step
from planner.options.layouts import SHARDED
from planner.planning.decision.layouts import layouts
from planner.planning.decision.results import Limits
from planner.planning.evidence.bands import memory_band, profile_band
from planner.planning.walk import walk
from planner.setup import TrainSetup
from tests.planner.helpers import loaded, plan_request

GPU = find_gpu("a100-80gb")
LLAMA = "meta-llama/llama-3.1-8b"


@pytest.mark.parametrize(("parallel", "median", "worst"), [("fsdp2", 2e-4, 0.015), ("zero1", 2e-4, 0.03)])
def test_shipped_profiles_are_the_frozen_dry_runs(parallel: str, median: float, worst: float) -> None:
    errors, formula = [], []
    for model, gpu, setup, measured, *_ in frozen.points("ranks"):
        if setup.parallel != parallel:
            continue
        breakdown = memory_of(model, gpu, setup)[0].breakdown
        if breakdown.profiled:
            errors.append(abs(breakdown.peak_allocated_bytes / measured["allocated"] - 1))
            formula.append(abs(predict_memory(model, gpu, setup).peak_allocated_bytes / measured["allocated"] - 1))
    assert len(errors) > 10
    assert statistics.median(errors) < min(median, statistics.median(formula) / 3)
    assert max(errors) < worst


def test_a_walk_over_shards_says_what_each_setup_does() -> None:
    workload = replace(plan_request("meta-llama/Llama-3.1-8B", "a100-80gb", seq_len=1024), cluster=make_cluster(GPU, 4))
    points = [point for point in walk(workload, layouts=layouts(workload)) if point.shared.parallel in SHARDED]
    profiled = 0
    for point in random.Random(0).sample(points, 40):
        exact = memory_of(workload.model, GPU, point.setup)[0].breakdown
        profiled += exact.profiled
        assert point.peak_device_bytes == pytest.approx(exact.peak_device_bytes, abs=4096), point.setup
    assert profiled > 10


def test_weights_that_are_gathered_and_freed_leave_holes() -> None:
    setup = TrainSetup(kernels="liger", num_gpus=8, parallel="fsdp2", checkpointing=1)
    alone, unfreed, fixed = (
        memory_of(loaded(LLAMA), GPU, variant)[0].breakdown.allocator_gap_bytes
        for variant in (setup, setup.replace(reshard_after_forward=False), setup.replace(expandable_segments=False))
    )
    assert alone - unfreed > 400 << 20  # a layer of 416 MiB, and a third of the table
    assert fixed != alone


def test_an_engine_that_takes_each_gradient_as_it_comes_has_a_layers_nowhere() -> None:
    base = {"method": "full", "lora_rank": 0, "precision": "bf16-mixed", "kernels": "liger", "num_gpus": 4}
    step = {
        parallel: rank_step(loaded(LLAMA), GPU, TrainSetup(**base, parallel=parallel))
        for parallel in ("fsdp2", "zero3")
    }
    alive = {
        name: {group[0] for group in profile.groups_at("turn", 2, accumulated=False)}
        for name, profile in step.items()
        if profile is not None
    }
    assert (GRADIENTS in alive["fsdp2"], GRADIENTS in alive["zero3"]) == (True, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": "fsdp2", "offload": "parameters"},
        {"parallel": "fsdp2", "context_degree": 2},
        {"parallel": "zero2", "objective": "dpo", "loss": "full"},
        {"parallel": "ddp"},
    ],
)
def test_what_no_profile_of_ranks_shows_is_left_to_the_closed_forms(fields: dict[str, str]) -> None:
    assert rank_step(loaded(LLAMA), GPU, TrainSetup(num_gpus=4, kernels="liger", **fields)) is None


def test_the_band_of_a_sharded_rank_is_narrower_by_its_profile() -> None:
    model, setup = loaded(LLAMA), TrainSetup(num_gpus=4, parallel="fsdp2")
    assert profile_band(setup) < memory_band(model, setup)
    assert profile_band(setup.replace(parallel="zero2")) == memory_band(model, setup.replace(parallel="zero2"))


@pytest.mark.parametrize(("kernels", "band"), [("liger", 0.06), ("fused", 0.08)])
def test_the_reserve_of_a_walked_rank_is_its_profiles_where_it_has_one(kernels: str, band: float) -> None:
    """Fused adapters are in fp32, of which no rank has a profile."""
    setup = TrainSetup(num_gpus=8, parallel="fsdp2", kernels=kernels, checkpointing=1, stack="axolotl")
    limits = Limits(loaded(LLAMA), 76 << 30, gpu=GPU)
    assert limits.bytes_with_margin(setup) == pytest.approx((76 << 30) / (1 + band))
    assert memory_of(loaded(LLAMA), GPU, setup)[0].breakdown.profiled == (band < 0.08)
