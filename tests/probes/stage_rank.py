"""Real pipeline stages (gloo, CPU tensors), one process each, followed with the dry run's accounting: peaks as JSON.

    python -m tests.probes.stage_rank STORE_FILE MODEL_TYPE FIELDS_OF_SETUPS_AS_JSON

Several setups run one after the other in one group; each has a line in the stage's file, STORE_FILE and its number.
The stages are forked from this process, which has loaded the libraries.
"""

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from planner.setup import TrainSetup
from probes.allocator.events import Event
from tests.probes.dryrun_small import peaks, small_config
from tests.probes.layout_rank import preload

NO_FLASH = (7, 0)


def traced(model_type: str, fields: dict[str, Any], device: str, stage: int) -> list[Event]:
    """The events of one stage's steps; the default process group must exist unless on meta."""
    from probes.dryrun.fakeworld import fake_world
    from probes.dryrun.stages import PipelineWorld, stage_config
    from probes.dryrun.trace import trace_run
    from probes.stack.configs import load_config

    setup = TrainSetup(**fields)
    config = stage_config(load_config(small_config(model_type)), setup.pipeline_degree, stage)
    world = PipelineWorld(setup, stage)
    with fake_world(setup.num_gpus, rank=stage) if device == "meta" else nullcontext():
        trace = trace_run(config, setup, capability=NO_FLASH, device=device, workspaces=False, world=world)
    return trace.events


def run_stage(stage: int, store: str, model_type: str, jobs: list[dict[str, Any]]) -> None:
    """Runs the stage of every setup, in one group, and writes beside the store."""
    import torch.distributed as dist

    from tests.probes.settled_group import register, settle

    dist.init_process_group(
        register(),
        init_method=f"file://{store}",
        rank=stage,
        world_size=jobs[0]["num_gpus"],
        timeout=timedelta(seconds=300),
    )
    with open(f"{store}{stage}", "w") as answer:
        for fields in jobs:
            answer.write(json.dumps(peaks(traced(model_type, fields, "cpu", stage))) + "\n")
            settle()
    dist.destroy_process_group()


def main() -> None:
    """Forks the stages; a stage that dies ends the others, whose connections close."""
    preload()
    store, model_type, setups = sys.argv[1:]
    jobs = json.loads(setups)
    stages = []
    for stage in range(jobs[0]["num_gpus"]):
        stages.append(os.fork())
        if not stages[-1]:
            return run_stage(stage, store, model_type, jobs)
    sys.exit(max(os.waitpid(stage, 0)[1] for stage in stages) > 0)


if __name__ == "__main__":
    main()
