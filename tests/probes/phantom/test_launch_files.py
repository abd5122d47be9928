"""TRL's and transformers' own trainers on the phantom GPU, run from the launch files that `plan --out` writes, against
the dry run of the same setup."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole import some

ROOT = Path(__file__).parent.parent.parent.parent
POINTS = (
    "trl: lora bf16-autocast, chunked loss, checkpointing",
    "trl: full bf16-pure, chunked loss, no checkpointing",
    "hf: qlora bf16-autocast + fp32 cast, full loss, checkpointing",
    "hf: lora bf16-autocast, full loss, no checkpointing",
)
TOLERANCE = 0.002
"""Both count the same storages; what differs is a few small tensors that a trainer holds (labels, logged sums)."""


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["hf", "trl"])
def test_the_dry_run_is_what_the_tools_own_trainers_do(tool: str) -> None:
    points = some([point for point in POINTS if point.startswith(tool)], 2)
    words = [word for point in points for word in ("--point", point)]
    command = [sys.executable, "-m", "benchmarks.trace_vs_dryrun", "--layers", "2", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])  # trainers print too
    assert set(rows) == set(points)
    for point, row in rows.items():
        assert "not_run" not in row, (point, row)
        assert abs(row["error_fraction"]) < TOLERANCE, (point, row)
        assert row["dry_run_reserved_bytes"] == pytest.approx(row["traced_reserved_bytes"], rel=0.05), point
