"""`plan table`: a row is what `plan` chooses, what is there is not planned again, and bad input is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from finetune_planner.cli.app import run
from finetune_planner.cli.bulk import COLUMNS, Config, Grid, rows_of
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest

MODEL = "Qwen/Qwen2.5-0.5B"
CARDS = ("t4", "rtx-4090")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder).to_pylist()
    return rows


def test_a_row_is_what_a_whole_plan_chooses() -> None:
    grid = Grid(cards=tuple(map(find_gpu, CARDS)), seq_lens=(1024, 8192), methods=("full",))
    rows = list(rows_of(Config(model_id=MODEL), grid))
    assert len(rows) == grid.num_plans
    spec = catalogue.load(MODEL)
    for row in rows:
        plan_request = PlanRequest(fixed={"method": (row["method"],)}, seq_len=row["seq_len_tokens"])
        answer = plan_workload(plan_request.workload(spec, find_gpu(row["gpu"])))
        assert row["fits"] == isinstance(answer, Plan)
        assert row["peak_device_bytes"] == answer.subject.formula.peak_device_bytes
        assert row["micro_batch_seqs"] == answer.subject.setup.micro_batch_seqs
        assert row["optimizer"] == answer.subject.setup.optimizer
        if isinstance(answer, Plan):
            assert row["tokens_per_s"] == answer.subject.formula.tokens_per_s
        else:
            assert row["missing_bytes"] == answer.missing_bytes > 0
    assert {row["fits"] for row in rows} == {True, False}


def test_a_second_call_goes_on_where_the_first_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["table", "--match", "gpt2-", "--gpus", "t4,rtx-4090", "--seq-lens", "1024", "--methods", "lora"]
    words += ["--out", str(tmp_path), "--json=full"]
    assert run(words) == 0
    first = json.loads(capsys.readouterr().out)
    files = sorted(tmp_path.iterdir())
    assert first["rows"] == 2 * first["configurations"] == 2 * len(files) == len(rows_in(tmp_path))
    assert {name: row[name] for row in rows_in(tmp_path) for name in row}.keys() == COLUMNS.keys()
    files[0].unlink()
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["planned"] == 1
    assert sorted(tmp_path.iterdir()) == files
    assert run([*words, "--global-batch", "8"]) == 0  # another grid is another file
    assert json.loads(capsys.readouterr().out)["planned"] == len(files)


def test_configurations_of_a_directory(tmp_path: Path) -> None:
    spec = catalogue.load(MODEL)
    config = dict(spec.config)
    for name, content in {"mine/small": config, "other": {"model_type": "no-such-type"}}.items():
        folder = tmp_path / "configs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(content))
    words = ["--gpus", "t4", "--seq-lens", "1024", "--methods", "lora"]
    assert run(["table", "--configs", str(tmp_path / "configs"), *words, "--out", str(tmp_path / "a")]) == 0
    first, second = sorted(rows_in(tmp_path / "a"), key=lambda row: str(row["model"]))
    assert first["model"] == "mine/small"
    assert first["fits"]
    assert (second["fits"], second["num_params"]) == (False, None)
    assert "no-such-type" in second["problem"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--gpus", "nonesuch"], 2), (["--seq-lens", "long"], 2), (["--methods", "magic"], 2),
        (["--match", "no such model"], 2), (["--configs", "/nonexistent"], 2), (["--out", "/proc/nowhere"], 3),
    ],
)  # fmt: skip
def test_bad_input_has_a_hint(words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["table", "--out", str(tmp_path), *words]) == code
    assert "hint: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_said_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(["table", "--out", str(tmp_path / "t")]) == 3
    errors = capsys.readouterr().err
    assert "pyarrow" in errors
    assert "planning" not in errors
