"""Real pipeline stages (gloo, CPU tensors), one process each, followed with the dry run's accounting: peaks as JSON.

    python -m tests.probes.stage_rank STAGE STORE_FILE MODEL_TYPE FIELDS_OF_SETUPS_AS_JSON

Several setups run one after the other in one group; one line of output for each.
"""

import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from planner.setup import TrainSetup
from probes.allocator.events import Event
from tests.probes.dryrun_small import peaks, small_config

NO_FLASH = (7, 0)


def traced(model_type: str, fields: dict[str, Any], device: str, stage: int) -> list[Event]:
    """The events of one stage's steps; the default process group must exist unless on meta."""
    from probes.dryrun.fakeworld import fake_world
    from probes.dryrun.stages import PipelineWorld, stage_config
    from probes.dryrun.trace import trace_run
    from probes.stack import load_config

    setup = TrainSetup(**fields)
    config = stage_config(load_config(small_config(model_type)), setup.pipeline_degree, stage)
    world = PipelineWorld(setup, stage)
    with fake_world(setup.num_gpus, rank=stage) if device == "meta" else nullcontext():
        found = trace_run(config, setup, capability=NO_FLASH, device=device, workspaces=False, world=world)
    return found.events


def main() -> None:
    """Runs the stage of every setup and prints."""
    import torch
    import torch.distributed as dist

    from tests.probes.settled_group import register, settle

    stage, store, model_type, setups = sys.argv[1:]
    torch.set_num_threads(1)
    jobs = json.loads(setups)
    dist.init_process_group(
        register(),
        init_method=f"file://{store}",
        rank=int(stage),
        world_size=jobs[0]["num_gpus"],
        timeout=timedelta(seconds=300),
    )
    for fields in jobs:
        print(json.dumps(peaks(traced(model_type, fields, "cpu", int(stage)))))
        settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
