"""The dry run against recorded measurements of others: one JSON line per configuration, and a summary.

    python -m benchmarks.dryrun_vs_measured --out dryrun_vs_measured.jsonl [--groups fms_acceleration,...]
    python -m benchmarks.dryrun_vs_measured --out dryrun_vs_measured.jsonl --table

Rows: one GPU, memory measured with confidence A or B, a complete setup (`planner.planning.evidence.measured`), the
newest of repeats under other library versions. The step that is run is that of the libraries installed here; what
differed in the recorded stack is in the row's `differs`.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.planning.evidence.measured import MeasuredRow, load_rows, newest_versions
from planner.setup.interchange import setup_to_dict


def run(row: MeasuredRow) -> dict[str, Any]:
    """One recorded row with its dry run."""
    from probes.dryrun import DryRunReport, report_for_config

    assert row.setup is not None
    result: dict[str, Any] = {
        "id": row.id,
        "group": row.group,
        "stack": row.stack,
        "model": row.model or row.model_name,
        "gpu": row.gpu,
        "setup": setup_to_dict(row.setup),
        "measured_allocated": row.allocated_bytes,
        "measured_reserved": row.reserved_bytes,
        "confidence": row.memory_confidence,
        "versions": dict(row.versions),
        "differs": list(row.differs),
        "assumed": list(row.assumed),
    }
    config = row.config
    if config is None:
        entry = catalogue.find(row.model or "")
        if entry is None:
            return result | {"failure": "no configuration"}
        config = entry.config
    gpu = find_gpu(row.gpu or "a100-80gb")
    report = report_for_config(config, gpu.compute_capability or (8, 0), row.setup)
    if not isinstance(report, DryRunReport):
        return result | {"failure": report.message}
    found = report.prediction
    return result | {
        "predicted_allocated": found.peak_allocated_bytes,
        "predicted_reserved": found.peak_reserved_bytes,
        "peak_phase": found.peak_phase,
        "phases": dict(found.phase_peaks_bytes),
        "kernels": dict(report.kernels),
        "elapsed_s": round(report.elapsed_s, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Errors by group and method, and the worst cases."""
    lines = []
    for what in ("allocated", "reserved"):
        have = [row for row in rows if row.get(f"measured_{what}") and row.get(f"predicted_{what}")]

        def error(row: dict[str, Any], what: str = what) -> float:
            return float(row[f"predicted_{what}"]) / float(row[f"measured_{what}"]) - 1.0

        lines.append(f"{what}: {len(have)} configurations")
        groups: dict[str, list[dict[str, Any]]] = {"all": have}
        for row in have:
            groups.setdefault(f"{row['group']} / {row['setup']['method']} / loss {row['setup']['loss']}", []).append(
                row
            )
        for name, members in groups.items():
            if not members:
                continue
            errors = sorted(abs(error(row)) for row in members)
            bias = statistics.fmean(error(row) for row in members)
            p95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
            lines.append(
                f"  {name:58} n {len(members):3}  median {100 * statistics.median(errors):5.1f} %  "
                f"95th {100 * p95:5.1f} %  bias {100 * bias:+5.1f} %"
            )
        lines += [
            f"  {100 * error(row):+6.1f} %  {row['id']:24} {row['model']:36} {row['gpu']:14} {row['peak_phase']:9}"
            f" {row['differs']}"
            for row in sorted(have, key=lambda one: -abs(error(one)))[:12]
        ]
    failures = [row for row in rows if "failure" in row]
    lines.append(f"not run: {len(failures)}")
    lines += sorted({f"  {row['model']}: {row['failure'][:140]}" for row in failures})
    return "\n".join(lines)


def main() -> int:
    """Runs what is not in the file yet, or summarises the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", default="", help="comma-separated source groups; default all")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if not args.table:
        done = {row["id"] for row in rows}
        wanted = {name for name in args.groups.split(",") if name}
        candidates = [
            row
            for row in newest_versions(load_rows())
            if row.setup is not None
            and row.num_gpus == 1
            and row.status == "ok"
            and row.memory_confidence in ("A", "B")
            and (row.allocated_bytes or row.reserved_bytes)
            and not row.unmapped_memory
            and (not wanted or row.group in wanted)
        ]
        print(f"{len(candidates)} configurations", file=sys.stderr)
        with args.out.open("a") as file:
            for row in candidates:
                if row.id in done:
                    continue
                try:
                    result = run(row)
                except PlannerError as problem:
                    result = {"id": row.id, "model": row.model, "failure": str(problem)}
                file.write(json.dumps(result) + "\n")
                file.flush()
                rows.append(result)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
