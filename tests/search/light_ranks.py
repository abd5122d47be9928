"""`plan tune` with real torchrun jobs whose ranks import no torch, and those ranks: for `test_tune_ranks.py`.

    light_ranks.py tune MODEL FOLDER     the command, as a person gives it; its study is FOLDER/study
    light_ranks.py REQUEST RESULT ...    one rank, as `probes.gpu.agent` starts it

Rank 0 adds "start PID KEY" to FOLDER/log in one write. The n-th start waits as long as FOLDER/hold-n is there. Rank 1
kills itself under DDP, when rank 0 has started and before it has an answer.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

FOLDER = "LIGHT_RANKS_FOLDER"
SHARED = ["--gpu", "rtx-4090", "--gpus", "2", "--device", "cpu", "--parallel", "ddp", "--parallel", "fsdp2"]
ONE_OF_EACH = ["--method", "full", "--precision", "fp32", "--optimizer", "adamw", "--attention", "sdpa"]
ONE_OF_EACH += ["--loss", "chunked", "--no-checkpointing", "--seq-len", "64", "--global-batch", "4"]
MAX_PROBES = 3


def tune(model: str, folder: str) -> int:
    """The command with these ranks in place of the real ones."""
    from finetune_planner.cli.app import run
    from probes.gpu import executors

    os.environ[FOLDER] = folder
    executors.LocalExecutor = partial(executors.LocalExecutor, argv=(sys.executable, __file__))  # type: ignore[assignment, misc]
    place = ["--out", f"{folder}/study", "--store", f"{folder}/store.jsonl"]
    limits = ["--max-probes", str(MAX_PROBES), "--budget", "10h", "--no-dry-run", "--json=full"]
    return run(["tune", model, *SHARED, *ONE_OF_EACH, *place, *limits])


def rank() -> int:
    """One rank of a job."""
    sys.path.insert(0, str(Path(__file__).parent))  # a probe's Python looks neither here nor in the working directory
    from search_cases import measurement

    from planner.setup.codec import Outcome
    from probes.gpu import worker
    from probes.gpu.ranks import rank_info_of
    from probes.gpu.request import ProbeRequest, StatusPipe
    from search.dimensions import key_of

    def answer(request: ProbeRequest, status: StatusPipe) -> Outcome:
        folder, setup = Path(os.environ[FOLDER]), request.setup
        log = folder / "log"
        outcome = measurement(setup, 1000.0 * setup.micro_batch_seqs, 2**30)
        if rank_info_of().rank == 1:
            if setup.parallel == "ddp":
                while not (log.exists() and key_of(setup) in log.read_text()):
                    time.sleep(0.01)  # torchrun would end rank 0 before its line stands in the log
                os.kill(os.getpid(), signal.SIGKILL)
            return outcome
        line = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(line, f"start {os.getpid()} {key_of(setup)}\n".encode())
        os.close(line)
        started = len(log.read_text().splitlines())
        while setup.parallel == "ddp" or (folder / f"hold-{started}").exists():
            time.sleep(0.01)  # torchrun ends this rank when the other is dead, the test when it has seen enough
        return outcome

    return worker.main(measure=answer)


if __name__ == "__main__":
    if sys.argv[1] == "tune":
        sys.exit(tune(*sys.argv[2:]))
    from probes.gpu.worker import leave

    leave(rank())
