"""Stand-ins for unused parts of PyTorch: a cold run loads none of them, its figures are the same, and nothing stays
different when the real ones come. In a process of its own: in the tests' own everything is real."""

import json
import os
import subprocess
import sys

import pytest

from probes.dryrun import standins
from tests.whole import WHOLE

_SCRIPT = """
import json, sys
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun import dry_run_report
from probes.dryrun.standins import NAMES, given_up, load_real, standing_in

gpu = find_gpu("a100-80gb")
STEP = int(sys.argv[1])
POINTS = [
    ("qwen/qwen2.5-0.5b", TrainSetup(seq_len_tokens=512, lora_dropout=0.05)),
    ("google/gemma-3-1b-it", TrainSetup(method="full", lora_rank=0, attention="eager", checkpointing=0)),
    ("meta-llama/Llama-3.1-8B", TrainSetup(method="qlora", quantization="nf4-double", optimizer="paged-adamw-8bit")),
    ("mistralai/Mixtral-8x7B-v0.1", TrainSetup(seq_len_tokens=256)),
    ("gpt2", TrainSetup(method="full", lora_rank=0, precision="fp16-mixed", loss="full", accumulation_steps=2)),
    ("google-t5/t5-small", TrainSetup(seq_len_tokens=256, loss="full")),
]

def figures():
    found = []
    for name, setup in POINTS[::STEP]:
        report = dry_run_report(catalogue.load(name), gpu, setup, use_cache=False)
        found.append([report.prediction.peak_allocated_bytes, report.prediction.peak_reserved_bytes, report.num_events])
    return found

found = {"cold": figures(), "given_up": given_up()}

from transformers import models
from transformers.utils.import_utils import _LazyModule, define_import_structure

plain = _LazyModule("plain", models.__file__, define_import_structure(models.__file__))
found["same_models"] = [
    getattr(models, name) == getattr(plain, name)
    for name in ("_class_to_module", "_modules", "_object_missing_backend", "_import_structure")
]
found["loaded"] = [name for name in NAMES if name in sys.modules]
import torch
import transformers.distributed.sharding_utils as sharding

plain = torch.empty(2)
found["no_instance"] = isinstance(plain, sharding.DTensor) or isinstance(plain, torch.distributed.tensor.DTensor)
found["not_loaded_by_asking"] = "torch.distributed.tensor" not in sys.modules
def opaque():
    pass

with standing_in():
    import torch._dynamo

    marked = id(torch._dynamo.allow_in_graph(opaque))
    found["called"] = torch._dynamo.disable(lambda one: one + 1)(1)
load_real()
from torch.distributed.tensor import DTensor

found["bound_to_the_real_one"] = sharding.DTensor is DTensor and torch.distributed.tensor.DTensor is DTensor
from torch._dynamo import trace_rules

found["marked"] = marked in trace_rules._allowed_callable_ids
found["real"] = figures()
print(json.dumps(found))
"""


def test_a_cold_run_loads_none_of_them_and_the_real_ones_take_their_place() -> None:
    users = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-c", _SCRIPT, "1" if WHOLE else "2"]
    done = subprocess.run(command, env=users, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["given_up"]
    assert found["loaded"] == []
    assert all(found["same_models"]), found["same_models"]
    assert found["cold"] == found["real"]
    assert not found["no_instance"]
    assert found["not_loaded_by_asking"]
    assert found["bound_to_the_real_one"]
    assert found["marked"]
    assert found["called"] == 2


@pytest.mark.parametrize(("torch", "given"), [("2.13.0+cpu", True), ("2.11.0", False), ("2.130.0", False)])
def test_only_versions_that_were_checked_are_stood_in_for(
    torch: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = standins._Finder()
    monkeypatch.setattr(standins, "_FINDER", finder)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(standins, "version", {"torch": torch, "transformers": "5.23.0"}.__getitem__)
    standins._checked.cache_clear()
    with standins.standing_in():
        assert finder.active == given
    standins._checked.cache_clear()
    assert standins.given_up() != given
