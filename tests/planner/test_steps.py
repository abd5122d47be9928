"""Small data gets enough optimizer steps, by a smaller batch and then by more epochs; a request is never overruled."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_planner.cli.answer import workload_for
from finetune_planner.cli.request_options import DataOptions, RequestOptions
from planner.core.errors import UsageError
from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.hyperparameters import rate_batch
from planner.hardware.gpus import find_gpu
from planner.memory.around import evaluating_bytes, evaluation_bytes, logits_bytes, occasions
from planner.memory.workload import Data
from planner.models.resolve import resolve_model
from planner.planning.decision.policy import checkpoint_bytes
from planner.planning.decision.results import PREFERENCE_FRACTION
from planner.planning.plan_request import PlanRequest
from planner.planning.useful import epoch_s, useful_speeds, useful_tokens_per_s
from planner.samples.dataset import choose_length, measure
from planner.samples.steps import (
    LEAST_GLOBAL_BATCH,
    MIN_STEPS,
    global_batch,
    num_epochs,
    small_data_note,
    steps_between_saves,
    steps_of_run,
    steps_per_epoch,
)
from planner.setup import TrainSetup
from reports.command import default_next_command
from reports.text import epoch_sentence
from tests.planner.helpers import plan_request, planned
from tests.planner.launch_sweep import request


@pytest.mark.parametrize(
    ("epoch_seqs", "batch", "epochs"), [(None, 32, 1), (100_000, 32, 1), (3_200, 32, 1), (1_600, 16, 1), (100, 8, 3)]
)
def test_the_batch_is_halved_before_epochs_are_added(epoch_seqs: int | None, batch: int, epochs: int) -> None:
    assert global_batch(epoch_seqs) == batch
    assert num_epochs(epoch_seqs, batch) == epochs


def test_a_stop_costs_a_quarter_of_a_run_and_an_hour_at_most() -> None:
    """A 70B's steps of 42 s were saved every 500: 5.8 hours, longer than many a job may run."""
    assert [steps_between_saves(*run) for run in ((12, 42.0), (10_000, 1.0), (10_000, 42.0), (10, 5000.0))] == [
        3,
        500,
        85,
        1,
    ]
    assert steps_between_saves(10_000) == 500
    slow = request(TrainSetup(), num_steps=10_000, step_s=42.0)
    assert all(
        "save_steps: 85" in EXPORTERS[target](slow).files[0].text for target in ("trl", "axolotl", "llamafactory")
    )


def test_a_default_batch_has_at_most_half_a_million_tokens() -> None:
    """Before, 32 sequences of 131,072: 4.2 M tokens a step."""
    lengths = (2048, 16_384, 32_768, 131_072, 1 << 20)
    assert [global_batch(None, seq_len_tokens=length) for length in lengths] == [32, 32, 16, 8, 8]
    assert global_batch(None, 16, seq_len_tokens=131_072) == 16


def test_a_packed_row_counts_as_the_samples_in_it() -> None:
    """67 rows of 7.5 samples: one row a step is a batch of 8 samples, and two epochs are over 100 steps."""
    assert global_batch(67, samples_per_seq=7.5) == 1
    assert num_epochs(67, 1) == 2
    assert global_batch(1000, samples_per_seq=2.0) == 8  # of 4 at least, which it does not need
    assert global_batch(300, samples_per_seq=2.0) == 4
    assert (rate_batch(1, 7.5), rate_batch(32, 7.5), rate_batch(8, 1.0)) == (8, 128, 8)


def test_what_evaluating_and_saving_take() -> None:
    """Evaluation at the micro-batch is below the training peak; at transformers' 8 it would not be on this card."""
    fixed = {"method": ("lora",), "optimizer": ("adamw-fused",)}
    workload = plan_request("meta-llama/Llama-3.1-8B", "rtx-4090", data=Data(epoch_tokens=2_000_000), fixed=fixed)
    plan = planned(workload)
    setup = plan.chosen.setup
    peak = plan.chosen.formula.peak_device_bytes
    at = {occasion.name: occasion for occasion in occasions(workload.model, workload.gpu, setup)}
    assert at["evaluation, 1 at once"].device_bytes <= peak
    assert at["saving"].device_bytes < peak
    assert at["saving"].host_bytes == 41_943_040 * 4
    assert 0 < at["merging"].device_bytes - 2 * workload.model.num_params < 1.3e9  # the base, and little more
    assert evaluation_bytes(workload.model, workload.gpu, setup, 8) < evaluation_bytes(
        workload.model, workload.gpu, setup, 16
    )
    assert logits_bytes(workload.model, setup) == 2048 * 128_256 * 4
    weights, states = checkpoint_bytes(workload, setup)
    assert states == 2 * weights == 2 * 41_943_040 * 4
    notes = " ".join(plan.notes)
    for words in (
        "123 optimizer steps",
        "a checkpoint takes 0.47 GiB",
        "eval_accumulation_steps",
        "merging the adapter",
    ):
        assert words in notes


def test_liger_evaluates_with_whole_logits_where_its_forward_does() -> None:
    """Liger 0.8.4's forward leaves the logits out in training alone unless it is asked to, as transformers does since
    5.15 (LLaMA-Factory 0.9.5 takes none above 5.6); TRL's own head never makes them whole."""
    model, card = resolve_model("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090")
    trl = TrainSetup(loss="liger", kernels="liger", checkpointing=1, seq_len_tokens=2048)
    by = {stack: trl.replace(stack=stack) for stack in ("trl", "hf", "llamafactory", "ms-swift")}
    whole = 2048 * 128_256 * 2  # bytes of 16-bit logits
    least = evaluation_bytes(model, card, by["trl"], 1)
    for stack, version in (("hf", "5.14"), ("llamafactory", ""), ("ms-swift", "4.51")):
        setup = by[stack].replace(transformers_version=version)
        assert evaluation_bytes(model, card, setup, 1) == pytest.approx(least + 5 * whole, rel=0.02)
        assert evaluating_bytes(model, card, setup, 1) == evaluation_bytes(model, card, setup, 1)
    for stack, version in (("hf", "5.15"), ("hf", ""), ("ms-swift", ""), ("trl", "")):
        assert evaluating_bytes(model, card, by[stack].replace(transformers_version=version), 1) == 0


def test_every_launch_file_evaluates_at_the_micro_batch() -> None:
    setup = TrainSetup(micro_batch_seqs=2, loss="chunked")
    for target, sign in {"trl": ": ", "hf": "=", "unsloth": "="}.items():
        text = EXPORTERS[target](request(setup)).files[0].text
        assert f"per_device_eval_batch_size{sign}2" in text
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
    data = Data(epoch_tokens=choice.epoch_tokens, epoch_seqs=choice.epoch_seqs)
    options = {"seq_len": choice.seq_len_tokens, "data": data}
    workload = PlanRequest(**options).workload(model, find_gpu("rtx-4090"))
    assert workload.global_batch_seqs == 8
    plan = planned(workload)
    assert any("optimizer steps an epoch" in note for note in plan.notes)
    workload = PlanRequest(global_batch=64, **options).workload(model, find_gpu("rtx-4090"))
    assert workload.global_batch_seqs == 64


@pytest.mark.parametrize(
    ("fields", "options", "epoch"),
    [
        ({}, {"num_samples": 500}, (500 * 2048, 500, 1.0)),
        ({}, {"num_samples": 500, "epoch_tokens": 84_000}, (84_000, 500, 1.0)),
        ({}, {"num_samples": 10, "epoch_tokens": 84_000}, (10 * 2048, 10, 1.0)),  # longer ones are cut
        ({"packing": (True,)}, {"num_samples": 500, "epoch_tokens": 84_000}, (84_000, 42, 500 / 42)),
        ({"objective": ("dpo",)}, {"num_samples": 500}, (2 * 500 * 2048, 500, 1.0)),
        ({"objective": ("grpo",)}, {"num_samples": 500}, (8 * 500 * 2048, 4000, 1.0)),
        ({}, {"epoch_tokens": 84_000}, (84_000, 42, 1.0)),
        ({}, {}, (None, None, 1.0)),
        # continued pretraining packs by itself, and splits texts that are longer than a row
        ({"objective": ("pretrain",)}, {"num_samples": 1000, "epoch_tokens": 9000}, (9000, 5, 200.0)),
        ({"objective": ("pretrain",)}, {"num_samples": 10, "epoch_tokens": 90_000}, (90_000, 44, 10 / 44)),
    ],
)
def test_a_job_is_planned_from_numbers_alone(
    fields: dict[str, tuple[object, ...]], options: dict[str, int], epoch: tuple[int | None, int | None, float]
) -> None:
    workload = plan_request("HuggingFaceTB/SmolLM2-135M", "rtx-4090", fixed=fields, data=Data(**options))
    data = workload.data
    assert (data.epoch_tokens, data.epoch_seqs, data.samples_per_seq) == epoch
    assert bool(data.real_fractions) == (epoch == (84_000, 500, 1.0))  # rows of the mean: shorter than 2,048


def test_numbers_alone_give_steps_time_cost_and_what_is_not_known() -> None:
    workload = plan_request("HuggingFaceTB/SmolLM2-135M", "rtx-4090", data=Data(num_samples=500, epoch_tokens=84_000))
    plan = planned(workload)
    notes = " ".join(plan.notes)
    for words in ("126 optimizer steps", "63 optimizer steps an epoch", "168 tokens on average", "--packing"):
        assert words in notes
    assert "2 epochs of 84 k tokens take" in epoch_sentence(workload, plan.chosen)
    assert "--dataset-tokens 84000 --samples 500" in default_next_command(plan)
    full = planned(plan_request("HuggingFaceTB/SmolLM2-135M", "rtx-4090", data=Data(num_samples=500)))
    assert "on average" not in " ".join(full.notes)


def test_what_is_no_padding_decides_the_micro_batch(tmp_path: Path) -> None:
    """Rows shorter than the plan's length, padded to their longest: another setup is the best then."""
    file = tmp_path / "uneven.jsonl"
    file.write_text("\n".join(json.dumps({"text": "word" * number}) for number in [400] * 60 + [1990] * 4))
    epochs = {}
    for packing in (True, False):
        options = RequestOptions(packing=packing, method=["lora"])
        workload = workload_for("Qwen/Qwen2.5-0.5B", "t4", options, data=DataOptions(dataset=str(file)))
        plan, blind = planned(workload), planned(replace(workload, data=replace(workload.data, real_fractions=())))
        setup, useful = plan.chosen.setup, useful_tokens_per_s(workload, plan.chosen)
        pairs = [(micro, workload.global_batch_seqs // micro) for micro in (1, 2, 4, 8)]
        assert useful >= (1 - PREFERENCE_FRACTION) * max(
            useful_speeds(workload, setup).tokens_per_s(setup.optimizer, pairs)
        )
        epochs[packing] = epoch_s(workload, plan.chosen), epoch_s(workload, blind.chosen)
        assert f"{useful:,.0f} tokens/s of the samples' own" in epoch_sentence(workload, plan.chosen)
    assert epochs[False][0] < 0.97 * epochs[False][1]
    assert epochs[True][0] < 0.8 * epochs[False][0]  # the mask of packed samples costs the causal half


def test_tokens_of_a_sample_are_not_taken_for_those_of_an_epoch() -> None:
    with pytest.raises(UsageError, match="less than one a sample") as caught:
        workload_for("HuggingFaceTB/SmolLM2-135M", "rtx-4090", RequestOptions(samples=50_000, dataset_tokens=2_000))
    assert "--tokens 100000000" in caught.value.hint


def test_a_file_has_its_own_number_of_samples(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "hello"}')
    with pytest.raises(UsageError, match="has 1 sample"):
        workload_for(
            "HuggingFaceTB/SmolLM2-135M", "rtx-4090", RequestOptions(samples=3), data=DataOptions(dataset=str(file))
        )


@pytest.mark.parametrize(("target", "packing"), [((), True), (("mlx",), False), (("torchtitan",), True)])
def test_a_target_that_packs_always_or_never_decides_it_before_the_data(
    target: tuple[str, ...], packing: bool, tmp_path: Path
) -> None:
    file = tmp_path / "uneven.jsonl"
    file.write_text("\n".join(json.dumps({"text": "word" * number}) for number in range(20, 190, 3)))
    data = DataOptions(dataset=str(file))
    workload = workload_for("Qwen/Qwen2.5-0.5B", "m3 max 64gb", RequestOptions(), data=data, targets=target)
    assert workload.fixed["packing"] == (packing,)


ASKED = {"role": "user", "content": "Why?"}


@pytest.mark.parametrize("num_chats", [500, 5000])
def test_ragged_chats_are_packed_whole_and_give_enough_steps(tmp_path: Path, num_chats: int) -> None:
    """About 170 tokens on average, 99 % below 700. Before: rows of 768, 3.5 and 23 steps an epoch, rank 8."""
    dice, file = random.Random(7), tmp_path / "chats.jsonl"
    words = ["word" * min(1440, max(10, round(dice.lognormvariate(4.83, 0.72)))) for _ in range(num_chats)]
    file.write_text(
        "\n".join(json.dumps({"messages": [ASKED, {"role": "assistant", "content": text}]}) for text in words)
    )
    workload = workload_for(
        "meta-llama/Llama-3.1-8B", "rtx-4090", RequestOptions(), data=DataOptions(dataset=str(file))
    )
    assert workload.fixed["packing"] == (True,)
    assert workload.seq_len_tokens > max(map(len, words)) / 4  # nothing is cut
    assert workload.min_rank == 16
    assert workload.data.epoch_seqs is not None
    assert workload.epochs * steps_per_epoch(workload.data.epoch_seqs, workload.global_batch_seqs) >= MIN_STEPS
    assert workload.data.samples_per_seq * workload.global_batch_seqs >= LEAST_GLOBAL_BATCH / 1.5  # rows are whole


def test_large_data_is_not_warned_about() -> None:
    assert small_data_note(1_000_000, 32) == ""
    assert "train 2 epochs, 80 steps" in small_data_note(320, 8, 2)  # the user's, not the rule's three
    assert "train 3 epochs" in small_data_note(320, 8)
    assert steps_per_epoch(1_000_000, 32) == 31_250
    assert small_data_note(1, 8) == (
        "1 optimizer step an epoch at 8 sequences: the launch files train 3 epochs, 3 steps, still fewer than 100: "
        "more data helps most"
    )


def test_a_part_of_a_step_is_a_step() -> None:
    """As transformers counts: 98 rows by 4, half an epoch, trained 13 steps (30 November 2026)."""
    assert steps_of_run(98, 4, 0.5) == 13
    assert "0.5 epochs, 13 steps" in small_data_note(98, 4, 0.5)
