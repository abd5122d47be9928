"""The parent of a job's ranks.

    python -m probes.gpu.agent REQUEST.json RESULT.json --status-fd N --parent PID -- WORKER

Waits for the job's turn on all of its devices, then is torchrun: `torch.distributed.run` starts one worker per rank,
ends them all when one fails, and this process tells the runner which ranks died and how. torchrun gives every rank a
session of its own; the ranks die with this process (`worker.die_with_parent`), and this process with the runner.
"""

import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from probes.gpu.device import lease_all
from probes.gpu.request import StatusPipe
from probes.gpu.worker import EXIT_RANK_FAILED, begin, leave

STATUS_FD = 0
"""torchrun passes no descriptor on but the standard three: the ranks find the status pipe in place of their input."""
HOST = "127.0.0.1"
"""All ranks are on this machine; its own name may not resolve (containers)."""


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--")
    request, args = begin(argv[:at], __doc__)
    if args.status_fd is not None:
        os.dup2(args.status_fd, STATUS_FD, inheritable=True)
        os.close(args.status_fd)
    status = StatusPipe(STATUS_FD if args.status_fd is not None else None)
    status.progress(f"starting {request.num_ranks} ranks")
    command = [*argv[at + 1 :], str(args.request), str(args.result), "--parent", str(os.getpid())]
    command += ["--status-fd", str(STATUS_FD)] if args.status_fd is not None else []
    with lease_all(request.devices, status.waiting):
        return run_ranks(request.num_ranks, command)


def run_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """One torchrun job on this machine: a free port, no restart, every rank's output in this process's own.

    Nothing is looked up by name: where the name server does not answer, torchrun waits for it at each of four places
    (Measured: 50 s until the first step with one silent name server; 21 s so).

    Source: PyTorch 2.13 torch/distributed/run.py, `--standalone` (c10d rendezvous on localhost:0).
    """
    socket.getfqdn = lambda name="": HOST  # torchrun's name in its own records, which nobody reads
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # c10d's socket.cpp asks who 127.0.0.1 is
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its notice
    if sys.platform == "linux" and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look the machine's name up
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # for its record of events, which nobody reads: `inspect.stack` twice an event, through every loaded module's file
    dynamic_rendezvous.get_method_name = lambda depth=0: ""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the ranks' own words shall end the log
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:0", f"--rdzv-id={uuid.uuid4()}"]
    options += [f"--local-addr={HOST}", "--nnodes=1", f"--nproc-per-node={num_ranks}"]
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
