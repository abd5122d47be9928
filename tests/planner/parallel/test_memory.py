"""The memory of ranks: the ZeRO paper's table, hand-computed buffers, and what must hold whatever the model."""

from collections.abc import Mapping
from typing import Any

import pytest

from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.memory.engines.host import host_bytes_per_node
from planner.memory.model import predict_memory, rank_memories
from planner.memory.trained import trained_parameters
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.allowed import SHARDED
from planner.setup.memory_terms import MemoryBreakdown
from tests.planner.helpers import loaded

GPU = find_gpu("a100-80gb")
FULL: dict[str, Any] = {"method": "full", "precision": "bf16-mixed", "lora_rank": 0}
LORA: dict[str, Any] = {"method": "lora", "precision": "bf16-autocast"}
QLORA: dict[str, Any] = {"method": "qlora", "precision": "bf16-autocast", "quantization": "nf4-double"}
METHODS = {"full": FULL, "lora": LORA, "qlora": QLORA}
PADDING = 1e-4
"""Whole bytes and elements where states are cut over the ranks."""


def _worst(setup: TrainSetup, model: ModelSpec | None = None) -> MemoryBreakdown:
    return rank_memories(model if model is not None else loaded(), GPU, setup)[0].breakdown


def _bytes(breakdown: MemoryBreakdown, *names: str) -> int:
    """The bytes of all terms whose names begin with one of these."""
    return sum(term.size_bytes for term in breakdown.terms if term.name.startswith(names))


@pytest.mark.parametrize(
    ("parallel", "paper", "names"),
    [
        ("ddp", 16, ("weights:", "states of", "gradients")),
        ("zero1", 4 + 12 / 64, ("weights:", "fp32 master", "states of")),
        ("zero2", 2 + 14 / 64, ("weights:", "fp32 master", "states of")),
        ("zero3", 16 / 64, ("weights /", "fp32 master", "states of", "gradients / 64")),
    ],
)
def test_our_states_are_the_zero_papers(parallel: str, paper: float, names: tuple[str, ...]) -> None:
    """Llama-3.1-8B on 64 GPUs, bytes a parameter (arXiv:1910.02054, figure 1): weights, masters, moments and the
    gradients that are kept.

    DDP under autocast holds fp32 weights and gradients (4 + 4 + 8) where the paper counts 2 + 2 + 12: the same 16. Its
    buckets are on top (4 more). ZeRO-1 and ZeRO-2 keep 2 and 2/64 of gradients until the step.
    """
    model = loaded()
    breakdown = _worst(TrainSetup(**FULL, num_gpus=64, parallel=parallel), model)
    backward = [term for term in breakdown.terms if "backward" in term.phases]
    states = sum(
        term.size_bytes for term in breakdown.terms if term.name.startswith(names) and term.phases != ("backward",)
    )
    if parallel == "zero1":
        states += sum(term.size_bytes for term in backward if term.name == "gradients in the backward")
    if parallel == "zero2":
        states += 2 * model.num_params // 64
    assert states / model.num_params == pytest.approx(paper, rel=1e-3)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(
    "name", ["meta-llama/llama-3.1-8b", "qwen/qwen2.5-1.5b", "allenai/olmoe-1b-7b-0924", "google-t5/t5-base"]
)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("checkpointing", [0, 1])
def test_ddp_is_one_gpu_and_its_buckets(method: str, name: str, steps: int, checkpointing: int) -> None:
    """Phase by phase, whatever the one-GPU model becomes."""
    model = loaded(name)
    setup = TrainSetup(**METHODS[method], accumulation_steps=steps, checkpointing=checkpointing, seq_len_tokens=512)
    alone = predict_memory(model, GPU, setup)
    assert rank_memories(model, GPU, setup)[0].breakdown == alone
    ranks = _worst(setup.replace(num_gpus=2, parallel="ddp"), model)
    buckets = trained_parameters(model, setup).size_bytes
    for phase in ("forward", "loss", "backward", "step"):
        assert ranks.phase_bytes[phase] - buckets == alone.phase_bytes[phase], phase


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("parallel", SHARDED)
@pytest.mark.parametrize("steps", [1, 4])
def test_more_shards_never_raise_a_ranks_peak(method: str, parallel: str, steps: int) -> None:
    peaks = [
        _worst(TrainSetup(**METHODS[method], num_gpus=num, parallel=parallel, accumulation_steps=steps))
        for num in (2, 3, 4, 8, 16, 64, 512)
    ]
    allocated = [breakdown.peak_allocated_bytes for breakdown in peaks]
    assert allocated == sorted(allocated, reverse=True)
    assert allocated[0] > allocated[-1]


@pytest.mark.parametrize("field", ["tensor_degree", "pipeline_degree"])
def test_more_splits_never_raise_a_ranks_peak(field: str) -> None:
    peaks = [
        _worst(TrainSetup(**FULL, num_gpus=num, accumulation_steps=16, **{field: num})).peak_allocated_bytes
        for num in (2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_each_stage_of_sharding_holds_less() -> None:
    """Full fine-tuning on eight GPUs: DDP, ZeRO-1, ZeRO-2 and ZeRO-3 in falling order; resharding and groups too."""

    def peak(parallel: str, **more: Any) -> int:
        return _worst(TrainSetup(**FULL, num_gpus=8, parallel=parallel, **more)).peak_allocated_bytes

    order = [peak("ddp"), peak("zero1"), peak("zero2"), peak("zero3")]
    assert order == sorted(order, reverse=True)
    assert peak("fsdp2", reshard_after_forward=False) > peak("fsdp2")
    assert peak("fsdp2", shard_degree=4) > peak("fsdp2")
    assert peak("fsdp2") > peak("fsdp2", offload="parameters")
    assert peak("zero2") > peak("zero2", offload="optimizer")
    assert peak("zero3") > peak("zero3", offload="optimizer") > peak("zero3", offload="parameters")


def test_offloaded_states_lie_on_the_host() -> None:
    """Per parameter: FSDP2 4 (weights) + 4 (gradients), pinned and rounded up, + 8 (moments); ZeRO-2 4
    (masters) + 4 and 2 (gradients and the 16-bit copy) + 8; ZeRO-3 with its weights 2 more."""
    model = loaded()

    def per_parameter(parallel: str, offload: str) -> float:
        setup = TrainSetup(**FULL, parallel=parallel, offload=offload)
        return host_bytes_per_node(model, setup, 1) / model.num_params

    assert 16 < per_parameter("fsdp2", "parameters") < 17.5
    assert per_parameter("zero2", "optimizer") == pytest.approx(18, rel=PADDING)
    assert per_parameter("zero3", "parameters") == pytest.approx(20, rel=PADDING)
    assert host_bytes_per_node(model, TrainSetup(**FULL, num_gpus=8, parallel="zero3"), 1) == 0


@pytest.mark.parametrize(
    ("model_id", "num_gpus", "measured_gb"),
    [("meta-llama/Llama-2-70b-hf", 2, 107), ("meta-llama/Meta-Llama-3-70B", 4, 127)],
)
def test_fsdp1_pins_a_gradient_beside_every_frozen_group(model_id: str, num_gpus: int, measured_gb: int) -> None:
    """Published for a whole node (huggingface/peft docs/source/accelerate/fsdp.md, philschmid.de/fsdp-qlora-llama3);
    what is left is the processes' own, 6 to 10 GB each."""
    fields = {**QLORA, "precision": "bf16-pure", "adapter_dtype": "bf16", "parallel": "fsdp2", "offload": "parameters"}
    setup = TrainSetup(**fields, num_gpus=num_gpus, fsdp_version=1, checkpointing=1)
    held = host_bytes_per_node(loaded(model_id), setup, 1)
    assert 6e9 < (measured_gb * 1e9 - held) / num_gpus < 10e9
    assert host_bytes_per_node(loaded(model_id), setup.replace(fsdp_version=2), 1) < held / 2


def test_pipeline_stages_hold_what_is_in_flight() -> None:
    """GPipe holds 16 micro-batches where 1F1B holds four; the last stage has the loss, the first most in flight."""

    def stages(schedule: str) -> Mapping[str, MemoryBreakdown]:
        setup = TrainSetup(
            **FULL, num_gpus=4, pipeline_degree=4, accumulation_steps=16, checkpointing=0, pipeline_schedule=schedule
        )
        return {rank.name: rank.breakdown for rank in rank_memories(loaded(), GPU, setup)}

    ours, gpipe = stages("1f1b"), stages("gpipe")
    assert next(iter(ours)) == "stage 1 of 4"
    activation_bytes = sum(
        term.size_bytes
        for term in ours["stage 4 of 4"].terms
        if term.category == "activations" and {"forward", "backward"} <= set(term.phases) and not term.resident
    )
    stored = sum(t.size_bytes for t in ours["stage 1 of 4"].terms if "more micro-batches in flight" in t.name)
    assert stored == pytest.approx(3 * activation_bytes, rel=0.01)
    assert _bytes(ours["stage 4 of 4"], "loss chain") > 0
    assert not _bytes(ours["stage 3 of 4"], "loss chain")
    for name, breakdown in gpipe.items():
        assert breakdown.peak_allocated_bytes > ours[name].peak_allocated_bytes


def test_data_parallel_in_one_process_gathers_logits_on_gpu_0() -> None:
    """8 GPUs x 2,048 tokens x 128,256 logits in bf16, and the sum of all gradients beside GPU 0's own."""
    first, other = rank_memories(loaded(), GPU, TrainSetup(**LORA, num_gpus=8, parallel="dp"))
    assert (first.name, first.num_ranks) == ("GPU 0", 1)
    assert (other.name, other.num_ranks) == ("every other GPU", 7)
    single_gpu = predict_memory(loaded(), GPU, TrainSetup(**LORA))
    logits_bytes = _bytes(first.breakdown, "loss chain") - _bytes(single_gpu, "loss chain")
    assert 0 < logits_bytes <= 8 * 2 * 2048 * 128_256
    assert not _bytes(other.breakdown, "states of")


def test_the_worst_rank_comes_first_and_all_gpus_are_counted() -> None:
    setup = TrainSetup(**FULL, num_gpus=8, pipeline_degree=4, parallel="fsdp2", accumulation_steps=8)
    ranks = rank_memories(loaded(), GPU, setup)
    peaks = [rank.breakdown.peak_device_bytes for rank in ranks]
    assert peaks == sorted(peaks, reverse=True)
    assert sum(rank.num_ranks for rank in ranks) == 8


@pytest.mark.parametrize(
    ("name", "stack", "fields", "dry_gib"),
    [
        ("Qwen/Qwen3-8B", "axolotl", {}, 12.74),
        ("Qwen/Qwen3-8B", "axolotl", {"offload": "parameters"}, 7.02),
        ("Qwen/Qwen3-8B", "axolotl", {"method": "lora", "lora_rank": 16, "lora_targets": "attention"}, 8.74),
        ("Qwen/Qwen3-8B", "hf", {}, 17.78),
        ("openai/gpt-oss-20b", "axolotl", {"accumulation_steps": 4}, 29.46),
        ("openai/gpt-oss-20b", "hf", {"offload": "parameters"}, 6.75),
    ],
)
def test_axolotl_shards_as_loaded_and_keeps_one_root_gathered(
    name: str, stack: str, fields: dict[str, object], dry_gib: float
) -> None:
    """Against dry runs of a rank of 8 on an H100 (30 November 2026), which wraps a model as the stack's own function
    does: bf16 shards in the place of fp32 ones, tables and head gathered from the forward to the backward's end; a
    mixture's stacks have all their gradients at once."""
    full = fields.get("method") != "lora"
    values: dict[str, Any] = {"method": "full", "lora_rank": 0} if full else {"adapter_dtype": "fp32"}
    attention = "flash-attention-2" if "gpt" in name else "sdpa"
    values |= {"loss": "chunked" if full else "full", "checkpointing": 1, "seq_len_tokens": 2048, "num_gpus": 8}
    values |= {"precision": "bf16-autocast", "parallel": "fsdp2", "stack": stack, "attention": attention, **fields}
    setup = TrainSetup(**values)
    peak_bytes = predict_memory(loaded(name), find_gpu("h100-sxm"), setup).peak_allocated_bytes
    assert peak_bytes / GIB == pytest.approx(dry_gib, rel=0.02)
