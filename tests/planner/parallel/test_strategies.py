"""The spreads a plan chooses from: what is thought of, what is left out and why, and what the user's requests do."""

from typing import Any

import pytest

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.planning.decision.layouts import (
    FIELDS,
    STAGES,
    all_layouts,
    layout_key,
    layout_order,
    layouts,
)
from planner.setup import TrainSetup
from tests.planner.helpers import plan_request


def job(
    num_gpus: int = 8, *, model: str = "meta-llama/Llama-3.1-8B", nodes: int | None = None, **options: Any
) -> Workload:
    gpu = "a100-80gb"
    return plan_request(model, gpu, cluster=make_cluster(find_gpu(gpu), num_gpus, num_nodes=nodes), **options)


def names(workload: Workload, *stages: str) -> list[str]:
    return [layout.name for layout in layouts(workload, stages or STAGES)]


def test_one_gpu_has_no_spreads() -> None:
    assert all_layouts(plan_request()) == ()


def test_every_spread_makes_a_setup_and_keeps_the_global_batch() -> None:
    workload = job(16, nodes=2)
    candidates = layouts(workload, STAGES)
    assert len({layout_key(TrainSetup(**layout.fields)) for layout in candidates}) == len(candidates) > 15
    for layout in candidates:
        setup = TrainSetup(**layout.fields)
        assert setup.num_gpus == 16
        assert setup.data_degree == layout.data_degree
        assert workload.global_batch_seqs % layout.data_degree == 0


def test_replicated_and_sharded_come_first_and_offloading_last() -> None:
    stages = [layout.stage for layout in layouts(job(), STAGES)]
    assert stages == sorted(stages, key=STAGES.index)
    assert names(job(), "replicate") == ["DDP"]
    assert {"ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"} <= set(names(job(), "shard"))
    assert not any("groups" in name or "GPipe" in name for name in names(job()))
    assert not {"dp", "device-map"} & {layout.fields["parallel"] for layout in all_layouts(job())}
    assert all("GPipe" in name for name in names(job(fixed={"pipeline_schedule": ("gpipe",)})))


def test_over_several_nodes_groups_are_sharded_and_matrices_stay_within_one() -> None:
    assert "FSDP2 in groups of 8" in names(job(16, nodes=2))
    assert len(set(names(job(16, nodes=2)))) == len(names(job(16, nodes=2)))
    assert all(layout.fields["tensor_degree"] <= 8 for layout in layouts(job(32, nodes=4), ("split",)))


def test_what_the_global_batch_cannot_be_dealt_to_is_left_out_with_the_reason() -> None:
    left = {layout.name: layout.reason for layout in all_layouts(job(64, global_batch=32))}
    assert "32 sequences" in left["DDP"]
    assert "64 copies" in left["DDP"]
    assert left["tensor 8 under FSDP2"] == ""


def test_heads_that_cannot_be_divided_are_a_reason() -> None:
    left = {layout.name: layout.reason for layout in all_layouts(job(model="Qwen/Qwen2.5-7B"))}
    assert "28 attention heads" in left["tensor 8"]
    assert left["tensor 4 under FSDP2"] == ""


def test_more_stages_than_layers_are_a_reason() -> None:
    candidates = all_layouts(job(64, model="Qwen/Qwen2.5-0.5B", fixed={"pipeline_degree": (32,)}))
    assert candidates
    assert all("24 layers" in layout.reason for layout in candidates)


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "dp", "device-map"])
def test_a_wish_for_one_way_is_kept(parallel: str) -> None:
    candidates = layouts(job(fixed={"parallel": (parallel,)}), STAGES)
    assert candidates
    assert {layout.fields["parallel"] for layout in candidates} == {parallel}


def test_degrees_that_were_asked_for_are_the_only_ones() -> None:
    candidates = layouts(job(fixed={"tensor_degree": (2,), "pipeline_degree": (2,)}), STAGES)
    assert {layout.name for layout in candidates} == {
        f"tensor 2 × pipeline 2 under {name}" for name in ("DDP", "ZeRO-1", "FSDP2")
    }


def test_a_degree_that_does_not_divide_the_gpus_is_named() -> None:
    candidates = all_layouts(job(fixed={"tensor_degree": (3,)}))
    assert candidates
    assert all("cannot be cut" in layout.reason for layout in candidates)


def test_key_and_rank_follow_the_setup() -> None:
    ddp, fsdp2 = TrainSetup(num_gpus=8, parallel="ddp"), TrainSetup(num_gpus=8, parallel="fsdp2")
    assert layout_key(ddp) != layout_key(fsdp2)
    assert len(layout_key(ddp)) == len(FIELDS)
    assert layout_order(TrainSetup()) == 0 < layout_order(ddp) < layout_order(fsdp2)
    assert layout_order(fsdp2) < layout_order(fsdp2.replace(offload="parameters"))
