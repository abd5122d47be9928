"""Writes the measured runs of two memory estimators' own repositories into `planner/data/measured_published.jsonl`.

    python tools/import_published.py --fitcheck DIR --canifinetune DIR

`--fitcheck`: the unpacked source distribution of fitcheck-llm 0.3.1 (data/measurements). `--canifinetune`: a checkout
of DaoyuanLi2816/can-i-finetune-this (benchmarks/results). Both run a loop of their own that keeps `outputs`, without
`expandable_segments`, on one card, and say everything that decides memory.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.core.units import GIB, MIB  # noqa: E402
from planner.setup.interchange import asked_setup  # noqa: E402

OUT = ROOT / "planner" / "data" / "measured_published.jsonl"
CANI = "DaoyuanLi2816/can-i-finetune-this@053ce9e"
SAME_SHAPES = {
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": "Qwen/Qwen2.5-1.5B",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
}
PINNED = "SDPA pinned to its memory-efficient kernel for fp16, keys repeated before it: no setup says so"
FP16 = "fp16 weights without autocast: a setup says bf16-pure, which has the same bytes; its speed is another's"


def catalogue_name(model: str) -> str:
    """The catalogue's id of a model with these shapes."""
    return SAME_SHAPES.get(model, model.removesuffix("-Instruct"))


def canifinetune_rows(folder: Path) -> list[dict[str, Any]]:
    """RTX 4080, transformers 5.8, peft 0.19, torch 2.6: `outputs` live until the next forward; no autocast."""
    found = []
    for file in sorted((folder / "benchmarks" / "results").glob("Qwen__*.json")):
        run = json.loads(file.read_text())
        config, measured = run["config"], run["measured"]
        quantized = config["method"] == "qlora"
        found.append(
            {
                "id": f"canifinetune-{len(found):04d}",
                "group": "canifinetune",
                "source": f"{CANI}:{file.relative_to(folder)}",
                "date": run["timestamp"][:10],
                "model": catalogue_name(config["model_id"]),
                "model_name": config["model_id"],
                "gpu": "rtx-4080",
                "setup": {
                    "stack": "plain-loop",
                    "method": config["method"],
                    "precision": "bf16-pure",
                    "quantization": "nf4-double" if quantized else "none",
                    "kbit_fp32_cast": quantized,
                    "lora_rank": config["lora_rank"],
                    "lora_targets": "attention",
                    "optimizer": "paged-adamw-8bit",
                    "attention": config["attention_implementation"],
                    "checkpointing": config["gradient_checkpointing"],
                    "loss": "full",
                    "micro_batch_seqs": config["micro_batch_size"],
                    "seq_len_tokens": config["seq_len"],
                },
                "allocated_bytes": round(measured["peak_allocated_gb"] * GIB),
                "reserved_bytes": round(measured["peak_reserved_gb"] * GIB),
                "tokens_per_s": run["tokens_per_second"],
                "speed_confidence": "B",
                "differs": ["the loop reads the loss each step; three steps timed, the first among them"],
                "versions": {"torch": "2.6.0", "transformers": "5.8.1", "peft": "0.19.1", "bitsandbytes": "0.49.2"},
            }
        )
    return found


def fitcheck_rows(folder: Path) -> list[dict[str, Any]]:
    """Tesla T4, three sessions (torch 2.10 and 2.14, transformers 5.0 and 5.17): the peak of the second step."""
    found = []
    for file in sorted((folder / "data" / "measurements").glob("*.json")):
        text = json.loads(file.read_text())
        for run in text.get("runs", ()):
            asked, measured = run["run"], run["measured"]
            model = catalogue_name(run["model_id"])
            if model.startswith("deepseek-ai/deepseek-coder"):
                continue  # not in the catalogue
            quantized = asked["quantization"] != "none"
            pinned = asked["attn_impl"] == "sdpa"
            found.append(
                {
                    "id": f"fitcheck-{len(found):04d}",
                    "group": "fitcheck",
                    "source": f"fitcheck-llm/fitcheck-llm@0.3.1:data/measurements/{file.name}",
                    "date": file.stem[-10:] if "-20" in file.stem[-11:] else "2026-09-21",
                    "model": model,
                    "model_name": run["model_id"],
                    "gpu": "t4",
                    "setup": {
                        "stack": "plain-loop",
                        "method": "qlora" if quantized else "lora",
                        "precision": "bf16-pure",
                        "quantization": "none" if not quantized else "nf4-double" if asked["double_quant"] else "nf4",
                        "kbit_fp32_cast": quantized,
                        "lora_rank": asked["lora_rank"],
                        "lora_targets": "attention",
                        "optimizer": asked["optimizer"],
                        "attention": asked["attn_impl"],
                        "checkpointing": asked["grad_checkpoint"],
                        "loss": "full",
                        "micro_batch_seqs": asked["batch_size"],
                        "seq_len_tokens": asked["seq_len"],
                    },
                    "allocated_bytes": round(measured["peak_allocated_mib"] * MIB),
                    "reserved_bytes": round(measured["peak_reserved_mib"] * MIB),
                    "device_bytes": round(measured["process_mib"] * MIB),
                    "step_time_s": measured.get("step_seconds"),
                    "differs": [FP16],
                    "unmapped_memory": PINNED if pinned else None,
                }
            )
    return found


def main() -> None:
    """Reads both and writes the file, one compact row per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fitcheck", type=Path, required=True)
    parser.add_argument("--canifinetune", type=Path, required=True)
    asked = parser.parse_args()
    lines = []
    for row in (*canifinetune_rows(asked.canifinetune), *fitcheck_rows(asked.fitcheck)):
        setup = asked_setup(row["setup"])  # refuses what cannot be
        whole = {
            **row,
            "stack": "plain-loop",
            "status": "ok",
            "method": setup.method,
            "config_id": "|".join(f"{value}" for value in (row["model"], *row["setup"].values())),
            "memory_confidence": "A",
        }
        lines.append(json.dumps({name: value for name, value in whole.items() if value is not None}))
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} rows in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
