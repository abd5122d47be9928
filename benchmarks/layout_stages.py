"""Formula against dry run where a model is cut or lies in the host's memory: offloaded FSDP2, tensor parallelism,
pipeline stages, device maps, nn.DataParallel. One JSON line per point.

    python -m benchmarks.layout_stages --out stages.jsonl [--only tensor,offload] [--each 20] [--seed 0]
    python -m benchmarks.layout_stages --out stages.jsonl --markdown      # tables of today's formula

Points already in the file are skipped. Setups are drawn at random (seeded), models in rotation; the same list for every
run with one seed. Measured and compared as in `benchmarks/layout_formula_vs_dryrun.py`.
"""

import argparse
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.layout_formula_vs_dryrun import (
    METHODS,
    MODELS,
    OTHER,
    SEQ_LENS,
    append_point,
    describe,
    formula,
    key_of,
    rows_of,
)
from planner.core.errors import SetupError
from planner.memory.engines import why_not
from planner.models import catalogue
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict

FULL: dict[str, Any] = {"method": "full", "lora_rank": 0}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "offload": (
        {"parallel": "fsdp2", "offload": "parameters"},
        {"parallel": "fsdp2", "offload": "parameters", "reshard_after_forward": False},
        {"parallel": "fsdp2", "offload": "parameters", "shard_degree": 8},
    ),
    "tensor": tuple(FULL | {"parallel": "none", "num_gpus": n, "tensor_degree": n} for n in (2, 4, 8)),
    "tensor in fsdp2": (
        FULL | {"parallel": "fsdp2", "num_gpus": 8, "tensor_degree": 2},
        FULL | {"parallel": "fsdp2", "num_gpus": 16, "tensor_degree": 8},
        FULL | {"parallel": "fsdp2", "num_gpus": 16, "tensor_degree": 4, "shard_degree": 2},
    ),
    "pipeline": tuple(
        FULL
        | {"parallel": "none", "num_gpus": n, "pipeline_degree": n, "pipeline_schedule": schedule, "loss": "full"}
        | {"precision": "bf16-pure"}
        for n in (2, 4, 8)
        for schedule in ("1f1b", "gpipe")
    ),
    "pipeline in fsdp2": tuple(
        FULL
        | {"parallel": "fsdp2", "num_gpus": 2 * n, "pipeline_degree": n, "pipeline_schedule": schedule, "loss": "full"}
        for n in (2, 4)
        for schedule in ("1f1b", "gpipe")
    ),
    "device map": ({"parallel": "device-map", "num_gpus": 2}, {"parallel": "device-map", "num_gpus": 4}),
    "dp": ({"parallel": "dp", "num_gpus": 2}, {"parallel": "dp", "num_gpus": 4}),
}
WORLD_SIZES = (2, 8, 16)
MICRO_BATCHES = {"pipeline": (4, 8), "pipeline in fsdp2": (4, 8)}


def points(kind: str, seed: int, models: tuple[str, ...]) -> Iterator[tuple[str, TrainSetup]]:
    """Endless (model id, setup) of one kind, its variants and the models in rotation."""
    draw = random.Random(f"{seed} {kind}")
    while True:
        for model in models:
            spec = catalogue.load(model)
            assert spec is not None
            fields: dict[str, Any] = {name: draw.choice(values) for name, values in OTHER.items()}
            fields |= {"num_gpus": draw.choice(WORLD_SIZES), "seq_len_tokens": draw.choice(SEQ_LENS)}
            fields |= {"micro_batch_seqs": draw.choice((1, 2))} | draw.choice(METHODS) | draw.choice(KINDS[kind])
            if fields["method"] == "full":
                fields |= {"lora_targets": "all-linear", "quantization": "none"}
            if kind in MICRO_BATCHES:
                fields["accumulation_steps"] = draw.choice(MICRO_BATCHES[kind])
            try:
                setup = TrainSetup(**fields)
            except SetupError:
                continue
            if not why_not(spec, setup):
                yield model, setup


def kind_of(setup: TrainSetup) -> str:
    """The kind of a setup, as in KINDS."""
    inside = " in fsdp2" if setup.parallel == "fsdp2" else ""
    if setup.pipeline_degree > 1:
        return f"pipeline{inside}"
    if setup.tensor_degree > 1:
        return f"tensor{inside}"
    return {"device-map": "device map", "dp": "dp"}.get(setup.parallel, "offload")


def markdown(rows: list[dict[str, Any]], worst: int) -> str:
    """Errors of today's formula by kind, and the worst points of each."""
    errors: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        if "allocated" not in row:
            continue
        setup = setup_from_dict(row["setup"])
        found = formula(row["model"], setup)
        error = found.peak_allocated_bytes / row["allocated"] - 1.0
        errors.setdefault(kind_of(setup), []).append((error, describe(row, setup, found, _layout_of(setup))))
    lines = ["| kind | points | median | 95th | worst | bias |", "|---|--:|--:|--:|--:|--:|"]
    for kind, pairs in errors.items():
        sizes = sorted(abs(error) for error, _ in pairs)
        cells = [statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], sizes[-1]]
        bias = statistics.fmean(error for error, _ in pairs)
        text = " | ".join(f"{100 * value:.2f} %" for value in cells)
        lines.append(f"| {kind} | {len(sizes)} | {text} | {100 * bias:+.2f} % |")
    lines += ["", "| error | dry run, formula | point |", "|--:|---|---|"]
    for pairs in errors.values():
        lines += [text for _, text in sorted(pairs, key=lambda one: -abs(one[0]))[:worst]]
    return "\n".join(lines) + "\n"


def _layout_of(setup: TrainSetup) -> str:
    layout = ", ".join(f"{name} {value}" for name, value in setup.layout.items())
    return f"{setup.parallel} x {setup.num_gpus}, {layout}"


def main() -> int:
    """Runs or summarises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, separated by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--each", type=int, default=20, help="points of each kind in the file when done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=3, help="points to list of each kind")
    parser.add_argument("--markdown", action="store_true", help="print tables of today's formula and stop")
    args = parser.parse_args()
    rows = rows_of(args.out)
    if args.markdown:
        print(markdown(rows, args.worst))
        return 0
    done = {key_of(row["model"], row["setup"]) for row in rows}
    with args.out.open("a") as file:
        for kind in args.only.split(","):
            seen: set[str] = set()
            for model, setup in points(kind, args.seed, tuple(args.models.split(","))):
                key = key_of(model, setup_to_dict(setup))
                seen.add(key)
                if len(seen) > args.each:
                    break
                if key in done:
                    continue
                done.add(key)
                append_point(file, model, setup, kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
