"""Programs of structures, made of one run, against dry runs at other sizes."""

from pathlib import Path
from typing import Any

import pytest

from planner.hardware.gpus import find_gpu
from planner.planning.run_speed import run_speed
from planner.setup import TrainSetup
from planner.speed.sized import ProgramSpeed
from planner.speed.step_program import load_programs, save_programs
from probes.dryrun import DryRunReport, dry_run_report
from probes.tracing.programs import NoProgram, Primes, ProgramBuilder, program_structures
from tests.planner.helpers import loaded
from tests.whole import some

GPU = find_gpu("a100-80gb")
SMALL, HYBRID = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3.5-0.8B"
CASES = [
    (SMALL, {"method": "lora", "loss": "liger", "kernels": "eager"}, {"micro_batch_seqs": 3, "seq_len_tokens": 700}),
    (SMALL, {"method": "lora", "loss": "chunked", "kernels": "liger"}, {"micro_batch_seqs": 1, "seq_len_tokens": 6000}),
    (
        SMALL,
        {"method": "qlora", "quantization": "nf4", "loss": "chunked", "checkpointing": 2, "lora_dropout": 0.05},
        {"micro_batch_seqs": 4, "seq_len_tokens": 1000, "lora_rank": 64, "accumulation_steps": 2},
    ),
    (
        SMALL,
        {"method": "full", "lora_rank": 0, "loss": "full", "checkpointing": 1, "optimizer": "adamw"},
        {"micro_batch_seqs": 2, "seq_len_tokens": 512},
    ),
    (HYBRID, {"method": "lora", "loss": "chunked", "checkpointing": 1}, {"seq_len_tokens": 2048}),
    (
        SMALL,
        {"method": "lora", "loss": "chunked", "objective": "dpo", "checkpointing": 1},
        {"micro_batch_seqs": 3, "seq_len_tokens": 900, "accumulation_steps": 2},
    ),
    (
        "google-bert/bert-base-uncased",
        {"method": "full", "lora_rank": 0, "loss": "full", "objective": "classification"},
        {"micro_batch_seqs": 6, "seq_len_tokens": 300},
    ),
]
NEAR = 0.003
"""A loss's last tile is counted as a part of a whole one; a later micro-batch's sums of gradients once."""


@pytest.mark.parametrize(("name", "structure", "sizes"), some(CASES, 3))
def test_program_of_one_run_is_every_dry_runs(
    name: str, structure: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    model = loaded(name)
    setup = TrainSetup(**structure, **sizes)
    builder = ProgramBuilder(model, (setup.optimizer,))
    program = builder.program(setup, GPU)
    save_programs(tmp_path / "one.gz", builder.tables, {"one": program}, {})
    programs = load_programs(tmp_path / "one.gz")
    assert programs is not None
    report = dry_run_report(model, GPU, setup, use_cache=False)
    assert isinstance(report, DryRunReport)
    assert report.program is not None
    wanted = run_speed(report.program, model, GPU, setup)
    speed = ProgramSpeed(model, GPU, setup, programs, program).step_time(setup)
    assert speed.step_time_s == pytest.approx(wanted.step_s, rel=NEAR)
    for part, seconds in wanted.parts_s.items():
        assert speed.parts_s.get(part, 0.0) == pytest.approx(seconds, abs=2 * NEAR * wanted.step_s), part


def test_sizes_are_read_off_their_factors() -> None:
    primes = Primes([4096, 14336, 128256, 23 * 64, 53])
    seqs, tokens, rank = primes.seqs, primes.tokens, primes.rank
    assert seqs != 23
    assert rank != 53
    assert primes.form(4096) == ((0, 4096.0),)
    short = Primes([512, 768], longest=512)
    assert short.tokens < 512
    assert short.form(512) == ((0, 512.0),)  # which kernels would lengthen 467 to
    assert Primes([], alike=lambda rows: rows == 23 * 1307).seqs == 29  # a tile of the loss as wide as a layer
    assert primes.form(seqs * tokens) == ((3, 1.0),)
    assert primes.form(seqs * (tokens - 1)) == ((1, -1.0), (3, 1.0))
    assert primes.form(1024, tile=1024) != primes.form(1024)
    with pytest.raises(NoProgram):
        primes.form(rank * rank)


def test_what_is_asked_has_peoples_own_files_too() -> None:
    model = loaded(SMALL)
    setups = [setup for setup, _ in program_structures(model, ("a100-80gb",)).values()]
    assert {setup.kernels for setup in setups} == {"eager", "liger", "fused"}
    assert not any(setup.activation_offload for setup in setups)
