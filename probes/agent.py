"""The parent of a job's ranks: `python -m probes.agent REQUEST.json RESULT.json --status-fd N --parent PID -- WORKER`.

Waits for the job's turn on all of its devices, then is torchrun: `torch.distributed.run` starts one worker per rank,
ends them all when one fails, and this process tells the runner which ranks died and how. torchrun gives every rank a
session of its own; the ranks die with this process (`worker.die_with_parent`), and this process with the runner.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from probes.device import take_turns
from probes.request import ProbeRequest
from probes.worker import EXIT_RANK_FAILED, StatusPipe, TolerantLog, die_with_parent, leave

STATUS_FD = 0
"""torchrun passes no descriptor on but the standard three: the ranks find the status pipe in place of their input."""
HOST = "127.0.0.1"
"""All ranks are on this machine; its own name may not resolve (containers)."""


def main(argv: Sequence[str]) -> int:
    """Runs one job; 0 when every rank ended well."""
    mine, _, worker = (list(part) for part in _split(argv))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(mine)
    die_with_parent(args.parent)
    sys.stdout, sys.stderr = TolerantLog(1), TolerantLog(2)
    request = ProbeRequest.from_dict(json.loads(args.request.read_text(encoding="utf-8")))
    os.dup2(args.status_fd, STATUS_FD, inheritable=True)
    os.close(args.status_fd)
    status = StatusPipe(STATUS_FD)
    status.progress("starting the ranks")
    turns = take_turns(request.devices, status.waiting)
    command = [*worker, str(args.request), str(args.result)]
    command += ["--status-fd", str(STATUS_FD), "--parent", str(os.getpid())]
    try:
        return run_ranks(request.num_ranks, command, status)
    finally:
        turns.close()


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    at = list(argv).index("--")
    return argv[:at], argv[at : at + 1], argv[at + 1 :]


def run_ranks(num_ranks: int, command: Sequence[str], status: StatusPipe) -> int:
    """One torchrun job on this machine: a free port, no restart, every rank's output in this process's own.

    Source: PyTorch 2.13 torch/distributed/run.py, `--standalone` (c10d rendezvous on localhost:0).
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its notice
    if sys.platform == "linux" and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look the machine's name up
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the ranks' own words shall end the log
    options = ["--standalone", f"--local-addr={HOST}", "--nnodes=1", f"--nproc-per-node={num_ranks}"]
    options += ["--max-restarts=0", "--no-python"]
    try:
        torchrun.run(torchrun.parse_args([*options, *command]))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            StatusPipe(STATUS_FD, rank).send("exit", failure.exitcode)
        return EXIT_RANK_FAILED
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:  # no rendezvous, no worker: say so in the log, the runner names it
        import traceback

        traceback.print_exc()
        code = 1
    leave(code)
