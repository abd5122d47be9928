"""Step programs, and the formula, against the dry run's own prices at random sizes.

    python -m benchmarks.step_programs --runs 1000 [--seed 1] [--out FILE] [--models NAME ...] [--objectives]   # torch
    python -m benchmarks.step_programs --summary [FILE]

Resumable. A run is a structure that plans walk of a model that has programs (`--objectives`: of other objectives), at
any micro-batch, length, rank, accumulation and optimizer. The step is run on meta tensors and its operators are priced
(`planner.speed.timeline.run_time`) on each card that runs these kernels, a point each: the program, which was compiled
from one other run, and the formula are compared with that.
"""

import argparse
import copy
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.shared import DATA, percentile, rows_of, rows_so_far
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.planning.run_speed import run_speed
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
from planner.speed.roofline import CURRENT, throughput_profile
from planner.speed.sized import program_speed
from planner.speed.step_program import programs_of

RECORDED = DATA / "step_programs.jsonl.gz"
CARDS = {
    "a100-80gb": ("a100-80gb", "rtx-3090", "l40s", "rtx-4090", "h200"),
    "rtx-4090": ("rtx-4090", "l40s", "rtx-3090"),
    "h100-sxm": ("h100-sxm", "h200"),
}
"""Cards that run the same kernels."""


def with_programs(names: Sequence[str], objective: str) -> list[ModelSpec]:
    """Models of the catalogue, or those that are named, that have programs."""
    every = (catalogue.load(name) for name in names or catalogue.names())
    return [model for model in every if model is not None and programs_of(model, objective) is not None]


def drawn(
    seed: int, names: Sequence[str] = (), *, objectives: bool = False
) -> Iterator[tuple[ModelSpec, tuple[str, ...], TrainSetup]]:
    """Runs without end, each with the cards of its kernels."""
    from probes.tracing.programs import objective_structures, program_structures

    rng, models = random.Random(seed), with_programs(names, "classification" if objectives else "sft")
    structures = objective_structures if objectives else program_structures

    @cache
    def asked(place: int) -> list[tuple[str, tuple[TrainSetup, GpuSpec]]]:
        return sorted(structures(models[place]).items(), key=lambda pair: pair[0])

    while True:
        place = rng.randrange(len(models))
        model, (_, (setup, gpu)) = models[place], rng.choice(asked(place))
        sizes: dict[str, Any] = {
            "micro_batch_seqs": rng.choice([1, 1, 2, 3, 4, 6, 8, 16]),
            "seq_len_tokens": rng.choice([128, 256, 512, 1024, 2048, 4096, 8192, rng.randrange(100, 9000)]),
            "accumulation_steps": rng.choice([1, 1, 2, 8]),
            "optimizer": rng.choice(["adamw-fused", "adamw-fused", "adamw", "adamw-8bit", "adafactor", "lion-8bit"]),
        }
        if setup.method != "full":
            sizes["lora_rank"] = rng.choice([4, 8, 16, 32, 64, 128, 256])
        sizes["seq_len_tokens"] = min(sizes["seq_len_tokens"], model.learned_positions or sizes["seq_len_tokens"])
        yield model, CARDS[gpu.key], setup.replace(**sizes)


def judged(model: ModelSpec, cards: Sequence[str], setup: TrainSetup) -> Iterator[dict[str, Any]]:
    """For each card seconds of a step by its own operators, by the program, and by the formula."""
    from probes.dryrun.depths import plan_depth
    from probes.dryrun.engine import full_trace
    from probes.dryrun.operators import full_program
    from probes.stack.configs import load_config

    plan = plan_depth(load_config(model.config), checkpointing=setup.checkpointing, full_depth=False)
    trace = full_trace(copy.deepcopy(plan), find_gpu(cards[0]).compute_capability or (8, 0), setup)
    assert trace.operators is not None
    program = full_program(trace.operators, trace.trainables)
    assert program is not None
    for gpu in map(find_gpu, cards):
        by_program = program_speed(model, gpu, setup)
        if by_program is None:
            continue
        run = run_speed(program, model, gpu, setup)
        formula = throughput_profile(model, gpu, setup, conditions=CURRENT).step_time(setup).step_time_s
        yield {
            "model": model.model_id, "gpu": gpu.key, "setup": setup_to_dict(setup), "run_s": round(run.step_s, 6),
            "waits": round(run.parts_s["host"] / run.step_s, 4), "formula_s": round(formula, 6),
            "program_s": round(by_program.step_time(setup).step_time_s, 6),
        }  # fmt: skip


def points_of(path: Path) -> list[dict[str, Any]]:
    """The points of a file, a line of it a run."""
    return [point for run in rows_of(path) if isinstance(run, list) for point in run]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Errors of both, by model and all together."""
    lines = [f"| {'model':34} | points | program: median | 95th | worst | formula: median | 95th | worst |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in (*sorted({row["model"] for row in rows}), "all"):
        selected = [row for row in rows if name in ("all", row["model"])]
        cells = []
        for level in ("program_s", "formula_s"):
            errors = [abs(row[level] / row["run_s"] - 1) for row in selected]
            figures = (statistics.median(errors), percentile(errors, 0.95), max(errors))
            cells += [f"{100 * figure:.2f} %" for figure in figures]
        lines.append(f"| {name:34} | {len(selected)} | {' | '.join(cells)} |")
    worst = sorted(rows, key=lambda row: -abs(row["program_s"] / row["run_s"] - 1))[:8]
    for row in worst:
        setup = row["setup"]
        lines.append(
            f"worst: {row['program_s'] / row['run_s'] - 1:+.2%} {row['model']} {row['gpu']} {json.dumps(setup)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=())
    parser.add_argument("--objectives", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("step_programs.jsonl"))
    parser.add_argument("--summary", nargs="?", const=RECORDED, type=Path)
    args = parser.parse_args()
    if args.summary:
        print(summary(points_of(args.summary)))
        return
    from probes.dryrun.startup import collection_paused, load_libraries

    load_libraries()
    done = len(rows_so_far(args.out))
    with args.out.open("a", encoding="utf-8") as file:
        runs = drawn(args.seed, args.models, objectives=args.objectives)
        for place, run in enumerate(islice(runs, args.runs)):
            if place < done:
                continue
            try:
                with collection_paused():
                    outcome: Any = [*judged(*run)]
            except Exception as error:  # whatever the libraries stumble over
                outcome = f"{type(error).__name__}: {error}"[:200]
            file.write(json.dumps(outcome) + "\n")
            file.flush()
    print(summary(points_of(args.out)))


if __name__ == "__main__":
    main()
