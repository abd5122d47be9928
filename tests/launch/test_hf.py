"""The plain transformers + peft script, alone and under `accelerate launch`, really trains as planned.

All are forked from a process that has imported the libraries (tests/launch/test_trl.py trains from a cold start, which
goes through `accelerate launch` too).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.frameworks.exporters import EXPORTERS, ExportRequest, hf
from planner.frameworks.exporters.text import program
from planner.setup import TrainSetup
from tests.launch.conftest import Run, export_request, num_saved, write_launch

pytestmark = pytest.mark.processes

SETUPS = {
    "lora": TrainSetup(
        precision="fp32", lora_rank=4, lora_targets="attention", micro_batch_seqs=2, accumulation_steps=2,
        seq_len_tokens=64,
    ),
    "full-every-2-layers": TrainSetup(
        method="full", precision="fp32", lora_rank=0, micro_batch_seqs=3, seq_len_tokens=64, checkpointing=2,
        optimizer="sgd",
    ),
    "qlora-packed-cast": TrainSetup(
        method="qlora", quantization="nf4-double", precision="fp32", kbit_fp32_cast=True, lora_rank=4,
        micro_batch_seqs=1, accumulation_steps=2, seq_len_tokens=48, packing=True, checkpointing=0,
    ),
}  # fmt: skip
TRAINED = {
    "lora": 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32)),
    "full-every-2-layers": None,
    "qlora-packed-cast": 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)),
}
"""Trained parameters of the tiny model by hand: layers x rank x (in + out) of each adapted matrix; None: all."""


def request(setup: TrainSetup) -> ExportRequest:
    return export_request(setup, steps=8, rate=0.05)


def said(run: Run) -> dict[str, int]:
    """What the run itself counted before its first step."""
    line = next(line for line in run.output.splitlines() if line.startswith("RUN "))
    return json.loads(line.removeprefix("RUN "))


def check(name: str, run: Run, place: Path) -> None:
    setup = SETUPS[name]
    counts = said(run)
    assert counts["micro_batch_seqs"] == setup.micro_batch_seqs
    assert counts["accumulation_steps"] == setup.accumulation_steps
    assert counts["global_batch_seqs"] == setup.global_batch_seqs
    assert len(run.losses) == 8
    assert run.losses[-1] < run.losses[0]
    if TRAINED[name] is None:
        from transformers import AutoModelForCausalLM

        assert counts["trained_parameters"] == AutoModelForCausalLM.from_pretrained(place / "outputs").num_parameters()
    else:
        assert counts["trained_parameters"] == TRAINED[name] == num_saved(place / "outputs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full-every-2-layers", "qlora-packed-cast"])
def test_the_plain_script_trains_as_planned(name: str, place: Path, launch: Callable[..., Run]) -> None:
    emitted = EXPORTERS["hf"](request(SETUPS[name]))
    assert not emitted.unsupported
    write_launch(place, emitted)
    check(name, launch(emitted.command), place)


def test_packed_blocks_hold_every_sample_and_teach_something() -> None:
    """The last one is shorter, the only one where there are few samples; a loss of none would divide by zero."""
    scope: dict[str, Any] = {"MAX_LENGTH": 4}
    exec(program("PACKED"), scope)
    few = {"input_ids": [[1, 2], [3]], "labels": [[-100, 2], [3]]}
    assert scope["pack"](few) == {"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]}
    ended = {"input_ids": [[1, 2, 3, 4, 5]], "labels": [[-100, -100, 3, 4, -100]]}
    assert scope["pack"](ended)["input_ids"] == [[1, 2, 3, 4]]


@pytest.mark.slow
def test_accelerate_launches_the_plain_script(place: Path, launch: Callable[..., Run]) -> None:
    name = "lora"
    write_launch(place, EXPORTERS["hf"](request(SETUPS[name])))
    emitted = EXPORTERS["accelerate"](request(SETUPS[name]))
    write_launch(place, emitted)
    check(name, launch(emitted.command.replace("SCRIPT", f"launch/{hf.FILE}")), place)


def test_accelerate_starts_a_script_with_the_emitted_file(
    tmp_path: Path, launch: Callable[..., Run], warm_programs: Path
) -> None:
    """A process of the same Python, told the file's settings."""
    emitted = EXPORTERS["accelerate"](request(SETUPS["lora"].replace(precision="bf16-autocast")))
    write_launch(tmp_path, emitted)
    script = tmp_path / "told.py"
    script.write_text("import os, sys\nprint('TOLD', os.environ['ACCELERATE_MIXED_PRECISION'], sys.executable)\n")
    run = launch(emitted.command.replace("SCRIPT", script.name))
    assert f"TOLD bf16 {warm_programs / 'python'}\n" in run.output
