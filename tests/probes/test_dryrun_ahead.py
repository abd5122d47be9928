"""The child that loads a dry run's libraries beside the formula: the same report, and none of it is missed."""

import os
import pickle
import subprocess
from pathlib import Path

import pytest

from planner.core.notes import Place, place_of, risk

pytest.importorskip("torch")
pytest.importorskip("transformers")

_SCRIPT = """
import sys

torch = sys.modules.pop("torch")  # a fork that has imported all stands for a process that has not
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun import dry_run_report, helper

model, gpu, setup = catalogue.load("qwen/qwen2.5-0.5b"), find_gpu("a100-80gb"), TrainSetup(seq_len_tokens=256)
layout = setup.replace(parallel="ddp", num_gpus=2)

def figures(setup=setup):
    found = dry_run_report(model, gpu, setup, use_cache=False)
    return found.prediction, found.phase_groups, found.timeline, found.num_events

sys.executable = sys.argv[1]  # the children start with the libraries imported
helper.load_ahead()
first = helper._HELPER
beside, said = figures(), []
args = model, gpu, setup.replace(micro_batch_seqs=2), [100, 200]
over = helper.reported("probes.dryrun.varying:over_lengths", *args, source="", seed=0, say=said.append)
assert said and over.num_micro_batches == 2
try:
    helper.reported("probes.dryrun.varying:over_lengths", *args[:2], layout, [100], source="", seed=0, say=said.append)
except ValueError:
    pass
else:
    raise AssertionError("the child's word")
tree = helper.tree_answer(model.config, 1000.0)["spec"]
assert (len(tree["layer_order"]), tree["vocab_size"]) == (model.num_layers, model.vocab_size)
assert helper._HELPER is first and first._child.poll() is None
figures(layout)
assert first._child is None and helper._HELPER is not first
assert figures() == beside  # with every library real
def interrupted(text):
    raise KeyboardInterrupt

try:
    helper.reported("probes.dryrun.varying:over_lengths", *args, source="", seed=0, say=interrupted)
except KeyboardInterrupt:
    pass
assert helper._HELPER._child is None
helper._HELPER = None
assert helper.tree_answer(model.config, 0.01) is None  # ended before it had loaded anything
assert helper._HELPER._child is None
helper._HELPER = None
assert figures() == beside
assert "torch" not in sys.modules
helper._HELPER._child.kill()
helper._HELPER._child.wait()
sys.modules["torch"] = torch
assert figures() == beside
helper._HELPER = None
assert helper.load_ahead() is None  # the libraries are here by now
"""


def test_a_note_keeps_its_place_on_the_way_from_the_child() -> None:
    assert place_of(pickle.loads(pickle.dumps(risk("a report's")))) is Place.RISK


def test_a_report_from_the_child_is_the_same_and_a_dead_child_is_not_missed(warm_programs: Path) -> None:
    warm = str(warm_programs / "python")
    done = subprocess.run([warm, "-c", _SCRIPT, warm], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
