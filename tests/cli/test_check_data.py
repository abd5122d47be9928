"""`plan check --dataset`: a file on its own samples."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from finetune_planner.cli.app import run
from planner.models import catalogue

FILE = (
    "base_model: {model}\nadapter: lora\nlora_r: 16\nlora_target_linear: true\nbf16: true\nflash_attention: true\n"
    "datasets:\n  - path: short.jsonl\n    type: alpaca\nsequence_len: {length}\nsample_packing: {packing}\n"
    "micro_batch_size: 4\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\n"
)
WORDS = (50, 100, 150, 1020)
"""Of the questions; an answer has four, and both are followed by no more than the template's few tokens."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a tokenizer of words, and samples of at most a kilotoken in a file that cuts at eight."""
    monkeypatch.chdir(tmp_path)
    spec = catalogue.load("meta-llama/Llama-3.1-8B")
    assert spec is not None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict(spec.config)))
    rows = [{"instruction": "word " * num, "output": "word " * 4} for num in WORDS for _ in range(25)]
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def with_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))


def answer(
    capsys: pytest.CaptureFixture[str], *more: str, length: int = 8192, packing: str = "false", gpu: str = "rtx-4090"
) -> dict[str, Any]:
    Path("a.yaml").write_text(FILE.format(model="./model", length=length, packing=packing))
    run(["check", "a.yaml", "--gpu", gpu, "--no-dry-run", "--json=full", *more])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def peak(document: dict[str, Any]) -> int:
    return int(document["prediction"]["peak_device_bytes"])


def test_memory_is_that_of_the_longest_sample_that_the_tokenizer_counts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_tokenizer(folder)
    plain, own = answer(capsys), answer(capsys, "--dataset", "short.jsonl")
    longest = int(re.findall(r"the longest ([\d,]+)", own["notes"][0])[0].replace(",", ""))
    assert max(WORDS) < longest < max(WORDS) + 40
    as_cut = answer(capsys, length=-(-longest // 8) * 8)
    assert own["setup"] == plain["setup"]  # the file is what it is
    assert peak(own) == peak(as_cut) < 0.5 * peak(plain)
    assert (plain["verdict"], own["verdict"]) == ("does_not_fit", as_cut["verdict"])
    assert own["prediction"]["tokens_per_s"] < 0.8 * as_cut["prediction"]["tokens_per_s"]  # the rest is padding
    assert "an epoch takes" in own["notes"][0]
    assert any("--dataset short.jsonl counts" in note for note in plain["notes"])


def test_an_estimate_of_lengths_makes_a_verdict_uncertain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, own = answer(capsys), answer(capsys, "--dataset", "short.jsonl")
    assert peak(own) == peak(plain)
    assert (plain["verdict"], own["verdict"]) == ("does_not_fit", "uncertain")
    assert own["memory_band"][0] > 0.5 > plain["memory_band"][0]
    assert "hf download" in own["notes"][0]


def test_packing_is_a_change_where_the_samples_are_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokenizer(folder)
    (packed,) = (
        change
        for change in answer(capsys, "--dataset", "short.jsonl", gpu="h100-sxm")["changes"]
        if change["label"].startswith("packing")
    )
    fields = {"packing": True, "micro_batch_seqs": 1, "accumulation_steps": 1}
    assert packed["fields"] == fields
    assert packed["in_place"]
    assert packed["speedup"] > 1.2
    assert not [change for change in answer(capsys, gpu="h100-sxm")["changes"] if "packing" in change["label"]]
    rows = answer(capsys, "--dataset", "short.jsonl", packing="true")
    assert peak(rows) == peak(answer(capsys, packing="true"))  # a packed row is full


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--dataset", "none.jsonl"], "no data set"),
        (["--columns", "text=a"], "--columns"),
        (["--dataset", "short.jsonl", "--annotations", "github"], "--dataset is of one file"),
    ],
)
def test_data_that_cannot_be_meant_are_refused(
    folder: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text(FILE.format(model="./model", length=2048, packing="false"))
    assert run(["check", "a.yaml", "--gpu", "rtx-4090", "--no-dry-run", *words]) == 2
    assert why in capsys.readouterr().err


def test_data_of_prompts_say_nothing_of_completions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(FILE.format(model="./model", length=2048, packing="false") + "rl: grpo\n")
    words = ["check", "a.yaml", "--gpu", "h100-sxm", "--no-dry-run", "--set", "seq_len=1024"]
    assert run([*words, "--dataset", "short.jsonl"]) == 2
    assert "completions are made" in capsys.readouterr().err


def test_data_that_llamafactory_names_in_its_table_are_seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model_name_or_path: ./model\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: identity, mine\n"
    Path("a.yaml").write_text(text + "cutoff_len: 2048\nbf16: true\n")
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"mine": {"file_name": "../short.jsonl"}}')
    assert run(["check", "a.yaml", "--gpu", "h100-sxm", "--no-dry-run"]) == 0
    assert "mine lies here: --dataset data/../short.jsonl" in " ".join(capsys.readouterr().out.split())


def test_data_in_a_folder_that_is_closed_to_this_user_are_not_seen(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def closed(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith("/root/"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", closed)
    text = "model_name_or_path: ./model\nuse_peft: true\nmax_length: 512\ndataset_name: /root/data/short.jsonl\n"
    Path("a.yaml").write_text(text)
    assert run(["check", "a.yaml", "--gpu", "h100-sxm", "--no-dry-run"]) == 0
    assert "lies here" not in capsys.readouterr().out
