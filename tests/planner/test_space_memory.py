"""The walk's figures are `memory_of`'s: the space shares parts, it has no memory model of its own."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import memory_of
from planner.memory.workload import Workload
from planner.planning.decision.layouts import STAGES, layouts
from planner.planning.groups import WalkCache
from planner.planning.space import dimension_values
from planner.planning.walk import walk
from planner.setup import TrainSetup
from tests.planner.helpers import loaded, plan_request
from tests.whole import some

ROUNDING = 1e-6
"""Whole bytes in the walk's straight lines; every candidate for the peak is extended by itself, so nothing else."""


@pytest.mark.parametrize(
    ("name", "gpu"),
    some(
        [
            ("qwen/qwen2.5-1.5b", "rtx-4090"),
            ("meta-llama/llama-3.1-8b", "a100-80gb"),
            ("microsoft/phi-2", "t4"),
            ("qwen/qwen3.5-4b", "h100-sxm"),
            ("allenai/olmoe-1b-7b-0924", "h100-sxm"),
        ],
        2,
    ),
)
def test_walk_peak_is_that_of_the_setup_alone(name: str, gpu: str) -> None:
    model, card = loaded(name), find_gpu(gpu)
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
        exact = memory_of(model, card, point.setup)[0].breakdown.peak_device_bytes
        error = point.peak_device_bytes / exact - 1.0
        assert abs(error) <= ROUNDING, (error, point.setup)


@pytest.mark.parametrize(
    ("name", "gpu", "seq_len", "num_gpus"),
    [
        ("Qwen/Qwen2.5-1.5B", "rtx-4090", 128, 1),
        ("google/gemma-3-4b-it", "a100-80gb", 2048, 1),
        ("microsoft/phi-2", "t4", 512, 1),
        ("google/gemma-2-9b", "h100-sxm", 4096, 1),
        ("meta-llama/Llama-3.2-1B", "rtx-4090", 4096, 4),
    ],
)
def test_what_another_setup_dominates_is_never_smaller(
    name: str, gpu: str, seq_len: int, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is left out for its speed, or because the one that dominates it does not fit: no plan that fits may be lost
    by it. Both by closed forms: what is left out has no step profile."""
    monkeypatch.setattr("planner.planning.peaks.step_profile_of", lambda *_: None)
    workload, cache = plan_request(name, gpu, seq_len=seq_len), WalkCache()
    if num_gpus > 1:
        workload = replace(workload, cluster=make_cluster(workload.gpu, num_gpus))
    unfused = 0
    runs = cache.runs(workload, dimension_values(workload), layouts(workload, STAGES))
    for run in [run for run in runs if run.dominating is not None][::7]:
        assert run.dominating.dominating is None
        unfused += run.dominating.shared.attention != run.shared.attention
        for loss in run.choices:
            mine, best = (cache.peaks(workload, candidate, loss) for candidate in (run, run.dominating))
            for at in range(len(run.pairs)):
                assert all(peak >= other for peak, other in zip(mine.at(at), best.at(at), strict=True))
    assert unfused


@pytest.mark.parametrize(("slower", "left_out"), [(0.02, False), (0.04, True)])
def test_a_run_is_left_out_where_the_dominating_one_is_faster_by_more_than_a_preference(
    slower: float, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fixed:
        def __init__(self, setup: TrainSetup) -> None:
            self._fused = setup.attention != "eager" and setup.kernels == "liger"

        def tokens_per_s(self, _: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
            return [1000.0 if self._fused else 1000.0 * (1 - slower)] * len(pairs)

    monkeypatch.setattr("planner.planning.walk.family_speeds", lambda _model, _gpu, setup, *_: Fixed(setup))
    workload = plan_request("Qwen/Qwen2.5-1.5B", "rtx-4090", seq_len=128)
    runs = WalkCache().runs(workload, dimension_values(workload), layouts(workload, STAGES))
    dominated = {run.shared for run in runs if run.dominating is not None and run.shared.kernels == "eager"}
    walked = {point.shared for point in walk(workload)}
    assert dominated
    assert (dominated <= walked, walked & dominated == set()) == (not left_out, left_out)
