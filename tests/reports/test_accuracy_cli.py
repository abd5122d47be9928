"""`python -m benchmarks.accuracy`: the formula level over the recorded rows, and its pages."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import accuracy_summary, own_runs
from benchmarks.accuracy import AccuracyTable, level_tables, write
from benchmarks.measured import load_rows


@pytest.fixture(scope="module")
def tables(warm_programs: Path) -> list[AccuracyTable]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_programs / "python"))
        return level_tables("formula", load_rows())


def test_formula_meets_the_aim_on_allocated_memory(tables: list[AccuracyTable]) -> None:
    """Aim of the formula level: median at most 8 %, no more than 2 % of cases predicted to fit where they did not."""
    assert [table.what for table in tables] == ["allocated", "reserved", "device", "tokens_per_s"]
    assert all(table.level == "formula" and table.overall and table.overall.num_configs > 20 for table in tables)
    table = tables[0]
    assert table.overall is not None
    assert table.overall.median_error <= 0.08
    assert table.false_fit_fraction <= 0.02
    assert table.false_fits[0] >= 70
    expressed = next(group for group in table.exact if group.name == "expressed fully")
    assert expressed.median_error <= 0.02


def test_the_pages_hold_what_the_formula_says_today(tables: list[AccuracyTable], tmp_path: Path) -> None:
    """Markdown, CSV and charts of docs/accuracy; UPDATE_DOCS=1 writes them."""
    text = write("formula", tables, tmp_path)
    if os.environ.get("UPDATE_DOCS"):
        shutil.copytree(tmp_path, accuracy_summary.FOLDER, dirs_exist_ok=True)
        for page in accuracy_summary.PAGES:
            page.write_text(accuracy_summary.written(page), encoding="utf-8")
        own_runs.PAGE.write_text(own_runs.page(), encoding="utf-8")
    for name in ("formula.md", "formula-allocated.csv", "formula-device.csv"):
        assert (tmp_path / name).read_text() == (accuracy_summary.FOLDER / name).read_text(), "UPDATE_DOCS=1"
    assert all(accuracy_summary.written(page) == page.read_text("utf-8") for page in accuracy_summary.PAGES)
    assert own_runs.page() == own_runs.PAGE.read_text("utf-8")
    stems = ("allocated", "reserved", "device", "tokens-per-s")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"formula.md", *(f"formula-{stem}.{kind}" for stem in stems for kind in ("csv", "svg"))}
    assert "fms_acceleration" in text
    assert "peft_metamathqa" in text
