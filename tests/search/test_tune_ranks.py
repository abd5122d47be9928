"""`plan tune` on several GPUs with real torchrun jobs: a rank dies, the whole command is killed, the study goes on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from light_ranks import MAX_PROBES
from search_cases import LLAMA, make_old

from tests.probes.moved_clock import alive
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("light_ranks.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
"""What shows nothing for this long hangs."""


def command(python: str | Path, model: Path, folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [str(python), str(PROGRAM), "tune", str(model), str(folder)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def starts(folder: Path) -> list[tuple[int, str]]:
    """(process id of rank 0, setup) of every job so far."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(pid), key) for _, pid, key in (line.split(" ", 2) for line in lines)]


def until(is_so: Callable[[], bool], what: str, running: "subprocess.Popen[str] | None" = None) -> None:
    """Waits for something to become so, while a command runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert running is None or running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.skipif(
    not WHOLE, reason="5 CPU seconds; test_kill.py kills searches, test_torchrun.py ranks (TESTS_WHOLE=1)"
)
@pytest.mark.slow
def test_dead_rank_is_a_failed_trial_and_a_killed_search_goes_on_where_it_was(
    tmp_path: Path, warm_programs: Path
) -> None:
    """The plan's DDP loses rank 1 to SIGKILL; the command is killed in its second trial and given again: as a user
    starts it first, with its jobs and ranks, then warm (tests/warm)."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hold-2").touch()
    first = command(sys.executable, model, tmp_path)
    try:
        until(lambda: len(starts(tmp_path)) == 2, "no second trial", first)
        held_pid, held_key = starts(tmp_path)[1]
    finally:
        first.kill()
        first.communicate()
    until(lambda: not any(alive(pid) for pid, _ in starts(tmp_path)), "a rank outlived its command")
    make_old(tmp_path / "study")
    second = command(warm_programs / "python", model, tmp_path)
    try:
        output, errors = second.communicate(timeout=PATIENCE_S)
    finally:
        second.kill()
        second.wait()
    assert second.returncode == 0, errors
    assert not alive(held_pid)

    answer = json.loads(output)
    rows = [row for row in answer["search"]["trials"] if row["level"] == "probe"]
    assert rows[0]["setup"]["parallel"] == "ddp"
    assert "rank 1 of 2: killed by SIGKILL" in rows[0]["reason"]
    assert [row["feasible"] for row in rows[1:]] == [True] * (MAX_PROBES - 1)
    jobs = [key for _, key in starts(tmp_path)]
    assert jobs.count(held_key) == 2  # the probe in flight, and nothing else, runs again
    assert len(jobs) == MAX_PROBES + 1 == len(set(jobs)) + 1
    assert {row["setup"]["parallel"] for row in rows[1:]} == {"fsdp2"}
    assert any("rehearsed on this machine's CPU" in note for note in answer["notes"])
    assert answer["chosen"]["probe"] is None  # a CPU's figures say nothing of the plan's GPU
    assert "tokens/s" in errors  # every answer is told as it comes
