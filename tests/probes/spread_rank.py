"""One real rank (gloo, CPU tensors) of a tiny job, followed with the dry run's accounting: its peaks as JSON.

python spread_rank.py RANK WORLD_SIZE STORE_FILE MODEL_TYPE SETUP_FIELDS_AS_JSON
"""

import json
import sys
from datetime import timedelta
from typing import Any

from planner.setup import TrainSetup
from probes.allocator.events import Event
from tests.probes.dryrun_small import peaks, small_config

NO_FLASH = (7, 0)
NUM_LAYERS = 3


def traced(model_type: str, fields: dict[str, Any], device: str) -> list[Event]:
    """The events of one rank's step; the default process group must exist unless on meta."""
    from probes.dryrun.spread import fake_job, world_of
    from probes.dryrun.trace import trace_run
    from probes.stack import load_config

    setup = TrainSetup(**fields)
    config = load_config(small_config(model_type))
    options: dict[str, Any] = {"capability": NO_FLASH, "workspaces": False, "num_layers": NUM_LAYERS}
    if device == "meta":
        with fake_job(setup) as world:
            return trace_run(config, setup, device="meta", world=world, **options).events
    return trace_run(config, setup, device=device, world=world_of(setup), **options).events


def main() -> None:
    """Runs the rank and prints."""
    import torch
    import torch.distributed as dist

    from tests.probes.settled_group import register

    rank, world_size, store, model_type, fields = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        register(),
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=300),
    )
    found = peaks(traced(model_type, json.loads(fields), "cpu"))
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
