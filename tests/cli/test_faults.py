"""A fault of ours has an exit code of its own and a report; nothing of a stranger's reaches the terminal raw."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from finetune_planner.app.progress import printable
from finetune_planner.cli import lists
from finetune_planner.cli.app import run
from finetune_planner.cli.output import console
from planner.core.errors import EXIT_INTERNAL


@pytest.fixture
def _broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fault(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("while connecting to postgresql://me:hunter2@host/d with token=abcdef")

    monkeypatch.setattr(lists, "print_json", fault)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("_broken")
def test_a_fault_of_ours_is_no_answer_and_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "--json"]) == EXIT_INTERNAL
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (file,) = tmp_path.glob("finetune-planner-fault-*.txt")
    assert str(file) in captured.err
    assert "issue tracker" in captured.err
    text = file.read_text()
    assert "command: plan 'gpus' '--json'" in text
    assert "ZeroDivisionError" in text
    assert "lists.py" in text
    assert "hunter2" not in text + captured.err
    assert "abcdef" not in text + captured.err
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("_broken")
def test_a_report_that_cannot_be_written_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert run(["gpus", "--json"]) == EXIT_INTERNAL
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_escape_codes_of_strangers_are_shown_not_obeyed() -> None:
    assert printable("a\x1b]0;title\x07b\u202ec\n\td") == r"a\x1b]0;title\x07b\u202ec" + "\n\td"
    assert printable("Größe 模型 😀") == "Größe 模型 😀"


def test_columns_of_a_data_set_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"\x1b[2J\x1b]0;owned\x07": 1}) + "\n")
    assert run(["HuggingFaceTB/SmolLM2-135M", "--gpu", "rtx-4090", "--dataset", str(file)]) == 2
    captured = capsys.readouterr()
    assert "are not known" in captured.err
    assert "\x1b" not in captured.err + captured.out


def test_tables_for_people_hold_no_escape_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.table import Table

    monkeypatch.setenv("TERM", "dumb")
    table = Table()
    table.add_column("name\x1b[31m")
    table.add_row("value\x1b]0;x\x07")
    page = console()
    page.print(table)
    page.print("line\x1b[2J", markup=False)
    assert "\x1b" not in capsys.readouterr().out


def test_exit_code_is_documented() -> None:
    root = Path(__file__).parents[2]
    for page in ("CONTRIBUTING.md", "docs/questions.md"):
        assert re.search(rf"\b{EXIT_INTERNAL}\b", (root / page).read_text()), page
    assert os.EX_SOFTWARE == EXIT_INTERNAL
