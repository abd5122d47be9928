"""`plan diff`: which setting a new version or another config changes, and by how much."""

import json
import os
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from finetune_planner.cli import diff
from finetune_planner.cli.app import run
from planner.core.errors import EnvironmentProblem, UsageError
from planner.planning.trace_result import Holding, TraceResult
from tests.reports.factories import make_trace

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
PROFILED = """model_name_or_path: Qwen/Qwen2.5-1.5B
dtype: bfloat16
use_peft: true
lora_target_modules: [all-linear]
max_length: 2048
bf16: true
loss_type: chunked_nll
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


def test_memory_is_said_to_be_predicted_as_check_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(PROFILED)
    levels = []
    for words in (["check", str(config), "--no-dry-run"], ["diff", str(config), str(config)]):
        assert run([*words, "--gpu", "rtx-4090"]) == 0
        levels += re.findall(r"\[(formula|profile)", capsys.readouterr().out.partition("tokens/s")[0])
    assert levels == ["profile", "profile"]


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


UV = """#!{python}
import os, pathlib, sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "bad==1" in sys.argv:
    sys.exit("no such release")
if sys.argv[1] == "venv":
    folder = pathlib.Path(sys.argv[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to({python!r})
    (folder / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages").mkdir(parents=True)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in of uv was asked."""
    log, uv = tmp_path / "calls", tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable, log=str(log)))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(uv.parent / "python"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    return log


def test_an_environment_is_made_once_and_sees_this_torch(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = diff.environment(["transformers==4.56", "peft"])
    assert "uv makes an environment of peft, transformers==4.56" in capsys.readouterr().err
    folder = python.parents[1]
    (linked,) = folder.rglob("zz_torch.pth")
    assert (Path(linked.read_text()) / "torch").resolve() == Path(str(find_spec("torch").origin)).parent
    assert (folder / "override.txt").read_text() == diff.NO_TORCH
    calls_before = calls.read_text()
    assert diff.environment(["peft", "transformers==4.56"]) == python
    assert calls.read_text() == calls_before
    assert capsys.readouterr().err == ""


def test_a_torch_that_is_asked_for_is_installed(calls: Path) -> None:
    python = diff.environment(["torch==2.9.0", "transformers==4.56"])
    assert "--override" not in calls.read_text()
    assert not list(python.parents[1].rglob("zz_torch.pth"))


def test_what_uv_cannot_make_is_said_and_not_kept(calls: Path) -> None:
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="no such release"):
            diff.environment(["bad==1"])


RESULT = make_trace(
    by_category=(Holding(name="loss", size_bytes=2 << 30, num_allocations=1),),
    by_op=(Holding(name="_log_softmax", size_bytes=2 << 30, num_allocations=1),),
    libraries={"transformers": "4.56.0"},
)


def test_the_answer_names_what_grew(
    tmp_path: Path, calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax = Holding(name="_softmax", size_bytes=3 << 30, num_allocations=8)
    grown = replace(
        RESULT, peak_allocated_bytes=8 << 30, peak_reserved_bytes=8 << 30, libraries={"transformers": "5.23.0"},
        phase_peaks_bytes={"forward": 4 << 30, "backward": 8 << 30},
        by_category=(*RESULT.by_category, replace(softmax, name="activations kept for the backward")),
        by_module=(replace(softmax, name="model.layers.*.self_attn"),), by_op=(softmax, *RESULT.by_op),
    )  # fmt: skip
    ran: list[Any] = []

    def traced(order: Any) -> TraceResult:
        ran.append(order)
        return (RESULT, grown)[len(ran) - 1]

    monkeypatch.setattr(diff, "traced", traced)
    monkeypatch.setattr("probes.phantom.runner.protection", lambda order: type("P", (), {"kind": "landlock"}))
    file = tmp_path / "train.py"
    file.write_text("import transformers, peft, torch, json, mine\n")  # no setup that can be read
    words = ["diff", str(file), "--from", "transformers==4.56", "--to", "5.23", "--with", "numpy<3", "--gpu", "h200"]
    assert run([*words, "--trace", "-y", "--json=full"]) == 0
    captured = capsys.readouterr()
    trace = json.loads(captured.out)["trace"]
    assert (trace["added_bytes"], trace["by_phase"]) == (3 << 30, {"forward": 0, "backward": 3 << 30})
    assert trace["by_module"] == [{"name": "model.layers.*.self_attn", "before_bytes": 0, "added_bytes": 3 << 30}]
    assert [operation["name"] for operation in trace["by_op"]] == ["_softmax"]
    assert "not by setting" in captured.err
    assert captured.err.count("executes this program") == 2
    call_lines = calls.read_text().splitlines()
    assert [line.split("override.txt ")[1] for line in call_lines if "override" in line] == [
        "accelerate numpy<3 peft transformers==4.56",
        "accelerate numpy<3 peft transformers==5.23",
    ]
    assert ran[0].command[1:] == ran[1].command[1:] == (str(file),)
    assert ran[0].command[0] != ran[1].command[0]
    assert not ran[0].options.limited
    ran.clear()
    assert run([*words, "--trace", "-y"]) == 0
    shown = capsys.readouterr().out
    assert "transformers 4.56.0 -> 5.23.0" in shown
    assert "+3.00 GiB  model.layers.*.self_attn  (not there before)" in shown


TRAINER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
Trainer(model=model, args=TrainingArguments("o", per_device_train_batch_size=4), train_dataset=rows).train()
"""


def test_the_settings_are_told_also_where_it_cannot_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise EnvironmentProblem("FullyShardedDataParallel cannot be followed")

    monkeypatch.setattr("finetune_planner.cli.diff.trace_both", refused)
    (tmp_path / "train.py").write_text(TRAINER)
    words = ["diff", str(tmp_path / "train.py"), "--from", "transformers==4.56", "--to", "5.23", "--gpu", "h200"]
    assert run([*words, "--set", "seq_len_tokens=512", "--trace", "-y", "--json=full"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["added_bytes"] < 0  # transformers 5 loads 16-bit weights as they are
    assert "cannot be followed" in captured.err


def test_a_function_has_one_name_in_every_environment() -> None:
    """The innermost that is not PyTorch's: what it calls there is not asked for."""
    from probes.phantom import origins

    here: dict[str, Any] = {"seen": origins._running}
    torch_file, file = "/x/lib/site-packages/torch/nn/linear.py", "/x/lib/python3.11/site-packages/llama/model.py"
    exec(compile("def inner():\n    return outer()\ndef outer():\n    return seen()\n", torch_file, "exec"), here)
    exec(compile("class Model:\n    def forward(self):\n        return inner()\n", file, "exec"), here)
    line, code = here["Model"]().forward()
    assert origins.code_name(code) == "llama/model.py: Model.forward"
    assert line.file == __file__


def test_a_config_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: {a: [b\n")
    with pytest.raises(UsageError, match="runs Python programs"):
        diff._imported(tmp_path / "train.yaml", ())
