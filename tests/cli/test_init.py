"""`plan init`: answers become the command; what is not understood is asked again."""

import io
from pathlib import Path

import pytest

from finetune_planner.cli.app import run


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_answers_become_a_plan_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("finetune_planner.app.levels.dry_run_possible", lambda: "torch")  # the formula is enough here
    folder = tmp_path / "my plan"
    lines = ["smollm2", "HuggingFaceTB/SmolLM2-135M", "rtx", "3060", "no-such.jsonl", "", "lora", str(folder)]
    answer(monkeypatch, *lines)
    assert run(["init"]) == 0
    out, err = capsys.readouterr()
    assert f"plan HuggingFaceTB/SmolLM2-135M --gpu 3060 --method lora --out '{folder}'" in err
    for words in ("is not one model", "say which: ", "is not one exact device", "no file at no-such.jsonl"):
        assert words in err
    assert "tokens/s" in out
    assert (folder / "launch" / "run.sh").exists()


def test_no_answer_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch)
    assert run(["init"]) != 0
    assert "Traceback" not in capsys.readouterr().err
