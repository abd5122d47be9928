"""One rank of a job that misbehaves as its request says (`config["faults"]`, by rank): the real
`probes.gpu.worker` main under the real torchrun agent. No torch but where ranks truly meet ("meets-...")."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a probe's Python looks neither here nor in the working directory

from fault_worker import fail_as, measured

from planner.setup.codec import Outcome
from probes.gpu import worker
from probes.gpu.ranks import rank_info_of
from probes.gpu.request import ProbeRequest, StatusPipe


def misbehave(request: ProbeRequest, status: StatusPipe) -> Outcome:
    """Does what `config["faults"]` names for this rank; "waits" stands for a rank that would meet the others."""
    rank_info = rank_info_of()
    fault = request.config.get("faults", {}).get(str(rank_info.rank), "ok")
    pids = request.config.get("pids")
    if pids:
        temporary_path = Path(pids) / f".{rank_info.rank}"
        temporary_path.write_text(f"{os.getpid()} {os.getppid()}")
        temporary_path.rename(Path(pids) / str(rank_info.rank))
    status.progress(f"about to {fault}")
    print(f"rank {rank_info.rank} of {rank_info.size}, fault {fault}", flush=True)
    if fault.startswith("meets"):
        return meet(request, fault)
    if fault == "waits":
        time.sleep(600)
    fail_as(fault)
    return measured(request)


def meet(request: ProbeRequest, fault: str) -> Outcome:
    """Ranks that truly meet over gloo; "-and-sleeps" does not come to the second exchange."""
    from datetime import timedelta

    import torch.distributed as dist

    from probes.gpu.process_group import ProcessGroup, process_group_of

    rank_info = rank_info_of()
    with process_group_of(rank_info, "cpu", request.limits.time_s) as process_group:
        assert process_group.gather(rank_info.rank) == list(range(rank_info.size))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=request.limits.time_s))
        hasty = ProcessGroup(rank_info=rank_info, group=group)
        hasty.gather("connected")  # only what follows is in a hurry: meeting takes as long as the machine needs
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        if fault == "meets-and-sleeps":
            time.sleep(600)
        hasty.gather("still here")
        process_group.same("the others wait longer")
    return measured(request)


if __name__ == "__main__":
    worker.leave(worker.main(measure=misbehave))
