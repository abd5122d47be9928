"""Sequences that are cut over GPUs: bytes and seconds by hand, refusals, what stays as it is."""

from typing import Any

import pytest

from planner.core.errors import SetupError
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.engines import why_not
from planner.memory.model import rank_memories
from planner.memory.workload import Workload
from planner.planning.decision.layouts import LONG_TOKENS, all_layouts
from planner.setup import TrainSetup
from planner.speed.several_gpus.speed import layout_step_time
from tests.planner.helpers import loaded

A100 = find_gpu("a100-80gb")
TOKENS = 65536


def _setup(degree: int, parallel: str = "fsdp2", **fields: Any) -> TrainSetup:
    values = {"num_gpus": 8, "seq_len_tokens": TOKENS, "loss": "chunked", **fields}
    return TrainSetup(context_degree=degree, parallel=parallel, **values)


@pytest.mark.parametrize("parallel", ["fsdp2", "zero3"])
def test_activations_shrink_and_speed_is_paid_for(parallel: str) -> None:
    model, cluster = loaded(), make_cluster(A100, 8)
    sizes, seconds = [], []
    for degree in (1, 2, 4, 8):
        setup = _setup(degree, parallel, accumulation_steps=degree)
        (rank,) = rank_memories(model, A100, setup)
        bytes_by_term = {term.name: term.size_bytes for term in rank.breakdown.terms}
        assert bytes_by_term["checkpointed layer inputs"] == TOKENS // degree * 4096 * 2 * 32
        sizes.append(rank.breakdown.peak_device_bytes)
        seconds.append(layout_step_time(model, A100, setup, cluster).step_time_s)
    assert sizes == sorted(sizes, reverse=True)
    # the same tokens per step: cutting sequences only adds
    assert seconds == sorted(seconds)
    assert seconds[-1] < 1.3 * seconds[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parallel": "ddp"}, "is planned beside zero1"),
        ({"parallel": "fsdp2", "num_gpus": 16, "tensor_degree": 2}, "beside tensor_degree 2 is not planned"),
        ({"parallel": "fsdp2", "attention": "flash-attention-2"}, "needs attention sdpa"),
        ({"parallel": "zero3", "attention": "eager"}, "sdpa or flash-attention-2"),
        ({"parallel": "fsdp2", "seq_len_tokens": 1000}, "cannot be cut into 16 pieces"),
        ({"parallel": "fsdp2", "num_gpus": 12}, "cannot be cut into context_degree 8"),
        ({"parallel": "fsdp2", "compile": True}, "torch.compile"),
    ],
)
def test_what_cannot_be_built(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        _setup(8, **fields)


@pytest.mark.parametrize(
    ("name", "parallel", "degree", "words"),
    [
        ("google/gemma-2-9b", "fsdp2", 2, "sliding window"),
        ("google/gemma-2-9b", "zero3", 2, ""),
        ("qwen/qwen2.5-7b", "zero3", 8, "28 heads"),
        ("qwen/qwen2.5-7b", "fsdp2", 8, ""),
        ("qwen/qwen3.5-27b", "zero3", 2, "state along the sequence"),
        ("google/flan-t5-base", "fsdp2", 2, "not causal"),
    ],
)
def test_models_that_no_engine_cuts(name: str, parallel: str, degree: int, words: str) -> None:
    reason = why_not(loaded(name), _setup(degree, parallel))
    assert (words in reason) if words else not reason


def test_long_sequences_are_cut_unasked_and_short_ones_are_not() -> None:
    def names(tokens: int, **fixed: tuple[Any, ...]) -> set[str]:
        workload = Workload(
            model=loaded(), gpu=A100, memory_bytes=A100.memory_bytes, headroom_bytes=0, seq_len_tokens=tokens,
            global_batch_seqs=8, cluster=make_cluster(A100, 8), fixed=fixed,
        )  # fmt: skip
        return {layout.name for layout in all_layouts(workload) if "context" in layout.name or "Ulysses" in layout.name}

    ways = (("context", "FSDP2"), ("Ulysses", "ZeRO-3"))
    assert names(LONG_TOKENS) == {f"{how} {degree} under {who}" for how, who in ways for degree in (2, 4, 8)}
    assert names(LONG_TOKENS // 2) == set()
    assert names(2048, context_degree=(2,), parallel=("fsdp2",)) == {"context 2 under FSDP2"}
