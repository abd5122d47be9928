"""Step programs: the timelines' algebra, and the speeds of structures that ship one."""

import tomllib
from pathlib import Path

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory.profiles import program_key
from planner.setup import TrainSetup
from planner.speed import family_speeds, speed_profile
from planner.speed.roofline import CURRENT, ThroughputProfile, throughput_profile
from planner.speed.sized import ProgramSpeed, ScaledSpeed
from planner.speed.step_program import (
    ONCE,
    TILES,
    Run,
    SizedLayout,
    SizedOperator,
    SizedSegment,
    StepProgram,
    Tables,
    load_programs,
    programs_of,
    save_programs,
)
from planner.speed.timeline import IDLE, QUEUE_S, SYNCHRONIZE, ClockMap, clock_map_of, issue_of
from tests.planner.helpers import loaded

MODEL = loaded("meta-llama/Llama-3.2-1B")
H200 = find_gpu("h200")
FULL = TrainSetup(
    method="full",
    precision="bf16-mixed",
    lora_rank=0,
    kernels="liger",
    loss="chunked",
    seq_len_tokens=2048,
    micro_batch_seqs=8,
    optimizer="adamw-fused",
    checkpointing=0,
)
LORA = TrainSetup(method="lora", kernels="liger", loss="chunked", lora_rank=16, seq_len_tokens=1024)


DEVICE = {0: 5e-3, 1: 2e-3, 2: 1e-3, 3: 3e-3}


def course(*calls: tuple[float, int | None]) -> ClockMap:
    return clock_map_of(issue_of(calls), DEVICE)


def test_course_of_calls_is_what_two_clocks_say() -> None:
    """By hand: the host issues a kernel of 5 ms, a view, one of 2 ms, waits, and issues a third."""
    timeline = course((1e-3, 0), (0.2e-3, None), (0.8e-3, 1), (0.5e-3, -1), (1e-3, 2))
    ends = 1e-3 + QUEUE_S + 5e-3 + 2e-3
    assert timeline.host_host == pytest.approx(ends + 1e-3)
    assert timeline.device_host == pytest.approx(ends + 1e-3 + QUEUE_S + 1e-3)
    assert timeline.device_device == pytest.approx(5e-3 + 2e-3 + 1e-3 + QUEUE_S + 1e-3)


def test_courses_are_composed_in_any_grouping() -> None:
    first, second = course((1e-3, 3), (2e-3, 2)), course((4e-3, 2), (0.0, -1))
    assert first.then(second).then(first) == pytest.approx(first.then(second.then(first)))
    assert first.times(5) == pytest.approx(course(*[(1e-3, 3), (2e-3, 2)] * 5))
    assert second.times(3) == pytest.approx(course(*[(4e-3, 2), (0.0, -1)] * 3))
    assert first.then(IDLE) == first.times(1) == first
    assert first.times(0) == IDLE
    assert ClockMap(0.0, 1.0, 2.0, 3.0).then(SYNCHRONIZE).host_host == 2.0


@pytest.mark.parametrize(
    ("measured_s", "setup"),
    [(0.545, FULL.replace(micro_batch_seqs=16)), (0.427, FULL.replace(kernels="eager", checkpointing=1))],
)
def test_program_is_near_measured_steps(measured_s: float, setup: TrainSetup) -> None:
    """This project's runs on an H200, no price of which was read off them (docs/accuracy/operators.md)."""
    assert speed_profile(MODEL, H200, setup).step_time(setup).step_time_s == pytest.approx(measured_s, rel=0.05)


def test_program_answers_alike_short_and_whole() -> None:
    for setup in (FULL, LORA.replace(accumulation_steps=4, checkpointing=1), LORA.replace(loss="liger")):
        speed = speed_profile(MODEL, H200, setup)
        assert isinstance(speed, ProgramSpeed)
        whole = speed.step_time(setup)
        pair = setup.micro_batch_seqs, setup.accumulation_steps
        assert speed.at(*pair) == pytest.approx((whole.step_time_s, whole.tokens_per_s))
        assert family_speeds(MODEL, H200, setup).tokens_per_s(setup.optimizer, [pair]) == [speed.at(*pair)[1]]
        assert sum(whole.parts_s.values()) == pytest.approx(whole.step_time_s)
        assert whole.parts_s["matrix"] > 0 < whole.parts_s["loss"]


def test_more_of_anything_takes_longer() -> None:
    for setup in (FULL, LORA):
        speed = speed_profile(MODEL, H200, setup)
        steps = [speed.at(micro, 2)[0] for micro in (1, 2, 3, 5, 8, 16)]
        assert steps == sorted(steps)
        longer = setup.replace(seq_len_tokens=2 * setup.seq_len_tokens)
        assert (
            speed_profile(MODEL, H200, longer).at(4, 1)[0]
            > speed.at(4, 1)[0]
            > speed_profile(MODEL, H200, setup.replace(seq_len_tokens=setup.seq_len_tokens // 2)).at(4, 1)[0]
        )
    recomputed = speed_profile(MODEL, H200, FULL.replace(checkpointing=1)).at(8, 1)[0]
    assert recomputed > speed_profile(MODEL, H200, FULL).at(8, 1)[0]


def test_what_has_no_program_is_the_formulas() -> None:
    offloaded = LORA.replace(checkpointing=1, activation_offload=True)
    scaled = speed_profile(MODEL, H200, offloaded)
    assert isinstance(scaled, ScaledSpeed)
    whole = scaled.step_time(offloaded)
    assert scaled.at(1, 1) == pytest.approx((whole.step_time_s, whole.tokens_per_s))
    assert whole.step_time_s > speed_profile(MODEL, H200, LORA.replace(checkpointing=1)).at(1, 1)[0]
    assert isinstance(speed_profile(MODEL, find_gpu("mi300x"), LORA), ThroughputProfile)
    for other in ({"adapter": "dora"}, {"compile": True}, {"attention": "eager"}):
        variant = LORA.replace(**other)
        speed = speed_profile(MODEL, H200, variant)
        assert isinstance(speed, ScaledSpeed)
        formulas = [throughput_profile(MODEL, H200, setup, conditions=CURRENT).at(2, 4)[0] for setup in (variant, LORA)]
        plain = speed_profile(MODEL, H200, LORA).at(2, 4)[0]
        assert speed.at(2, 4)[0] / plain == pytest.approx(formulas[0] / formulas[1], rel=0.2)


def test_padding_lengthens_a_program_by_its_attention() -> None:
    full = LORA.replace(micro_batch_seqs=4, accumulation_steps=2)
    padded = full.replace(uneven=True)
    plain, speed = (speed_profile(MODEL, H200, setup) for setup in (full, padded))
    whole, before = speed.step_time(padded), plain.step_time(full)
    assert before.step_time_s < whole.step_time_s < 1.5 * before.step_time_s
    differ = {name for name, seconds in whole.parts_s.items() if seconds != before.parts_s[name]}
    assert differ == {"attention"}
    tokens_per_s = family_speeds(MODEL, H200, padded).tokens_per_s(padded.optimizer, [(4, 2)])[0]
    assert (whole.step_time_s, whole.tokens_per_s) == pytest.approx(speed.at(4, 2))
    assert tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-3)
    alone = padded.replace(micro_batch_seqs=1)
    assert isinstance(speed_profile(MODEL, H200, alone), ProgramSpeed)


def test_trainers_around_transformers_models_share_a_program() -> None:
    trl = LORA.replace(checkpointing=1, micro_batch_seqs=1, seq_len_tokens=256)
    seconds = speed_profile(MODEL, H200, trl).at(1, 4)
    for stack in ("axolotl", "llamafactory", "ms-swift"):
        setup = trl.replace(stack=stack)
        assert speed_profile(MODEL, H200, setup).at(1, 4) == seconds
        reentrant = speed_profile(MODEL, H200, setup.replace(reentrant_checkpointing=True))
        assert isinstance(reentrant, ProgramSpeed)
        assert reentrant.at(1, 4)[0] < 0.9 * seconds[0]  # its host passes no hooks
    fused = {"kernels": "fused", "stack": "axolotl"}
    assert isinstance(speed_profile(MODEL, H200, trl.replace(**fused)), ProgramSpeed)
    assert isinstance(speed_profile(MODEL, H200, trl.replace(stack="unsloth")), ScaledSpeed)
    assert isinstance(speed_profile(MODEL, H200, trl.replace(stack="torchtune")), ThroughputProfile)


def test_paged_optimizer_moves_its_states() -> None:
    paged = FULL.replace(optimizer="paged-adamw-32bit")
    answer = speed_profile(MODEL, H200, paged).step_time(paged)
    formula = throughput_profile(MODEL, H200, paged, conditions=CURRENT).step_time(paged)
    assert answer.parts_s["paging"] == pytest.approx(formula.parts_s["paging"])
    assert answer.without_paging().step_time_s < answer.step_time_s


def test_an_optimizer_that_a_program_does_not_know_is_the_formulas() -> None:
    speed = speed_profile(MODEL, H200, FULL)
    assert isinstance(speed, ProgramSpeed)
    programs = programs_of(MODEL)
    program = programs.get(program_key(MODEL, H200, FULL))
    without = ProgramSpeed(MODEL, H200, FULL, programs, program._replace(steps={}))
    whole = without.step_time(FULL)
    assert without.at(8, 1)[0] == pytest.approx(whole.step_time_s)
    assert whole.step_time_s == pytest.approx(speed.at(8, 1)[0], rel=0.03)
    assert whole.parts_s["optimizer"] > 0


def test_programs_are_written_once_and_read_again(tmp_path: Path) -> None:
    tables = Tables()
    layout = SizedLayout((((1, 1.0),), ((0, 64.0),)), (), True, (), "bfloat16")
    place = tables.operator(SizedOperator("aten.mul.Tensor", (layout, layout), (layout,)))
    assert tables.operator(SizedOperator("aten.mul.Tensor", (layout, layout), (layout,))) == place
    segment = tables.segment(SizedSegment("forward", (Run(ONCE, 0, (5 * place + 1,)), Run(TILES, 0, (5 * place + 1,)))))
    program = StepProgram((((segment,), 3),), (((segment,), 1),), (), {"adamw": ((5 * place + 2, 7),)}, 12, True)
    save_programs(tmp_path / "one.gz", tables, {"a key": program}, {"torch": "2"})
    programs = load_programs(tmp_path / "one.gz")
    assert programs.versions == {"torch": "2"}
    assert programs.get("a key") == program
    assert programs.operators == [*tables.operators]
    assert programs.segments == [*tables.segments]
    assert programs.get("another") is None
    (tmp_path / "two.gz").write_bytes(b"no file of programs")
    assert load_programs(tmp_path / "two.gz") is None


def test_shipped_programs_are_read() -> None:
    programs = programs_of(MODEL)
    assert len(programs.keys) > 100
    for key in sorted(programs.keys)[::40]:
        program = programs.get(key)
        assert program is not None, key
        assert program.steps.keys() >= {"adamw-fused", "adamw-8bit"}, key


def test_another_objective_has_programs_of_its_own() -> None:
    preferences = FULL.replace(objective="dpo", loss="chunked")
    speed = speed_profile(MODEL, H200, preferences)
    assert isinstance(speed, ProgramSpeed)
    assert speed.at(2, 1)[0] > 1.5 * speed_profile(MODEL, H200, FULL).at(2, 1)[0]  # pairs
    answered = speed_profile(MODEL, H200, preferences.replace(precomputed_reference=True))
    assert isinstance(answered, ScaledSpeed)  # like that with a reference
    assert answered.at(2, 1)[0] < speed.at(2, 1)[0]
    assert programs_of(MODEL).keys.isdisjoint(programs_of(MODEL, "dpo").keys)
    assert programs_of(MODEL, "grpo") is programs_of(MODEL)


def test_all_data_is_in_the_wheel() -> None:
    """setuptools takes the files that a pattern matches, not those of a directory that it matches."""
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["planner"]
    taken = {path for pattern in patterns for path in (root / "planner").glob(pattern)}
    assert {path for path in (root / "planner" / "data").rglob("*") if path.is_file()} <= taken
