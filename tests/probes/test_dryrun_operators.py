"""The operators that a dry run sees: those of the full model, whatever depth was run."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.hardware.gpus import find_gpu
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.planning.run_speed import run_speed, with_run_speed
from planner.setup import TrainSetup
from planner.setup.outcome import HOST_BOUND, Candidate, Fidelity
from planner.speed.operators import ISSUERS, WAIT, Program
from probes.dryrun import DryRunReport, dry_run_report
from tests.planner.helpers import loaded
from tests.whole import some

MODEL, GPU = "Qwen/Qwen3-0.6B", find_gpu("h200")
SETUPS: dict[str, dict[str, Any]] = {
    "lora, checkpointing, Liger": {"lora_rank": 8, "kernels": "liger", "accumulation_steps": 2},
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "checkpointing": 0, "loss": "chunked"},
    "qlora": {"method": "qlora", "quantization": "nf4-double", "optimizer": "adamw-8bit", "checkpointing": 0},
}


@cache
def shallow() -> ModelSpec:
    """The published sizes in eight layers."""
    spec = loaded(MODEL)
    config = {key: value for key, value in spec.config.items() if key != "layer_types"}
    return spec_from_config({**config, "num_hidden_layers": 8}, model_id=MODEL, source="test")


def report(fields: dict[str, Any], **options: Any) -> DryRunReport:
    outcome = dry_run_report(shallow(), GPU, TrainSetup(seq_len_tokens=512, **fields), use_cache=False, **options)
    assert isinstance(outcome, DryRunReport), outcome
    return outcome


def counted(program: Program, places: Any) -> Counter[tuple[Any, int]]:
    """How often each operator with its layouts is issued, by whom."""
    counts: Counter[tuple[Any, int]] = Counter()
    for place in places:
        for call in program.segments[place].calls:
            counts[program.operators[call // len(ISSUERS)], call % len(ISSUERS)] += 1
    return counts


@pytest.mark.parametrize("name", some([*SETUPS], 2))
def test_the_full_depth_issues_what_was_repeated(name: str) -> None:
    short, whole = report(SETUPS[name]), report(SETUPS[name], full_depth=True)
    assert short.depth < short.num_layers == whole.depth
    assert short.program is not None
    assert whole.program is not None
    for places in ("micro_batch", "step"):
        mine = counted(short.program, getattr(short.program, places))
        assert mine == counted(whole.program, getattr(whole.program, places))
    assert short.program.num_modules == whole.program.num_modules
    assert sum(short.program.added.values()) == sum(whole.program.added.values())
    setup = TrainSetup(seq_len_tokens=512, **SETUPS[name])
    assert run_speed(short.program, shallow(), GPU, setup).step_s == pytest.approx(
        run_speed(whole.program, shallow(), GPU, setup).step_s
    )
    assert short.prediction.tokens_per_s == pytest.approx(whole.prediction.tokens_per_s)


def test_a_dry_run_says_how_fast_and_who_waits() -> None:
    baseline = report(SETUPS["lora, checkpointing, Liger"])
    names = Counter(operator.name for operator in baseline.program.operators)
    assert {
        "liger.rms_norm",
        "liger.swiglu_backward",
        "trl.logprob_tile",
    } <= names.keys() or "aten._log_softmax.default" in names
    prediction = baseline.prediction
    assert prediction.step_time_s is not None
    assert sum(prediction.time_parts_s.values()) == pytest.approx(prediction.step_time_s)
    # 512 tokens of a small model: launches, not work
    (note,) = [note for note in prediction.notes if note.startswith(HOST_BOUND)]
    rougher = replace(prediction, level=Fidelity.FORMULA, notes=(f"{note} and one call more",))
    levels = Candidate(setup=TrainSetup(seq_len_tokens=512), budget_bytes=1 << 40, formula=rougher, dry_run=prediction)
    assert [note for note in levels.notes if note.startswith(HOST_BOUND)] == [note]  # estimate said both levels'
    larger = report({**SETUPS["lora, checkpointing, Liger"], "micro_batch_seqs": 4}).prediction
    assert larger.tokens_per_s is not None
    whole = TrainSetup(seq_len_tokens=512, **SETUPS["lora, checkpointing, Liger"], micro_batch_seqs=4096)
    silent = replace(larger, step_time_s=None, tokens_per_s=None)
    assert with_run_speed(silent, baseline.program, shallow(), GPU, whole) == silent  # it would outrun the card
    own_model = TrainSetup(seq_len_tokens=512, stack="cs336")  # whose operators are none of transformers'
    assert with_run_speed(silent, baseline.program, shallow(), GPU, own_model) == silent
    assert with_run_speed(silent, baseline.program, shallow(), GPU, own_model.replace(stack="trl")) != silent
    assert prediction.tokens_per_s is not None
    assert larger.tokens_per_s > 2 * prediction.tokens_per_s


def test_values_that_the_host_looks_at_are_waited_for() -> None:
    chunked = report({"lora_rank": 8, "loss": "chunked"}).program
    assert any(operator.name == WAIT for operator in chunked.operators)


def test_what_travels_or_generates_has_no_speed_of_its_own() -> None:
    offloaded = report({"lora_rank": 8, "activation_offload": True}).prediction
    assert offloaded.tokens_per_s is None
