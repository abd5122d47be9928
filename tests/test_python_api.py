"""`finetune_planner` from Python: the same answers as the command line, typed, and at home in a notebook."""

import copy
import json
import pickle
import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import finetune_planner
from finetune_planner import (
    Planned,
    PlannerError,
    check,
    compare,
    compare_targets,
    estimate,
    plan,
    trace,
    which_gpu,
    which_model,
)
from finetune_planner.api import Options
from finetune_planner.cli.app import run
from finetune_planner.cli.request_options import RequestOptions
from planner.core.notes import Place, place_of

MODEL = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture(scope="module")
def small() -> Planned:
    return plan(MODEL, "rtx-4090", seq_len=1024, method="lora", dry_run=False)


def test_a_wish_has_the_options_of_the_command_line() -> None:
    assert set(Options.__annotations__) == {field.name for field in fields(RequestOptions)}


def test_what_there_is_is_listed_before_it_is_imported() -> None:
    assert {"plan", "check", "PlannerError"} <= {*dir(finetune_planner)}


def test_a_plan_is_the_command_line_s(small: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run([MODEL, "--gpu", "rtx-4090", "--seq-len", "1024", "--method", "lora", "--no-dry-run", "--json=full"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert small.to_dict() == answer
    assert small.fits
    assert small.peak_device_bytes == answer["chosen"]["formula"]["peak_device_bytes"]
    assert small.tokens_per_s == answer["chosen"]["formula"]["tokens_per_s"]


def test_a_plan_shows_itself_in_a_notebook(small: Planned) -> None:
    assert "tokens/s" in str(small)
    assert len(str(small).splitlines()) <= 25
    shown = small._repr_html_()
    assert shown.startswith("<pre")
    assert "<script" not in shown
    assert MODEL in shown


def test_nothing_fits_is_an_answer() -> None:
    answer = plan("meta-llama/Llama-3.1-8B", "rtx-3060", method="full", dry_run=False)
    assert not answer.fits
    assert answer.peak_device_bytes > answer.chosen.budget_bytes
    assert "Nothing fits" in str(answer)


def test_a_target_constrains_the_plan(tmp_path: Path) -> None:
    planned = plan(MODEL, "rtx-4090", dry_run=False, target="axolotl")
    assert planned.answer.workload.targets == ("axolotl",)
    (launch,) = planned.write(tmp_path, targets=["axolotl"])
    assert not launch.refused
    assert not launch.differences
    with pytest.raises(PlannerError, match="--target must be one of"):
        plan(MODEL, "rtx-4090", dry_run=False, target="trill")


def test_a_plan_is_written_as_it_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data and its targets, as `--dataset` and `--target` beside `--out`; the report says the command."""
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "a few words"}\n' * 40)
    planned = plan(MODEL, "rtx-4090", dry_run=False, dataset=Path("data.jsonl"), target="hf", method="lora")
    launches = planned.write("there")
    assert {launch.target for launch in launches if launch.command} == {"hf"}
    assert 'DATASET = "../data.jsonl"' in Path("there/launch/prepare_data.py").read_text()
    command = shlex.split(json.loads(Path("there/plan.json").read_text())["command"])
    assert run([*command[1:], "--no-dry-run", "--out", "again"]) == 0
    assert Path("again/launch/hf/train_hf.py").read_text() == Path("there/launch/hf/train_hf.py").read_text()
    named = plan(MODEL, "rtx-4090", dry_run=False, dataset="who/what")
    assert "--dataset who/what --out my-plan" in " ".join(str(named).split())
    named.write("hub", targets="hf", dataset="who/else")
    assert 'DATASET = "who/else"' in Path("hub/launch/prepare_data.py").read_text()


def test_answers_are_copied_and_sent_to_other_processes(small: Planned) -> None:
    guess = estimate(MODEL, "t4", method="lora", precision="bf16-autocast", dry_run=False)
    assert any(place_of(note) is not Place.PLAIN for note in small.answer.notes)  # which a string does not keep
    for answer in (small, guess, compare([small, small])):
        for same in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
            assert same == answer
            assert same.to_dict() == answer.to_dict()
    assert asdict(small.answer)["notes"] == small.answer.notes
    assert repr(small).startswith(f"<Planned: {MODEL}")
    assert "\n" not in repr(small)


def test_values_of_other_types_are_read_or_errors() -> None:
    same = plan(MODEL, "t4", dry_run=False, seq_len=512, dataset_tokens=20_000_000, lr=1.0)
    odd = plan(MODEL, "t4", dry_run=False, seq_len=np.int64(512), dataset_tokens=2e7, lr=1)  # type: ignore[arg-type]
    assert odd == same
    for wrong in ({"seq_len": "2048"}, {"seq_len": 2048.5}, {"rank": True}, {"targets": ["q_proj"]}, {"price": "1"},
                  {"packing": 1}, {"method": [1]}):  # fmt: skip
        with pytest.raises(PlannerError, match=f"{next(iter(wrong))} must be") as raised:
            plan(MODEL, "t4", dry_run=False, **wrong)  # type: ignore[arg-type]
        assert raised.value.hint
    with pytest.raises(PlannerError, match="no data set at"):
        plan(MODEL, "t4", dry_run=False, dataset="missing.jsonl")
    for command in ([], "python train.py"):
        with pytest.raises(PlannerError, match="list of words"):
            trace(command, "t4")


def test_bad_words_are_errors_with_a_hint() -> None:
    with pytest.raises(PlannerError) as unknown:
        plan(MODEL, "rtx-4090", seqlen=5)  # type: ignore[call-arg]
    assert "seq_len" in unknown.value.hint
    with pytest.raises(PlannerError) as flag:
        plan(MODEL, "rtx-4090", no_dry_run=True)  # type: ignore[call-arg]
    assert flag.value.hint == "did you mean dry_run?"
    with pytest.raises(PlannerError, match="rtx-40900"):
        plan(MODEL, "rtx-40900")
    with pytest.raises(PlannerError, match="named by a string"):
        plan(MODEL, None)  # type: ignore[arg-type]
    with pytest.raises(PlannerError, match="whole number, got '2'") as quoted:
        plan(MODEL, "rtx-4090", gpus="2")  # type: ignore[arg-type]
    assert quoted.value.hint == "for example gpus=2"
    with pytest.raises(PlannerError, match="--hard-negatives must be at least 0"):
        plan(MODEL, "rtx-4090", hard_negatives=-1)
    with pytest.raises(PlannerError, match="at least two"):
        compare([])


def test_an_estimate_is_the_command_line_s(capsys: pytest.CaptureFixture[str]) -> None:
    answer = estimate(MODEL, "rtx-4090", method="lora", lora_rank=8, micro_batch_seqs=2, dry_run=False)
    words = ["estimate", MODEL, "--gpu", "rtx-4090", "--method", "lora", "--rank", "8", "--micro-batch", "2"]
    assert run([*words, "--no-dry-run", "--json=full"]) == 0
    assert answer.to_dict() == json.loads(capsys.readouterr().out)
    assert answer.fits
    assert "It fits" in str(answer)


def test_a_config_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"model_name_or_path: {MODEL}\ndataset_name: trl-lib/Capybara\nper_device_train_batch_size: 2\n"
        "max_length: 512\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\nbf16: true\n"
        "use_peft: true\nlora_r: 8\n"
    )
    answer = check(file, "rtx-4090", dry_run=False)
    assert answer.verdict == "fits"
    assert answer.to_dict()["setup"]["lora_rank"] == 8
    assert "fits" in answer._repr_html_()


def test_plans_are_compared_and_written(small: Planned, tmp_path: Path) -> None:
    both = compare({"small": small, "other": plan(MODEL, "t4", seq_len=1024, method="lora", dry_run=False)})
    assert [row["name"] for row in both.to_dict()] == ["small", "other"]
    assert "rtx-4090" in str(both) or "4090" in str(both)
    launches = small.write(tmp_path / "out", targets=["trl"])
    assert [launch.target for launch in launches] == ["trl"]
    assert (tmp_path / "out" / "launch" / "trl").is_dir()
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["kind"] == "plan"


class _Frame(list[dict[str, Any]]):
    """As much of pandas.DataFrame as these tests look at."""


def test_tables_are_data_frames(small: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = ModuleType("pandas")
    pandas.DataFrame = _Frame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    rows: Any = small.to_dataframe()
    assert rows[0]["label"] == "chosen"
    assert rows[0]["peak_device_bytes"] == small.peak_device_bytes
    assert len(rows) == 1 + len(small.answer.alternatives)  # type: ignore[union-attr]
    assert {row["memory_level"] for row in rows} == {"formula", "profile"}
    terms: Any = estimate(MODEL, "rtx-4090", dry_run=False).to_dataframe()
    assert terms[0]["size_bytes"] >= terms[-1]["size_bytes"] >= 0
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PlannerError, match="pandas"):
        small.to_dataframe()


def test_everything_public_is_documented() -> None:
    for name in finetune_planner.__all__:
        assert name == "__version__" or getattr(finetune_planner, name).__doc__


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((Path(__file__).parent.parent / "docs" / "tutorial.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        exec(compile(cell, "tutorial.ipynb", "exec"), names)
    assert len(cells) >= 8
    assert names["answer"].fits
    assert names["found"].verdict in ("fits", "does_not_fit", "uncertain")
    assert all((tmp_path / "my-plan" / "launch" / launch.target).is_dir() for launch in names["launches"])


def test_tables_are_the_command_line_s(capsys: pytest.CaptureFixture[str]) -> None:
    for words, table in (
        (["which-gpu", MODEL, "--vendor", "intel"], which_gpu(MODEL, vendor="intel", method="lora")),
        (["which-model", "SmolLM2-135M", "--gpu", "t4"], which_model("t4", "SmolLM2-135M", method="lora")),
        (["compare-targets", MODEL, "--gpu", "rtx-4090"], compare_targets(MODEL, "rtx-4090", method="lora")),
    ):
        capsys.readouterr()
        assert run([*words, "--method", "lora", "--json=full"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(table.to_dict()))
        assert len(str(table).splitlines()) > 3
        assert len(table.to_dataframe()) > 0


def test_settings_have_the_names_that_trainers_give_them() -> None:
    estimated_setup = estimate(MODEL, "rtx-4090", dry_run=False, lora_r=8, batch_size=4, max_length=512).candidate.setup
    assert (estimated_setup.lora_rank, estimated_setup.micro_batch_seqs, estimated_setup.seq_len_tokens) == (8, 4, 512)
    setup = plan(MODEL, "rtx-4090", dry_run=False, lora_r=8, batch_size=4, max_length=512).chosen.setup
    assert (setup.lora_rank, setup.global_batch_seqs, setup.seq_len_tokens) == (8, 4, 512)
    with pytest.raises(PlannerError, match="lora_r and rank are one option"):
        plan(MODEL, "rtx-4090", dry_run=False, lora_r=8, rank=16)


def test_estimate_takes_several_gpus_and_their_nodes() -> None:
    two = {"method": "full", "num_gpus": 16, "parallel": "fsdp2", "dry_run": False}
    fast = estimate(MODEL, "h100-sxm", nodes=2, interconnect="ib-3200", **two)
    slow = estimate(MODEL, "h100-sxm", nodes=2, interconnect="ethernet-10", **two)
    assert fast.candidate.formula.tokens_per_s > 2 * slow.candidate.formula.tokens_per_s
    assert slow.to_dict()["cluster"] == {"num_nodes": 2, "within": "nvlink", "between": "ethernet-10"}
