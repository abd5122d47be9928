"""`python -m benchmarks.accuracy`: the formula level over the recorded rows, files, and bad options."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks import accuracy_summary, own_runs
from benchmarks.accuracy import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_formula_meets_the_aim_on_allocated_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Aim of the formula level: median at most 8 %, no more than 2 % of cases predicted to fit where they did not. With
    --json nothing else is on stdout."""
    code, out, _ = run(capsys, "--what", "memory", "--json")
    assert code == 0
    tables = json.loads(out)
    table = tables[0]
    assert [each["what"] for each in tables] == ["allocated", "reserved", "device"]
    assert all(each["level"] == "formula" and each["overall"]["num_configs"] > 20 for each in tables)
    assert table["overall"]["median_error"] <= 0.08
    assert table["fit"]["false_fit_fraction"] <= 0.02
    assert table["fit"]["num_out_of_memory"] >= 70
    expressed = next(group for group in table["exact"] if group["name"] == "expressed fully")
    assert expressed["median_error"] <= 0.02


def test_out_writes_markdown_csv_and_charts_and_the_pages_hold_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables in docs/accuracy are what the formula says today; UPDATE_DOCS=1 writes them."""
    code, out, _ = run(capsys, "--what", "all", "--out", str(tmp_path))
    assert code == 0
    if os.environ.get("UPDATE_DOCS"):
        shutil.copytree(tmp_path, accuracy_summary.FOLDER, dirs_exist_ok=True)
        for page in accuracy_summary.PAGES:
            page.write_text(accuracy_summary.written(page), encoding="utf-8")
        own_runs.PAGE.write_text(own_runs.page(), encoding="utf-8")
    for name in ("formula.md", "formula-allocated.csv", "formula-device.csv"):
        assert (tmp_path / name).read_text() == (accuracy_summary.FOLDER / name).read_text(), "UPDATE_DOCS=1"
    assert all(accuracy_summary.written(page) == page.read_text("utf-8") for page in accuracy_summary.PAGES)
    assert own_runs.page() == own_runs.PAGE.read_text("utf-8")
    names = {path.name for path in tmp_path.iterdir()}
    stems = ("allocated", "reserved", "device", "tokens-per-s")
    assert names == {"formula.md", *(f"formula-{stem}.{kind}" for stem in stems for kind in ("csv", "svg"))}
    text = (tmp_path / "formula.md").read_text()
    assert "fms_acceleration" in text
    assert "peft_metamathqa" in text
    assert "tokens per second" in out.lower()
    assert max(len(line) for line in out.splitlines()) <= 80


def test_one_source_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--what", "reserved", "--group", "peft_metamathqa", "--json")
    assert code == 0
    assert [group["name"] for group in json.loads(out)[0]["groups"]] == ["peft_metamathqa"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--level", "probe"), "--level"),
        (("--what", "everything"), "--what"),
        (("--group", "nobody"), "nobody"),
        (("--level", "dry_run", "--what", "speed"), "memory only"),
    ],
)
def test_bad_options_are_named_with_a_hint(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert expected in err
    assert "hint:" in err
