"""Search overhead per trial for a space of about 20,000 candidates: everything but the probe itself.

    python -m benchmarks.bench_search [--probes 20] [--repeats 5] [--out benchmarks/data/search_overhead.json]

The probe answers at once, so the time between probes is the search's own: claim, journal write with fsync, Gaussian
process, acquisition, stop rule, constraints, result. Making the posterior (encoding all candidates once) is reported
apart. The processor's time is reported beside the clock's: on a machine that others use, only the first says what the
search costs; the clock adds waiting for the disk (fsync) and for other processes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.synthetic_gpu import SCENARIOS, SyntheticGpu
from planner.setup import TrainSetup
from planner.setup.outcome import Evidence
from search.problem import Problem
from search.run import Strategy, search
from search.sampler import Posterior
from search.stopping import Budget

LIMIT_MS = 50.0


def measure(num_probes: int, *, sampler: str = "residual") -> dict[str, Any]:
    """Milliseconds of search between two probes, median and largest."""
    scenario = replace(SCENARIOS[2], large=True)
    problem = Problem(candidates=scenario.candidates())
    gpu = SyntheticGpu.of(scenario, 5)
    started = time.perf_counter()
    Posterior(problem)
    encode_s = time.perf_counter() - started
    left_at: list[float] = []
    gaps_s: list[float] = []
    cpu_left_at: list[float] = []
    cpu_gaps_s: list[float] = []

    def evaluate(setup: TrainSetup) -> Evidence:
        if left_at:
            gaps_s.append(time.perf_counter() - left_at[-1])
            cpu_gaps_s.append(time.process_time() - cpu_left_at[-1])
        evidence = gpu(setup)
        left_at.append(time.perf_counter())
        cpu_left_at.append(time.process_time())
        return evidence

    with tempfile.TemporaryDirectory() as directory:
        # A margin below zero: nothing ever counts as good enough, so that every probe of the budget is made.
        search(
            problem,
            evaluate,
            storage=directory,
            strategy=Strategy(sampler=sampler, margin=-0.5),
            budget=Budget(max_probes=num_probes),
        )
    return {
        "candidates": len(problem.candidates),
        "probes": len(left_at),
        "median_ms": round(1000 * statistics.median(gaps_s), 1),
        "largest_ms": round(1000 * max(gaps_s), 1),
        "cpu_median_ms": round(1000 * statistics.median(cpu_gaps_s), 1),
        "cpu_largest_ms": round(1000 * max(cpu_gaps_s), 1),
        "load_average": round(os.getloadavg()[0], 1),
        "belief_ms_once": round(1000 * encode_s, 1),
        "limit_ms": LIMIT_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="searches; the median of their medians is reported")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.repeats):
        runs.append(measure(arguments.probes))
        print(json.dumps(runs[-1]), flush=True)
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result |= {"repeats": len(runs), "cpu_medians_ms": [run["cpu_median_ms"] for run in runs], "cores": os.cpu_count()}
    print(json.dumps(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
