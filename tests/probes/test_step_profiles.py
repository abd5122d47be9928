"""Step profiles against the dry run: sizes from runs, moments of the full depth, and what is put together of parts."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory import profiles as profile_store
from planner.memory.engines import engine_of
from planner.memory.model import memory_of
from planner.memory.profiles import (
    MONOMIALS,
    StepProfile,
    find_profile,
    profiled_breakdown,
    step_of,
    structure_key,
)
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from planner.speed import step_program
from probes.dryrun import DryRunReport, dry_run_report
from probes.tracing.__main__ import main
from probes.tracing.moments import growing
from probes.tracing.profile_builder import ProfileBuilder, planned_structures
from probes.tracing.programs import ProgramBuilder
from probes.tracing.sizes import NoPolynomial, Point, Sizes, fit
from probes.tracing.structures import Span, spans
from tests.planner.helpers import loaded
from tests.whole import some
from tools.build_profiles import deviations

GPU = find_gpu("a100-80gb")
SMALL = "HuggingFaceTB/SmolLM2-135M"
POINTS = [Point(7, 1664, 24, 4096), Point(3, 1152, 40, 3456), Point(5, 2176, 56, 4096)]


@cache
def _builder(name: str) -> ProfileBuilder:
    return ProfileBuilder(loaded(name))


@pytest.mark.parametrize(
    ("sizes", "powers"),
    [
        ([4096] * 3, (0, 0, 0, 0)),
        ([2 * p.micro_batch_seqs * p.seq_len_tokens * 576 for p in POINTS], (1, 1, 0, 0)),
        ([p.seq_len_tokens**2 for p in POINTS], (0, 2, 0, 0)),
        ([4 * 576 * p.rank for p in POINTS], (0, 0, 1, 0)),
        ([2 * p.micro_batch_seqs * p.seq_len_tokens * p.rank for p in POINTS], (1, 1, 1, 0)),
        ([65536 * p.tile_tokens for p in POINTS], (0, 0, 0, 1)),
    ],
)
def test_one_monomial_is_told_from_all_others(sizes: list[int], powers: tuple[int, ...]) -> None:
    ((index, factor),) = fit(POINTS, sizes, tiled=True)
    assert MONOMIALS[index] == powers
    assert factor > 0


def test_two_monomials_are_found_and_what_is_neither_is_refused() -> None:
    sizes = [4 * p.micro_batch_seqs * (p.seq_len_tokens - 1) for p in POINTS]
    factors = {MONOMIALS[index]: factor for index, factor in fit(POINTS, sizes, tiled=False)}
    assert factors == {(1, 1, 0, 0): 4.0, (1, 0, 0, 0): -4.0}
    with pytest.raises(NoPolynomial):
        fit(POINTS, [1_000_003, 20, 70_001], tiled=True)


def test_a_size_that_two_forms_give_is_known_of_neither_but_of_what_makes_it_apart() -> None:
    """768 x 3,072 / 64 bytes of scales are those of an adapter of rank 24: small, and told apart by what they are."""
    sizes, adapter, scales = Sizes(), ((6, 1536.0),), ((0, 36864.0),)
    sizes.learn(POINTS[0], (False, "adapters"), 36864, adapter)
    assert sizes.form(POINTS[0], (False, "weights"), 36864) is None
    sizes.learn(POINTS[0], (False, "weights"), 36864, scales)
    assert sizes.form(POINTS[0], (False, "adapters"), 36864) == adapter
    sizes.learn(POINTS[0], (True, "aten.mm.default"), 5 << 20, adapter)
    sizes.learn(POINTS[0], (True, "aten.mm.default"), 5 << 20, scales)
    assert sizes.form(POINTS[0], (True, "aten.mm.default"), 5 << 20) is None


def test_lengths_are_cut_where_a_window_ends() -> None:
    ranges = spans([0, 1024, 512, 1024])
    assert [(span.shortest_tokens, span.longest_tokens) for span in ranges] == [(1, 511), (512, 1023), (1024, None)]
    assert spans([]) == (Span(shortest_tokens=1, longest_tokens=None),)
    assert spans([256, 4096], 2048)[1:] == (Span(shortest_tokens=256, longest_tokens=2048),)


def test_runs_end_where_learned_positions_do() -> None:
    """GPT-Neo's masks are of as many tokens as its table of positions."""
    name = "EleutherAI/gpt-neo-125m"
    setup = TrainSetup(attention="eager", kernels="eager", loss="full", checkpointing=1)
    profile = _builder(name).profile(setup, GPU)
    errors = _against_dry_run(profile, loaded(name), setup.replace(micro_batch_seqs=2, seq_len_tokens=1024))
    assert max(abs(errors[phase]) for phase in errors if phase != "reserved") < 0.003, errors


def _against_dry_run(profile: StepProfile, model: ModelSpec, setup: TrainSetup) -> dict[str, float]:
    report: Any = dry_run_report(model, GPU, setup, use_cache=False)
    assert isinstance(report, DryRunReport), report
    step = step_of(profile, model, setup)
    assert step is not None
    state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=setup.adds_gradients)
    mine = profiled_breakdown(step, GPU, setup, state)
    errors = {phase: mine.phase_bytes[phase] / size - 1 for phase, size in report.prediction.phase_peaks_bytes.items()}
    reserved = mine.peak_reserved_bytes / report.prediction.peak_reserved_bytes - 1
    return {**errors, "reserved": reserved}


@pytest.mark.parametrize(
    "fields",
    some(
        [
            {"method": "full", "lora_rank": 0, "precision": "bf16-mixed", "checkpointing": 0, "loss": "full"},
            {"checkpointing": 1, "loss": "chunked", "kernels": "liger"},
            {"method": "qlora", "quantization": "nf4-double", "checkpointing": 8, "loss": "liger", "kernels": "liger"},
        ],
        3,
    ),
    ids=lambda fields: fields.get("method", "lora"),
)
def test_a_profile_is_the_dry_run_at_sizes_that_were_not_run(fields: dict[str, Any]) -> None:
    model, setup = loaded(SMALL), TrainSetup(**fields)
    profile = _builder(SMALL).profile(setup, GPU)
    for micro, steps, tokens, rank in ((4, 4, 2048, 8),):
        sizes = {"micro_batch_seqs": micro, "accumulation_steps": steps, "seq_len_tokens": tokens}
        rank = rank if setup.method != "full" else 0
        errors = _against_dry_run(profile, model, setup.replace(**sizes, lora_rank=rank))
        assert max(abs(errors[phase]) for phase in errors if phase != "reserved") < 0.003, errors
        assert -0.03 < errors["reserved"] < 0.08, errors


def test_a_profile_of_ranks_is_the_dry_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer's gradients, which are most of what a short micro-batch's backward holds."""
    model = loaded(SMALL)
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-mixed", loss="chunked", num_gpus=4, parallel="fsdp2")
    setup = setup.replace(micro_batch_seqs=2, seq_len_tokens=1536)
    profile = ProfileBuilder(model, of_rank=True).profile(engine_of(setup).computes(setup), GPU)
    profiles = SimpleNamespace(get=lambda *_: profile, without_gradients={})
    monkeypatch.setattr("planner.memory.ranks.rank_profiles_of", lambda _: profiles)
    report = dry_run_report(model, GPU, setup, use_cache=False)
    assert isinstance(report, DryRunReport)
    mine = memory_of(model, GPU, setup)[0].breakdown
    assert mine.profiled
    errors = {phase: mine.phase_bytes[phase] / size - 1 for phase, size in report.prediction.phase_peaks_bytes.items()}
    assert max(abs(errors[phase]) for phase in ("forward", "loss", "step")) < 0.001, errors
    assert 0 < errors["backward"] < 0.01, errors


def test_what_is_put_together_is_what_is_run() -> None:
    """Liger's loss behind every second layer, and a base with quantized scales, from runs of others."""
    model, builder = loaded(SMALL), ProfileBuilder(loaded(SMALL))
    base = TrainSetup(method="qlora", quantization="nf4", kernels="liger")
    structures = {
        str(number): (base.replace(quantization=quantization, loss=loss, checkpointing=every), GPU)
        for number, (quantization, loss, every) in enumerate(
            (quantization, loss, every)
            for quantization in ("nf4", "nf4-double")
            for loss in ("chunked", "liger")
            for every in (0, 1, 2)
        )
    }
    ran = []
    run = builder.tried

    def counted(setup: TrainSetup, gpu: Any, first: int) -> Any:
        ran.append((setup.quantization, setup.loss, setup.checkpointing))
        return run(setup, gpu, first)

    builder.tried = counted  # type: ignore[method-assign]
    profiles = builder.all(structures)
    assert not builder.failures
    assert len(profiles) == len(structures) > len(ran)
    setup = base.replace(quantization="nf4-double", loss="liger", checkpointing=2)
    assert ("nf4-double", "liger", 2) not in ran
    sizes = {"micro_batch_seqs": 3, "accumulation_steps": 2, "seq_len_tokens": 1024}
    errors = _against_dry_run(profiles[structure_key(model, GPU, setup)], model, setup.replace(**sizes))
    assert max(abs(errors[phase]) for phase in ("loss", "backward")) < 0.001, errors


def test_setups_of_one_profile_hold_the_same_bytes() -> None:
    """Another trainer, another 16-bit type with its loss scaler, and rows of packed samples are one sequence."""
    model, sizes = loaded(SMALL), {"micro_batch_seqs": 1, "seq_len_tokens": 1920}
    setup = TrainSetup(
        kernels="eager", loss="liger", attention="flash-attention-2", adapter_dtype="fp32", checkpointing=1, **sizes
    )
    packed = {"packing": True, "micro_batch_seqs": 3, "seq_len_tokens": 640}
    other = setup.replace(stack="unsloth", precision="fp16-autocast", lora_dropout=0.0, **packed)
    assert structure_key(model, GPU, other) == structure_key(model, GPU, setup)
    reports: list[Any] = [dry_run_report(model, GPU, variant, use_cache=False) for variant in (setup, other)]
    mine, others = (report.prediction.phase_peaks_bytes for report in reports)
    assert others == pytest.approx(mine, rel=5e-5)


SHARED = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "google-bert/bert-base-cased")
"""Of a structure of layers each, small and unlike the model that was run in width, heads and depth; BERT has no norm
behind its layers and classifies."""


@pytest.mark.parametrize("name", some(SHARED, 4))
def test_shipped_profiles_are_those_of_fresh_runs(name: str) -> None:
    """One structure of each, another for each; `tools/build_profiles.py --check` takes others."""
    model = replace(loaded(name))
    structures = sorted(planned_structures(model, ("a100-80gb",)).items())
    structures = [entry for entry in structures if find_profile(model, GPU, entry[1][0]) is not None]
    setup, gpu = structures[(7 + 31 * SHARED.index(name)) % len(structures)][1]
    errors = [*deviations(model, gpu, setup)]
    assert errors
    assert max(abs(allocated) for _, allocated, _ in errors) < 0.0003, (setup, errors)
    assert all(-0.05 < reserved < 0.1 for *_, reserved in errors), (setup, errors)


def test_a_structure_that_does_not_grow_with_its_depth_has_no_profile() -> None:
    counts = [{(("weights", "weights"), 0): many} for many in (5, 13)]
    (terms,) = growing(counts, (4, 12), [{(0, 512.0, 0): 2}]).values()
    assert terms == {(0, 512.0, 0): 2, (0, 512.0, 1): 2}
    with pytest.raises(NoPolynomial, match="depth"):
        growing(counts, (4, 13), [{(0, 512.0, 0): 1}])


def test_the_command_makes_profiles_for_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == main(["no/such-model"]) == 2
    assert "hint: " in capsys.readouterr().err
    for module in (profile_store, step_program):
        monkeypatch.setattr(module, "user_directory", lambda: tmp_path)
    setup = TrainSetup(loss="chunked", kernels="liger")
    key = structure_key(loaded(SMALL), GPU, setup)
    preferences = TrainSetup(objective="dpo", kernels="liger", micro_batch_seqs=2, seq_len_tokens=512)

    def asked(model: ModelSpec, cards: Any = (), plan_request: PlanRequest | None = None) -> Any:
        setups = [setup if plan_request is None or not plan_request.fixed else preferences]
        return {structure_key(model, GPU, variant): (variant, GPU) for variant in setups}

    monkeypatch.setattr("probes.tracing.__main__.planned_structures", asked)
    monkeypatch.setattr("probes.tracing.__main__.program_structures", lambda *_: {key: (setup, GPU)})
    few = partial(ProgramBuilder, optimizers=("adamw-fused", "adamw-8bit"))  # Adafactor's step alone takes four seconds
    monkeypatch.setattr("probes.tracing.__main__.ProgramBuilder", few)
    assert main([SMALL]) == main([SMALL, "--objective", "dpo"]) == 0
    model = replace(loaded(SMALL), model_id="a copy")
    assert find_profile(model, GPU, setup) is not None
    made = step_program.load_programs(step_program.user_programs(model))
    assert made.keys == {key}
    assert find_profile(model, GPU, setup.replace(adapter="rslora")) == find_profile(model, GPU, setup)
    assert find_profile(model, GPU, setup.replace(adapter="dora")) is None
    profile = find_profile(model, GPU, preferences)
    assert profile is not None
    errors = _against_dry_run(profile, model, preferences)
    assert max(abs(errors[phase]) for phase in errors if phase != "reserved") < 0.003, errors
    assert find_profile(model, GPU, setup.replace(checkpointing=0)) is None
