"""CPU seconds of `plan MODEL --gpu GPU` with its dry runs, cold: a new process and an empty cache for every plan.

    python -m benchmarks.cold_plans [--gpu a100-80gb] [--every-model] [--models llama] [--out after.jsonl]
    python -m benchmarks.cold_plans --compare before.jsonl after.jsonl

One model of every type of the catalogue (the one with the most layers that has at most 40 billion parameters,
the smallest where all are larger), or all of them. CPU seconds are user and system of the process and of the child
that loads the libraries beside the formula; wall seconds are what passes, fewer on two quiet cores; `runs` is how
many dry runs the plan made.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from planner.models import catalogue
from planner.models.resolve import resolve_model

MOST_PARAMETERS = 40e9
AIM_S = 5.0


def chosen(every: bool, part: str) -> dict[str, str]:
    """Model -> its type."""
    by_type: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for entry in catalogue.entries():
        spec = resolve_model(entry.names[0])
        by_type[entry.config["model_type"]].append((spec.num_layers, spec.num_params, entry.names[0]))
    if every:
        return {name: kind for kind, each in by_type.items() for _, _, name in each if part in name}
    found = {}
    for kind, each in by_type.items():
        small = [one for one in each if one[1] <= MOST_PARAMETERS]
        found[max(small)[2] if small else min(each, key=lambda one: one[1])[2]] = kind
    return {name: kind for name, kind in found.items() if part in name}


def cold(model: str, gpu: str) -> dict[str, Any]:
    """One plan in a process of its own, with what it printed last."""
    code = f"from finetune_planner.cli.app import main; main([{model!r}, '--gpu', {gpu!r}])"
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ,
            "HOME": home,
            "XDG_CACHE_HOME": home,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        ) as process:
            assert process.stdout is not None
            said = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        runs = len(list(Path(home).rglob("dry-run/*.json")))
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"cpu_s": cpu_s, "wall_s": wall_s, "runs": runs, "exit": process.returncode, "said": said}


def compare(before: Path, after: Path) -> int:
    """Prints seconds before and after by model; the number of plans whose text differs."""
    old, new = (
        {one["model"]: one for one in map(json.loads, path.read_text().splitlines())} for path in (before, after)
    )
    both = sorted(old.keys() & new.keys(), key=lambda name: -old[name]["cpu_s"])
    print("| model | type | dry runs | CPU s before | after |\n|---|---|--:|--:|--:|")
    for name in both:
        was, now = old[name], new[name]
        print(f"| {name} | {now['type']} | {now['runs']} | {was['cpu_s']:.1f} | {now['cpu_s']:.1f} |")
    differing = [name for name in both if old[name]["said"] != new[name]["said"]]
    for title, lines in (("before", old), ("after", new)):
        print(f"{title}: {_summary([lines[name]['cpu_s'] for name in both])}")
    print(f"{len(differing)} of {len(both)} plans say something else: {', '.join(differing)}")
    return len(differing)


def _summary(seconds: list[float]) -> str:
    above = sum(one > AIM_S for one in seconds)
    return f"median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s, {above} above {AIM_S:.0f} s"


def main() -> int:
    """Measures and prints one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--every-model", action="store_true")
    parser.add_argument("--models", default="", metavar="PART", help="only those whose name holds this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        return int(compare(*args.compare) > 0)
    seconds = []
    for model, kind in chosen(args.every_model, args.models).items():
        found = {"model": model, "type": kind, **cold(model, args.gpu)}
        seconds.append(found["cpu_s"])
        times = f"{found['cpu_s']:6.1f} s, wall {found['wall_s']:6.1f} s"
        print(f"{model:45} {times}, {found['runs']} dry runs, exit {found['exit']}", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print(_summary(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
