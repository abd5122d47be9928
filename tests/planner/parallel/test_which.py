"""Which cluster: the numbers of GPUs tried, the picks, and that each is what a plan of it takes."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.engines.host import (
    HOST_MEMORY_MOST_BYTES,
    HOST_MEMORY_RATIO,
    HOST_SHARE,
    assumed_host_bytes,
    host_bytes_per_node,
)
from planner.memory.workload import Data, Workload
from planner.planning.clusters import (
    ClusterOption,
    Job,
    Limits,
    Outcome,
    cheapest,
    counts,
    deciding_outcomes,
    every_outcome,
    fastest,
    nearest,
    smallest,
)
from planner.setup import TrainSetup
from tests.planner.helpers import plan_request, planned, refusal_of


def job(num_gpus: int, gpu: str = "a100-80gb", model: str = "Qwen/Qwen2.5-1.5B", method: str = "lora") -> Workload:
    cluster = make_cluster(find_gpu(gpu), num_gpus) if num_gpus > 1 else None
    data = Data(epoch_tokens=10_000_000)
    return plan_request(model, gpu, cluster=cluster, fixed={"method": (method,)}, global_batch=32, price=2.0, data=data)


def cluster_job(workload: Workload) -> Job:
    return Job(workload=workload, cluster=workload.cluster or make_cluster(workload.gpu, 1))


def fitting(outcomes: Iterable[Outcome]) -> list[ClusterOption]:
    return [outcome for outcome in outcomes if isinstance(outcome, ClusterOption)]


@cache
def options(num_gpus: int, **limits: float | None) -> list[ClusterOption]:
    return fitting(every_outcome([cluster_job(job(num_gpus))], Limits(**limits)))


def test_counts_are_powers_of_two_up_to_the_limit() -> None:
    assert counts(1) == (1,)
    assert counts(64) == (1, 2, 4, 8, 16, 32, 64)
    assert counts(100) == (1, 2, 4, 8, 16, 32, 64)


def test_a_cluster_is_what_a_plan_of_it_takes() -> None:
    """Nothing fits on the cards alone, and no offloading was tried: a plan does."""
    workload = job(2, "rtx-4090", "Qwen/Qwen2.5-7B", "full")
    (option,) = fitting(every_outcome([cluster_job(workload)], Limits()))
    plan = planned(workload, explained=False)
    assert option.candidate == plan.chosen
    assert option.candidate.setup.offload != "none"


def test_the_picks_of_all_clusters_are_among_those_that_decide() -> None:
    jobs = [cluster_job(job(num, gpu)) for gpu in ("t4", "a100-80gb") for num in (1, 2)]
    options = fitting(every_outcome(jobs, Limits()))
    for limits in (Limits(), Limits(deadline_s=900.0, budget_usd=0.01)):
        every = [replace(option, meets=limits.keep(option.duration_s, option.cost_usd)) for option in options]
        deciding = fitting(deciding_outcomes(jobs, limits))
        for pick in (smallest, cheapest, fastest):
            assert pick(every) == pick(deciding)
        if not any(option.meets for option in every):
            assert nearest(every, limits) == nearest(deciding, limits)
        assert len(deciding) < len(every)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_time_and_cost_are_those_of_all_gpus(num_gpus: int) -> None:
    (option,) = options(num_gpus)
    assert option.duration_s == pytest.approx(10_000_000 / option.candidate.tokens_per_s)
    assert option.cost_usd == pytest.approx(option.duration_s / 3600 * 2.0 * num_gpus)
    assert option.candidate.setup.num_gpus == num_gpus


def test_a_preference_that_no_number_of_gpus_fits_is_refused_with_its_bytes() -> None:
    cluster = make_cluster(find_gpu("t4"), 2)
    arguments = {"fixed": {"objective": ("orpo",)}, "global_batch": 32}
    refused = refusal_of(plan_request("google/gemma-2-27b", "t4", cluster=cluster, seq_len=32_768, **arguments))
    assert refused.nearest.formula.peak_device_bytes > refused.workload.budget_bytes


def test_limits_decide_what_is_kept() -> None:
    (free,) = options(2)
    assert free.meets
    assert free.cost_usd is not None
    assert not options(2, deadline_s=free.duration_s / 2)[0].meets
    assert not options(2, budget_usd=free.cost_usd / 2)[0].meets
    assert options(2, deadline_s=free.duration_s * 2, budget_usd=free.cost_usd * 2)[0].meets


def test_picks() -> None:
    single, two = options(1)[0], options(2)[0]
    cheap = replace(two, cost_usd=0.01)
    assert smallest([two, single]) is single
    assert cheapest([single, cheap]) is cheap
    assert fastest([single, two]) is two
    late = [replace(each, meets=False) for each in (single, two)]
    assert smallest(late) is cheapest(late) is fastest(late) is None
    assert nearest(late, Limits(deadline_s=1.0)) == replace(two, meets=False)
    assert nearest([*late, replace(cheap, meets=False)], Limits(budget_usd=0.005)) == replace(cheap, meets=False)
    assert two.duration_s < single.duration_s
    dear = [replace(two, cost_usd=single.cost_usd * 9, meets=False), late[0]]
    both = Limits(deadline_s=single.duration_s / 2, budget_usd=single.cost_usd / 2)
    assert nearest(dear, both) == late[0]
    assert cheapest([replace(single, cost_usd=None)]) is None
    assert nearest([], Limits()) is None


def test_offloaded_states_lie_in_the_hosts() -> None:
    """Full fine-tuning with everything on the host: eight copies in fp32 while it loads and the shards made of them;
    in the files' own type no copy, and weights, gradients and two states over the nodes."""
    model = plan_request("Qwen/Qwen2.5-7B").model
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", num_gpus=8, parallel="fsdp2", offload="parameters"
    )
    whole = host_bytes_per_node(model, setup, 1)
    assert whole == 9 * 4 * model.num_params
    assert host_bytes_per_node(model, setup, 2) == pytest.approx(whole / 2, rel=1e-6)
    pure = setup.replace(precision="bf16-pure")  # pinned shards are rounded up to a power of two
    assert 8 <= host_bytes_per_node(model, pure, 1) / model.num_params <= 12
    assert host_bytes_per_node(model, setup.replace(offload="none"), 1) == 0
    workload = job(8)
    assert (
        assumed_host_bytes(workload)
        == int(HOST_SHARE * HOST_MEMORY_MOST_BYTES)
        < HOST_MEMORY_RATIO * 8 * workload.gpu.memory_bytes
    )
    assert assumed_host_bytes(job(8, gpu="rtx-4090")) == HOST_MEMORY_RATIO * 8 * find_gpu("rtx-4090").memory_bytes
