"""Adds runs that this project measured itself to `benchmarks/data/measured_own.jsonl`.

    python tools/import_own_runs.py RUNS.jsonl --gpu h200 --group h200 --date 2026-11-26 --versions torch=2.11.0,...

`RUNS.jsonl` holds one run of a trainer's own program a line, as `benchmarks/contact` writes them: `case`, `setup` in
the interchange form with its `model` and `gpu`, the three peaks, seconds of every optimizer step, and what other runs
of the same process had left on the device (taken off already). A group that is there already is replaced.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.shared import DATA, rows_of, rows_so_far, write_rows  # noqa: E402
from planner.core.errors import SetupError  # noqa: E402
from planner.setup.interchange import setup_from_request  # noqa: E402

OUT = DATA / "measured_own.jsonl"
WARM_UP_STEPS = 1
DIFFERS = {
    "h100-q8-int8-mb2-ck-liger": "memory: bitsandbytes keeps a copy of every column with a value above 6 (subA); of "
    "random weights those are nearly all of down_proj's, 3.6 GB more than without any"
}
"""Row -> why another run of its setup would not have the figure."""
NO_DEVICE = {
    "h200-q05-lora-mb8-ck-liger": "its device memory is left out: exactly 256 MiB more lay beyond the allocator than "
    "in any other run, and it was the fourth model of its process; the same setup alone in its process (H100) has none"
}
"""Row whose device memory is not its own -> how that is known."""
CORRECTED: dict[str, tuple[dict[str, Any], str]] = {
    "q8-trl-default-bf16-2048": (
        {"lora_dropout": 0.05},
        "lora_dropout 0.05, TRL's default where its file is silent: the record says 0, with which the dry run is one "
        "[8, 2048, 4096] in bf16 too low; with 0.05 it is exact in all three figures",
    )
}
"""Case -> what its recorded setup gets wrong, and how that is known."""


def measured_row(run: dict[str, Any], gpu: str, group: str, date: str, versions: dict[str, str]) -> dict[str, Any]:
    """One row in the form of the recorded runs. tokens/s are of the median step after the first with what the trainer
    takes between two, as predictions count them; of pairs both sequences'."""
    fields = dict(run["setup"])
    model, gpu = fields.pop("model"), fields.pop("gpu", gpu)
    changes, why = CORRECTED.get(run["case"], ({}, ""))
    setup = {"stack": "trl", **fields, **changes}
    step_s, between_s = median(run["step_s"][WARM_UP_STEPS:]), median(run["between_s"])
    device = run.get("process_bytes")  # its own, where it shared the card
    if device is None and not run.get("shared_device"):
        device = run["device_bytes"]
    row: dict[str, Any] = {
        "id": f"{group}-{run['case']}",
        "group": group,
        "stack": "hf-trainer",
        "source": f"measured for this project: TRL's own trainer, random weights, {len(run['step_s'])} steps",
        "status": "ok",
        "method": setup["method"],
        "date": date,
        "model": model,
        "model_name": model,
        "gpu": gpu,
        "config_id": run["case"],
        "allocated_bytes": run["peak_allocated_bytes"],
        "reserved_bytes": run["peak_reserved_bytes"],
        "device_bytes": device,
        "memory_confidence": "A",
        "tokens_per_s": round(run["tokens_per_step"] / (step_s + between_s), 1),
        "step_time_s": step_s,
        "between_steps_s": between_s,
        "speed_confidence": "A",
        "versions": versions,
    }
    left = "what earlier runs of the same process had left was taken off all three peaks"
    row["assumed"] = [*([why] if why else ()), *([left] if run.get("leftover_subtracted_bytes") else ())]
    if row["id"] in NO_DEVICE:
        row |= {"device_bytes": None, "assumed": [*row["assumed"], NO_DEVICE[row["id"]]]}
    if row["id"] in DIFFERS:
        row["differs"] = [DIFFERS[row["id"]]]
    if run.get("layers"):
        return row | {"unmapped": f"{run['layers']} layers of it"}
    try:
        tokens = setup_from_request(setup).tokens_per_step
        return row | {"setup": setup, "tokens_per_s": round(tokens / (step_s + between_s), 1)}
    except SetupError as error:
        return row | {"unmapped": error.message}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--date", required=True)
    parser.add_argument("--versions", required=True, help="name=version,...")
    parser.add_argument("--shared-device", action="store_true", help="device memory holds other processes' too")
    args = parser.parse_args()
    versions = dict(pair.split("=", 1) for pair in args.versions.split(","))
    runs, rows = rows_of(args.runs), [row for row in rows_so_far(OUT) if row["group"] != args.group]
    shared = {"shared_device": args.shared_device}
    rows += [measured_row(run | shared, args.gpu, args.group, args.date, versions) for run in runs]
    rows.sort(key=lambda row: row["group"])
    write_rows(OUT, rows)
    print(f"{len(runs)} rows of {args.group} in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
