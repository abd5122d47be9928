"""Kinds of hostile input, one product each: what is broken is said in words (exit 2 or 3), at once."""

import copy
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli.app import run
from planner.core.errors import ConfigError
from planner.frameworks.readers.loading import parse_toml
from planner.samples.dataset import measure
from tests.whole import paired, some

IN_WORDS = (0, 1, 2, 3)
"""Exit codes of an answer; 70 is an internal error."""
LONG = 20_000
CPU_S = 5.0
"""Two to four times what each of these takes; before, 12 s and more."""

POINT = {
    "model": "HuggingFaceTB/SmolLM2-135M", "gpu": "rtx-4090", "tokens_per_s": 1000.0, "source": "a",
    "conditions": {"trainer_overhead": True},
    "setup": {"method": "lora", "lora_rank": 8, "lora_targets": "all-linear", "seq_len_tokens": 512},
}  # fmt: skip
STORED = {
    "record": {
        "model_id": "HuggingFaceTB/SmolLM2-135M", "setup": {"method": "lora", "lora_rank": 8},
        "outcome": {
            "outcome": "measurement", "flags": [], "step_times_s": [1.0, 1.1], "tokens_per_step": 100,
            "environment": {"device": "cuda", "gpu_key": "rtx-4090", "gpu_name": "x"},
        },
    }
}  # fmt: skip
BENCH = {
    "gpu_name": "NVIDIA GeForce RTX 4090", "matmul_flops_per_s": {"bf16": 1e14}, "copy_bytes_per_s": 1e12,
    "issue_s": 5e-6, "memory_bytes": 2**34, "sm_count": 10, "capability": [8, 9], "l2_bytes": 100,
}  # fmt: skip
STRANGE = ["text", "", None, True, -1, 0, [], {}, [[]], ["a"], {"a": "b"}, 1e300, 2**70, "1e5", [None]]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in inner:
        yield from places(child, (*at, name))


def put(document: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The document with another value at a place."""
    if not at:
        return new
    edited = node = copy.deepcopy(document)
    for name in at[:-1]:
        node = node[name]
    node[at[-1]] = new
    return edited


CALIBRATED = [
    (option, put(document, at, new))
    for option, document in (((), POINT), ((), STORED), (("--microbench",), BENCH))
    for at in places(document)
    for new in STRANGE
]


@pytest.mark.parametrize("part", range(4))
def test_calibrate_takes_no_value_of_another_type_for_its_own(part: int, tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    for option, document in some(CALIBRATED, 14)[part::4]:
        file.write_text(json.dumps(document) + "\n")
        assert run(["calibrate", *option, str(file)]) in IN_WORDS, document


DEEP = {
    "key": ".".join("a" * LONG) + " = 1",
    "table": "[" + ".".join("a" * LONG) + "]",
    "array": "[[" + ".".join("a" * LONG) + "]]",
    "inline": "x = {" + ".".join("a" * LONG) + " = 1}",
    "quoted": ".".join(['"b"'] * LONG) + " = 1",
    "second": "[x]\na = 1\n" + " . ".join("a" * LONG) + " = 1",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_toml_of_many_dotted_parts_is_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match="nested too"):
        parse_toml(text, "x.toml")
    assert time.process_time() - began < CPU_S


def test_toml_with_dots_that_nest_nothing_is_read() -> None:
    dots = "." * 300
    text = f'# {dots}\na.b = 1 # {dots}\nc = "{dots}"\n'
    assert parse_toml(text, "x.toml") == {"a": {"b": 1}, "c": dots}


BOMBS = {
    "a.jsonl.gz": b'{"text":"a"}\n',
    "a.csv.gz": b"text\n",
    "a.txt.gz": b"a\n\n",
    "b.txt.gz": b"\n",
    "b.jsonl.gz": b"\n",
}


@pytest.mark.parametrize("name", some(list(BOMBS), 5))
def test_a_file_that_unpacks_to_nothing_but_itself_is_refused(name: str, tmp_path: Path) -> None:
    """Eight megabytes of one sample; the same few times are data."""
    piece, file, small = BOMBS[name], tmp_path / name, tmp_path / f"small-{name}"
    with gzip.open(file, "wb") as packed:
        packed.write(b"text\n" * ("csv" in name) + piece * (8_000_000 // len(piece)))
    began = time.process_time()
    with pytest.raises(ConfigError, match="bytes in the first"):
        measure(file)
    assert time.process_time() - began < CPU_S
    if name.startswith("a."):
        with gzip.open(small, "wb") as packed:
            packed.write(piece * 200)
        assert measure(small).num_samples in (199, 200)


def test_a_parquet_file_with_more_rows_than_bytes_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for num, message in ((300_000, "300,000 rows in"), (2000, "")):
        rows = arrow.table({"text": arrow.array(["a"] * num).dictionary_encode()})
        parquet.write_table(rows, tmp_path / f"{num}.parquet", compression="zstd")
        if message:
            with pytest.raises(ConfigError, match=message):
                measure(tmp_path / f"{num}.parquet")
        else:
            assert measure(tmp_path / f"{num}.parquet").num_samples == num


ELIFS = "".join(f"elif x == {number}:\n    b = {number}\n" for number in range(1, 1200))
NESTED = {
    "unknown": f"import sys\nx = int(sys.argv[1])\nif x == 0:\n    b = 1\n{ELIFS}",
    "known": f"x = 1100\nif x == 0:\n    b = 1\n{ELIFS}",
}


@pytest.mark.parametrize("kind", NESTED)
def test_a_chain_that_python_runs_is_followed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = "from transformers import TrainingArguments\nTrainingArguments('x', per_device_train_batch_size=b)\n"
    (tmp_path / "t.py").write_text(NESTED[kind] + made)
    assert run(["check", str(tmp_path / "t.py"), "--gpu", "rtx-4090", "--no-dry-run"]) == 3
    errors = capsys.readouterr().err
    assert ("micro_batch_seqs" in errors) == (kind == "unknown"), errors


@pytest.mark.parametrize(("mark", "number", "quoted"), [("\x01", 0, False), ("\x02", 7, True)], ids=repr)
def test_a_script_may_hold_the_marks_of_its_reader(mark: str, number: int, quoted: bool, tmp_path: Path) -> None:
    words = f"{mark}{number}{mark}"
    words = f'"{words} $(echo {words})"' if quoted else words
    script = f"trl sft --model_name_or_path gpt2 --max_length 64 --run_name {words}; echo {words}\n"
    (tmp_path / "run.sh").write_text(script)
    assert run(["check", str(tmp_path / "run.sh"), "--gpu", "rtx-4090", "--no-dry-run"]) == 0


SETTINGS = "base_model: HuggingFaceTB/SmolLM2-135M\nmicro_batch_size: 512\nsequence_len: 4096\nadapter: lora\n"


BEFORE, BEHIND = ["", "a: 1\n---\n", "---\n"], ["---\na: 1\n", "...\n---\n", "---\n- 1\n", "--- text\n", "..."]


@pytest.mark.parametrize(("before", "after"), paired(BEFORE, BEHIND, 1))
def test_fix_of_several_documents_is_an_answer(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(before + SETTINGS + after)
    for where in ((), ("--out", "g.yaml")):
        assert run(["check", "f.yaml", "--gpu", "rtx-4090", "--no-dry-run", "--fix", *where]) in IN_WORDS


@pytest.mark.parametrize(
    "command", [["HuggingFaceTB/SmolLM2-135M", "--gpu", "rtx-4090", "--no-dry-run"], ["store", "show"]]
)
@pytest.mark.parametrize("link", ["itself", "each other", "into nothing"])
def test_a_store_that_is_a_link_in_a_circle_is_said(
    command: list[str], link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = tmp_path / "s.jsonl", tmp_path / "t.jsonl"
    os.symlink(store if link == "itself" else other, store)
    if link == "each other":
        os.symlink(store, other)
    monkeypatch.setenv("FINETUNE_PLANNER_STORE", str(store))
    code = run(command)
    assert code in IN_WORDS
    assert (code == 3) == (link != "into nothing")
    assert ("hint: remove the link" in capsys.readouterr().err) == (link != "into nothing")


@pytest.mark.parametrize("endpoint", ["http://[::1", "file:///etc", "http://x:99999"])
def test_an_endpoint_that_is_no_address_is_said(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert run(["no-such/model", "--gpu", "rtx-4090", "--no-dry-run"]) in (2, 3)
    words = "HF_ENDPOINT is not an http address" in capsys.readouterr().err
    assert words or endpoint == "http://x:99999"
