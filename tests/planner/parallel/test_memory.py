"""The memory of ranks: the ZeRO paper's table, hand-computed buffers, and what must hold whatever the model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import padded
from planner.memory.engines import engine_of
from planner.memory.engines.host import host_bytes_per_node
from planner.memory.engines.zero import own_buffers
from planner.memory.model import predict_memory, rank_memories
from planner.memory.rank_part import rank_parts
from planner.memory.states import MOMENTS, RankState
from planner.memory.trained import trained_parameters
from planner.memory.workspace import NCCL_NVLINK_BYTES, NCCL_NVLINK_PAIR_BYTES, NCCL_PCIE_BYTES, communicator_bytes
from planner.models.spec import ModelSpec
from planner.options.stacks import STACKS
from planner.planning.predict import memory_notes
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


def test_ddp_buckets_are_as_large_as_the_gradients() -> None:
    """Hand-computed: LoRA of rank 16 on all linear layers of Llama-3.1-8B, 41,943,040 parameters in fp32."""
    assert _bytes(_worst(TrainSetup(**LORA, num_gpus=2, parallel="ddp")), "DDP's buckets") == 4 * 41_943_040


def _fsdp2(**more: Any) -> RankState:
    setup = TrainSetup(**{**FULL, "num_gpus": 8, "parallel": "fsdp2", **more})
    accumulated = setup.accumulation_steps > 1
    return engine_of(setup).state(rank_parts(loaded(), setup)[0], setup, accumulated=accumulated)


def _at(state: RankState, moment: str, category: str) -> int:
    """Bytes of one category that are held at a moment and not all along."""
    temporary = [
        allocation
        for allocation in state.allocations
        if allocation.category == category and allocation.moments != MOMENTS
    ]
    return sum(allocation.size_bytes for allocation in temporary if moment in allocation.moments)


def test_fsdp2_gathers_one_block_and_prefetches_another() -> None:
    """Hand-computed for Llama-3.1-8B on 8 GPUs, in bf16: a block has 218,112,000 parameters, the head and the table
    525,336,576 each, the final norm 4,096. Arriving, the head's buffer and weights stand beside the last block's
    buffer; in a block's backward its weights, the next one's buffer, and the reduce-scatter's input before."""
    share = _fsdp2()
    block, table, tail = 2 * 218_112_000, 2 * 525_336_576, 2 * (525_336_576 + 4096)
    assert _at(share, "gather", "weights") == block + 2 * tail
    assert _at(share, "forward", "weights") == 2 * block
    assert _at(share, "loss", "weights") == tail
    assert share.loss_forward_bytes == tail
    assert _at(share, "first", "weights") == 2 * block
    assert _at(share, "last", "weights") == block + table
    matrix = 2 * 4096 * 14336
    assert _at(share, "first", "gradients") == matrix + tail
    # the head's gradient, its copy, and an eighth of it in bf16 and again in fp32
    assert _at(share, "head", "gradients") == 2 * tail + tail // 8 + 2 * tail // 8
    assert _at(share, "step", "gradients") == 4 * loaded().num_params // 8


def test_fsdp2_keeps_every_block_where_weights_are_not_resharded() -> None:
    keep, free = _fsdp2(reshard_after_forward=False), _fsdp2()
    block, table = 2 * 218_112_000, 2 * 525_336_576
    assert _at(keep, "loss", "weights") - _at(free, "loss", "weights") == 32 * block + table
    assert _at(keep, "first", "weights") == 32 * block + table
    assert _at(keep, "last", "weights") == block + table


def test_fsdp2_holds_whole_gradients_until_the_last_micro_batch_unless_each_is_reduced() -> None:
    cut, waits = (_fsdp2(accumulation_steps=2, sync_each_batch=sync) for sync in (True, False))
    whole = 2 * loaded().num_params
    assert _at(waits, "loss", "gradients") - _at(cut, "loss", "gradients") == whole
    # a share in fp32 when they are reduced, where the other is there all along
    assert _at(waits, "step", "gradients") == 2 * whole // 8


def test_fsdp2_pads_small_first_dimensions() -> None:
    """Mixtral's stacks of 8 experts over 16 ranks: every rank of the first half holds a whole expert, an eighth."""
    model = loaded("mistralai/mixtral-8x7b-v0.1")

    def weights(num_gpus: int) -> int:
        return _bytes(_worst(TrainSetup(**LORA, num_gpus=num_gpus, parallel="fsdp2"), model), "weights /")

    experts = (
        2 * sum(linear.num_weights for linear in model.layer_kinds[0].linears if linear.num > 1) * model.num_layers
    )
    assert weights(8) - weights(16) == pytest.approx((2 * model.num_params - experts) / 16, rel=PADDING)


def test_zero_buckets_are_whole_whatever_is_trained() -> None:
    """DeepSpeed's default of 5e8 elements for a large model, and no more than there is to reduce."""
    assert own_buffers(8_030_261_248).reduce_bucket_elements == 500_000_000
    assert own_buffers(41_943_040).reduce_bucket_elements == 41_943_040
    setup = TrainSetup(**FULL, num_gpus=8, parallel="zero2")
    assert _bytes(_worst(setup), "ZeRO's reduce bucket") == 2 * 500_000_000


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("parallel", ["zero1", "zero2", "zero3", "fsdp2"])
def test_engines_that_cast_compute_without_autocast(method: str, parallel: str) -> None:
    setup = TrainSetup(**METHODS[method], num_gpus=4, parallel=parallel)
    inner = engine_of(setup).computes(setup)
    assert inner.autocast_dtype is None
    assert inner.compute_dtype == "bf16"
    assert inner.num_gpus == 1
    assert not inner.layout
    assert method == "full" or inner.resolved_adapter_dtype == "bf16"
    half = engine_of(setup).computes(
        setup.replace_trusted(precision="fp16-mixed" if method == "full" else "fp16-autocast")
    )
    assert (half.compute_dtype, half.weight_dtype) == ("fp16", "fp16")


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


def test_hybrid_shard_holds_what_its_group_alone_would() -> None:
    """And what it all-reduced in bf16, an eighth of all gradients, until the backward ends."""
    hybrid, group = _fsdp2(num_gpus=16, shard_degree=8), _fsdp2()
    extra = _at(hybrid, "end", "gradients") - _at(group, "end", "gradients")
    assert extra == 2 * loaded().num_params // 8
    for moment in ("gather", "forward", "loss", "head", "first", "step"):
        assert hybrid.moment_bytes[moment] == group.moment_bytes[moment]
    assert (
        _fsdp2(num_gpus=16, shard_degree=8, precision="bf16-pure").moment_bytes
        == _fsdp2(precision="bf16-pure").moment_bytes
    )


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


@pytest.mark.parametrize("parallel", ["fsdp2", "zero3"])
def test_a_cut_sequence_is_told_of_no_padding(parallel: str) -> None:
    setup = TrainSetup(**FULL, num_gpus=8, parallel=parallel, micro_batch_seqs=4, seq_len_tokens=8192, loss="chunked")
    assert padded(loaded(), setup) is not None
    assert padded(loaded(), setup.replace(context_degree=4)) is None


def test_what_a_rank_keeps_beside_its_card_is_its_own_part() -> None:
    """Offloaded checkpoints: an eighth of 2**20 tokens, 4,096 bf16 numbers each, in all 32 layers. Paged states of
    ZeRO: 2 bytes a parameter of its shard (and the scales on the card)."""
    model = loaded("meta-llama/Llama-3.1-8B")
    setup = TrainSetup(
        **FULL,
        num_gpus=8,
        parallel="fsdp2",
        context_degree=8,
        seq_len_tokens=1 << 20,
        checkpointing=1,
        activation_offload=True,
    )
    assert host_bytes_per_node(model, setup, 1) == 8 * (1 << 17) * 2 * 4096 * 32
    paged = TrainSetup(method="full", lora_rank=0, optimizer="paged-adamw-8bit", num_gpus=8, parallel="zero3")
    (note,) = (note for note in memory_notes(model, find_gpu("a100-40gb"), paged) if "paged" in note)
    assert f"{2 * model.num_params / 8 / GIB:.2f} GiB of paged optimizer state" in note


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


def test_communicators_are_counted_by_group() -> None:
    """One per group a rank talks to; a pair's is smaller; none without a second process."""
    ddp = TrainSetup(num_gpus=8, parallel="ddp")
    assert communicator_bytes(GPU, ddp) == NCCL_NVLINK_BYTES
    assert communicator_bytes(GPU, ddp.replace(num_gpus=2)) == NCCL_NVLINK_PAIR_BYTES
    assert communicator_bytes(find_gpu("rtx-4090"), ddp) == NCCL_PCIE_BYTES
    hybrid = TrainSetup(**FULL, num_gpus=16, parallel="fsdp2", shard_degree=8)
    assert communicator_bytes(GPU, hybrid) == NCCL_NVLINK_BYTES + NCCL_NVLINK_PAIR_BYTES
    assert communicator_bytes(GPU, ddp.replace(parallel="device-map")) == 0


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


def test_torchtitan_reduces_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own policy (mixed_precision_reduce): the reduce-scatter's input is twice as wide."""
    setup = TrainSetup(**FULL, stack="torchtitan", num_gpus=8, parallel="fsdp2", loss="full", checkpointing=1)
    in_fp32 = _worst(setup).phase_bytes["backward"]
    half = replace(STACKS["torchtitan"], reduces_fp32=False)
    monkeypatch.setattr(TrainSetup, "trainer", half)
    block, (table, *_) = loaded().layer_kinds[0], loaded().embeddings
    more = in_fp32 - _worst(setup).phase_bytes["backward"]
    assert 2 * sum(linear.num_weights for linear in block.linears) < more < 2 * table.num_params
