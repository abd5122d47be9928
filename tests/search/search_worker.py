"""A worker process for the tests of shared studies.

    search_worker.py NAME STORAGE LOG GATES MAX_PROBES MARGIN

Every probe appends "start NAME KEY" and "end NAME KEY" to the log in single writes, so that another process can count
them. The n-th start of the log waits as long as the file `hold-n` is in the directory GATES: a test decides what is in
flight when it kills, at any load. A dead worker's heartbeat is not found out by waiting (an hour) but made old by the
test.
"""

import os
import sys
import time
from pathlib import Path

from search_cases import problem, scenario

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.setup import TrainSetup
from planner.setup.outcome import Evidence
from search import run
from search import storage as search_storage
from search.dimensions import key_of
from search.stopping import Budget

HEARTBEAT_S, GRACE_S = 1, 3600


def main(name: str, storage: str, log: str, gates: str, max_probes: str, margin: str) -> None:
    gpu = SyntheticGpu.of(scenario(), 1)

    def write(word: str, setup: TrainSetup) -> int:
        """Adds a line; its number among those with this word."""
        line = f"{word} {name} {key_of(setup)}\n"
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)
        lines = [entry for entry in Path(log).read_text().splitlines(keepends=True) if entry.startswith(word)]
        return max(number for number, entry in enumerate(lines, start=1) if entry == line)

    def evaluate(setup: TrainSetup) -> Evidence:
        gate = Path(gates) / f"hold-{write('start', setup)}"
        while gate.exists():
            time.sleep(0.01)
        evidence = gpu(setup)
        write("end", setup)
        return evidence

    result = run.search(
        problem(),
        evaluate,
        storage=storage,
        budget=Budget(max_probes=int(max_probes)),
        margin=float(margin),
    )
    best = key_of(result.best.setup) if result.best else "none"
    print(f"{best}\t{result.num_probes}\t{result.reason}")


if __name__ == "__main__":
    search_storage.HEARTBEAT_S, search_storage.GRACE_S = HEARTBEAT_S, GRACE_S
    run.MAX_RECORDED_EXCLUSIONS = 2  # each is a trial like any other, with its writes
    main(*sys.argv[1:])
