"""How long a dry run takes: cold (a new process, everything imported) and warm, for an 8B and a 70B model.

    python -m benchmarks.bench_dryrun [--json out.json]

Both the wall clock and the process's own CPU time are printed: on a shared machine only the second says something about
the program. Aim: 3 s cold and 1 s warm per setup.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B")
SETUPS: dict[str, dict[str, object]] = {
    "full": {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "optimizer": "adamw"},
    "LoRA": {"lora_rank": 16},
    "LoRA, no checkpointing": {"lora_rank": 16, "checkpointing": 0, "loss": "chunked"},
    "QLoRA": {"method": "qlora", "quantization": "nf4-double", "optimizer": "paged-adamw-8bit"},
}
REPEATS = 3


def child(model: str) -> dict[str, object]:
    """Times one model in this process: the first run is cold."""
    wall, cpu = time.perf_counter(), time.process_time()
    from planner.hardware.gpus import find_gpu
    from planner.models import catalogue
    from planner.setup import TrainSetup
    from probes.dryrun import DryRunReport, dry_run_report

    spec, gpu = catalogue.load(model), find_gpu("a100-80gb")
    assert spec is not None

    def once(fields: dict[str, object], tokens: int) -> tuple[float, float, DryRunReport]:
        started_wall, started_cpu = time.perf_counter(), time.process_time()
        report = dry_run_report(spec, gpu, TrainSetup(seq_len_tokens=tokens, **fields), use_cache=False)  # type: ignore[arg-type]
        assert isinstance(report, DryRunReport), report
        return time.perf_counter() - started_wall, time.process_time() - started_cpu, report

    once(SETUPS["LoRA"], 2048)
    cold = {"cold_wall_s": time.perf_counter() - wall, "cold_cpu_s": time.process_time() - cpu}
    warm = {}
    for name, fields in SETUPS.items():
        runs = [once(fields, 2048 + index) for index in range(REPEATS)]
        warm[name] = {
            "wall_s": statistics.median(run[0] for run in runs),
            "cpu_s": statistics.median(run[1] for run in runs),
            "events": runs[-1][2].num_events,
            "depth": runs[-1][2].depth,
        }
    return {"model": model, **cold, "warm": warm}


def main() -> int:
    """One child per model, so that each is cold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return 0
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, one thread")
    results = []
    for model in MODELS:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.bench_dryrun", "--child", model],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        result = json.loads(done.stdout.splitlines()[-1])
        results.append(result)
        print(f"{model}: cold {result['cold_wall_s']:.2f} s wall, {result['cold_cpu_s']:.2f} s CPU")
        for name, timing in result["warm"].items():
            print(
                f"    {name:24} {timing['wall_s']:6.2f} s wall {timing['cpu_s']:6.2f} s CPU, {timing['events']} events"
            )
    if args.json:
        args.json.write_text(json.dumps({"load": load, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
