"""Published memory of other objectives than supervised text, and the formula's error where a row says enough.

    python -m benchmarks.published_objectives

Each row of benchmarks/data/published_objectives.jsonl has its source (repository:path@commit, or an address), what it
says, and either `open` (why nothing predicts it) or a `setup` with what was assumed; `enough`: the source says all that
memory hangs on (of pictures also which modules stay in 16 bits, and samples short enough that their length decides
nothing). Half of the rows are held out of
any fit (`held_out`, by the source's checksum); no constant has been fitted to any of them.
"""

import statistics
from collections import Counter
from typing import Any

from benchmarks.image_models import configs
from benchmarks.shared import DATA, rows_of
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.models.catalogue import load
from planner.models.encoders import with_vision
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.setup.interchange import setup_from_dict

UNITS = {"allocated_gb": 1e9, "reserved_gib": 2**30, "device_gib": 2**30}


def model_of(row: dict[str, Any]) -> ModelSpec | None:
    """The row's model: of the catalogue, or a VLM, in 4 bits but for the modules that its tool keeps."""
    if "picture_model" not in row:
        return load(row["model"]) if "model" in row else None
    name = row["picture_model"]
    listed = next(filter(None, (load(f"{owner}/{name}") for owner in ("google", "Qwen"))), None)
    config = dict(configs()[name] if listed is None else listed.config)
    if kept_modules := row.get("kept"):
        config["quantization_config"] = {"load_in_4bit": True, "llm_int8_skip_modules": kept_modules}
        config["quantization_config"] |= {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True}
    return with_vision(spec_from_config(config, model_id=row["model"], source=row["source"]))


def error(row: dict[str, Any]) -> float | None:
    """The formula's relative error, None where the row does not say enough or the model is not in the catalogue."""
    model = model_of(row) if "setup" in row else None
    if model is None:
        return None
    breakdown = predict_memory(model, find_gpu(row["gpu"]), setup_from_dict(row["setup"]))
    name, unit = next((name, unit) for name, unit in UNITS.items() if name in row)
    size: int = getattr(breakdown, f"peak_{name.partition('_')[0]}_bytes")
    return size / (row[name] * unit) - 1


def main() -> None:
    rows = rows_of(DATA / "published_objectives.jsonl")
    errors = {row["source"]: deviation for row in rows if (deviation := error(row)) is not None}
    print(f"{len(rows)} rows, {sum(row['held_out'] for row in rows)} held out; {len(errors)} predicted")
    for why, number in Counter(row["open"] for row in rows if "open" in row).most_common():
        print(f"{number:3d} open: {why}")
    for row in rows:
        if row["source"] in errors:
            note = "held out" if row["held_out"] else ""
            print(f"{100 * errors[row['source']]:+6.1f} % {row['objective']:14s} {row['model']} {note}")
            print(f"         {row['source']}: {row['assumed']}")
    enough = [row["source"] for row in rows if row.get("enough") and row["source"] in errors]
    for what, some in (("all", list(errors)), ("which say enough", enough)):
        if some:
            print(
                f"median {100 * statistics.median(abs(errors[source]) for source in some):.1f} % of {len(some)} {what}"
            )


if __name__ == "__main__":
    main()
