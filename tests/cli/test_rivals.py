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
    found = tmp_path / "python"
    found.write_text(f"#!/bin/sh\n{body}\n")
    found.chmod(0o755)
    return found


def test_errors_are_taken_on_the_runs_that_the_rival_answers(tmp_path: Path) -> None:
    """Five GiB for every run: the error of each is 5 GiB over what was measured, less one."""
    (found,) = compare_rivals(ROWS, [python(tmp_path, f"while read -r line; do echo '{ANSWER}'; done")], _lookup)
    errors = sorted(abs(5 * 2**30 / (row.reserved_bytes or 1) - 1) for row in ROWS)
    assert (found.name, found.group, found.figure, found.num_configs) == ("fake 1.0", "canifinetune", "reserved", 11)
    assert found.median_error == pytest.approx(errors[5])
    assert found.worst_error == pytest.approx(errors[-1])
    assert found.own_worst_error < 0.15
    assert "| fake 1.0 | canifinetune | reserved | 11 |" in rivals_table([found])


def test_a_python_without_any_rival_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="none of canifinetune"):
        compare_rivals(ROWS, [python(tmp_path, "while read -r line; do echo '[]'; done")], _lookup)
    with pytest.raises(EnvironmentProblem, match="did not answer"):
        compare_rivals(ROWS, [tmp_path / "nowhere"], _lookup)
