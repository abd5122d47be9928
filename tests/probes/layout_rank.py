"""Real ranks (gloo, CPU tensors) of tiny jobs, followed with the dry run's accounting.

    python -m tests.probes.layout_rank WORLD_SIZE

Every line of the input is a job, [store file, model type, fields of the setup] as JSON; every line of the output is
what became of it: rank 0's peaks, or the words of the ranks that failed. Each rank is a process of its own, forked from
this one: it starts with the libraries loaded and with nothing else of the jobs before it.
"""

import json
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from planner.setup import TrainSetup
from probes.allocator.events import Event
from tests.probes.dryrun_small import peaks, small_config

NO_FLASH = (7, 0)
NUM_LAYERS = 3


def traced(model_type: str, fields: dict[str, Any], device: str) -> list[Event]:
    """The events of one rank's step; the default process group must exist unless on meta."""
    from probes.dryrun.rank import fake_job, world_of
    from probes.dryrun.trace import trace_run
    from probes.stack.configs import load_config

    setup = TrainSetup(**fields)
    config = load_config(small_config(model_type))
    options: dict[str, Any] = {"capability": NO_FLASH, "workspaces": False, "num_layers": NUM_LAYERS}
    if device == "meta":
        with fake_job(setup) as world:
            return trace_run(config, setup, device="meta", world=world, **options).events
    return trace_run(config, setup, device=device, world=world_of(setup), **options).events


def rank_peaks(rank: int, world_size: int, store: str, model_type: str, fields: dict[str, Any]) -> dict[str, int]:
    """One rank's part of a job."""
    import torch.distributed as dist

    from tests.probes.settled_group import register

    dist.init_process_group(
        register(), init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    return peaks(traced(model_type, fields, "cpu"))


def fork_rank(answer: Path, rank: int, *job: Any) -> int:
    """Starts a rank that writes its peaks, or its last words, and ends; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        answer.write_text(json.dumps(rank_peaks(rank, *job)))
        os._exit(0)
    except BaseException:
        answer.write_text(traceback.format_exc()[-3000:])
    finally:
        os._exit(1)


def run_job(world_size: int, store: str, model_type: str, fields: dict[str, Any]) -> dict[str, int] | str:
    """Rank 0's peaks; text when a rank failed. A rank that dies ends the others: its connections close."""
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / str(rank) for rank in range(world_size)]
        job = world_size, store, model_type, fields
        ranks = [fork_rank(answer, rank, *job) for rank, answer in enumerate(answers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        texts = [answer.read_text() if answer.exists() else "" for answer in answers]
    if any(codes):
        return "\n".join(
            f"rank {rank} ended with {code}: {text}" for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
        )
    peaks: dict[str, int] = json.loads(texts[0])
    return peaks


def preload() -> None:
    """What every rank would import; nothing that starts a thread."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import transformers.integrations.bitsandbytes
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import probes.dryrun.rank
    import probes.dryrun.trace  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """Answers jobs until the input ends."""
    preload()
    for line in sys.stdin:
        print(json.dumps(run_job(int(sys.argv[1]), *json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
