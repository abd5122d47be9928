"""Regenerates the recorded measurements of the planner from a folder of collected facts.

    python tools/import_measurements.py --shared ../shared

Reads `data/measurements.jsonl` and `data/models/` there; writes `planner/data/measured_single_gpu.jsonl` and
`planner/data/measured_multi_gpu.jsonl`: one compact row per usable run (successful with a memory figure or a
throughput of confidence A or B, or out of memory), with a setup where one can express the run.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.core.errors import PlannerError  # noqa: E402
from planner.core.units import GIB  # noqa: E402
from planner.setup.interchange import setup_from_dict, setup_to_dict  # noqa: E402
from tools.measurement_sources import GPUS, MAPPERS, MODELS, Mapped, Row, multi_gpu, other  # noqa: E402

MEMORY_METRICS = {"max_allocated": "allocated_bytes", "max_active": "allocated_bytes", "max_reserved": "reserved_bytes"}
OUT = ROOT / "planner" / "data"


def usable(row: Row) -> bool:
    """Whether a row carries a figure that a prediction can be held against."""
    if row["status"] in ("oom", "oom_inferred"):
        return "micro_batch_size" in row and "seq_len" in row
    if row["status"] != "ok":
        return False
    return has_memory(row) or has_speed(row)


def has_memory(row: Row) -> bool:
    """A peak of PyTorch's own count, confidence A or B."""
    return row.get("confidence_mem") in ("A", "B") and row.get("mem_metric_class") in MEMORY_METRICS


def has_speed(row: Row) -> bool:
    """Tokens/s per GPU, confidence A or B."""
    return row.get("confidence_tput") in ("A", "B") and bool(row.get("tokens_per_s_per_gpu"))


def convert(row: Row, catalogue: frozenset[str]) -> dict[str, Any]:
    """One recorded row in the planner's own form."""
    single = row.get("n_gpus", 1) == 1
    mapped = MAPPERS.get(row["source_group"], other)(row) if single else multi_gpu(row)
    model = MODELS.get(row.get("model_id", ""), row.get("model_id", ""))
    known = model in catalogue
    if not known and mapped.config is None and not mapped.unmapped:
        mapped.unmapped = "model not in the catalogue"
    out: dict[str, Any] = {
        "id": row["id"],
        "group": row["source_group"],
        "stack": mapped.stack,
        "source": row["source"],
        "date": str(row.get("source_date", "")),
        "status": "ok" if row["status"] == "ok" else "oom",
        "model": model if known else None,
        "model_name": row.get("model_id"),
        "num_params": row.get("n_params"),
        "gpu": GPUS.get(row.get("gpu_key", "")),
        "gpu_name": row.get("gpu_key"),
        "num_gpus": row.get("n_gpus", 1),
        "parallelism": row["parallelism"],
        "method": row["method_class"],
        "variant": row.get("variant"),
        "len_class": row.get("len_class"),
        "avg_seq_len_tokens": row.get("avg_seq_len"),
        "config_id": row["config_id"],
        "versions": row["versions"] if isinstance(row.get("versions"), dict) else {},
    }
    if out["gpu"] is None and "A100-80GB (the card is not stated)" in mapped.assumed:
        out["gpu"] = "a100-80gb"
    if not single:
        out |= {"micro_batch_seqs": row.get("micro_batch_size"), "seq_len_tokens": row.get("seq_len")}
    out |= figures(row)
    out |= placement(mapped)
    return {key: value for key, value in out.items() if value not in (None, "", [], {})}


def figures(row: Row) -> dict[str, Any]:
    """What was measured, in base units."""
    out: dict[str, Any] = {}
    if row["status"] != "ok":
        out["inferred"] = row["status"] == "oom_inferred" or None
        return out
    elsewhere = row.get("other_mem_GiB") or {}
    if has_memory(row):
        out[MEMORY_METRICS[row["mem_metric_class"]]] = round(row["peak_mem_GiB"] * GIB)
        out["memory_confidence"] = row["confidence_mem"]
        for name, key in (
            ("nvidia_smi_used_peak", "device_bytes"),
            ("reserved_99th_pct_over_steps", "reserved_p99_bytes"),
            ("max_reserved_before_training(model loaded + LoRA)", "loaded_reserved_bytes"),
        ):
            if isinstance(elsewhere.get(name), (int, float)):
                out[key] = round(elsewhere[name] * GIB)
    if has_speed(row):
        out["tokens_per_s"] = row["tokens_per_s_per_gpu"]
        out["speed_confidence"] = row["confidence_tput"]
        out["step_time_s"] = row.get("step_time_s")
        out["tokens_counted"] = row.get("tokens_counted")
    return out


def placement(mapped: Mapped) -> dict[str, Any]:
    """The setup, validated, or why there is none."""
    out: dict[str, Any] = {
        "assumed": mapped.assumed,
        "differs": mapped.differs,
        "unmapped": mapped.unmapped,
        "unmapped_memory": mapped.unmapped_memory,
        "config": mapped.config,
    }
    if mapped.setup is None or mapped.unmapped:
        return out
    try:
        setup = setup_from_dict(mapped.setup)
    except PlannerError as problem:
        out["unmapped"] = problem.message
        return out
    out["setup"] = setup_to_dict(setup)
    out["speed_seq_len_tokens"] = mapped.speed_seq_len_tokens
    return out


def main() -> int:
    """Write both files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder that holds data/measurements.jsonl")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    data = arguments.shared / "data"
    catalogue = set()
    for path in sorted((data / "models").glob("*.json")):
        config = json.loads(path.read_text())
        catalogue.add(config["_id"])
    rows = [json.loads(line) for line in (data / "measurements.jsonl").read_text().splitlines()]
    converted = [convert(row, frozenset(catalogue)) for row in rows if usable(row)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in (
        ("measured_single_gpu.jsonl", [row for row in converted if row["num_gpus"] == 1]),
        ("measured_multi_gpu.jsonl", [row for row in converted if row["num_gpus"] != 1]),
    ):
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in chosen)
        (arguments.out / name).write_text(text)
        mapped = sum("setup" in row for row in chosen)
        print(f"{name}: {len(chosen)} rows, {mapped} with a setup, {len(text)} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
