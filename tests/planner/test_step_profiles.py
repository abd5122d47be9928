"""Step profiles without torch: evaluation, the store, and that walk and `predict` take them where they are."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.core.packed import read_packed, write_packed
from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory import profiles as profile_store
from planner.memory.engines import engine_of
from planner.memory.model import memory_of, predict_memory
from planner.memory.profiles import (
    BATCH,
    LOSS_BEGINS,
    Piece,
    ProfiledStep,
    ProfileMoment,
    StepProfile,
    at_rest,
    config_digest,
    find_profile,
    load_profiles,
    profiled_kind,
    respaced,
    save_profiles,
    structure_key,
)
from planner.memory.rank_part import rank_parts
from planner.memory.step import allocator_gap_bytes
from planner.models import catalogue
from planner.models.encoders import with_vision
from planner.models.spec import ModelSpec
from planner.models.structures import sizes_of, structure_of
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.planning.walk import walk
from planner.setup import TrainSetup
from planner.setup.outcome import Fidelity
from tests.planner.helpers import loaded
from tests.whole import some

GPU = find_gpu("a100-80gb")
NAME = "Qwen/Qwen2.5-0.5B"
MIB = 1 << 20


def _profile() -> StepProfile:
    """Weights of 100 MiB; 1 KiB a token kept, 10 bytes a token and rank; gradients of 5 MiB; tiles of 2 KiB."""
    weights = ("weights", "weights: layers"), ((0, 100.0 * MIB),)
    activations = ("activations", "kept for the backward"), ((3, 1024.0), (9, 10.0))
    batch, tile = (BATCH, ((3, 48.0),)), (("loss", "loss chain"), ((13, 2048.0),))
    gradients = ("gradients", "accumulated gradients"), ((0, 5.0 * MIB),)
    moments = (
        ProfileMoment("load", False, (weights, batch)),
        ProfileMoment("forward", False, (weights, batch, activations)),
        ProfileMoment(LOSS_BEGINS, False, (weights, batch, activations)),
        ProfileMoment("loss", False, (weights, batch, activations, tile)),
        ProfileMoment("backward", False, (weights, batch, activations, gradients)),
        ProfileMoment("backward", True, (weights, batch, activations, gradients, gradients[:1] + gradients[1:])),
        ProfileMoment("step", False, (weights, batch, gradients)),
    )
    pieces = (
        Piece(one_sequence=alone, shortest_tokens=1, longest_tokens=None, moments=moments) for alone in (False, True)
    )
    return StepProfile(pieces=tuple(pieces))


def test_a_moment_is_the_sum_of_its_groups_at_any_size() -> None:
    setup = TrainSetup(seq_len_tokens=1000, lora_rank=8, loss="full")
    step = ProfiledStep(_profile(), loaded(NAME), setup)
    activation_bytes, samples = 3 * 1000 * (1024 + 80), 3 * 1000 * 24
    load, forward, loss = step.bytes_at(3, "load", "forward", "loss", accumulated=False)
    assert load == 100 * MIB + samples
    assert forward == 100 * MIB + samples + activation_bytes
    assert loss == 100 * MIB + samples + activation_bytes + 2048 * 3000
    largest, with_earlier = (step.before_step(3, accumulated=accumulated)[0] for accumulated in (False, True))
    assert with_earlier >= largest + samples
    groups = step.groups_at("backward", 3, accumulated=False)
    assert sum(groups.values()) == step.bytes_at(3, "backward", accumulated=False)[0]
    assert groups["gradients", "accumulated gradients"] == 5 * MIB
    single, several = (step.groups_at("loss", 3, accumulated=more) for more in (False, True))
    assert (single["other", "batch"], several["other", "batch"]) == (samples, 2 * samples)
    assert (
        single["activations", "kept for the backward"]
        == several["activations", "kept for the backward"]
        == activation_bytes
    )


def test_one_sequence_that_takes_several_tiles_has_the_loss_of_several_sequences() -> None:
    """Runs of one sequence have fewer tokens than a tile: what one takes looks like what a token does. At 1 x 8,192
    tokens TRL's loss was up to 23 % too many bytes (SmolLM2-360M, QLoRA)."""
    several, alone = sorted(_profile().pieces, key=lambda piece: piece.one_sequence)
    loss = next(moment for moment in alone.moments if moment.phase == "loss")
    untold = loss._replace(groups=(*loss.groups[:-1], (loss.groups[-1][0], ((2, 2048.0),))))
    others = tuple(untold if moment is loss else moment for moment in alone.moments)
    profile = StepProfile(pieces=(several, replace(alone, moments=others)))
    for tokens, tile in ((2048, 2048), (4096, 4096), (8192, 4096)):
        step = ProfiledStep(profile, loaded(NAME), TrainSetup(seq_len_tokens=tokens, lora_rank=8, loss="chunked"))
        ((size,), groups) = (
            step.bytes_at(1, "loss", accumulated=False),
            step.groups_at("loss", 1, accumulated=False),
        )
        assert groups["loss", "loss chain"] == 2048 * tile
        assert size == sum(groups.values())


def test_the_allocators_gap_is_of_what_comes_and_goes_within_a_phase() -> None:
    step = ProfiledStep(_profile(), loaded(NAME), TrainSetup(seq_len_tokens=1000, lora_rank=8, loss="full"))
    largest, gap = step.before_step(3, accumulated=False)
    assert largest == max(step.bytes_at(3, "forward", "loss", "backward", accumulated=False))
    assert gap == allocator_gap_bytes(loss=2048 * 3000, layer=5 * MIB)


def test_profiles_are_read_as_they_were_written_and_damaged_ones_are_none(tmp_path: Path) -> None:
    path, profile = tmp_path / "one.json.gz", _profile()
    save_profiles(path, {"a": profile, "b": profile}, {"torch": "2.13"})
    profiles = load_profiles(path)
    assert profiles is not None
    assert profiles.keys == {"a", "b"}
    assert profiles.get("a") == profile
    assert profiles.get("c") is None
    other = tmp_path / "other.json.gz"
    other.write_bytes(path.read_bytes()[:-20])
    assert load_profiles(other) is None
    seal, _, content = gzip.decompress(path.read_bytes()).partition(b"\n")
    for name, damaged in {"unsealed": content, "changed": seal + b"\n" + content.replace(b"2.13", b"2.14")}.items():
        other = tmp_path / name
        other.write_bytes(gzip.compress(damaged))
        assert load_profiles(other) is None, name
    write_packed(tmp_path / "newer", {**json.loads(content), "schema": -1})
    for name in ("newer", "missing"):
        assert load_profiles(tmp_path / name) is None


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_a_key_says_its_spacing_at_one_place_whatever_its_other_values(targets: Any) -> None:
    setup = TrainSetup(lora_targets=targets, checkpointing=4)
    key = structure_key(loaded(NAME), GPU, setup)
    assert respaced(key, 1) == structure_key(loaded(NAME), GPU, setup.replace(checkpointing=1))


ADAPTERS = TrainSetup(lora_dropout=0.05, checkpointing=1, loss="liger", kernels="eager", adapter_dtype="fp32")
FULL = TrainSetup(method="full", lora_rank=0, loss="full", kernels="eager", precision="bf16-mixed")


@pytest.mark.parametrize(
    ("setup", "same", "other"),
    [
        (ADAPTERS, {"stack": "unsloth"}, {"stack": "torchtune"}),
        (ADAPTERS, {"stack": "plain-loop"}, {"stack": "plain-loop", "loss": "full"}),
        (FULL, {"stack": "llamafactory"}, {"stack": "unsloth"}),
        (FULL.replace(objective="dpo"), {"stack": "axolotl"}, {"stack": "llamafactory"}),
        (ADAPTERS, {"lora_dropout": 0.1}, {"lora_dropout": 0.0}),
        (ADAPTERS, {"precision": "fp16-autocast"}, {"precision": "bf16-fp16-autocast"}),
        (FULL, {"precision": "fp16-mixed"}, {"precision": "fp32"}),
        (ADAPTERS, {"checkpointing": 0, "reentrant_checkpointing": True}, {"reentrant_checkpointing": True}),
        (ADAPTERS, {"attention": "flash-attention-2", "packing": True}, {"attention": "sdpa", "packing": True}),
        (
            ADAPTERS,
            {"lora_targets": ("k_proj", "q_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj", "query")},
            {"lora_targets": ("q_proj", "v_proj")},
        ),
        (
            ADAPTERS.replace(lora_targets=("q_proj", "v_proj")),
            {"lora_targets": (r".*self_attn\.[qv]_proj",)},
            {"lora_targets": (r".*layers\.3\.self_attn\.[qv]_proj",)},
        ),
    ],
)
def test_setups_whose_step_holds_the_same_bytes_have_one_profile(
    setup: TrainSetup, same: dict[str, Any], other: dict[str, Any]
) -> None:
    """`tests/probes/test_step_profiles.py` runs some of these pairs."""
    model = loaded(NAME)
    kept = {name: value for name, value in same.items() if name == "checkpointing"}
    assert structure_key(model, GPU, setup.replace(**same)) == structure_key(model, GPU, setup.replace(**kept))
    assert structure_key(model, GPU, setup.replace(**other)) != structure_key(model, GPU, setup)


def test_a_packed_micro_batch_is_one_sequence_of_all_its_samples(shipped: Any) -> None:
    model, setup = _fresh(shipped[0]), shipped[1].replace(attention="flash-attention-2")
    packed = setup.replace(packing=True, micro_batch_seqs=3, seq_len_tokens=1000)
    long = setup.replace(micro_batch_seqs=1, seq_len_tokens=3000)
    mine, one = (memory_of(model, GPU, variant)[0].breakdown for variant in (packed, long))
    assert mine.profiled
    assert mine.phase_bytes == one.phase_bytes
    assert mine.peak_reserved_bytes == one.peak_reserved_bytes
    by_mask = memory_of(model, GPU, packed.replace(attention="sdpa"))[0].breakdown
    assert not by_mask.profiled


def test_a_full_loss_in_pieces_of_so_many_tokens_has_no_profile(shipped: Any) -> None:
    """LitGPT's: a run's pieces are not another size's. Taken for one they were 1 to 7 % too many bytes."""
    assert profiled_kind(shipped[1].replace(stack="litgpt"))
    assert not profiled_kind(shipped[1].replace(stack="litgpt", loss="full"))
    assert profiled_kind(shipped[1].replace(stack="torchtune", loss="full"))


BESIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "LitGPT's loss in pieces": (
        19395492864,
        {"stack": "litgpt", "loss": "full", "method": "qlora", "quantization": "nf4", "precision": "bf16-pure",
         "adapter_dtype": "bf16", "micro_batch_seqs": 3, "seq_len_tokens": 2048, "checkpointing": 0},
    ),
    "TRL 0.28's preferences": (
        7023091200,
        {"objective": "dpo", "trl_version": "0.28", "loss": "full", "precision": "bf16-autocast", "lora_dropout": 0.0,
         "micro_batch_seqs": 1, "seq_len_tokens": 1024},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BESIDE)
def test_what_a_loss_of_their_own_takes_stands_beside_a_profile(what: str) -> None:
    """Dry runs of 1 December 2026; closed forms alone were 0.45 % and 0.005 % off."""
    model, (dry, fields) = catalogue.load("meta-llama/Llama-3.2-1B"), BESIDE[what]
    assert model is not None
    usual: dict[str, Any] = {"accumulation_steps": 2, "optimizer": "adamw", "kernels": "eager", "lora_dropout": 0.05}
    mine = memory_of(model, find_gpu("a100-80gb"), TrainSetup(**usual | {"lora_rank": 16} | fields))[0].breakdown
    assert mine.profiled
    assert mine.peak_allocated_bytes == pytest.approx(dry, rel=1e-5)


def test_a_model_with_its_encoder_has_no_profile_of_its_text_alone() -> None:
    text = loaded("Qwen/Qwen3.5-2B")
    assert profile_store.profiles_of(_fresh(text)) is not None
    assert profile_store.profiles_of(with_vision(_fresh(text))) is None


def test_profiles_of_other_versions_are_not_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a cache, or a team's, holds: any other version of any library that a step executes."""
    model, here = loaded(NAME), profile_store.library_versions()
    monkeypatch.setattr(profile_store, "user_directory", lambda: tmp_path)
    digest, profile = config_digest(model.config), {"own": _profile()}
    for name in here:
        save_profiles(tmp_path / f"{digest}-{name}.json.gz", profile, {**here, name: "0.0"})
    profiles = profile_store.profiles_of(replace(model, model_id="before"))
    assert profiles is None or "own" not in profiles.keys
    save_profiles(tmp_path / f"{digest}-all.json.gz", profile, here)
    profiles = profile_store.profiles_of(replace(model, model_id="after"))
    assert profiles is not None
    assert profiles.keys == {"own"}


def test_a_structures_profile_is_any_sizes_and_depths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose sizes share no factor: three weights a layer and one beside them, 2 features a token each layer
    that is not checkpointed; the samples beyond a window that is not the run's are not known."""
    like = replace(loaded(NAME), config=dict(loaded(NAME).config))
    ran, spec = sizes_of(like), loaded(NAME)
    monkeypatch.setattr(profile_store, "SHIPPED", tmp_path)
    layers, setup = spec.num_layers, TrainSetup(checkpointing=7, kernels="liger", seq_len_tokens=1000, loss="full")
    terms = {
        ("weights", "weights: layers"): ((0, 2.0 * ran["hidden"] * ran["intermediate"], 1, 3 * 7),),
        ("activations", "kept for the backward"): ((3, 2.0 * ran["hidden"], 0, 6), (3, 8.0, 5, 0)),
    }
    moment = ProfileMoment("forward", False, tuple(terms.items()))  # type: ignore[arg-type]
    pieces = tuple(
        replace(piece, moments=(moment,), shortest_tokens=first) for piece in _profile().pieces for first in (1, 4096)
    )
    key = structure_key(spec, GPU, setup)
    profiles = {at_rest(key, layers, 7): StepProfile(pieces=pieces), at_rest(key, layers + 1, 7): _profile()}
    save_profiles(tmp_path / f"{structure_of(spec)}.json.gz", profiles, {}, like)  # type: ignore[arg-type]
    profile = find_profile(_fresh(spec), GPU, setup)
    assert profile is not None
    (forward,) = profile.pieces[0].moments
    weights, activations = (dict(form) for _, form in forward.groups)
    periods = layers // 7
    assert weights == {0: (1 + 21 * periods) * 2.0 * spec.hidden_size * 4864}
    assert activations == {3: 12.0 * spec.hidden_size * periods + 40}
    assert find_profile(_fresh(spec), GPU, setup.replace(checkpointing=25)) is None  # fewer layers than that
    windowed = replace(spec.layer_kinds[0], attention=replace(spec.layer_kinds[0].attention, window_tokens=2048))  # type: ignore[type-var]
    other = profile_store.ModelProfiles(
        {**read_packed(tmp_path / f"{structure_of(spec)}.json.gz", profile_store.SCHEMA, shipped=False)},  # type: ignore[dict-item]
        replace(spec, layer_kinds=(windowed,) * layers),
    ).get(key, 7)
    assert other is not None
    assert [(piece.shortest_tokens, piece.longest_tokens) for piece in other.pieces] == [(1, 2047), (1, 2047)]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One structure of one model has a profile: LoRA under autocast, every layer checkpointed, TRL's loss."""
    model, setup = loaded(NAME), TrainSetup(loss="chunked", kernels="liger")
    save_profiles(
        tmp_path / f"{config_digest(model.config)}.json.gz", {structure_key(model, GPU, setup): _profile()}, {}
    )
    monkeypatch.setattr(profile_store, "SHIPPED", tmp_path)
    load_profiles.cache_clear()
    return model, setup


def _fresh(model: ModelSpec) -> ModelSpec:
    """A model that has looked for its profiles nowhere yet."""
    return replace(model, model_id="a copy")


def test_predict_says_profile_where_there_is_one_and_formula_elsewhere(shipped: Any) -> None:
    model, setup = _fresh(shipped[0]), shipped[1]
    prediction = predict(model, GPU, setup)
    assert prediction.level is Fidelity.PROFILE
    assert prediction.memory_band_fraction < predict(model, GPU, setup.replace(loss="full")).memory_band_fraction
    assert predict(model, GPU, setup.replace(stack="axolotl")).level is Fidelity.PROFILE
    for fields in ({"checkpointing": 0}, {"stack": "litgpt"}):
        assert predict(model, GPU, setup.replace(**fields)).level is Fidelity.FORMULA
    state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=False)
    states = state.optimizer_bytes(setup.optimizer)[0]
    mine = memory_of(model, GPU, setup)[0].breakdown
    assert mine.phase_bytes["load"] == 100 * MIB + setup.tokens_per_micro_batch * 24
    assert sum(term.size_bytes for term in mine.terms if term.name == f"states of {setup.optimizer}") == states
    assert mine.phase_bytes != predict_memory(model, GPU, setup).phase_bytes


def test_a_rank_of_ddp_holds_what_one_gpu_does_and_its_buckets(shipped: Any) -> None:
    model, setup = _fresh(shipped[0]), shipped[1]
    alone, (rank,) = (memory_of(model, GPU, variant) for variant in (setup, setup.replace(num_gpus=4, parallel="ddp")))
    state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=False)
    assert rank.num_ranks == 4
    assert rank.breakdown.profiled
    more = rank.breakdown.peak_allocated_bytes - alone[0].breakdown.peak_allocated_bytes
    assert more == state.trained.size_bytes
    assert rank.breakdown.context_bytes > alone[0].breakdown.context_bytes


def test_a_user_s_own_profiles_come_first_where_the_libraries_are_those_installed(
    shipped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, key = tmp_path / "own", structure_key(shipped[0], GPU, shipped[1])
    monkeypatch.setattr(profile_store, "user_directory", lambda: directory)
    monkeypatch.setattr(profile_store, "library_versions", lambda: {"torch": "2.13"})
    other = StepProfile(pieces=_profile().pieces[:1])
    save_profiles(profile_store.user_path(shipped[0]), {key: other}, {"torch": "2.13", "dry run": "1"})
    assert find_profile(_fresh(shipped[0]), GPU, shipped[1]) == other
    monkeypatch.setattr(profile_store, "library_versions", lambda: {"torch": "2.14"})
    assert find_profile(_fresh(shipped[0]), GPU, shipped[1]) == _profile()


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_walk_takes_the_same_peaks(shipped: Any, num_gpus: int) -> None:
    model, setup = _fresh(shipped[0]), shipped[1]
    fixed = {"method": ("lora",), "precision": ("bf16-autocast",), "lora_targets": ("all-linear",)}
    workload = PlanRequest(fixed=fixed, seq_len=1024, global_batch=8).workload(model, GPU)
    if num_gpus > 1:
        workload = replace(workload, cluster=make_cluster(GPU, num_gpus))
    seen = 0
    for point in walk(workload):
        if find_profile(model, GPU, point.setup) is not None:
            seen += 1
            assert point.peak_device_bytes == memory_of(model, GPU, point.setup)[0].breakdown.peak_device_bytes
    assert seen > 10
    assert structure_key(model, GPU, setup)


OF_EACH = (
    TrainSetup(kernels="liger", loss="chunked", checkpointing=1, micro_batch_seqs=2),
    TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", kernels="liger", loss="liger", checkpointing=0,
        micro_batch_seqs=2,
    ),
    TrainSetup(method="qlora", quantization="nf4-double", kernels="liger", loss="full", checkpointing=4),
)  # fmt: skip


def test_what_ships_weighs_what_the_closed_forms_say_of_every_model() -> None:
    """Weights, gradients and what the backward holds, of any size that a structure's numbers were worked out for."""
    seen = 0
    for place, name in enumerate(some(catalogue.names(), 2)):
        model, setup = catalogue.load(name), OF_EACH[place % 3].replace(seq_len_tokens=1024)
        profile = find_profile(model, GPU, setup) if model is not None else None
        if model is None or profile is None:
            continue
        seen += 1
        closed = predict_memory(model, GPU, setup).phase_bytes
        mine = memory_of(model, GPU, setup)[0].breakdown
        assert mine.profiled
        assert mine.phase_bytes["step"] == pytest.approx(closed["step"], rel=0.005), name
        assert mine.phase_bytes["backward"] == pytest.approx(closed["backward"], rel=0.02), name
    assert seen > 30


FP32_ADAPTERS = {"precision": "bf16-pure", "seq_len_tokens": 4096, "micro_batch_seqs": 8, "loss": "chunked"}
FOLLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "products of fp32 adapters without autocast": ("meta-llama/Llama-3.1-8B", FP32_ADAPTERS),
    "of a small model": ("Qwen/Qwen2.5-0.5B", FP32_ADAPTERS),
    "of gate and up at once": ("microsoft/Phi-3-mini-4k-instruct", FP32_ADAPTERS),
    "of 16-bit adapters": (
        "meta-llama/Llama-3.1-8B",
        FP32_ADAPTERS | {"method": "qlora", "quantization": "nf4-double"},
    ),
    "a norm behind the table widens the stream": (
        "bigscience/bloom-3b",
        FP32_ADAPTERS | {"precision": "bf16-autocast"},
    ),
}


@pytest.mark.parametrize("what", FOLLOWED)
def test_closed_forms_follow_what_runs_of_the_step_showed(what: str) -> None:
    """Within 1 %: they answer where a structure has no profile, as of GRPO. Before 30 November 2026 these lay up to
    10 % too low."""
    name, fields = FOLLOWED[what]
    model, card, setup = catalogue.load(name), find_gpu("h100-sxm"), TrainSetup(**fields)
    assert model is not None
    profiled = memory_of(model, card, setup)[0].breakdown
    assert profiled.profiled
    assert predict_memory(model, card, setup).peak_allocated_bytes == pytest.approx(
        profiled.peak_allocated_bytes, rel=0.01
    )


def test_beyond_a_window_a_profile_is_sdpas() -> None:
    """Of starcoder2 it said 9 to 25 % more than the dry run of FlashAttention, which is handed no mask there."""
    model, card = catalogue.load("bigcode/starcoder2-3b"), find_gpu("h100-sxm")
    assert model is not None
    flash = TrainSetup(attention="flash-attention-2", checkpointing=4, loss="chunked", lora_rank=128)
    within, beyond = (
        memory_of(model, card, flash.replace(seq_len_tokens=tokens))[0].breakdown for tokens in (2048, 4096)
    )
    assert (within.profiled, beyond.profiled) == (True, False)
    assert beyond.peak_allocated_bytes == pytest.approx(18.80 * 2**30, rel=0.01)  # the dry run's
