"""The child that loads a dry run's libraries beside the formula: the same report, and none of it is missed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

_SCRIPT = """
import sys
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun import ahead, dry_run_report

ahead._num_cores = lambda: 2
model, gpu, setup = catalogue.load("qwen/qwen2.5-0.5b"), find_gpu("a100-80gb"), TrainSetup(seq_len_tokens=256)

def figures():
    found = dry_run_report(model, gpu, setup, use_cache=False)
    return found.prediction, found.phase_groups, found.timeline, found.num_events

with ahead.loading_ahead():
    child = ahead._HELPER._child
    beside = figures()
    assert "torch" not in sys.modules
    assert child.poll() is None
    child.kill()
    child.wait()
    assert figures() == beside
    assert "torch" in sys.modules
assert ahead._HELPER is None
with ahead.loading_ahead():  # the libraries are here by now
    assert ahead._HELPER is None
"""


def test_a_report_from_the_child_is_the_same_and_a_dead_child_is_not_missed() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
