"""`benchmarks.accuracy --rivals`: another estimator's answers become errors beside the formula's, on the same runs."""

from pathlib import Path

import pytest

from benchmarks.accuracy import _lookup, compare_rivals, rivals_table
from benchmarks.measured import load_rows
from planner.core.errors import EnvironmentProblem

ROWS = [row for row in load_rows() if row.group == "canifinetune"]
ANSWER = '[{"name": "fake 1.0", "figure": "reserved", "gib": 5.0, "why": ""}]'


def python(tmp_path: Path, body: str) -> Path:
    """Something that is started as a Python is."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


def test_errors_are_taken_on_the_runs_that_the_rival_answers(tmp_path: Path) -> None:
    """Five GiB for every run: the error of each is 5 GiB over what was measured, less one."""
    (rival,) = compare_rivals(ROWS, [python(tmp_path, f"while read -r line; do echo '{ANSWER}'; done")], _lookup)
    errors = sorted(abs(5 * 2**30 / (row.reserved_bytes or 1) - 1) for row in ROWS)
    assert (rival.name, rival.group, rival.figure, rival.num_configs) == ("fake 1.0", "canifinetune", "reserved", 11)
    assert rival.median_error == pytest.approx(errors[5])
    assert rival.worst_error == pytest.approx(errors[-1])
    assert rival.own_worst_error < 0.15
    assert "| fake 1.0 | canifinetune | reserved | 11 |" in rivals_table([rival])


def test_a_python_without_any_rival_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="none of canifinetune"):
        compare_rivals(ROWS, [python(tmp_path, "while read -r line; do echo '[]'; done")], _lookup)
    with pytest.raises(EnvironmentProblem, match="did not answer"):
        compare_rivals(ROWS, [tmp_path / "nowhere"], _lookup)
