"""`plan diff`: which setting a new version or another config changes, and by how much."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
from trl import SFTTrainer
from peft import LoraConfig
base = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", quantization_config=base)
args = TrainingArguments(output_dir="o", per_device_train_batch_size=4, bf16=True)
SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=LoraConfig(r=16), max_seq_length=2048).train()
"""


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["diff", *words, "--gpu", "h200", "--json=full"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_version_s_default_is_named_as_what_grew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/trl issue 876: from 0.7.2 on checkpointing is no longer switched on by itself."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    difference = answer(capsys, str(file), "--from", "trl==0.7.1", "--to", "0.7.4")
    assert difference["changes"][0]["names"] == ["checkpointing"]
    peaks = [difference[side]["predicted_peak_device_bytes"] for side in ("before", "after")]
    assert difference["added_bytes"] == peaks[1] - peaks[0] > 0
    assert difference["changes"][0]["added_bytes"] == pytest.approx(difference["added_bytes"], rel=0.05)
    back = answer(capsys, str(file), "--from", "trl==0.7.4", "--to", "0.7.1")
    assert back["added_bytes"] == -difference["added_bytes"]


def test_two_files_differ_by_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(SCRIPT)
    new.write_text(SCRIPT.replace("batch_size=4", "batch_size=8").replace("load_in_4bit", "load_in_8bit"))
    difference = answer(capsys, str(old), str(new))
    assert {tuple(change["names"]) for change in difference["changes"]} >= {("micro_batch_seqs",), ("quantization",)}
    assert "new.py:8" in next(
        change["origin"] for change in difference["changes"] if change["names"] == ["micro_batch_seqs"]
    )
    assert answer(capsys, str(old), str(old))["changes"] == []


def test_both_files_are_of_the_gpus_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ddp, zero = tmp_path / "ddp.yaml", tmp_path / "zero.yaml"
    text = "model_name_or_path: HuggingFaceTB/SmolLM2-135M\ndtype: bfloat16\nmax_length: 512\ndataset_name: a/b\n"
    ddp.write_text(text)
    zero.write_text(text + "accelerate_config: zero2\n")
    difference = answer(capsys, str(ddp), str(zero), "--gpus", "2")
    assert [change["names"] for change in difference["changes"]] == [["parallel"]]
    assert difference["added_bytes"] < 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [((), "--from trl==0.25"), (("--from", "trl==0.7", "--from", "peft==0.5", "--to", "1.0"), "--to PACKAGE==VERSION")],
)
def test_what_is_not_said_is_asked_for(
    words: tuple[str, ...], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["diff", str(tmp_path / "train.py"), *words, "--gpu", "rtx-4090"]) == 2
    assert hint in capsys.readouterr().err
