"""Stand-ins for unused parts of PyTorch: a cold run loads none of them, its figures are the same, and nothing stays
different when the real ones come. In a process of its own, as other tests have loaded everything already."""

import json
import subprocess
import sys

_SCRIPT = """
import json, sys
from planner.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from probes.dryrun import dry_run_report
from probes.dryrun.standins import NAMES, given_up, load_real, standing_in

spec, gpu = catalogue.load("qwen/qwen2.5-0.5b"), find_gpu("a100-80gb")
setup = TrainSetup(seq_len_tokens=512, lora_dropout=0.05)

def figures():
    report = dry_run_report(spec, gpu, setup, use_cache=False)
    return [report.prediction.peak_allocated_bytes, report.prediction.peak_reserved_bytes, report.num_events]

found = {"cold": figures(), "given_up": given_up()}
found["loaded"] = [name for name in NAMES if name in sys.modules]
found["again"] = figures()
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
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["given_up"]
    assert found["loaded"] == []
    assert found["cold"] == found["again"] == found["real"]
    assert not found["no_instance"]
    assert found["not_loaded_by_asking"]
    assert found["bound_to_the_real_one"]
    assert found["marked"]
    assert found["called"] == 2
