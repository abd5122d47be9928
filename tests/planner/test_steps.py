"""Small data gets enough optimizer steps, by a smaller batch and then by more epochs; a wish is never overruled."""

import json
from pathlib import Path

import pytest

from planner.cli.wish import workload
from planner.dataset import choose_length, measure
from planner.decision.job import checkpoint_bytes
from planner.exporters import EXPORTERS
from planner.gpus import find_gpu
from planner.hyperparameters import rate_batch
from planner.memory.around import evaluation_bytes, logits_bytes, occasions
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.planning import plan_workload
from planner.setup import TrainSetup
from planner.steps import global_batch, num_epochs, small_data_note, steps_per_epoch
from tests.planner.helpers import wish
from tests.planner.launch_sweep import request


@pytest.mark.parametrize(
    ("epoch_seqs", "batch", "epochs"), [(None, 32, 1), (100_000, 32, 1), (3_200, 32, 1), (1_600, 16, 1), (100, 8, 3)]
)
def test_the_batch_is_halved_before_epochs_are_added(epoch_seqs: int | None, batch: int, epochs: int) -> None:
    assert global_batch(epoch_seqs) == batch
    assert num_epochs(epoch_seqs, batch) == epochs


def test_a_packed_row_counts_as_the_samples_in_it() -> None:
    """67 rows of 7.5 samples: one row a step is a batch of 8 samples, and two epochs are over 100 steps."""
    assert global_batch(67, samples_per_seq=7.5) == 1
    assert num_epochs(67, 1) == 2
    assert global_batch(1000, samples_per_seq=2.0) == 8  # of 4 at least, which it does not need
    assert global_batch(300, samples_per_seq=2.0) == 4
    assert (rate_batch(1, 7.5), rate_batch(32, 7.5), rate_batch(8, 1.0)) == (8, 32, 8)


def test_what_evaluating_and_saving_take() -> None:
    """Evaluation at the micro-batch is below the training peak; at transformers' 8 it would not be on this card."""
    asked = wish("meta-llama/Llama-3.1-8B", "rtx-4090", dataset_tokens=2_000_000, fixed={"method": ("lora",)})
    plan = plan_workload(asked)
    assert isinstance(plan, Plan)
    setup = plan.chosen.setup
    peak = plan.chosen.formula.peak_device_bytes
    at = {one.name: one for one in occasions(asked.model, asked.gpu, setup)}
    assert at["evaluation, 1 at once"].device_bytes <= peak
    assert at["saving"].device_bytes < peak
    assert at["saving"].host_bytes == 41_943_040 * 4
    assert 0 < at["merging"].device_bytes - 2 * asked.model.num_params < 1.2e9  # the base, and little more
    assert evaluation_bytes(asked.model, asked.gpu, setup, 8) < evaluation_bytes(asked.model, asked.gpu, setup, 16)
    assert logits_bytes(asked.model, setup) == 2048 * 128_256 * 4
    weights, states = checkpoint_bytes(asked, setup)
    assert states == 2 * weights == 2 * 41_943_040 * 4
    notes = " ".join(plan.notes)
    for words in (
        "123 optimizer steps",
        "a checkpoint takes 0.47 GiB",
        "eval_accumulation_steps",
        "merging the adapter",
    ):
        assert words in notes


def test_every_launch_file_evaluates_at_the_micro_batch() -> None:
    setup = TrainSetup(micro_batch_seqs=2, loss="chunked")
    for target, words in {
        "trl": "per_device_eval_batch_size: 2",
        "hf": "per_device_eval_batch_size=2",
        "unsloth": "per_device_eval_batch_size=2",
    }.items():
        text = EXPORTERS[target](request(setup)).files[0].text
        assert words in text
        assert "eval_accumulation_steps" in text


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
    asked = workload(model, find_gpu("rtx-4090"), fixed={}, **options)
    assert asked.global_batch_seqs == 8
    plan = plan_workload(asked)
    assert isinstance(plan, Plan)
    assert any("optimizer steps an epoch" in note for note in plan.notes)
    asked = workload(model, find_gpu("rtx-4090"), fixed={}, global_batch=64, **options)
    assert asked.global_batch_seqs == 64


def test_large_data_is_not_warned_about() -> None:
    assert small_data_note(1_000_000, 32) == ""
    assert "train 2 epochs, 80 steps" in small_data_note(320, 8, 2)  # the user's, not the rule's three
    assert "train 3 epochs" in small_data_note(320, 8)
    assert steps_per_epoch(1_000_000, 32) == 31_250
