"""The plain script for clips of sound really trains: two steps of a tiny Whisper, as planned."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.frameworks.exporters import EXPORTERS, DatasetChoice, ExportRequest
from planner.memory.trained import trained_parameters
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from tests.launch.conftest import Run, export_request, num_saved, two_steps
from tests.whole import some

RATE = 16_000
SIZES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
MARKS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]


def tiny_whisper(folder: Path) -> ModelSpec:
    """A random Whisper of clips of one second with its processor, as a model folder; its inventory."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor
    from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[], additional_special_tokens=MARKS[1:])
    ends = tokenizer.convert_tokens_to_ids(MARKS[0])
    config = WhisperConfig(
        **SIZES,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        vocab_size=len(tokenizer),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), ends),
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(MARKS[1]),
    )
    WhisperProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    return spec_from_config(json.loads((folder / "config.json").read_text()), model_id="whisper", source="test")


def write_clips(folder: Path, num: int) -> None:
    """Tones of different heights and what they are called; the last text is longer than any that is kept."""
    from datasets import Dataset

    texts = [*(f"tone {index}" for index in range(num)), "x" * 60]
    sounds: list[dict[str, Any]] = [
        {"array": [math.sin(at * (1 + place) / 9) for at in range(RATE // 2)], "sampling_rate": RATE}
        for place in range(len(texts))
    ]
    folder.mkdir()
    Dataset.from_dict({"audio": sounds, "text": texts}).to_parquet(folder / "train.parquet")


def request(model: ModelSpec, setup: TrainSetup) -> ExportRequest:
    data = DatasetChoice(path="./rows", columns="text", local=True)
    return export_request(setup, model_id="./tiny-whisper", model=model, dataset=data, held_out=None)


LORA = TrainSetup(
    stack="hf", precision="fp32", lora_rank=4, lora_targets=("q_proj", "v_proj"), micro_batch_seqs=2,
    accumulation_steps=2, seq_len_tokens=24,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("method", some(["lora", "full"], 2))
def test_two_steps_on_clips_train_as_planned(method: str, tmp_path: Path, launch: Callable[..., Run]) -> None:
    model = tiny_whisper(tmp_path / "tiny-whisper")
    write_clips(tmp_path / "rows", 8)
    full = {"method": "full", "lora_rank": 0, "lora_targets": "all-linear", "frozen_encoder": True}
    setup = LORA if method == "lora" else LORA.replace(**full)
    emitted = EXPORTERS["hf"](request(model, setup))
    assert not emitted.refused
    run = two_steps(launch, tmp_path, emitted, setup)
    counted = next(line for line in run.output.splitlines() if line.startswith("RUN "))
    trained = trained_parameters(model, setup).num
    assert json.loads(counted.removeprefix("RUN "))["trained_parameters"] == trained
    if method == "lora":
        assert num_saved(tmp_path / "outputs") == trained


def test_other_targets_refuse_sound_by_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = {"model_type": "whisper", **sizes, "pad_token_id": 0}
    model = spec_from_config(config | dict.fromkeys(SIZES, 2), model_id="w", source="test")
    for name in ("trl", "axolotl", "llamafactory", "unsloth", "torchtitan", "deepspeed"):
        refused = EXPORTERS[name](request(model, LORA)).refused
        assert refused, name
    assert "Seq2SeqTrainer" in EXPORTERS["trl"](request(model, LORA)).refused
