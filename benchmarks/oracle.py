"""Frozen dry runs of random setups, and how near a replacement of the hand-written formula comes to them.

    python -m benchmarks.oracle --judge 100 [--seed 1]           # step profiles made now, beside the formula
    python -m benchmarks.oracle --own                            # against this project's runs on GPUs
    python -m benchmarks.oracle --ranks                          # DDP's ranks, against their frozen dry runs
    python -m benchmarks.oracle --refresh FILE [--loss liger]    # dry-runs points anew (0.5 s each), resumable
    python -m benchmarks.oracle --merge FILE                     # takes what was refreshed into the frozen data

Frozen beside it, each with the setups that its own benchmark makes: adapters (adapter_kinds.jsonl, 657), pictures
(images.jsonl, 186), sound (sound.jsonl, 56), ranks (spread_*.jsonl, 972).
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.measured import own_rows
from benchmarks.shared import DATA, dry_run_row, error_table, loaded, rows_of, rows_so_far
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.model import predict_memory
from planner.memory.profiles import profiled_breakdown, profiled_kind, step_of
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from planner.setup.memory_terms import MemoryBreakdown

FROZEN, RANKS = DATA / "oracle.jsonl.gz", DATA / "spread_dry_runs.jsonl"


def frozen() -> list[dict[str, Any]]:
    """The points of `benchmarks.formula_vs_dryrun`: model, GPU, setup, the dry run's allocated peak by phase, and of
    some what it reserves."""
    return rows_of(FROZEN)


def profiled(builder: Any, model: ModelSpec, setup: TrainSetup, gpu: GpuSpec) -> MemoryBreakdown | None:
    """The memory of a setup by a profile made now, None where there is none of such setups.

    Raises:
        one of `probes.tracing.profile_builder.NOT_PROFILED`: there should be one.
    """
    inner = engine_of(setup).computes(setup)
    profile = builder.profile(inner, gpu) if profiled_kind(inner) else None
    step = step_of(profile, model, setup) if profile is not None else None
    if step is None:
        return None
    state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=setup.adds_gradients)
    return profiled_breakdown(step, gpu, setup, state)


Case = tuple[str, str, TrainSetup, GpuSpec, dict[str, float | None]]
"""Name, model, setup, card and the allocated and reserved bytes that a profile and the formula are held against."""


def own() -> Iterator[Case]:
    """Every own run on a GPU that a setup says."""
    for row in own_rows():
        if row.setup is not None and row.model is not None and row.gpu is not None and row.allocated_bytes:
            measured = {"allocated": row.allocated_bytes, "reserved": row.reserved_bytes}
            yield row.config_id, row.model, row.setup, find_gpu(row.gpu), measured


def judged(num: int, seed: int) -> Iterator[Case]:
    """Some of the frozen points."""
    rows = frozen()
    for row in sorted(random.Random(seed).sample(rows, min(num, len(rows))), key=lambda row: str(row["model"])):
        peaks = {figure: row.get(f"dry_run_{figure}") for figure in ("allocated", "reserved")}
        yield f"{row['model']} {row['setup']}", row["model"], setup_from_dict(row["setup"]), find_gpu(row["gpu"]), peaks


def ranks() -> Iterator[Case]:
    rows = [row for row in rows_of(RANKS) if row["setup"]["parallel"] == "ddp"]
    for row in sorted(rows, key=lambda row: str(row["model"])):
        peaks = {figure: row[figure] for figure in ("allocated", "reserved")}
        yield row["model"], row["model"], setup_from_dict(row["setup"]), find_gpu("a100-80gb"), peaks


def compared(cases: Iterator[Case]) -> Iterator[str]:
    """Profiles made now, and the formula, against each case; then the errors of all."""
    from probes.tracing.profile_builder import NOT_PROFILED, ProfileBuilder

    seen: dict[str, list[float]] = {}
    for model_name, group in groupby(cases, lambda case: case[1]):
        model = loaded(model_name)
        builder = ProfileBuilder(model)
        for name, _, setup, gpu, truth in group:
            try:
                profile = profiled(builder, model, setup, gpu)
            except NOT_PROFILED as error:
                yield f"{name:34} {type(error).__name__}: {error}"
                continue
            if profile is None:
                yield f"{name:34} no profile of such setups"
                continue
            cells = []
            for level, breakdown in (("profile", profile), ("formula", predict_memory(model, gpu, setup))):
                for figure, size in truth.items():
                    if size:
                        off = getattr(breakdown, f"peak_{figure}_bytes") / size - 1
                        seen.setdefault(f"{figure}, {level}", []).append(off)
                        cells.append(f"{level} {figure} {off:+.3%}")
            yield f"{name:34} {'  '.join(cells)}"
    yield from error_table("figure", seen, digits=4)


def refresh(path: Path, loss: str) -> None:
    """Dry-runs the points (of one loss) that the file does not have yet."""
    from benchmarks.formula_vs_dryrun import CAPABILITIES

    done = {row["place"] for row in rows_so_far(path)}
    with path.open("a") as file:
        for place, row in enumerate(frozen()):
            if place in done or (loss and row["setup"]["loss"] != loss):
                continue
            ran = dry_run_row(row["model"], CAPABILITIES[row["gpu"]], setup_from_dict(row["setup"]), 1 << 62)
            if "failure" not in ran:
                file.write(json.dumps({"place": place, "phases": ran["phases"], "reserved": ran["reserved"]}) + "\n")
                file.flush()


def merge(path: Path) -> int:
    """Takes refreshed values in; how many points moved by more than 1 part in 100,000."""
    from probes.dryrun.api import VERSION

    rows, moved = frozen(), 0
    for new in rows_of(path):
        row, peak = rows[new["place"]], max(new["phases"].values())
        moved += abs(row["dry_run_allocated"] / peak - 1) > 1e-5
        row |= {"dry_run_version": VERSION, "dry_run_phases": new["phases"], "dry_run_allocated": peak}
        row["dry_run_phase"] = max(new["phases"], key=lambda phase: new["phases"][phase])
        row["dry_run_reserved"] = new["reserved"]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    FROZEN.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same points give the same bytes
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--refresh", type=Path, metavar="FILE")
    parser.add_argument("--loss", default="")
    parser.add_argument("--merge", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.refresh:
        refresh(args.refresh, args.loss)
    elif args.merge:
        print(f"{merge(args.merge)} points moved")
    else:
        for line in compared(own() if args.own else ranks() if args.ranks else judged(args.judge, args.seed)):
            print(line)


if __name__ == "__main__":
    main()
