"""Frozen dry runs of random setups, and how near a replacement of the hand-written formula comes to them.

    python -m benchmarks.oracle --judge 100 [--seed 1] [--out FILE]   # step profiles made now, beside the formula
    python -m benchmarks.oracle --summary FILE                        # the same from what --judge wrote
    python -m benchmarks.oracle --own                                 # against this project's runs on GPUs
    python -m benchmarks.oracle --ranks                               # DDP's ranks, against their frozen dry runs
    python -m benchmarks.oracle --refresh FILE [--loss liger]         # dry-runs points anew (0.5 s each), resumable
    python -m benchmarks.oracle --merge FILE                          # takes what was refreshed into the frozen data

Frozen beside it, each with the setups that its own benchmark makes: adapters (adapter_kinds.jsonl, 657), pictures
(images.jsonl, 186), sound (sound.jsonl, 56), ranks (spread_*.jsonl, 972).
"""

import argparse
import gzip
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.measured import own_rows
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.model import predict_memory
from planner.memory.profiles import profiled_breakdown, profiled_kind, step_of
from planner.memory.rank_part import rank_parts
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.setup.interchange import setup_from_dict
from planner.setup.memory_terms import MemoryBreakdown

DATA = Path(__file__).parent / "data" / "oracle.jsonl.gz"
RANKS = DATA.with_name("spread_dry_runs.jsonl")


def frozen() -> list[dict[str, Any]]:
    """The points of `benchmarks.formula_vs_dryrun`: model, GPU, setup, the dry run's allocated peak by phase, and of
    some what it reserves."""
    return [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Keeps the points; the same ones give the same bytes."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    DATA.write_bytes(gzip.compress(text.encode(), mtime=0))


def judge(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of random points the errors of a profile made now and of the formula, or why there is no profile."""
    from probes.tracing.profile_builder import NOT_PROFILED, ProfileBuilder

    rows = frozen()
    chosen = sorted(random.Random(seed).sample(range(len(rows)), min(num, len(rows))), key=lambda i: rows[i]["model"])
    builder: tuple[str, ProfileBuilder] | None = None
    for place in chosen:
        row, started = rows[place], time.process_time()
        model, gpu, setup = _loaded(row["model"]), find_gpu(row["gpu"]), setup_from_dict(row["setup"])
        if builder is None or builder[0] != row["model"]:
            builder = row["model"], ProfileBuilder(model)
        record = {"place": place, "model": row["model"], "type": row["model_type"]}
        record["formula"] = _errors(row, predict_memory(model, gpu, setup))
        try:
            profile = builder[1].profile(setup, gpu) if profiled_kind(setup) else None
        except NOT_PROFILED as error:
            yield record | {"why": f"{type(error).__name__}: {error}"[:160]}
            continue
        step = step_of(profile, model, setup) if profile is not None else None
        if step is None:
            yield record | {"why": "no profile of such setups"}
            continue
        state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=setup.adds_gradients)
        record["profile"] = _errors(row, profiled_breakdown(step, gpu, setup, state))
        yield record | {"cpu_s": round(time.process_time() - started, 2)}


def own() -> str:
    """Profiles made now, and the formula, against every own run on a GPU: allocated and reserved memory."""
    from probes.tracing.profile_builder import NOT_PROFILED, ProfileBuilder

    lines: list[str] = []
    seen: dict[tuple[str, str], list[float]] = {}
    for row in own_rows():
        model, setup = catalogue.load(row.model or ""), row.setup
        if model is None or setup is None or not profiled_kind(setup) or not row.allocated_bytes:
            lines.append(f"{row.config_id:34} no profile of such setups")
            continue
        gpu = find_gpu(row.gpu or "")
        try:
            step = step_of(ProfileBuilder(model).profile(setup, gpu), model, setup)
        except NOT_PROFILED as error:
            lines.append(f"{row.config_id:34} {type(error).__name__}: {error}")
            continue
        assert step is not None, row.config_id
        state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=setup.adds_gradients)
        cells = []
        for level, breakdown in (
            ("profile", profiled_breakdown(step, gpu, setup, state)),
            ("formula", predict_memory(model, gpu, setup)),
        ):
            allocated = breakdown.peak_allocated_bytes / row.allocated_bytes - 1
            seen.setdefault(("allocated", level), []).append(allocated)
            cells.append(f"{level} allocated {allocated:+.3%}")
            if row.reserved_bytes:
                reserved = breakdown.peak_reserved_bytes / row.reserved_bytes - 1
                seen.setdefault(("reserved", level), []).append(reserved)
                cells.append(f"reserved {reserved:+.2%}")
        lines.append(f"{row.config_id:34} {'  '.join(cells)}")
    for (figure, level), errors in seen.items():
        lines += _line(f"{figure}, {level}", errors)
    return "\n".join(lines)


def ranks() -> str:
    """Profiles made now, and the formula, against the frozen dry runs of DDP's ranks."""
    from probes.tracing.profile_builder import NOT_PROFILED, ProfileBuilder

    gpu, lines = find_gpu("a100-80gb"), []
    rows = [row for row in map(json.loads, RANKS.read_text().splitlines()) if row["setup"]["parallel"] == "ddp"]
    seen: dict[tuple[str, str], list[float]] = {}
    for name, group in groupby(sorted(rows, key=lambda row: str(row["model"])), lambda row: str(row["model"])):
        model, builder = _loaded(name), ProfileBuilder(_loaded(name))
        for row in group:
            setup = setup_from_dict(row["setup"])
            try:
                step = step_of(builder.profile(engine_of(setup).computes(setup), gpu), model, setup)
            except NOT_PROFILED as error:
                lines.append(f"{name} {type(error).__name__}: {error}")
                continue
            assert step is not None, setup
            state = engine_of(setup).state(rank_parts(model, setup)[0], setup, accumulated=setup.adds_gradients)
            for level, breakdown in (
                ("profile", profiled_breakdown(step, gpu, setup, state)),
                ("formula", predict_memory(model, gpu, setup)),
            ):
                for figure in ("allocated", "reserved"):
                    off = getattr(breakdown, f"peak_{figure}_bytes") / row[figure] - 1
                    seen.setdefault((figure, level), []).append(off)
    return "\n".join([*lines, *(line for key, errors in seen.items() for line in _line(", ".join(key), errors))])


def _loaded(name: str) -> ModelSpec:
    spec = catalogue.load(name)
    assert spec is not None
    return spec


def _errors(row: dict[str, Any], breakdown: MemoryBreakdown) -> dict[str, float]:
    """Predicted / dry run - 1 of the peak, of each phase, and of what is reserved where that is known."""
    errors = {"peak": breakdown.peak_allocated_bytes / row["dry_run_allocated"] - 1}
    if "dry_run_reserved" in row:
        errors["reserved"] = breakdown.peak_reserved_bytes / row["dry_run_reserved"] - 1
    return errors | {
        phase: breakdown.phase_bytes[phase] / size - 1 for phase, size in row["dry_run_phases"].items() if size
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Errors of profile and formula on the same points, why others have no profile, and the worst by name."""
    both = [row for row in rows if "profile" in row]
    lines = [f"{len(rows)} points, {len(both)} with a profile"]
    for figure in ("peak", "reserved"):
        for level in ("profile", "formula"):
            lines += _line(f"{figure}, {level}", [row[level][figure] for row in both if figure in row[level]])
    lines += _line("peak, formula, points without a profile", [row["formula"]["peak"] for row in rows if "why" in row])
    reasons = Counter((row["type"], row["why"][:100]) for row in rows if "why" in row)
    lines += [f"  no profile: {kind}: {why} ({count})" for (kind, why), count in reasons.most_common()]
    every, named = frozen(), sorted(both, key=lambda row: -abs(row["profile"]["peak"]))[:10]
    for row in named:
        point = every[row["place"]]
        lines.append(f"  {row['profile']['peak']:+.3%} {row['model']} {point['gpu']} {json.dumps(point['setup'])}")
    return "\n".join(lines)


def _line(name: str, errors: list[float]) -> list[str]:
    if not errors:
        return []
    ordered = sorted(map(abs, errors))
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return [
        f"{name:42} n {len(ordered):4}  median {statistics.median(ordered):.4%}  95th {high:.3%}  "
        f"worst {ordered[-1]:.2%}  lowest {min(errors):+.2%}"
    ]


def refresh(path: Path, loss: str) -> None:
    """Dry-runs the points (of one loss) that the file does not have yet."""
    from benchmarks.formula_vs_dryrun import CAPABILITIES
    from probes.dryrun import DryRunReport, report_for_config

    done = {json.loads(line)["place"] for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for place, row in enumerate(frozen()):
            if place in done or (loss and row["setup"]["loss"] != loss):
                continue
            report = report_for_config(
                _loaded(row["model"]).config, CAPABILITIES[row["gpu"]], setup_from_dict(row["setup"])
            )
            if isinstance(report, DryRunReport):
                prediction = report.prediction
                sizes = {"phases": dict(prediction.phase_peaks_bytes), "reserved": prediction.peak_reserved_bytes}
                file.write(json.dumps({"place": place, **sizes}) + "\n")
                file.flush()


def merge(path: Path) -> int:
    """Takes refreshed values in; how many points moved by more than 1 part in 100,000."""
    from probes.dryrun.api import VERSION

    rows, moved = frozen(), 0
    for line in path.read_text().splitlines():
        new = json.loads(line)
        row, peak = rows[new["place"]], max(new["phases"].values())
        moved += abs(row["dry_run_allocated"] / peak - 1) > 1e-5
        row |= {"dry_run_version": VERSION, "dry_run_phases": new["phases"], "dry_run_allocated": peak}
        row["dry_run_phase"] = max(new["phases"], key=lambda phase: new["phases"][phase])
        row["dry_run_reserved"] = new["reserved"]
    write(rows)
    return moved


def main() -> None:
    """Judges, refreshes or merges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the errors there too, point by point")
    parser.add_argument("--summary", type=Path, metavar="FILE")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--refresh", type=Path, metavar="FILE")
    parser.add_argument("--loss", default="")
    parser.add_argument("--merge", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.own:
        print(own())
    elif args.ranks:
        print(ranks())
    elif args.refresh:
        refresh(args.refresh, args.loss)
    elif args.merge:
        print(f"{merge(args.merge)} points moved")
    elif args.summary:
        print(summary([json.loads(line) for line in args.summary.read_text().splitlines()]))
    else:
        rows = []
        for row in judge(args.judge, args.seed):
            rows.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        print(summary(rows))


if __name__ == "__main__":
    main()
