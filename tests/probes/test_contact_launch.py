"""The emitted file's own run on a bare machine: what is made for it, what is asked of TRL, what is told of it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.contact import launch as contact_launch
from benchmarks.contact import launched, trainer_time
from benchmarks.contact.launched import VARIABLE
from benchmarks.contact.readings import TINY

SETUP = {"micro_batch_seqs": 2, "accumulation_steps": 3, "seq_len_tokens": 48}
RUNG = {"peak_allocated_bytes": 800, "peak_reserved_bytes": 900, "peak_device_bytes": 1400, "tokens_per_s": 100.0}
SEEN = {"peak_allocated_bytes": 1000, "peak_reserved_bytes": 1000, "step_s": [9.0, 2.0, 2.0, 2.0], "between_s": [1.0]}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    folder = tmp_path / "plan"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 2}))
    folder.mkdir()
    document = {
        "workload": {"model": {"model_id": str(tmp_path / "tiny")}},
        "chosen": {
            "setup": SETUP,
            "fits": True,
            "formula": RUNG,
            "dry_run": {**RUNG, "tokens_per_s": None},
            "probe": None,
        },
    }
    (folder / "plan.json").write_text(json.dumps(document))
    return folder


def test_the_run_is_given_what_the_machine_lacks_and_leaves_nothing_large(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for TRL looks at what it is given, and says what a GPU would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def run(words: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> str:
        assert folder == plan
        named = dict(pairwise(words))
        tokenizer = AutoTokenizer.from_pretrained(named["--model_name_or_path"])
        rows = [json.loads(line) for line in (Path(named["--dataset_name"]) / "train.jsonl").read_text().splitlines()]
        assert len(rows) == SETUP["micro_batch_seqs"] * SETUP["accumulation_steps"] * 2
        ids = [tokenizer(row["text"])["input_ids"] for row in rows]
        assert all(len(one) >= SETUP["seq_len_tokens"] for one in ids)
        assert tokenizer.unk_token_id not in ids[0]
        loaded = AutoModelForCausalLM.from_pretrained(named["--model_name_or_path"])
        assert loaded.config.num_hidden_layers == 2
        assert len(tokenizer) <= loaded.config.vocab_size
        assert "expandable_segments:True" in environment["PYTORCH_ALLOC_CONF"]
        Path(named["--output_dir"]).mkdir()
        watched = (
            "import sitecustomize, sys; sys.exit(not any(type(one).__name__ == 'Watcher' for one in sys.meta_path))"
        )
        assert subprocess.run([sys.executable, "-c", watched], env=environment, check=False).returncode == 0
        (Path(environment[VARIABLE]) / "watched.json").write_text(json.dumps(SEEN))
        return ""

    monkeypatch.setattr(contact_launch, "_run", run)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    found = contact_launch.run_launched(plan, work, "cpu", steps=2, limit_s=300)
    assert "problem" not in found
    assert found["seen"] == SEEN
    assert set(found["promised"]) == {"formula", "dry_run"}
    assert sorted(one.name for one in work.iterdir()) == ["site", "texts", "watched"]
    assert json.loads(json.dumps(found)) == found
    told = contact_launch.told(found)
    assert told[0] == "4 steps: 2.0000 s, 1000.0 ms of the trainer between two, 96 tokens/s"
    assert "peak_reserved_bytes 1000, formula said 900 (-10.00%)" in told
    on_gpu = {**found, "driver_before": {"used_bytes": 300}, "seen": {**SEEN, "used_bytes": 1900}}
    assert "peak_device_bytes 1600, dry_run said 1400 (-12.50%)" in contact_launch.told(on_gpu)


def test_a_run_that_fails_or_hangs_is_told(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit(5)"]
    monkeypatch.setattr(contact_launch, "command", lambda *asked: words)
    monkeypatch.setattr(contact_launch, "make_model", lambda config, folder, device: None)
    found = contact_launch.run_launched(plan, tmp_path / "work", "cpu", steps=1)
    assert found["problem"] == "trl sft ended with status 5"
    assert contact_launch.told(found)[0] == "the launch file did not run: trl sft ended with status 5"
    words[2] = "import time; time.sleep(600)"
    found = contact_launch.run_launched(plan, tmp_path / "work", "cpu", steps=1, limit_s=0.5)
    assert found["problem"] == "trl sft did not end within 0.5 s"


def test_what_is_named_beside_the_file_are_fields_of_it_or_of_the_trainer() -> None:
    """TRL refuses an option that it does not know; `num_processes` is its launcher's."""
    from trl import ModelConfig, ScriptArguments, SFTConfig

    words = contact_launch.command(Path("m"), Path("t"), Path("o"), 20, "cpu")
    assert words[words.index("--config") + 1] == contact_launch.FILE
    options = {word[2:] for word in words if word.startswith("--")} - {"config", "num_processes"}
    known = {name for kind in (ModelConfig, ScriptArguments, SFTConfig) for name in kind.__dataclass_fields__}
    assert options <= known
    assert {"model_name_or_path", "dataset_name", "max_steps"} <= options


def test_every_step_and_what_lies_between_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    times = iter(range(100))
    monkeypatch.setattr("benchmarks.contact.launched.time.perf_counter", lambda: float(next(times)))
    watching = launched.callback_class(object)()
    for _ in range(3):
        watching.on_step_begin(None, None, None)
        watching.on_step_end(None, None, None)
    watching.on_train_end(None, None, None)
    seen = json.loads((tmp_path / "watched.json").read_text())
    assert (seen["step_s"], seen["between_s"]) == ([1.0, 1.0, 1.0], [1.0, 1.0])


def test_the_trainers_own_time_is_measured() -> None:
    found = trainer_time.trainer_host_times(steps=40)  # medians of thirty: no single disturbed step decides
    assert set(found["added_s"]) == {"1", "4"}
    assert 0.0 < found["added_s"]["1"] < 1.0
    assert min(found["per_step_s"], found["per_micro_batch_s"]) >= 0.0
