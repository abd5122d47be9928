"""The dry run of one rank: any world size in one process, truncated depth as at full depth, clear refusals."""

import functools
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.hardware.gpus import find_gpu
from planner.planning.evidence.followed import OWN_CODE, why_not_traced
from planner.setup import TrainSetup
from planner.setup.allowed import PARALLELS
from planner.setup.outcome import FailureKind, ProbeFailure
from probes.dryrun import DryRunReport, report_for_config
from probes.dryrun.fakeworld import fake_world
from tests.probes.dryrun_small import agreeing, assert_same_figures, small_config, small_spec
from tests.whole import some, these

AMPERE = (8, 0)
DEEP = {"gemma2": 9}
"""Layers of a model; five, of which three run, but that two kinds in turn need more before a block of them repeats."""
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0}
DEPTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp lora": ("llama", {"parallel": "ddp"}),
    "ddp full, accumulation": (
        "qwen2",
        {**FULL, "parallel": "ddp", "precision": "bf16-mixed", "accumulation_steps": 2},
    ),
    "fsdp2 lora": ("llama", {"parallel": "fsdp2"}),
    "fsdp2 full, mixed": ("qwen2", {**FULL, "parallel": "fsdp2", "precision": "bf16-mixed", "optimizer": "adamw"}),
    "fsdp2 full, kept, accumulation": (
        "llama",
        {
            **FULL,
            "parallel": "fsdp2",
            "precision": "bf16-pure",
            "reshard_after_forward": False,
            "accumulation_steps": 2,
            "checkpointing": 0,
        },
    ),
    "fsdp2 hybrid, alternating layers": ("gemma2", {**FULL, "parallel": "fsdp2", "shard_degree": 2}),
    "a ring inside fsdp2": ("llama", {"parallel": "fsdp2", "context_degree": 4}),
    "expert parallel inside fsdp2": (
        "qwen3_moe",
        {**FULL, "parallel": "fsdp2", "precision": "bf16-mixed", "expert_degree": 4, "accumulation_steps": 2},
    ),
    "fsdp2 nf4": ("llama", {"parallel": "fsdp2", "method": "qlora", "quantization": "nf4-double"}),
    "fsdp2 full, offloaded, accumulation": (
        "qwen2",
        {
            **FULL,
            "parallel": "fsdp2",
            "precision": "bf16-mixed",
            "offload": "parameters",
            "accumulation_steps": 2,
            "optimizer": "adamw",
        },
    ),
    "tensor full, tied": (
        "qwen2",
        {
            **FULL,
            "parallel": "none",
            "num_gpus": 2,
            "tensor_degree": 2,
            "precision": "bf16-mixed",
            "optimizer": "adamw",
        },
    ),
    "tensor inside fsdp2, hybrid, accumulation": (
        "llama",
        {**FULL, "parallel": "fsdp2", "num_gpus": 8, "tensor_degree": 2, "shard_degree": 2, "accumulation_steps": 2},
    ),
}
SOME = (
    "expert parallel inside fsdp2", "fsdp2 nf4", "tensor full, tied",
)  # fmt: skip
"""Each method, accumulation and way of cutting once."""


def _setup(**fields: Any) -> TrainSetup:
    values: dict[str, Any] = {"num_gpus": 4, "seq_len_tokens": 64, "micro_batch_seqs": 2, "lora_rank": 4}
    return TrainSetup(**{**values, **fields})


@functools.cache
def _report(model_type: str, setup: TrainSetup, **options: Any) -> DryRunReport:
    report = report_for_config(
        small_config(model_type, num_hidden_layers=DEEP.get(model_type, 5)), AMPERE, setup, **options
    )
    assert isinstance(report, DryRunReport), report
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", these(SOME, [*DEPTHS]))
def test_rank_repeated_depth_equals_full_depth(name: str) -> None:
    model_type, fields = DEPTHS[name]
    setup = _setup(**fields)
    short, full = _report(model_type, setup), _report(model_type, setup, full_depth=True)
    assert_same_figures(short, full)


def test_rank_of_any_world_size_holds_its_share() -> None:
    single = _report("llama", _setup(**FULL, num_gpus=1))
    shares = [_report("llama", _setup(**FULL, parallel="fsdp2", num_gpus=ranks)) for ranks in (2, 8)]
    parameter_bytes = [single.parameter_bytes, *(share.parameter_bytes for share in shares)]
    # mixed precision keeps the shards in fp32: half of the weights in twice their type
    assert parameter_bytes[1] == parameter_bytes[0]
    assert parameter_bytes == sorted(parameter_bytes, reverse=True)
    assert parameter_bytes[2] < parameter_bytes[0]
    copies = [_report("llama", _setup(parallel="ddp", num_gpus=ranks)) for ranks in (2, 8)]
    assert copies[0].prediction.phase_peaks_bytes == copies[1].prediction.phase_peaks_bytes


def test_rank_names_what_only_several_gpus_have() -> None:
    ddp = _report("llama", _setup(**FULL, parallel="ddp", checkpointing=0))
    trained = sum(size for (kind, _), size in ddp.phase_groups["load"].items() if kind == "weights")
    assert 0 < ddp.phase_groups["step"]["gradients", "DDP buckets"] <= trained
    sharded = _report("llama", _setup(**FULL, parallel="fsdp2"))
    backward = {name for _, name in sharded.phase_groups["backward"]}
    assert {"gathered weights", "reduce-scatter buffer"} <= backward


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        # TRL gathers a head by itself, in the type that it is cut in, and casts it tile by tile
        ({"method": "qlora", "quantization": "nf4", "kbit_fp32_cast": True, "loss": "chunked"}, {}),
        # the largest table arrives whole, a tied one with a second part of it
        ({"precision": "bf16-mixed", "loss": "chunked"}, {"tie_word_embeddings": True, "vocab_size": 256_000}),
        # Axolotl's root comes again as the model's backward begins
        ({"stack": "axolotl", "checkpointing": 0, "micro_batch_seqs": 4, "loss": "chunked"}, {}),
    ],
    ids=["own gather", "loading", "wide root"],
)
def test_formula_counts_what_is_gathered_beside_the_layers(fields: dict[str, Any], config: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 60_000, "hidden_size": 128, "tie_word_embeddings": False}
    model = small_spec("llama", **{**sizes, **config})
    setup = _setup(**{"parallel": "fsdp2", "num_gpus": 2, **fields})
    formula, run = agreeing(model, find_gpu("a100-80gb"), setup, 0.07)  # cuBLAS's workspace is not there at loading
    assert formula.peak_allocated_bytes > 0.99 * run.peak_allocated_bytes


def test_whole_gradients_wait_for_the_last_micro_batch_unless_each_is_reduced() -> None:
    setup = _setup(**FULL, parallel="fsdp2", precision="bf16-mixed", accumulation_steps=2)
    cut, waits = (_report("llama", setup.replace(sync_each_batch=sync)) for sync in (True, False))
    loss = waits.prediction.phase_peaks_bytes["loss"] - cut.prediction.phase_peaks_bytes["loss"]
    # all in 16 bit, in the place of a quarter in fp32, which is half of it
    assert loss == pytest.approx(cut.parameter_bytes, rel=0.02)


@pytest.mark.parametrize(
    "fields",
    some(
        [
            FULL,
            {},
            {"method": "qlora", "quantization": "nf4", "kernels": "fused"},  # which unpack a base that FSDP2 cut, too
            {"method": "qlora", "quantization": "nf4"},
        ],
        2,
    ),
    ids=str,
)
def test_offloaded_rank_holds_what_is_gathered(fields: dict[str, Any]) -> None:
    """No CPU process can tell host from device, so arithmetic: shards, gradients and states are gone, what is gathered
    and all else stays to the byte."""
    near = _report("llama", _setup(**fields, parallel="fsdp2"))
    far = _report("llama", _setup(**fields, parallel="fsdp2", offload="parameters"))
    assert far.parameter_bytes == 0 < near.parameter_bytes
    weights = ("weights", "weights: layers")
    scales = far.phase_groups["load"].get(weights, 0)  # of quantized weights: whole on every rank
    assert (scales > 0) == ("quantization" in fields)
    for phase in ("load", "forward", "loss", "step"):
        before, after = dict(near.phase_groups[phase]), dict(far.phase_groups[phase])
        assert before.pop(weights) > after.pop(weights, 0) == scales
        if phase == "load":  # a weight is whole before its part, of four, goes to the host
            assert after.pop(("other", "batch")) * 4 == before.pop(("other", "batch")) * 5
        gone = {group: size for group, size in before.items() if group not in after}
        assert {kind for kind, _ in gone} <= {"weights", "adapters", "gradients", "optimizer", "workspace"}
        assert [name for kind, name in gone if kind == "workspace"] == ["optimizer temporaries"] * (phase == "step")
        assert before == after | gone


@pytest.mark.parametrize("parallel", OWN_CODE)
def test_rank_says_what_ran(parallel: str) -> None:
    notes = _report("llama", _setup(parallel=parallel)).prediction.notes
    assert any("rank 0 of 4" in note and f"{OWN_CODE[parallel]} ran" in note for note in notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": "dp"},
        {"parallel": "device-map"},
        {"parallel": "zero1"},
        {"parallel": "zero3", "offload": "parameters"},
        {"parallel": "ddp", "tensor_degree": 2},
        {"parallel": "ddp", "pipeline_degree": 2},
    ],
    ids=str,
)
def test_rank_refuses_what_is_not_followed(fields: dict[str, Any]) -> None:
    setup = _setup(**fields)
    outcome = report_for_config(small_config("llama"), AMPERE, setup)
    assert isinstance(outcome, ProbeFailure)
    assert outcome.kind is FailureKind.UNSUPPORTED
    assert outcome.message == why_not_traced(setup) != ""


def test_every_followed_strategy_is_named() -> None:
    for parallel in set(PARALLELS) - {"none"}:
        assert (why_not_traced(_setup(parallel=parallel)) == "") == (parallel in OWN_CODE), parallel


def test_fake_world_leaves_no_group_and_refuses_a_real_one() -> None:
    import torch.distributed as dist

    with fake_world(8, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        with pytest.raises(ValueError, match="rank of a real job"), fake_world(2):
            pass
    assert not dist.is_initialized()


def test_one_gpu_after_a_job_is_as_before() -> None:
    anew = _report.__wrapped__
    before = anew("llama", _setup(num_gpus=1))
    anew("llama", _setup(parallel="fsdp2"))
    after = anew("llama", _setup(num_gpus=1))
    assert before.prediction.phase_peaks_bytes == after.prediction.phase_peaks_bytes
    assert before.num_events == after.num_events


def test_axolotls_rank_is_wrapped_by_layers_and_root_in_the_type_it_was_loaded_in() -> None:
    """Half the bytes of Accelerate's fp32 shards; the root, tables and head with it, stays gathered in the backward."""
    own, other = (_report("llama", _setup(**FULL, parallel="fsdp2", stack=stack)) for stack in ("axolotl", "hf"))
    assert 2 * own.parameter_bytes == other.parameter_bytes
    gathered = [report.phase_groups["backward"]["workspace", "gathered weights"] for report in (own, other)]
    assert gathered[0] > gathered[1]
