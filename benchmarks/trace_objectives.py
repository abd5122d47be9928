"""Holds the formula and the dry run of other objectives against the trainers themselves.

    python -m benchmarks.trace_objectives [--objective dpo] [--model 1b] [--method lora] [--gpu rtx-4090] [--no-trace]

For every objective x {1B, 8B} x {24, 80 GB} x {full, LoRA, QLoRA}: the setup that `plan MODEL --gpu GPU --objective
NAME --method METHOD` chooses, its launch file, and that file's own trainer run on a phantom GPU (docs/trace.md), two
optimizer steps at full depth. A cell without a plan says so. Results: benchmarks/data/trace_objectives.json, where the
cells that were not run again stay.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import shared
from benchmarks.shared import percentile
from benchmarks.trace_vs_dryrun import ROWS, config_of, prepared, traced
from planner.hardware.gpus import find_gpu
from planner.models.families import spec_from_config
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import Rollout
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import METHODS
from planner.setup.interchange import setup_to_dict
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport

OUT = shared.DATA / "trace_objectives.json"
MODELS = {"1b": "meta-llama/Llama-3.2-1B", "8b": "meta-llama/Llama-3.1-8B"}
GPUS = ("rtx-4090", "a100-80gb")
SEQ_LEN = 1024
GLOBAL_BATCH = 16


def pair(num: int) -> dict[str, Any]:
    return {"prompt": "a", "chosen": "b" * num, "rejected": "c" * num}


def prompt(num: int) -> dict[str, Any]:
    """Room for TRL's longest completion is left; prompts are not cut."""
    return {"prompt": "a" * (num // 2 - Rollout.usual(num // 2).completion_tokens), "answer": "b"}


DATA: dict[str, Callable[[int], dict[str, Any]]] = {
    **ROWS,
    "dpo": pair,
    "kto": lambda num: {"prompt": "a", "completion": "b" * num, "label": True},
    # its trainer leaves out what is too long instead of cutting it; a token ends each
    "reward": lambda num: {"chosen": "b" * (num // 2 - 1), "rejected": "c" * (num // 2 - 1)},
    "orpo": pair,
    "grpo": prompt,
    "classification": lambda num: {"text": "a" * num, "label": "b"},
    "embedding": lambda num: {"anchor": "a" * num, "positive": "b" * num, "negative": "c" * num},
}
"""Objective -> a row of its data, cut at so many letters."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding cached": ("embedding", {"cached_seqs": (4,), "hard_negatives": (1,)})
}
"""Settings of an objective that a grid of their own holds."""


def home(objective: str) -> str:
    """The tool whose own trainer is the truth."""
    return OBJECTIVES[objective].stack("trl")


def planned(model: str, gpu: str, objective: str, method: str, num_layers: int | None = None) -> TrainSetup | None:
    """The setup that a plan for TRL chooses by the formula, None where nothing fits."""
    objective, more = VARIANTS.get(objective, (objective, {}))
    fixed: dict[str, tuple[Any, ...]] = {"objective": (objective,), "method": (method,), **more}
    if find_spec("liger_kernel") is None:
        fixed["kernels"] = ("eager",)  # the trainer would refuse the file
    spec = spec_from_config(config_of(num_layers, model), model_id="./model", source="benchmark")
    request = PlanRequest(fixed=fixed, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, targets=(home(objective),)).workload(
        spec, find_gpu(gpu)
    )
    plan = plan_workload(request)
    return None if isinstance(plan, NoPlan) else plan.chosen.setup


def compare(
    model: str, gpu: str, setup: TrainSetup, num_layers: int | None = None, *, trace: bool = True
) -> dict[str, Any]:
    """The allocated peak of one setup by its trainer, by the dry run and by the formula."""
    config, card = config_of(num_layers, model), find_gpu(gpu)
    assert card.compute_capability is not None
    formula = predict(spec_from_config(config, model_id="./model", source="benchmark"), card, setup)
    report = report_for_config(config, card.compute_capability, setup)
    assert isinstance(report, DryRunReport), report
    dry = report.prediction.peak_allocated_bytes
    row: dict[str, Any] = {
        "setup": setup_to_dict(setup),
        "formula_bytes": formula.peak_allocated_bytes,
        "dry_run_bytes": dry,
        "formula_over_dry_run": formula.peak_allocated_bytes / dry - 1,
    }
    if not trace:
        return row
    with (
        tempfile.TemporaryDirectory() as name,
        prepared(home(setup.objective), setup, config, Path(name), DATA) as words,
    ):
        began = time.monotonic()
        measured = traced(words, Path(name), expandable_segments=setup.expandable_segments)
    return {
        **row,
        "traced_bytes": measured.peak_allocated_bytes,
        "traced_phases": dict(measured.phase_peaks_bytes),
        "formula_over_trace": formula.peak_allocated_bytes / measured.peak_allocated_bytes - 1,
        "dry_run_over_trace": dry / measured.peak_allocated_bytes - 1,
        "trace_s": round(time.monotonic() - began, 1),
    }


PAIRS = {
    "formula_over_trace": "formula against the trainer itself",
    "dry_run_over_trace": "dry run against the trainer itself",
    "formula_over_dry_run": "formula against the dry run",
}


def summary(rows: dict[str, Any]) -> list[str]:
    """One line for each pair that was compared."""
    lines = []
    for name, words in PAIRS.items():
        errors = [abs(row[name]) for row in rows.values() if name in row]
        if errors:
            lines.append(
                f"{words}: {len(errors)} cells, median {100 * statistics.median(errors):.2f} %, "
                f"95th percentile {100 * percentile(errors, 0.95):.2f} %, worst {100 * max(errors):.2f} %"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(name for name, row in OBJECTIVES.items() if not row.supervised), *VARIANTS]
    parser.add_argument("--objective", action="append", choices=names)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--gpu", action="append", choices=GPUS)
    parser.add_argument("--no-trace", action="store_true", help="formula and dry run alone, in seconds")
    parser.add_argument("--layers", type=int, help="another depth; the rows are then printed and not kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    grid = product(
        arguments.objective or names, arguments.model or MODELS, arguments.gpu or GPUS, arguments.method or METHODS
    )
    for objective, model, gpu, method in grid:
        key = f"{objective}: {model}, {gpu}, {method}"
        setup = planned(MODELS[model], gpu, objective, method, arguments.layers)
        if setup is None:
            rows[key] = {"not_run": "no setup fits"}
            print(f"{key}: no setup fits", flush=True)
            continue
        row = rows[key] = compare(MODELS[model], gpu, setup, arguments.layers, trace=not arguments.no_trace)
        differences = "  ".join(f"{name} {100 * row[name]:+6.2f} %" for name in PAIRS if name in row)
        print(f"{key:40s} dry run {row['dry_run_bytes'] / 2**20:9.1f} MiB  {differences}", flush=True)
    if arguments.layers is not None:
        print(json.dumps(rows), file=sys.stderr)
        return
    stored = json.loads(OUT.read_text())["rows"] if OUT.exists() else {}
    rows = {key: {**(stored.get(key, {}) if arguments.no_trace else {}), **row} for key, row in rows.items()}
    stored |= rows
    OUT.write_text(json.dumps({"seq_len": SEQ_LEN, "rows": dict(sorted(stored.items()))}, indent=1) + "\n")
    for line in summary(stored):
        print(line)


if __name__ == "__main__":
    main()
