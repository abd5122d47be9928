"""`finetune_planner` from Python: the same answers as the command line, typed, and at home in a notebook."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import finetune_planner
from finetune_planner import Planned, PlannerError, check, compare, estimate, plan
from finetune_planner.api import Options
from planner.cli.app import run
from planner.cli.wish_options import WishOptions

MODEL = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture(scope="module")
def small() -> Planned:
    return plan(MODEL, "rtx-4090", seq_len=1024, method="lora", dry_run=False)


def test_a_wish_has_the_options_of_the_command_line() -> None:
    assert set(Options.__annotations__) == {one.name for one in fields(WishOptions)}


def test_a_plan_is_the_command_line_s(small: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([MODEL, "--gpu", "rtx-4090", "--seq-len", "1024", "--method", "lora", "--no-dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert small.to_dict() == told
    assert small.fits
    assert small.peak_device_bytes == told["chosen"]["formula"]["peak_device_bytes"]
    assert small.tokens_per_s == told["chosen"]["formula"]["tokens_per_s"]


def test_a_plan_shows_itself_in_a_notebook(small: Planned) -> None:
    assert "tokens/s" in str(small)
    assert len(str(small).splitlines()) <= 25
    shown = small._repr_html_()
    assert shown.startswith("<pre")
    assert "<script" not in shown
    assert MODEL in shown


def test_nothing_fits_is_an_answer() -> None:
    answer = plan("meta-llama/Llama-3.1-70B", "rtx-3060", dry_run=False)
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


def test_bad_words_are_errors_with_a_hint() -> None:
    with pytest.raises(PlannerError) as unknown:
        plan(MODEL, "rtx-4090", seqlen=5)  # type: ignore[call-arg]
    assert "seq_len" in unknown.value.hint
    with pytest.raises(PlannerError, match="rtx-40900"):
        plan(MODEL, "rtx-40900")
    with pytest.raises(PlannerError, match="at least two"):
        compare([])


def test_an_estimate_is_the_command_line_s(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate(MODEL, "rtx-4090", method="lora", lora_rank=8, micro_batch_seqs=2, dry_run=False)
    words = ["estimate", MODEL, "--gpu", "rtx-4090", "--method", "lora", "--rank", "8", "--micro-batch", "2"]
    assert run([*words, "--no-dry-run", "--json"]) == 0
    assert found.to_dict() == json.loads(capsys.readouterr().out)
    assert found.fits
    assert "It fits" in str(found)


def test_a_config_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"model_name_or_path: {MODEL}\ndataset_name: trl-lib/Capybara\nper_device_train_batch_size: 2\n"
        "max_length: 512\ngradient_accumulation_steps: 4\ngradient_checkpointing: true\nbf16: true\n"
        "use_peft: true\nlora_r: 8\n"
    )
    found = check(file, "rtx-4090", dry_run=False)
    assert found.verdict == "fits"
    assert found.to_dict()["setup"]["lora_rank"] == 8
    assert "fits" in found._repr_html_()


def test_plans_are_compared_and_written(small: Planned, tmp_path: Path) -> None:
    both = compare({"small": small, "other": plan(MODEL, "t4", seq_len=1024, method="lora", dry_run=False)})
    assert [one["name"] for one in both.to_dict()] == ["small", "other"]
    assert "rtx-4090" in str(both) or "4090" in str(both)
    launches = small.write(tmp_path / "out", targets=["trl"])
    assert [one.target for one in launches] == ["trl"]
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
    assert {row["memory_rung"] for row in rows} == {"formula"}
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
    assert all((tmp_path / "my-plan" / "launch" / one.target).is_dir() for one in names["launches"])
