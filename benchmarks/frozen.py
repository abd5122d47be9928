"""Frozen dry runs, and how near closed forms and step profiles come to them.

    python -m benchmarks.frozen [SET ...]                         # tables of the closed forms: docs/accuracy
    python -m benchmarks.frozen SET --profiles [--sample 100]     # step profiles made now beside them (torch)
    python -m benchmarks.frozen SET --again FILE [--as OLD NEW]   # dry-runs the points anew (0.5 s each), resumable
    python -m benchmarks.frozen SET --take FILE                   # takes what was dry-run into the frozen data

Sets are the files of `benchmarks/data/dry_runs`, and "own": this project's runs on GPUs. They were drawn at random, or
enumerated, by `git show 00bc1b5f:benchmarks/NAME.py` (grid: formula_vs_dryrun; adapters: adapter_kinds; pictures:
images; sound; of several GPUs: layout_formula_vs_dryrun); "drawn" at random over all that a setup says at once, of
models up to 10.5B, behind some whose faults were mended (30 November 2026). `--as OLD NEW` runs the points of one
model, or of one kind of adapter, with another in its place: what a new one needs.
"""

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import image_models
from benchmarks.measured import own_rows
from benchmarks.shared import DATA, error_table, loaded, rows_of, rows_so_far
from planner.core.units import gib
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory import profiles, ranks
from planner.memory.engines import engine_of
from planner.memory.model import memory_of, rank_memories
from planner.models.encoders import with_vision
from planner.models.spec import ModelSpec
from planner.planning.decision.layouts import layout_name
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.memory_terms import MemoryBreakdown
from reports.setup_text import setup_words

FOLDER = DATA / "dry_runs"
SETS = ("grid", "adapters", "pictures", "sound", "ranks", "context", "experts", "objectives", "stages", "drawn")


class Point(NamedTuple):
    """A setup and what its run took: `measured` the peaks by figure, `phase` of the allocated one, `kernels` as the dry
    run counted them."""

    model: ModelSpec
    gpu: GpuSpec
    setup: TrainSetup
    measured: Mapping[str, int]
    phase: str = ""
    kernels: Mapping[str, int] = {}


@cache
def model_of(name: str) -> ModelSpec:
    """A model of the catalogue, or one with pictures by its bare name."""
    return loaded(name) if "/" in name else image_models.spec_of(name, image_models.configs()[name])


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a set: model, gpu, setup, allocated bytes, and where they were kept reserved, phases and kernels."""
    return rows_of(FOLDER / f"{name}.jsonl.gz")


def points(name: str) -> list[Point]:
    if name == "own":
        return [
            Point(loaded(row.model), find_gpu(row.gpu), row.setup,
                  {"allocated": row.allocated_bytes, "reserved": row.reserved_bytes or 0})
            for row in own_rows() if row.setup and row.model and row.gpu and row.allocated_bytes
        ]  # fmt: skip
    return [point_of(row) for row in rows(name)]


def point_of(row: Mapping[str, Any]) -> Point:
    measured = {figure: row[figure] for figure in ("allocated", "reserved") if figure in row}
    phases = row.get("phases", {"": 0})
    phase, kernels = max(phases, key=lambda phase: phases[phase]), row.get("kernels", {})
    model, setup = model_of(row["model"]), setup_from_dict(row["setup"])
    model = with_vision(model) if setup.builds_encoders else model
    return Point(model, find_gpu(row["gpu"]), setup, measured, phase, kernels)


def formula(point: Point) -> MemoryBreakdown:
    """The closed forms of the rank with the largest allocated peak."""
    breakdowns = (rank.breakdown for rank in rank_memories(point.model, point.gpu, point.setup))
    return max(breakdowns, key=lambda breakdown: breakdown.peak_allocated_bytes)


def kinds(point: Point) -> Iterator[tuple[str, str]]:
    """(grouping, name) of the tables in which a point counts."""
    model, setup = point.model, point.setup
    yield "all", "all points"
    yield "type", model.model_type
    if setup.num_gpus > 1:
        yield "strategy", layout_name(setup)
    if setup.objective != "sft":
        yield "objective", setup.objective
    if setup.method != "full":
        yield "adapter", setup.adapter
    yield "kind", kind_of(point)


def kind_of(point: Point) -> str:
    """What decides how well a closed form can follow, one word per point."""
    model, setup = point.model, point.setup
    traits = model.traits
    if setup.lora_dropout > 0 or traits.attention_dropout or traits.residual_dropout:
        return "with a dropout"
    if "math" in point.kernels and setup.autocast_dtype is not None:
        return "math kernel under autocast"
    if setup.quantization == "int8" and setup.checkpointing:
        return "int8 with checkpointing"
    if any(layer.attention is not None and layer.attention.kind == "linear" for layer in model.layer_kinds):
        return "linear attention"
    if any(layer.mlp is not None and layer.mlp.kind == "moe" for layer in model.layer_kinds):
        return "mixture of experts"
    if setup.attention == "eager" or "sdpa" not in model.attentions:
        return "eager attention"
    return "below 1e9 parameters" if model.num_params < 1_000_000_000 else "dense, fused attention"


def tables(some: Iterable[Point], worst: int) -> str:
    """Errors of the closed forms by each grouping that tells points apart, and the worst by name."""
    errors: dict[str, dict[str, list[float]]] = {}
    named: list[tuple[float, str]] = []
    for point in some:
        breakdown = formula(point)
        error = breakdown.peak_allocated_bytes / point.measured["allocated"] - 1
        for group, name in kinds(point):
            errors.setdefault(group, {}).setdefault(name, []).append(error)
        sizes = f"{gib(point.measured['allocated'])} ({point.phase}), {gib(breakdown.peak_allocated_bytes)}"
        spread = f", {layout_name(point.setup)} x {point.setup.num_gpus}" * (point.setup.num_gpus > 1)
        name = f"{point.model.model_id} on {point.gpu.key}{spread}: {setup_words(point.setup)}"
        named.append((error, f"| {100 * error:+.1f} % | {sizes} ({breakdown.peak_phase}) | {name} |"))
    lines = []
    for group, by_name in errors.items():
        lines += error_table(group, by_name) if group == "all" or len(by_name) > 1 else []
    lines += ["| error | dry run, formula | point |", "|--:|---|---|"]
    lines += [text for _, text in sorted(named, key=lambda entry: -abs(entry[0]))[:worst]]
    return "\n".join(lines)


class _Made:
    """Stands for a model's step profiles, or those of its ranks: each is made when it is asked for."""

    def __init__(self, model: ModelSpec, *, of_rank: bool) -> None:
        from probes.tracing.profile_builder import ProfileBuilder

        self._builder, self._made = ProfileBuilder(model, of_rank=of_rank), dict[str, Any]()
        self._as_profiled: Callable[[TrainSetup], TrainSetup] = ranks.as_profiled if of_rank else lambda inner: inner
        self.without_gradients: dict[int, Any] = {}
        self.point: Point | None = None

    def get(self, key: str, every: int) -> Any:
        """The profile of the point that is being looked at; None where the builder refuses."""
        from probes.tracing.profile_builder import NOT_PROFILED

        assert self.point is not None
        if key not in self._made:
            inner = self._as_profiled(engine_of(self.point.setup).computes(self.point.setup))
            try:
                self._made[key] = self._builder.profile(inner, self.point.gpu)
            except NOT_PROFILED as error:
                print(f"{type(error).__name__}: {error}")
                self._made[key] = None
        return self._made[key]


@contextmanager
def made_now(model: ModelSpec) -> Iterator[tuple[_Made, _Made]]:
    """Within it memory is told by profiles that are made now, not by those that ship."""
    alone, rank = _Made(model, of_rank=False), _Made(model, of_rank=True)
    with (
        mock.patch.object(profiles, "profiles_of", return_value=alone),
        mock.patch.object(ranks, "rank_profiles_of", return_value=rank),
    ):
        yield alone, rank


def compared(some: Iterable[Point]) -> Iterator[str]:
    """Profiles made now, and closed forms, against each point that has one; then the errors of all."""
    errors: dict[str, list[float]] = {}
    by_model = sorted(some, key=lambda point: point.model.model_id)
    for _, group in groupby(by_model, lambda point: point.model.model_id):
        of_model = list(group)
        with made_now(of_model[0].model) as made:
            for point in of_model:
                for each in made:
                    each.point = point
                profile = memory_of(point.model, point.gpu, point.setup)[0].breakdown
                if not profile.profiled:
                    continue
                cells = []
                for level, breakdown in (("profile", profile), ("formula", formula(point))):
                    for figure, size in point.measured.items():
                        error = getattr(breakdown, f"peak_{figure}_bytes") / size - 1
                        errors.setdefault(f"{layout_name(point.setup)}, {figure}, {level}", []).append(error)
                        cells.append(f"{level} {figure} {error:+.3%}")
                yield f"{point.model.model_id:34} {'  '.join(cells)}  {setup_words(point.setup)}"
    yield from error_table("figure", errors, digits=4)


def replaced(row: dict[str, Any], old: str, new: str) -> dict[str, Any] | None:
    """The row of another model, or of another kind of adapter; None where it is of neither."""
    if row["model"] == old:
        return {**row, "model": new}
    setup = setup_from_dict(row["setup"])
    return {**row, "setup": setup_to_dict(setup.replace(adapter=new))} if setup.adapter == old else None


def again(some: list[dict[str, Any]], path: Path) -> None:
    """Dry-runs the points that the file does not have yet, in their order; of one that fails the reason."""
    from probes.dryrun import DryRunReport, dry_run_report

    with path.open("a", encoding="utf-8") as file:
        for row in some[len(rows_so_far(path)) :]:
            point = point_of(row)
            report = dry_run_report(point.model, point.gpu, point.setup, use_cache=False)
            ran: dict[str, Any] = {name: row[name] for name in ("model", "gpu", "setup")}
            if isinstance(report, DryRunReport):
                peak = report.prediction
                ran |= {"allocated": peak.peak_allocated_bytes, "reserved": peak.peak_reserved_bytes}
                ran |= {"phases": dict(peak.phase_peaks_bytes), "kernels": dict(report.kernels)}
            else:
                ran["failure"] = report.message
            file.write(json.dumps(ran) + "\n")
            file.flush()


def take(name: str, path: Path) -> int:
    """Takes what was dry-run into a set, new points behind the others; how many moved by more than 1e-5."""
    frozen = {json.dumps([row["model"], row["gpu"], row["setup"]]): row for row in rows(name)}
    moved = 0
    for row in rows_of(path):
        key = json.dumps([row["model"], row["gpu"], row["setup"]])
        if "failure" not in row:
            moved += key in frozen and abs(frozen[key]["allocated"] / row["allocated"] - 1) > 1e-5
            frozen[key] = row
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in frozen.values())
    packed = gzip.compress(text.encode(), mtime=0)  # the same points give the same bytes
    (FOLDER / f"{name}.jsonl.gz").write_bytes(packed)
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", choices=[*SETS, "own", []], metavar="SET", default=SETS)
    parser.add_argument("--worst", type=int, default=4, help="points to list by name")
    parser.add_argument("--profiles", action="store_true")
    parser.add_argument("--sample", type=int, help="so many points, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="FILE")
    parser.add_argument("--as", dest="instead", nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--take", type=Path, metavar="FILE")
    args = parser.parse_args()
    for name in args.sets:
        if args.again:
            every = [replaced(row, *args.instead) if args.instead else row for row in rows(name)]
            again([row for row in every if row is not None], args.again)
        elif args.take:
            print(f"{take(name, args.take)} points moved")
        else:
            some = points(name)
            some = random.Random(args.seed).sample(some, min(args.sample, len(some))) if args.sample else some
            print(f"## {name}\n")
            for line in compared(some) if args.profiles else [tables(some, args.worst)]:
                print(line)


if __name__ == "__main__":
    main()
