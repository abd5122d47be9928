"""The formula's peak against the dry run's (peft's own code on meta tensors): every kind of adapter x six model types.

    python -m benchmarks.adapter_kinds --collect [KIND ...]    # dry-runs what is not kept yet, a second each
    python -m benchmarks.adapter_kinds [--all] [KIND ...]      # the tables, from what is kept: seconds, no torch

`--all` prints every point; otherwise only those beyond AIM. Whole models, 16-bit and two 4-bit bases, with and without
checkpointing.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.shared import DATA, error_table, loaded, rows_of
from planner.hardware.gpus import find_gpu
from planner.memory.model import predict_memory
from planner.options.adapters import ADAPTERS
from planner.setup.interchange import setup_from_dict

DRY_RUNS = DATA / "adapter_kinds.jsonl"
GPU = "a100-80gb"
AIM = 0.07
"""The band of adapters whose step is not LoRA's (`planner.planning.evidence.bands.ADAPTER_BAND`)."""
MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "gemma2": "google/gemma-2-2b",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "gpt2": "openai-community/gpt2-large",
    "gpt_neox": "EleutherAI/pythia-1b",
}
"""One of each type of tests/probes/test_adapter_kinds.py."""
INNER = {"phi3": ["qkv_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}
INNER["gpt_neox"] = ["query_key_value", "dense_4h_to_h"]
"""What IA3 scales, keys, values and the MLP's inner layer, where they are not called as in Llama: peft's own table."""
BASES: dict[str, dict[str, Any]] = {
    "16 bit": {},
    "4 bit": {"method": "qlora", "quantization": "nf4-double"},
    "4 bit, fp32 norms": {"method": "qlora", "quantization": "nf4", "kbit_fp32_cast": True, "stack": "hf"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 1024": {"checkpointing": 1, "micro_batch_seqs": 1, "seq_len_tokens": 1024, "loss": "chunked"},
    "4 x 1024": {"checkpointing": 1, "micro_batch_seqs": 4, "seq_len_tokens": 1024, "loss": "chunked"},
    "2 x 1024, all kept": {"checkpointing": 0, "micro_batch_seqs": 2, "seq_len_tokens": 1024, "loss": "full"},
}
Cell = tuple[str, str, str, str]
"""(type, adapter, base, shape), by their names above."""


def cells() -> Iterator[Cell]:
    for model_type in MODELS:
        for kind, row in ADAPTERS.items():
            if model_type == "gpt2" and not row.conv1d:
                continue
            for base, fields in BASES.items():
                if fields.get("quantization", "none") in row.quantizations:
                    for shape, sizes in SHAPES.items():
                        if row.checkpointing or not sizes["checkpointing"]:
                            yield model_type, kind, base, shape


def setup_of(cell: Cell) -> Any:
    model_type, kind, base, shape = cell
    targets = INNER.get(model_type, ["k_proj", "v_proj", "down_proj"])
    scaled = {"lora_targets": targets} if kind == "ia3" else {}
    return setup_from_dict({"adapter": kind, **scaled, **BASES[base], **SHAPES[shape]})


def kept() -> dict[Cell, dict[str, Any]]:
    return {tuple(row["cell"]): row for row in rows_of(DRY_RUNS)}


def collect(kinds: list[str], types: list[str]) -> None:
    """Dry-runs the cells that are not kept yet."""
    from planner.setup.outcome import Prediction
    from probes.dryrun import dry_run

    done = kept()
    with DRY_RUNS.open("a") as out:
        for cell in cells():
            if cell in done or cell[1] not in (kinds or ADAPTERS) or cell[0] not in (types or MODELS):
                continue
            outcome = dry_run(loaded(MODELS[cell[0]]), find_gpu(GPU), setup_of(cell), use_cache=False)
            if not isinstance(outcome, Prediction):
                print(cell, outcome.message)
                continue
            row = {"cell": cell, "peak_allocated_bytes": outcome.peak_allocated_bytes, "phase": outcome.peak_phase}
            out.write(json.dumps(row) + "\n")
            out.flush()


def tables(kinds: list[str], *, everything: bool) -> None:
    """Points (beyond AIM), then errors by kind and by type."""
    errors: dict[str, dict[str, list[float]]] = {"adapter": {}, "type": {}, "all": {}}
    for (model_type, kind, base, shape), row in kept().items():
        if kinds and kind not in kinds:
            continue
        setup = setup_of((model_type, kind, base, shape))
        formula = predict_memory(loaded(MODELS[model_type]), find_gpu(GPU), setup)
        error = formula.peak_allocated_bytes / row["peak_allocated_bytes"] - 1
        for group, name in (("adapter", kind), ("type", model_type), ("all", "all points")):
            errors[group].setdefault(name, []).append(error)
        if everything or abs(error) > AIM:
            print(
                f"{kind:16} {model_type:8} {base:17} {shape:18} dry run {row['peak_allocated_bytes'] / 2**20:8.1f} MiB "
                f"({row['phase']}), formula {error:+.2%} ({formula.peak_phase})"
            )
    for group, by_name in errors.items():
        print(*error_table(group, by_name), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--types", nargs="*", default=[])
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.collect:
        collect(given.kinds, given.types)
    else:
        tables(given.kinds, everything=given.all)
