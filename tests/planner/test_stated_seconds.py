"""Facts of seconds and step profiles stated by hand, of what planted faults got past (docs/faults.md)."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.hardware.gpus import all_gpus, find_gpu
from planner.memory import profiles as profile_store
from planner.memory.profiles import (
    LOSS_BEGINS,
    MONOMIALS,
    Piece,
    ProfiledStep,
    ProfileMoment,
    StepProfile,
    config_digest,
    reserved_peak,
    save_profiles,
)
from planner.memory.step import GAP_FLOOR_BYTES
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.adapters import ADAPTERS
from planner.setup import TrainSetup
from planner.speed import speed_profile, step_program
from planner.speed.operators import Layout
from planner.speed.prices import THIN, matrix_s, moved_s
from planner.speed.rates import card_rates
from planner.speed.sized import ScaledSpeed, Sized, Tiles
from planner.speed.step_program import (
    ONCE,
    TILES,
    ModelPrograms,
    Run,
    SizedLayout,
    SizedOperator,
    StepProgram,
    Tables,
    programs_of,
    save_programs,
)

H100 = card_rates(find_gpu("h100-sxm"))
MIB = 1 << 20


def model() -> ModelSpec:
    spec = catalogue.load("Qwen/Qwen2.5-0.5B")
    assert spec is not None
    return spec


@pytest.mark.parametrize("place", range(3))
def test_a_product_as_thin_as_an_adapters_costs_its_bytes(place: int) -> None:
    for edge, by_bytes in ((THIN, True), (THIN + 1, False)):
        sizes = [4096, 4096, 4096]
        sizes[place] = edge
        m, n, k = sizes
        moved = 2.0 * (m * k + k * n + m * n)
        assert (matrix_s(m, n, k, "bfloat16", H100) == pytest.approx(moved / (0.93 * H100.copy) + 2.5e-6)) == by_bytes
    emulated = card_rates(find_gpu("t4")), "bfloat16"  # by fp32's units, which are slower than its memory
    for rates, dtype in (emulated, (H100, "float32")):
        least = 2.0 * THIN * 4096 * 4096 / rates.matrix[dtype]
        assert matrix_s(THIN, 4096, 4096, dtype, rates) == pytest.approx(least + 2.5e-6)


L2_GAIN = {34: 1.45, 50: 1.2, 67: 1.03}
"""MB that a kernel moves -> how many times the copy rate. Source: readings of an H100, 50 MB of L2 (prices.jsonl)."""


@pytest.mark.parametrize("megabytes", L2_GAIN)
def test_what_is_still_in_the_cache_is_faster(megabytes: int) -> None:
    moved = 1e6 * megabytes
    rate = moved / (moved_s(moved, H100) - H100.launch_s)
    assert rate / H100.copy == pytest.approx(L2_GAIN[megabytes], abs=0.12)


def test_a_dimension_that_repeats_is_read_once() -> None:
    layout = Layout((8, 16), (0, 1), "bfloat16")
    assert (layout.numel, layout.size_bytes) == (128, 32)
    assert Layout((1, 16), (0, 1), "bfloat16").size_bytes == 32


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


def programs(shape: SizedLayout) -> ModelPrograms:
    raw = {
        "versions": {}, "programs": {}, "names": ["aten.add.Tensor"], "forms": list(shape.shape),
        "layouts": [[[*range(len(shape.shape))], shape.order, shape.dense, shape.repeated, shape.dtype]],
        "operators": [[0, [0], [0], [], 0]], "stretches": [], "steps": [],
    }  # fmt: skip
    return ModelPrograms(raw)


LENGTH, RANK = (2, 1.0), (6, 1.0)
"""One token, one rank, as places in MONOMIALS."""


@pytest.mark.parametrize(
    ("repeated", "strides"), [((), (48, 1)), ((0,), (0, 1)), ((1,), (1, 0))], ids=["whole", "row", "column"]
)
def test_an_operators_layout_at_its_sizes(repeated: tuple[int, ...], strides: tuple[int, int]) -> None:
    """Tokens by three times the rank: 100 by 48."""
    assert (MONOMIALS[LENGTH[0]], MONOMIALS[RANK[0]]) == ((0, 1, 0, 0), (0, 0, 1, 0))
    shape = SizedLayout(((LENGTH,), ((RANK[0], 3.0),)), (), True, repeated, "bfloat16")
    sized = Sized(programs(shape), H100, 4, 100, 16, {})
    assert sized.operator(0).inputs[0] == Layout((100, 48), strides, "bfloat16")


LOOPS = [
    # per, less -> (tile's tokens, turns, filled) of 5 tiles that are 4.5 whole ones, and of 100 tokens
    (ONCE, 0, (256, 1, 1.0)),
    (TILES, 0, (256, 5, 0.9)),
    (TILES, 1, (256, 4, 0.875)),
    (TILES, 7, (256, 0, 0.0)),
    (32, 0, (0, 4, 1.0)),
    (32, 1, (0, 3, 1.0)),
    (32, 9, (0, 0, 1.0)),
]


@pytest.mark.parametrize(("per", "less", "loop"), LOOPS, ids=str)
def test_how_often_a_run_comes(per: int, less: int, loop: tuple[int, int, float]) -> None:
    sized = Sized(programs(SizedLayout(((LENGTH,),), (), True, (), "bfloat16")), H100, 4, 100, 16, {})
    assert tuple(sized.loop(Run(per, less, ()), Tiles(256, 5, 0.9))) == pytest.approx(loop)


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


PHASES = ("load", "forward", "loss", "backward", "step", LOSS_BEGINS)
SETUP = TrainSetup(seq_len_tokens=1000, loss="full")


@pytest.mark.parametrize("highest", PHASES[1:4])
def test_the_highest_moment_before_the_step_is_that_of_any_phase(highest: str) -> None:
    sizes = [(phase, False, 9 * MIB if phase == highest else MIB) for phase in PHASES]
    step = ProfiledStep(profile(*sizes), model(), SETUP)
    assert step.before_step(2, accumulated=False)[0] == 9 * MIB


def test_a_later_micro_batchs_moment_is_there_with_accumulation_alone() -> None:
    step = ProfiledStep(profile(("backward", False, MIB), ("backward", True, 5 * MIB)), model(), SETUP)
    assert [step.bytes_at(2, "backward", accumulated=accumulated) for accumulated in (False, True)] == [
        [MIB],
        [5 * MIB],
    ]


def test_one_sequence_has_its_own_runs() -> None:
    step = ProfiledStep(profile(("forward", False, MIB), alone=MIB), model(), SETUP)
    assert [step.bytes_at(micro, "forward", accumulated=False) for micro in (1, 2)] == [[2 * MIB], [MIB]]


@pytest.mark.parametrize(("tokens", "complete"), [(999, True), (1000, True), (1001, False)])
def test_the_longest_length_that_was_run_is_one_of_them(tokens: int, complete: bool) -> None:
    setup = SETUP.replace(seq_len_tokens=tokens)
    assert ProfiledStep(profile(("load", False, MIB), longest=1000), model(), setup).complete == complete


@pytest.mark.parametrize("loss", [20 * MIB, 200 * MIB])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("temporaries", [50 * MIB, 3 * MIB])
def test_the_step_is_the_peak_where_its_temporaries_make_it_one(accumulation: int, temporaries: int, loss: int) -> None:
    """What the optimizer keeps lies beside every moment, what it makes beside the step alone."""
    step = ProfiledStep(
        profile(*((phase, False, loss if phase == "loss" else 8 * MIB) for phase in PHASES)), model(), SETUP
    )
    accumulated = accumulation > 1
    at_end = step.bytes_at(2, "step", accumulated=accumulated)[0] + temporaries
    highest = max(loss + int(0.18 * (loss - 8 * MIB)), 8 * MIB + temporaries) + GAP_FLOOR_BYTES
    assert reserved_peak(step.before_step(2, accumulated=accumulated), at_end) == highest


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
