"""What the planner itself costs, in CPU seconds, but for dry runs: a child makes those, timed by the clock.

python -m benchmarks.timings startup [--rounds 15]    # a plan by formula against importing typer and rich
python -m benchmarks.timings dryrun                   # cold (new process, all imports; aim 3 s) and warm (1 s)
python -m benchmarks.timings search [--rounds 5]      # between two probes of a space of 18,144 (aim 50 ms)
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIBRARIES = "import typer, rich, rich.console, rich.table"
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-1.5B", "mistralai/Mixtral-8x7B-v0.1")
DRY_RUN_MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B")
SETUPS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "optimizer": "adamw"},
    "LoRA": {"lora_rank": 16},
    "LoRA, no checkpointing": {"lora_rank": 16, "checkpointing": 0, "loss": "chunked"},
    "QLoRA": {"method": "qlora", "quantization": "nf4-double", "optimizer": "paged-adamw-8bit"},
}


def child_s(code: str) -> float:
    """CPU seconds of a new process, user and system; its bytecode is cached as in an installed package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "planner-pycache")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
    _, child.returncode, used = os.wait4(child.pid, 0)
    if child.returncode:
        raise SystemExit(child.returncode)
    return used.ru_utime + used.ru_stime


def startup(rounds: int) -> None:
    """Both in turn, after one round that writes the bytecode; the aim is a ratio of at most 3."""
    for model in MODELS:
        plan = f"from finetune_planner.cli.app import main; main(['{model}', '--gpu', 'a100-80gb', '--no-dry-run'])"
        pairs = [(child_s(LIBRARIES), child_s(plan)) for _ in range(rounds + 1)][1:]
        for name, of in (("least", min), ("median", statistics.median)):
            imports_s, plan_s = (of(times) for times in zip(*pairs, strict=True))
            print(f"{model:32} {name:6} imports {imports_s:.3f} s   plan {plan_s:.3f} s   {plan_s / imports_s:.2f}")


def dryrun(rounds: int) -> None:
    """A child for each model, which prints its own."""
    for model in DRY_RUN_MODELS:
        code = f"from benchmarks.timings import dryruns_of; dryruns_of({model!r}, {rounds})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def dryruns_of(model: str, rounds: int) -> None:
    """The first dry run of this process, libraries loaded for it, then each setup, of a length never seen."""
    from planner.hardware.gpus import find_gpu
    from planner.models.resolve import resolve_model
    from planner.setup import TrainSetup
    from probes.dryrun import DryRunReport, dry_run_report

    spec, gpu = resolve_model(model), find_gpu("a100-80gb")

    def run_s(fields: dict[str, Any], tokens: int) -> float:
        started = time.perf_counter()
        report = dry_run_report(spec, gpu, TrainSetup(seq_len_tokens=tokens, **fields), use_cache=False)
        assert isinstance(report, DryRunReport), report
        return time.perf_counter() - started

    cold_s = run_s(SETUPS["LoRA"], 2048)
    print(f"{model}: cold {cold_s:.2f} s")
    for name, fields in SETUPS.items():
        print(f"    {name:24} {statistics.median(run_s(fields, 2049 + number) for number in range(rounds)):6.2f} s")


def search(rounds: int) -> None:
    """Claim, journal with fsync, Gaussian process, acquisition, stop rule, constraints, result: all but the probe."""
    medians = [statistics.median(between_probes_ms()) for _ in range(rounds)]
    print(f"median {statistics.median(medians):.1f} ms between two probes; of each search {medians}")


def between_probes_ms() -> list[float]:
    """CPU milliseconds of one search between its probes, which answer at once."""
    from benchmarks.synthetic_gpu import SCENARIOS, SyntheticGpu
    from planner.setup import TrainSetup
    from planner.setup.outcome import Evidence
    from search.problem import Problem
    from search.run import search as run_search
    from search.stopping import Budget

    scenario = replace(SCENARIOS[2], large=True)
    gpu = SyntheticGpu.of(scenario, 5)
    at_s: list[tuple[float, float]] = []

    def evaluate(setup: TrainSetup) -> Evidence:
        arrived = time.process_time()
        evidence = gpu(setup)
        at_s.append((arrived, time.process_time()))
        return evidence

    problem = Problem(candidates=scenario.candidates())
    with tempfile.TemporaryDirectory() as directory:
        # A margin below zero: nothing ever counts as good enough, so that every probe of the budget is made.
        run_search(problem, evaluate, storage=directory, margin=-0.5, budget=Budget(max_probes=20))
    return [round(1000 * (after[0] - before[1]), 1) for before, after in itertools.pairwise(at_s)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("startup", "dryrun", "search"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported
    {"startup": startup, "dryrun": dryrun, "search": search}[arguments.what](arguments.rounds)


if __name__ == "__main__":
    main()
