"""Lets Accelerate 1.15 shard on CPU. On PYTHONPATH it is imported by every process that torchrun starts.

Accelerate looks at FSDP and at device meshes only where it finds an accelerator: with `use_cpu` it trains DDP and says
nothing. Here it is told that gloo on CPU is one. What was really sharded is written down for the test to read. A script
that ends inside its process group, as TRL's does, aborts now and then (pytorch issue 190489): here it leaves the group.
"""

import atexit
import json
import os
from pathlib import Path

if "LOCAL_RANK" in os.environ:
    import torch
    from accelerate import accelerator, state
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.tensor import DTensor

    CPUOffloadPolicy.__init__.__defaults__ = (False,)  # pinned memory asks for an accelerator

    prepare_model = accelerator.fsdp2_prepare_model

    def leave():
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self):
        self.device = torch.device("cpu")

    def watched(handler, model):
        model = prepare_model(handler, model)
        shards = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        counts = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "sharded": sum(shard.numel() for shard in shards),
            "here": sum(shard.to_local().numel() for shard in shards),
        }
        Path(os.environ["SHARDS_FILE"] + os.environ["RANK"]).write_text(json.dumps(counts))
        return model

    atexit.register(leave)
    state.PartialState._prepare_backend = backend
    state.PartialState.set_device = set_device
    accelerator.fsdp2_prepare_model = watched
