"""A campaign's measurements as tables: formula, dry run and probe side by side; truncated against full depth.

python -m benchmarks.probe_table benchmarks/data/h200.jsonl [--gpu h200] [--no-dry-run] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from planner.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.interchange import setup_from_dict
from planner.models.resolve import resolve_model
from planner.outcome import Measurement, Prediction
from planner.predict import predict
from probes.records import Record
from probes.store import Store


def measured(record: Record) -> Measurement | None:
    """The record's measurement, None for a failure."""
    return record.outcome if isinstance(record.outcome, Measurement) else None


def rung_rows(records: Sequence[Record], gpu_key: str, *, dry: bool) -> list[dict[str, Any]]:
    """One row per measured point of a known model: how far each rung was off."""
    rows = []
    card = find_gpu(gpu_key)
    for record in records:
        truth = measured(record)
        if truth is None or truth.environment.device != "cuda":
            continue
        try:
            spec, setup = resolve_model(record.model_id), setup_from_dict(record.setup)
            formula: Prediction = predict(spec, card, setup)
        except PlannerError as error:
            print(f"left out: {record.model_id}: {error.message}", file=sys.stderr)
            continue
        row: dict[str, Any] = {
            "model": record.model_id,
            "setup": dict(record.setup),
            "full_depth": record.request.get("depths") == [0],
            "peak_allocated_bytes": truth.peak_allocated_bytes,
            "peak_reserved_bytes": truth.peak_reserved_bytes,
            "tokens_per_s": truth.tokens_per_s,
            "flags": list(truth.flags),
            "formula_allocated": formula.peak_allocated_bytes / truth.peak_allocated_bytes - 1.0,
            "formula_reserved": formula.peak_reserved_bytes / truth.peak_reserved_bytes - 1.0,
            "formula_speed": _ratio(formula.tokens_per_s, truth.tokens_per_s),
        }
        if dry:
            from probes.dryrun import dry_run

            found = dry_run(spec, card, setup)
            if isinstance(found, Prediction):
                row["dry_allocated"] = found.peak_allocated_bytes / truth.peak_allocated_bytes - 1.0
                row["dry_reserved"] = found.peak_reserved_bytes / truth.peak_reserved_bytes - 1.0
                row["dry_phases"] = {
                    name: found.phase_peaks_bytes.get(name, 0) / size - 1.0
                    for name, size in truth.phase_peaks_bytes.items()
                    if size
                }
        rows.append(row)
    return rows


def _ratio(one: float | None, other: float | None) -> float | None:
    """How far one speed is above the other; None where either could not be measured."""
    return one / other - 1.0 if one and other else None


def depth_pairs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Setups measured both ways: truncated over full, minus 1."""
    found: dict[tuple[str, str], dict[bool, Measurement]] = {}
    for record in records:
        truth = measured(record)
        if truth is None:
            continue
        key = (record.model_id, json.dumps(record.setup, sort_keys=True))
        found.setdefault(key, {})[len(truth.layers_measured) == 1] = truth
    rows = []
    for (model, setup), both in found.items():
        if len(both) == 2:
            short, full = both[False], both[True]
            rows.append(
                {
                    "model": model,
                    "setup": json.loads(setup),
                    "layers": full.layers_measured[0],
                    "memory": short.peak_allocated_bytes / full.peak_allocated_bytes - 1.0,
                    "reserved": short.peak_reserved_bytes / full.peak_reserved_bytes - 1.0,
                    "speed": _ratio(short.tokens_per_s, full.tokens_per_s),
                    "flags": sorted({*short.flags, *full.flags}),
                }
            )
    return rows


def layout(values: Sequence[float]) -> str:
    """Median, 95th percentile and worst of absolute values, as text."""
    if not values:
        return "no data"
    sizes = sorted(abs(value) for value in values)
    high = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    return f"median {median(sizes):.2%}, 95th percentile {high:.2%}, worst {sizes[-1]:.2%} ({len(sizes)})"


def main() -> int:
    """Prints both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--no-dry-run", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    records = Store(args.store).latest()
    rows, pairs = rung_rows(records, args.gpu, dry=not args.no_dry_run), depth_pairs(records)
    print(f"{len(records)} outcomes, {sum(measured(one) is not None for one in records)} measurements\n")
    print("| against the probe | error |\n|---|---|")
    for title, key in (
        ("formula, allocated", "formula_allocated"),
        ("formula, reserved", "formula_reserved"),
        ("formula, tokens/s", "formula_speed"),
        ("dry run, allocated", "dry_allocated"),
        ("dry run, reserved", "dry_reserved"),
    ):
        print(f"| {title} | {layout([row[key] for row in rows if row.get(key) is not None])} |")
    print("\n| truncated against full depth | difference |\n|---|---|")
    for title, key in (("allocated", "memory"), ("reserved", "reserved"), ("tokens/s", "speed")):
        print(f"| {title} | {layout([pair[key] for pair in pairs if pair[key] is not None])} |")
    print("\n| model | setup | layers | allocated | tokens/s | flags |\n|---|---|---|---|---|---|")
    for pair in pairs:
        one = pair["setup"]
        name = f"{one['method']} r{one['lora_rank']} s{one['seq_len_tokens']} b{one['micro_batch_seqs']}"
        print(
            f"| {pair['model']} | {name} | {pair['layers']} | {pair['memory']:+.2%} | {pair['speed']:+.2%} "
            f"| {', '.join(pair['flags'])} |"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"rungs": rows, "pairs": pairs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
