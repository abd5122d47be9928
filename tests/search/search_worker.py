"""A worker process for the tests of shared studies: `search_worker.py STORAGE LOG SEED PROBE_S MAX_PROBES [SCENARIO]`.

Every probe appends "start KEY" and "end KEY" to the log in single writes, so that another process can count them.
"""

import os
import sys
import time

from search_cases import problem, scenario

from planner.outcome import Evidence
from planner.setup import TrainSetup
from search.dimensions import key_of
from search.run import search
from search.stopping import Budget
from search.synthetic import SyntheticGpu


def main(storage: str, log: str, seed: str, probe_s: str, max_probes: str, name: str = "8b-80g") -> None:
    gpu = SyntheticGpu.of(scenario(name), int(seed))

    def write(word: str, setup: TrainSetup) -> None:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{word} {os.getpid()} {key_of(setup)}\n".encode())
        os.close(handle)

    def evaluate(setup: TrainSetup) -> Evidence:
        write("start", setup)
        time.sleep(float(probe_s))
        evidence = gpu(setup)
        write("end", setup)
        return evidence

    result = search(
        problem(name), evaluate, storage=storage, budget=Budget(max_probes=int(max_probes)), heartbeat_s=1, grace_s=3
    )
    best = key_of(result.best.setup) if result.best else "none"
    print(f"{best}\t{result.num_probes}\t{result.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
