"""Formula against dry run over a grid of (model, setup) points, one JSON line per point.

    python -m benchmarks.formula_vs_dryrun --out grid.jsonl [--models qwen2,llama] [--limit 200] [--seed 0] [--parts]
    python -m benchmarks.formula_vs_dryrun --markdown [--out grid.jsonl]   # tables; default: the frozen points

Points already in the file are skipped, so a run can be stopped and taken up again. Setups are drawn at random (seeded)
from the space below, the same list for every run with one seed, models in rotation. With `--parts` every setup has at
least one of the later parts (PARTS).
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.oracle import frozen
from benchmarks.shared import collect, dry_run_row, error_table, loaded, rows_of
from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import experts_refusal, flash_refusal, halves_refusal
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.kernels import parts_of
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from probes.dryrun.api import VERSION

CAPABILITIES = {"rtx-4090": (8, 9), "a100-80gb": (8, 0), "h100-sxm": (9, 0), "t4": (7, 5)}
SEQ_LENS = (512, 1024, 2048, 4096)
MICRO_BATCHES = (1, 2, 4)
METHODS = (
    {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
    {"method": "full", "lora_rank": 0, "precision": "bf16-mixed"},
    {"method": "lora", "precision": "bf16-autocast"},
    {"method": "lora", "precision": "bf16-autocast"},
    {"method": "lora", "precision": "bf16-pure"},
    {"method": "lora", "precision": "fp16-autocast"},
    {"method": "lora", "precision": "fp32"},
    {"method": "qlora", "quantization": "nf4-double", "precision": "bf16-autocast"},
    {"method": "qlora", "quantization": "nf4-double", "precision": "bf16-autocast"},
    {"method": "qlora", "quantization": "nf4", "precision": "bf16-autocast", "kbit_fp32_cast": True},
    {"method": "qlora", "quantization": "int8", "precision": "bf16-autocast"},
)
OTHER: dict[str, tuple[Any, ...]] = {
    "optimizer": ("adamw-fused", "adamw-fused", "adamw", "adamw-8bit", "paged-adamw-8bit", "adafactor", "sgd"),
    "attention": ("sdpa", "sdpa", "flash-attention-2", "eager"),
    "checkpointing": (0, 1, 1, 2),
    "loss": ("full", "full", "chunked", "liger"),
    "accumulation_steps": (1, 1, 4),
    "lora_dropout": (0.0, 0.0, 0.05),
    "lora_targets": ("all-linear", "all-linear", "attention"),
    "packing": (False, False, False, True),
}
RANKS = (8, 16, 64)
PARTS: dict[str, tuple[Any, ...]] = {
    "kernels": ("eager", "liger", "fused"),
    "checkpointing": (0, 1, 2, 3, 4, 8, 16),
    "activation_offload": (False, False, True),
    "selective_checkpointing": (False, False, True),
    "quantize_experts": (False, True),
}
"""What came after the first grids: kernels, every n-th layer, offloaded inputs, kept attention, experts in 4 bits."""
NAMED = 10
"""Points that are listed by name."""


def with_parts(draw: random.Random, fields: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """The fields with later parts drawn in: those that would change nothing of this model stay as they were."""
    parts = {name: draw.choice(values) for name, values in PARTS.items()}
    if not parts_of(parts["kernels"], model.model_type):
        parts["kernels"] = "eager"
    if not any(layer.mlp is not None and layer.mlp.kind == "moe" for layer in model.layer_kinds):
        parts["quantize_experts"] = False
    return fields | parts


def has_parts(setup: TrainSetup) -> bool:
    """Whether a setup has any of the later parts."""
    return setup.checkpointing > 2 or any(name in setup.seldom for name in PARTS)


def refused(model: ModelSpec, setup: TrainSetup) -> str:
    """Why nothing trains this: attention that the flash kernels do not take, packed experts with adapters of their own,
    a quantized base of which nothing is quantized; the formula then counts what a person would have to run instead."""
    if setup.quantized and not any(linear.quantizes for layer in model.layer_kinds for linear in layer.linears):
        return f"transformers quantizes no matrix of {model.model_type}"
    if halves := halves_refusal(model, setup):
        return halves
    flash = flash_refusal(model) if setup.attention == "flash-attention-2" else ""
    return flash or (experts_refusal(model, setup) if setup.quantize_experts else "")


def points(seed: int, *, parts: bool = False) -> Iterator[tuple[str, str, TrainSetup]]:
    """Endless (model id, gpu key, setup), models in rotation so that every type comes early."""
    draw = random.Random(seed)
    by_type: dict[str, list[str]] = {}
    specs: dict[str, ModelSpec] = {}
    for name in catalogue.names():
        specs[name] = loaded(name)
        by_type.setdefault(specs[name].model_type, []).append(name)
    while True:
        for models in by_type.values():
            fields: dict[str, Any] = {name: draw.choice(values) for name, values in OTHER.items()}
            fields |= draw.choice(METHODS)
            if fields["method"] == "full":
                fields |= {"lora_dropout": 0.0, "lora_targets": "all-linear"}
            else:
                fields["lora_rank"] = draw.choice(RANKS)
            fields |= {"seq_len_tokens": draw.choice(SEQ_LENS), "micro_batch_seqs": draw.choice(MICRO_BATCHES)}
            model, gpu = draw.choice(models), draw.choice(list(CAPABILITIES))
            if specs[model].reads_both_ways:
                fields |= {"objective": "classification", "loss": "full", "stack": "hf"}
            if parts:
                fields = with_parts(draw, fields, specs[model])
            try:
                setup = TrainSetup(**fields)
            except SetupError:
                continue
            if not parts or (has_parts(setup) and not refused(specs[model], setup)):
                yield model, gpu, setup


def measure(model: str, gpu: str, setup: TrainSetup) -> dict[str, Any]:
    """One point's dry run; the formula is computed when tables are made, not here."""
    row = dry_run_row(model, CAPABILITIES[gpu], setup, 1 << 20)
    row |= {"model_type": loaded(model).model_type, "version": VERSION}
    return {name if name in ("kernels", "model_type") else f"dry_run_{name}": value for name, value in row.items()}


def kind_of(model_id: str, setup: TrainSetup, kernels: dict[str, int]) -> str:
    """What decides how well a closed form can follow, one word per point."""
    model = loaded(model_id)
    traits = model.traits
    if setup.lora_dropout > 0 or traits.attention_dropout or traits.residual_dropout:
        return "with a dropout"
    if "math" in kernels and setup.autocast_dtype is not None:
        return "math kernel under autocast"
    if setup.quantization == "int8" and setup.checkpointing:
        return "int8 with checkpointing"
    if any(layer.attention is not None and layer.attention.kind == "linear" for layer in model.layer_kinds):
        return "linear attention"
    if any(layer.mlp is not None and layer.mlp.kind == "moe" for layer in model.layer_kinds):
        return "mixture of experts"
    if setup.attention == "eager" or "sdpa" not in model.attentions:
        return "eager attention"
    return "below 1e9 parameters" if model.num_params < 1_000_000_000 else "dense, fused attention"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Errors of today's formula against the stored dry runs by kind of point and model type, as tables, and the
    worst by name."""
    errors: dict[str, dict[str, list[float]]] = {"all": {}, "kind": {}, "type": {}}
    named: list[tuple[float, str]] = []
    for row in rows:
        if "dry_run_allocated" not in row:
            continue
        setup = setup_from_dict(row["setup"])
        prediction = predict_memory(loaded(row["model"]), find_gpu(row["gpu"]), setup)
        error = prediction.peak_allocated_bytes / row["dry_run_allocated"] - 1.0
        phases = f"{row['dry_run_phase']} | {prediction.peak_phase}"
        size = f"{row['dry_run_allocated'] / GIB:.2f} GiB"
        named.append((error, f"| {row['model']} | {row['gpu']} | {words(setup)} | {phases} | {size} |"))
        for key in (
            ("all", "all points"),
            ("kind", kind_of(row["model"], setup, row["kernels"])),
            ("type", row["model_type"]),
        ):
            errors[key[0]].setdefault(key[1], []).append(error)
    lines = [line for group, by_name in errors.items() for line in error_table(group, by_name)]
    lines += [
        "| error | model | card | setup | peak in the dry run | in the formula | dry run |",
        "|--:" + "|---" * 6 + "|",
    ]
    for error, text in sorted(named, key=lambda entry: -abs(entry[0]))[:NAMED]:
        lines.append(f"| {100 * error:+.1f} % {text}")
    return "\n".join(lines)


def words(setup: TrainSetup) -> str:
    how = [setup.method, setup.precision]
    how += [setup.quantization] if setup.quantized else []
    how += ["k-bit fp32 cast"] if setup.kbit_fp32_cast else []
    how += [f"r{setup.lora_rank}", str(setup.lora_targets)] if setup.method != "full" else []
    how += [f"dropout {setup.lora_dropout:g}"] if setup.lora_dropout else []
    how += [setup.optimizer, setup.attention, f"checkpointing {int(setup.checkpointing)}", setup.loss]
    how += [f"{setup.micro_batch_seqs} x {setup.seq_len_tokens}{' packed' if setup.packing else ''}"]
    return ", ".join(how + ([f"accumulation {setup.accumulation_steps}"] if setup.accumulation_steps > 1 else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: summarise the frozen points")
    parser.add_argument("--models", default="", help="comma-separated model types; default all")
    parser.add_argument("--limit", type=int, default=2000, help="points in the file when done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", action="store_true", help="draw setups with later parts")
    parser.add_argument("--markdown", action="store_true", help="print tables of today's formula and stop")
    args = parser.parse_args()
    if args.out is None:
        print(markdown(frozen()))
        return 0
    if args.markdown:
        print(markdown(rows_of(args.out)))
        return 0
    wanted = {name for name in args.models.split(",") if name}
    drawn = (
        ({"model": model, "gpu": gpu}, setup)
        for model, gpu, setup in points(args.seed, parts=args.parts)
        if not wanted or loaded(model).model_type in wanted
    )
    collect(args.out, args.limit, drawn, measure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
