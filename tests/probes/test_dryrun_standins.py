"""Stand-ins for unused parts of PyTorch: a child with them finds the same as this process, where everything is real."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun import DryRunReport, dry_run_report, standins
from tests.whole import WHOLE

STEP = 1 if WHOLE else 3
POINTS = [
    ("qwen/qwen2.5-0.5b", TrainSetup(seq_len_tokens=512, lora_dropout=0.05)),
    ("google/gemma-3-1b-it", TrainSetup(method="full", lora_rank=0, attention="eager", checkpointing=0)),
    ("meta-llama/Llama-3.1-8B", TrainSetup(method="qlora", quantization="nf4-double", optimizer="paged-adamw-8bit")),
    ("mistralai/Mixtral-8x7B-v0.1", TrainSetup(seq_len_tokens=256)),
    ("gpt2", TrainSetup(method="full", lora_rank=0, precision="fp16-mixed", loss="full", accumulation_steps=2)),
    ("google-t5/t5-small", TrainSetup(seq_len_tokens=256, loss="full")),
][::STEP]


def figures() -> list[list[int]]:
    """Of every point, without the cache."""
    rows = []
    for name, setup in POINTS:
        model = catalogue.load(name)
        assert model is not None
        report = dry_run_report(model, find_gpu("a100-80gb"), setup, use_cache=False)
        assert isinstance(report, DryRunReport), report
        rows.append([report.prediction.peak_allocated_bytes, report.prediction.peak_reserved_bytes, report.num_events])
    return rows


_SCRIPT = """
import json, os, sys
from probes.dryrun import standins
from probes.dryrun.startup import load_libraries

standins.stand_in()
load_libraries()
from tests.probes.test_dryrun_standins import figures

found = {"cold": figures()}
NEEDED

from transformers import models
from transformers.utils.import_utils import _LazyModule, define_import_structure

plain = _LazyModule("plain", models.__file__, define_import_structure(models.__file__))
found["same_models"] = [
    getattr(models, name) == getattr(plain, name)
    for name in ("_class_to_module", "_modules", "_object_missing_backend", "_import_structure")
]
real = [name for name in standins.NAMES if type(sys.modules.get(name)) is not standins._Module]
found["loaded"] = [name for name in real if name in sys.modules]
import torch
import transformers.distributed.sharding_utils as sharding

plain = torch.empty(2)
found["no_instance"] = isinstance(plain, sharding.DTensor) or isinstance(plain, torch.distributed.tensor.DTensor)
found["called"] = torch._dynamo.disable(lambda one: one + 1)(1)
print(json.dumps(found))
"""


_FORK = """
child = os.fork()
if not child:
    try:
        exec({code!r})
    except BaseException:
        pass
    finally:
        os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == standins.EXIT_NEEDED, {what!r}
"""


@pytest.mark.processes
@pytest.mark.skipif(not WHOLE, reason="5 CPU seconds; every dry run of a plan goes the same way (TESTS_WHOLE=1)")
def test_a_run_with_stand_ins_loads_none_of_them_and_finds_the_same() -> None:
    """And a process in which the real module is needed ends, whatever a library would make of an exception."""
    needed = "".join(_FORK.format(code="\n".join(code.split("; ")), what=what) for what, code in NEEDED.items())
    users = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.replace("\nNEEDED\n", needed)], env=users, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["loaded"] == []
    assert all(answer["same_models"]), answer["same_models"]
    assert answer["cold"] == figures()
    assert not answer["no_instance"]
    assert answer["called"] == 2


NEEDED = {
    "a call": "from torch.distributed.tensor import DTensor; DTensor()",
    "a subclass": "from torch.distributed.tensor import DTensor; class Mine(DTensor): pass",
    "a part of a name": "from torch.distributed.tensor import DTensor; DTensor.from_local",
    "another name": "import torch.distributed.tensor as tensor; tensor.zeros",
    "another module": "import torch._dynamo.trace_rules",
    "a setting": "import torch._dynamo; torch._dynamo.config.cache_size_limit",
    "no plain number": "from torch.fx.experimental.symbolic_shapes import guard_int; guard_int('1')",
}


@pytest.mark.parametrize(("torch", "given"), [("2.13.0+cpu", True), ("2.11.0", False), ("2.130.0", False)])
def test_only_versions_that_were_checked_are_stood_in_for(
    torch: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(standins, "version", {"torch": torch, "transformers": "5.23.0"}.__getitem__)
    standins.stand_in()
    assert isinstance(sys.meta_path[0], standins._Finder) == given
