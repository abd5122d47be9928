"""Small data gets enough optimizer steps, by a smaller batch and then by more epochs; a wish is never overruled."""

import json
from pathlib import Path

import pytest

from planner.cli.wish import workload
from planner.dataset import choose_length, measure
from planner.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning import plan_workload
from planner.steps import global_batch, num_epochs, small_data_note, steps_per_epoch


@pytest.mark.parametrize(
    ("epoch_seqs", "batch", "epochs"), [(None, 32, 1), (100_000, 32, 1), (3_200, 32, 1), (1_600, 16, 1), (100, 8, 3)]
)
def test_the_batch_is_halved_before_epochs_are_added(epoch_seqs: int | None, batch: int, epochs: int) -> None:
    assert global_batch(epoch_seqs) == batch
    assert num_epochs(epoch_seqs, batch) == epochs


def test_every_gpu_gets_a_sequence() -> None:
    assert global_batch(100, num_gpus=16) == 16
    assert global_batch(None, num_gpus=3) == 33


def test_five_hundred_short_chats_are_warned_about(tmp_path: Path) -> None:
    """500 chats of about 170 tokens: 3.5 steps of 32 packed rows before, without a word."""
    file = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "word " * 80}]}
    file.write_text("\n".join(json.dumps(chat) for _ in range(500)))
    choice = choose_length(measure(file))
    model = resolve_model("HuggingFaceTB/SmolLM2-135M")
    options = {"seq_len": choice.seq_len_tokens, "dataset_tokens": choice.epoch_tokens, "epoch_seqs": choice.epoch_seqs}
    wish = workload(model, find_gpu("rtx-4090"), fixed={}, **options)
    assert wish.global_batch_seqs == 8
    plan = plan_workload(wish)
    assert isinstance(plan, Plan)
    assert any("optimizer steps an epoch" in note for note in plan.notes)
    asked = workload(model, find_gpu("rtx-4090"), fixed={}, global_batch=64, **options)
    assert asked.global_batch_seqs == 64


def test_large_data_is_not_warned_about() -> None:
    assert small_data_note(1_000_000, 32) == ""
    assert steps_per_epoch(1_000_000, 32) == 31_250
