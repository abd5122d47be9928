"""Facts of seconds and step profiles stated by hand, of what planted faults got past (docs/faults.md)."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.hardware.gpus import all_gpus, find_gpu
from planner.memory import profiles as profile_store
from planner.memory.profiles import (
    Piece,
    ProfiledStep,
    ProfileMoment,
    StepProfile,
    config_digest,
    save_profiles,
)
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.adapters import ADAPTERS
from planner.setup import TrainSetup
from planner.speed import speed_profile, step_program
from planner.speed.sized import ScaledSpeed
from planner.speed.step_program import (
    SizedOperator,
    StepProgram,
    Tables,
    programs_of,
    save_programs,
)

MIB = 1 << 20


def model() -> ModelSpec:
    spec = catalogue.load("Qwen/Qwen2.5-0.5B")
    assert spec is not None
    return spec


def test_utilization_falls_as_a_step_grows() -> None:
    """A step's products are the same whatever its time; adapters on attention alone have no program of their own."""
    shipped = catalogue.load("Qwen/Qwen3-8B")
    assert shipped is not None
    setup = TrainSetup(micro_batch_seqs=4, accumulation_steps=2, checkpointing=1, lora_targets="attention")
    speed = speed_profile(shipped, find_gpu("h100-sxm"), setup)
    assert isinstance(speed, ScaledSpeed)
    scaled, formula = speed.step_time(setup), speed._formula_profile.step_time(setup)
    assert scaled.step_time_s != formula.step_time_s
    assert scaled.mfu_fraction * scaled.step_time_s == pytest.approx(formula.mfu_fraction * formula.step_time_s)


LENGTH, RANK = (2, 1.0), (6, 1.0)
"""One token, one rank, as places in MONOMIALS."""


def profile(*moments: tuple[str, bool, int], longest: int | None = None, alone: int = 0) -> StepProfile:
    """One group of so many bytes at each moment (phase, of a later micro-batch, bytes); of micro-batch 1 more."""
    pieces = [
        Piece(
            one_sequence=single,
            shortest_tokens=1,
            longest_tokens=longest,
            moments=tuple(
                ProfileMoment(phase, later, ((("activations", phase), ((0, float(size + alone * single)),)),))
                for phase, later, size in moments
            ),
        )
        for single in (False, True)
    ]
    return StepProfile(pieces=tuple(pieces))


SETUP = TrainSetup(seq_len_tokens=1000, loss="full")


@pytest.mark.parametrize(("tokens", "complete"), [(999, True), (1000, True), (1001, False)])
def test_the_longest_length_that_was_run_is_one_of_them(tokens: int, complete: bool) -> None:
    setup = SETUP.replace(seq_len_tokens=tokens)
    assert ProfiledStep(profile(("load", False, MIB), longest=1000), model(), setup).complete == complete


@pytest.mark.parametrize(("gpu", "profiled"), [("a100-80gb", True), ("rtx-4090", True), ("Apple", False)])
def test_profiles_are_of_cudas_cards(gpu: str, profiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = find_gpu(gpu) if profiled else next(candidate for candidate in all_gpus() if candidate.vendor == gpu)
    spec = replace(model(), model_id=f"on {gpu}")
    key = profile_store.structure_key(spec, card, SETUP)
    save_profiles(tmp_path / f"{config_digest(spec.config)}.json.gz", {key: profile(("load", False, MIB))}, {})
    monkeypatch.setattr(profile_store, "SHIPPED", tmp_path)
    assert (profile_store.find_profile(spec, card, SETUP) is not None) == profiled


@pytest.mark.parametrize("name", ADAPTERS)
def test_profiles_are_of_adapters_whose_matrices_have_a_rank(name: str) -> None:
    row = ADAPTERS[name]
    some = {"loss": "full", "checkpointing": 0, "packing": False}
    bits = {} if "none" in row.quantizations else {"method": "qlora", "quantization": row.quantizations[0]}
    setup = TrainSetup(adapter=name, lora_rank=8 if row.size else 0, **some, **bits)
    assert profile_store.profiled_kind(setup) == (name in ("lora", "rslora", "pissa", "dora", "vera"))


def test_a_users_programs_of_other_versions_are_not_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, digest = step_program.library_versions(), config_digest(model().config)
    monkeypatch.setattr(step_program, "user_directory", lambda: tmp_path)
    program = StepProgram((), (), (), {}, 12, False)
    tables = Tables()
    tables.operator(SizedOperator("aten.add.Tensor"))
    save_programs(tmp_path / f"programs-{digest}-x.json.gz", tables, {"own": program}, {**here, "torch": "0.0"})
    programs = programs_of(replace(model(), model_id="others"))
    assert programs is None or "own" not in programs.keys
    save_programs(tmp_path / f"programs-{digest}-y.json.gz", tables, {"own": program}, here)
    programs = programs_of(replace(model(), model_id="own"))
    assert programs.keys == {"own"}
    path = tmp_path / f"programs-{digest}-y.json.gz"
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content.replace(b'"own"', b'"oms"')))
    step_program.load_programs.cache_clear()
    assert step_program.load_programs(path) is None
    assert json.loads(content.partition(b"\n")[2])["schema"] == step_program.SCHEMA
