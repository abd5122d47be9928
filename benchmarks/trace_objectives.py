"""Holds the formula and the dry run of other objectives against the trainers themselves.

    python -m benchmarks.trace_objectives [--objective dpo] [--model 1b] [--method lora] [--gpu rtx-4090] [--json]

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
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.trace_vs_dryrun import ROWS, config_of, prepared, traced
from planner.choices.objectives import DEFAULT, OBJECTIVES
from planner.cli.wish import workload
from planner.gpus import find_gpu
from planner.interchange import setup_to_dict
from planner.models.adapters import spec_from_config
from planner.plan import NoPlan
from planner.planning import plan_workload
from planner.predict import predict
from planner.setup import METHODS, TrainSetup
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport

OUT = Path(__file__).parent / "data" / "trace_objectives.json"
MODELS = {"1b": "meta-llama/Llama-3.2-1B", "8b": "meta-llama/Llama-3.1-8B"}
GPUS = ("rtx-4090", "a100-80gb")
SEQ_LEN = 1024
GLOBAL_BATCH = 16


def pair(num: int) -> dict[str, Any]:
    """A preference whose halves are cut at the length; of the prompt there is one letter."""
    return {"prompt": "a", "chosen": "b" * num, "rejected": "c" * num}


DATA = {**ROWS, "dpo": pair}


def planned(model: str, gpu: str, objective: str, method: str, num_layers: int | None = None) -> TrainSetup | None:
    """The setup that a plan for TRL chooses by the formula, None where nothing fits."""
    fixed = {"objective": (objective,), "method": (method,)}
    spec = spec_from_config(config_of(num_layers, model), model_id="./model", source="benchmark")
    wish = workload(spec, find_gpu(gpu), fixed=fixed, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, targets=("trl",))
    found = plan_workload(wish)
    return None if isinstance(found, NoPlan) else found.chosen.setup


def compare(model: str, gpu: str, setup: TrainSetup, num_layers: int | None = None) -> dict[str, Any]:
    """The allocated peak of one setup by its trainer, by the dry run and by the formula."""
    config, card = config_of(num_layers, model), find_gpu(gpu)
    with tempfile.TemporaryDirectory() as name, prepared("trl", setup, config, Path(name), DATA) as words:
        began = time.monotonic()
        found = traced(words, Path(name), expandable_segments=setup.expandable_segments)
        trace_s = time.monotonic() - began
    assert card.compute_capability is not None
    formula = predict(spec_from_config(config, model_id="./model", source="benchmark"), card, setup)
    report = report_for_config(config, card.compute_capability, setup)
    row = {
        "setup": setup_to_dict(setup),
        "traced_bytes": found.peak_allocated_bytes,
        "formula_bytes": formula.peak_allocated_bytes,
        "formula_error_fraction": formula.peak_allocated_bytes / found.peak_allocated_bytes - 1,
        "traced_phases": dict(found.phase_peaks_bytes),
        "trace_s": round(trace_s, 1),
    }
    if not isinstance(report, DryRunReport):
        return {**row, "dry_run": report.message}
    dry = report.prediction.peak_allocated_bytes
    return {**row, "dry_run_bytes": dry, "dry_run_error_fraction": dry / found.peak_allocated_bytes - 1}


def summary(rows: dict[str, Any]) -> list[str]:
    """One line for the formula and one for the dry run."""
    lines = []
    for name in ("formula", "dry_run"):
        errors = sorted(abs(one[f"{name}_error_fraction"]) for one in rows.values() if f"{name}_error_fraction" in one)
        if errors:
            at_95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
            lines.append(
                f"{name}: {len(errors)} cells, median {100 * statistics.median(errors):.2f} %, "
                f"95th percentile {100 * at_95:.2f} %, worst {100 * errors[-1]:.2f} %"
            )
    return lines


def main() -> None:
    """Runs the grid, or the part of it that was named, and prints each difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in OBJECTIVES if name != DEFAULT]
    parser.add_argument("--objective", action="append", choices=names)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--gpu", action="append", choices=GPUS)
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
        row = rows[key] = compare(MODELS[model], gpu, setup, arguments.layers)
        dry = f"{100 * row['dry_run_error_fraction']:+6.2f} %" if "dry_run_bytes" in row else row["dry_run"]
        print(
            f"{key:40s} traced {row['traced_bytes'] / 2**20:9.1f} MiB  formula "
            f"{100 * row['formula_error_fraction']:+6.2f} %  dry run {dry}  {row['trace_s']} s",
            flush=True,
        )
    if arguments.layers is not None:
        print(json.dumps(rows), file=sys.stderr)
        return
    kept = json.loads(OUT.read_text())["rows"] if OUT.exists() else {}
    kept = {key: kept[key] for key in kept if key not in rows} | rows
    OUT.write_text(json.dumps({"seq_len": SEQ_LEN, "rows": dict(sorted(kept.items()))}, indent=1) + "\n")
    for line in summary(kept):
        print(line)


if __name__ == "__main__":
    main()
