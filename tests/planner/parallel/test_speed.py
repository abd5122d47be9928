"""The step time of a spread: what communication adds, and what hides it."""

from dataclasses import replace
from typing import Any

import pytest

from planner.cluster import Cluster, make_cluster
from planner.gpus import find_gpu
from planner.models.catalogue import load
from planner.models.spec import ModelSpec
from planner.parallel.speed import SPREAD_PARTS, spread_profile, spread_step_time
from planner.setup import TrainSetup
from planner.throughput import step_time
from planner.throughput.calibration import load_calibration

A100 = find_gpu("a100-80gb")


def model() -> ModelSpec:
    found = load("meta-llama/Llama-3.1-8B")
    assert found is not None
    return found


def setup(parallel: str, gpus: int = 8, **changes: Any) -> TrainSetup:
    full = {"method": "full", "lora_rank": 0, "precision": "bf16-autocast"}
    return TrainSetup(**{**full, "num_gpus": gpus, "parallel": parallel, **changes})


def seconds(made: TrainSetup, cluster: Cluster | None = None) -> float:
    return spread_step_time(model(), A100, made, cluster or make_cluster(A100, made.num_gpus)).step_time_s


def communication_s(made: TrainSetup, interconnect: str | None = None) -> float:
    cluster = make_cluster(A100, made.num_gpus, interconnect=interconnect)
    return spread_step_time(model(), A100, made, cluster).parts_s["communication"]


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_the_profile_says_what_the_full_answer_says(parallel: str) -> None:
    made = setup(parallel, micro_batch_seqs=2, accumulation_steps=3)
    cluster = make_cluster(A100, 8)
    answer = spread_step_time(model(), A100, made, cluster)
    step, rate = spread_profile(model(), A100, made, cluster).at(2, 3)
    assert step == pytest.approx(answer.step_time_s)
    assert rate == pytest.approx(answer.tokens_per_s) == pytest.approx(made.tokens_per_step / step)
    assert set(answer.parts_s) <= set(SPREAD_PARTS)
    assert min(answer.parts_s.values()) >= 0.0
    assert sum(answer.parts_s.values()) == pytest.approx(step)


def test_ddp_adds_the_reduction_to_one_gpus_step() -> None:
    made = setup("ddp", method="lora", lora_rank=16, micro_batch_seqs=4)
    alone = step_time(model(), A100, made.with_(num_gpus=1, parallel="none")).step_time_s
    assert alone < seconds(made) < 1.01 * alone  # adapters' gradients are small
    full = setup("ddp")
    alone = step_time(model(), A100, full.with_(num_gpus=1, parallel="none")).step_time_s
    assert seconds(full) > 1.02 * alone


def test_a_slower_link_slows_every_strategy() -> None:
    for parallel in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        made = setup(parallel)
        slow = make_cluster(A100, 8, interconnect="pcie")
        assert seconds(made, slow) > 1.2 * seconds(made), parallel


def test_long_micro_batches_hide_the_gathers() -> None:
    def exposed(seqs: int) -> float:
        made = setup("fsdp2", micro_batch_seqs=seqs)
        return spread_step_time(model(), A100, made, make_cluster(A100, 8, interconnect="pcie")).share("communication")

    assert exposed(1) > 2 * exposed(16)


def test_accumulation_postpones_ddps_reduction_but_not_zero2s() -> None:
    """DDP's no_sync under the Trainer; DeepSpeed's stage 2 reduces every micro-batch."""

    def communication(parallel: str, steps: int) -> float:
        return communication_s(setup(parallel, accumulation_steps=steps))

    assert communication("ddp", 8) == pytest.approx(communication("ddp", 1))
    assert communication("zero1", 8) == pytest.approx(communication("zero1", 1))
    assert communication("zero2", 8) > 2 * communication("zero2", 1)
    assert communication("fsdp2", 8) < 8 * communication("fsdp2", 1)  # gathers repeat, reductions do not


def test_keeping_gathered_weights_saves_the_second_gather() -> None:
    slow = make_cluster(A100, 8, interconnect="pcie")
    assert seconds(setup("fsdp2", reshard_after_forward=False), slow) < seconds(setup("fsdp2"), slow)


def test_adapters_are_cheap_to_reduce_but_the_frozen_base_is_gathered() -> None:
    def exposed(parallel: str) -> float:
        made = setup(parallel, method="lora", lora_rank=16)
        return spread_step_time(model(), A100, made, make_cluster(A100, 8, interconnect="pcie")).parts_s[
            "communication"
        ]

    assert exposed("fsdp2") > 20 * exposed("ddp")


def test_a_quantized_base_is_gathered_in_its_bits() -> None:
    def exposed(**changes: Any) -> float:
        made = setup("fsdp2", lora_rank=16, seq_len_tokens=256, **changes)
        return spread_step_time(model(), A100, made, make_cluster(A100, 8, interconnect="pcie")).parts_s[
            "communication"
        ]

    assert exposed(method="qlora", quantization="nf4") < 0.6 * exposed(method="lora")


def test_sharding_divides_the_optimizer_step() -> None:
    def optimizer(parallel: str) -> float:
        return spread_step_time(model(), A100, setup(parallel), make_cluster(A100, 8)).parts_s["optimizer"]

    # 16-bit states under DDP, fp32 masters and states (twice the bytes) over eight ranks
    assert optimizer("zero1") == pytest.approx(optimizer("ddp") * 2 / 8, rel=0.1)


def test_hybrid_shard_keeps_gathers_within_the_node() -> None:
    slow = make_cluster(A100, 32, interconnect="ethernet-100")
    assert seconds(setup("fsdp2", 32, shard_degree=8), slow) < 0.7 * seconds(setup("fsdp2", 32), slow)


def test_more_nodes_expose_more_communication() -> None:
    shares = []
    for gpus in (8, 64, 512):
        made = setup("fsdp2", gpus, micro_batch_seqs=4)
        shares.append(spread_step_time(model(), A100, made, make_cluster(A100, gpus)).share("communication"))
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < shares[-1] < 0.5


def test_constants_come_from_the_calibration() -> None:
    slow = replace(load_calibration(), spread={"nvlink_share": 0.05})
    cluster = make_cluster(A100, 8)
    answer = spread_step_time(model(), A100, setup("zero3"), cluster, calibration=slow)
    assert answer.step_time_s > 1.5 * seconds(setup("zero3"))
