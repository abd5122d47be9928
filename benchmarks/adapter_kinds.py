"""The formula's peak against the dry run's (peft's own code on meta tensors), for every kind of adapter.

    python benchmarks/adapter_kinds.py [--whole] [KIND ...]      # --whole: every layer of the models, not six

Prints one line per point, and median and worst per kind.
"""

import statistics
import sys
from typing import Any

from planner.choices.adapters import ADAPTERS
from planner.hardware.gpus import find_gpu
from planner.interchange import setup_from_dict
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.adapters import spec_from_config
from planner.outcome import Prediction
from probes.dryrun import dry_run

MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B")
LAYERS = 6
BASES: tuple[dict[str, Any], ...] = (
    {},
    {"method": "qlora", "quantization": "nf4-double"},
    {"method": "qlora", "quantization": "nf4", "kbit_fp32_cast": True, "stack": "hf"},
)
SHAPES: tuple[dict[str, Any], ...] = (
    {"checkpointing": 1, "micro_batch_seqs": 1, "seq_len_tokens": 1024, "loss": "chunked"},
    {"checkpointing": 1, "micro_batch_seqs": 4, "seq_len_tokens": 1024, "loss": "chunked"},
    {"checkpointing": 0, "micro_batch_seqs": 2, "seq_len_tokens": 1024, "loss": "full"},
)


def main(kinds: list[str], *, whole: bool) -> None:
    """The table for these kinds, or for all."""
    gpu = find_gpu("a100-80gb")
    for kind in kinds or ADAPTERS:
        row, errors = ADAPTERS[kind], []
        for name in MODELS:
            entry = next(one for one in catalogue.entries() if one.model_id == name)
            config = dict(entry.config) | ({} if whole else {"num_hidden_layers": LAYERS})
            if "layer_types" in config and not whole:
                config["layer_types"] = config["layer_types"][:LAYERS]
            model = spec_from_config(config, model_id=name, source="catalogue, shortened")
            for base in BASES:
                for shape in SHAPES:
                    if shape["checkpointing"] and not row.checkpointing:
                        continue
                    if base.get("quantization", "none") not in row.quantizations:
                        continue
                    targets = {"lora_targets": ["k_proj", "v_proj", "down_proj"]} if kind == "ia3" else {}
                    setup = setup_from_dict({"adapter": kind, **targets, **base, **shape})
                    found = dry_run(model, gpu, setup, use_cache=False)
                    if not isinstance(found, Prediction):
                        print(f"{kind:17} {name:26} {base} {shape}: {found.message}")
                        continue
                    formula = predict_memory(model, gpu, setup)
                    error = formula.peak_allocated_bytes / found.peak_allocated_bytes - 1
                    errors.append(abs(error))
                    print(
                        f"{kind:17} {name:26} {setup.quantization:10} cast {setup.kbit_fp32_cast!s:5} "
                        f"checkpointing {setup.checkpointing} {setup.micro_batch_seqs} x {setup.seq_len_tokens}: "
                        f"dry run {found.peak_allocated_bytes / 2**20:8.1f} MiB ({found.peak_phase}), formula "
                        f"{error:+.2%} ({formula.peak_phase})",
                        flush=True,
                    )
        if errors:
            print(
                f"{kind}: median {statistics.median(errors):.2%}, worst {max(errors):.2%} of {len(errors)}", flush=True
            )


if __name__ == "__main__":
    main([one for one in sys.argv[1:] if one != "--whole"], whole="--whole" in sys.argv)
