"""Ranks that keep a part of the states: what ships, and the closed forms, against fresh dry runs of FSDP2 at random.

    python -m benchmarks.rank_profiles --out FILE --runs 80 [--seed 1] [NAME ...]   # measures; what is there is kept
    python -m benchmarks.rank_profiles --out FILE                                  # the table
    python -m benchmarks.rank_profiles --frozen                                    # the frozen runs, profiles made now

Points are drawn from what plans on several GPUs walk: a model with profiles of ranks, one of its structures, a way of
sharding, and sizes. `--frozen` builds profiles for the structures of `benchmarks/data/spread_dry_runs.jsonl` (of ZeRO's
engine no dry run is left; those rows are of the one there was).
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.layout_formula_vs_dryrun import GPU, measure, points, strategy_of
from benchmarks.shared import DATA, collect, loaded, percentile, rows_of
from planner.hardware.gpus import find_gpu
from planner.memory import ranks
from planner.memory.engines import engine_of
from planner.memory.model import memory_of, predict_memory
from planner.memory.profiles import rank_profiles_of
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.layouts import SHARDED
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict

FROZEN = DATA / "spread_dry_runs.jsonl"
TOO_MUCH = 300e9
"""Points beyond so many bytes are drawn again: nobody trains there."""


def drawn(names: list[str], seed: int) -> Iterator[tuple[str, TrainSetup]]:
    """Endless (model, setup) of those that have a profile."""
    specs = {name: spec for name in names if (spec := catalogue.load(name)) and rank_profiles_of(spec)}
    for name, setup in points("fsdp2", seed, list(specs)):
        small = predict_memory(specs[name], find_gpu(GPU), setup).peak_allocated_bytes < TOO_MUCH
        if small and ranks.rank_step(specs[name], find_gpu(GPU), setup) is not None:
            yield name, setup


class _Made:
    """Stands for a model's profiles of ranks: each is made when it is asked for."""

    def __init__(self, model: ModelSpec) -> None:
        from probes.tracing.profile_builder import ProfileBuilder

        self._builder, self._found = ProfileBuilder(model, of_rank=True), dict[str, Any]()
        self.without_gradients: dict[int, Any] = {}
        self.setup: TrainSetup | None = None

    def get(self, key: str, every: int) -> Any:
        """The profile of the setup that is being looked at."""
        from probes.tracing.profile_builder import NOT_PROFILED

        assert self.setup is not None
        if key not in self._found:
            inner = ranks.as_profiled(engine_of(self.setup).computes(self.setup))
            try:
                self._found[key] = self._builder.profile(inner, find_gpu(GPU))
            except NOT_PROFILED:
                self._found[key] = None
        return self._found[key]


def frozen() -> str:
    rows = [row for row in rows_of(FROZEN) if "allocated" in row and row["setup"]["parallel"] in SHARDED]
    named_errors: list[tuple[str, dict[str, Any]]] = []
    for name, group in groupby(sorted(rows, key=lambda row: str(row["model"])), lambda row: str(row["model"])):
        made = _Made(loaded(name))
        with mock.patch.object(ranks, "rank_profiles_of", lambda _, made=made: made):
            for row in group:
                made.setup = setup_from_dict(row["setup"])
                named_errors += errors(row)
    return table(named_errors)


def errors(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(strategy and figure, errors by level) of one row, and how it is called; nothing where it has no profile."""
    model, gpu, setup = loaded(row["model"]), find_gpu(GPU), setup_from_dict(row["setup"])
    levels = {"profile": memory_of(model, gpu, setup)[0].breakdown, "closed forms": predict_memory(model, gpu, setup)}
    if "allocated" not in row or not levels["profile"].profiled:
        return
    for figure in ("allocated", "reserved"):
        off = {name: getattr(memory, f"peak_{figure}_bytes") / row[figure] - 1 for name, memory in levels.items()}
        yield f"{setup.parallel}, {figure}", off | {"point": f"{row['model']} {strategy_of(setup)} {row['setup']}"}


def table(named_errors: list[tuple[str, dict[str, Any]]], worst: int = 5) -> str:
    """Errors by strategy and level, and the worst of the profiles by name."""
    lines = ["| | points | | median | 95th | lowest | highest |", "|---|--:|---|--:|--:|--:|--:|"]
    for group in sorted({name for name, _ in named_errors}):
        of_group = [by_level for name, by_level in named_errors if name == group]
        for level in ("profile", "closed forms"):
            off = [by_level[level] for by_level in of_group]
            middle = statistics.median(map(abs, off))
            cells = f"{middle:.4%} | {percentile(map(abs, off), 0.95):.2%} | {min(off):+.2%} | {max(off):+.2%}"
            lines.append(f"| {group} | {len(of_group)} | {level} | {cells} |")
    allocated = [by_level for name, by_level in named_errors if name.endswith("allocated")]
    for by_level in sorted(allocated, key=lambda point: -abs(point["profile"]))[:worst]:
        lines.append(f"{by_level['profile']:+.2%} (closed forms {by_level['closed forms']:+.2%}) {by_level['point']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frozen", action="store_true")
    args = parser.parse_args()
    if args.frozen:
        print(frozen())
    else:
        if args.runs:
            chosen = drawn(args.names or list(catalogue.names()), args.seed)
            collect(args.out, args.runs, (({"model": name}, setup) for name, setup in chosen), measure)
        print(table([named for row in rows_of(args.out) for named in errors(row)]))


if __name__ == "__main__":
    main()
