"""Formula against dry run over a grid of (model, setup) points, one JSON line per point.

    python -m benchmarks.formula_vs_dryrun --out grid.jsonl [--models qwen2,llama] [--limit 200] [--seed 0] [--parts]
    python -m benchmarks.formula_vs_dryrun --markdown [--out grid.jsonl]   # tables; default: the frozen points

Points already in the file are skipped, so a run can be stopped and taken up again. Setups are drawn at random (seeded)
from the space below, the same list for every run with one seed, models in rotation. With `--parts` every setup has at
least one of the later parts (PARTS).
"""

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.oracle import frozen
from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import experts_refusal, flash_refusal, halves_refusal
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.kernels import parts_of
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.memory_terms import MemoryBreakdown
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
TRACE_ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError, ImportError)
"""What the libraries raise where a point cannot be traced, as in `probes.dryrun.api`."""


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
        spec = catalogue.load(name)
        assert spec is not None
        specs[name] = spec
        by_type.setdefault(spec.model_type, []).append(name)
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


def second_step(trace: Any) -> Any:
    """The trace of one step as that of a later one: optimizer state and cuBLAS workspaces, which the first step makes,
    are there from its beginning.

    A dry run runs two steps for that reason; this takes half the time. Of 40 points both differ by at most 168 KiB.
    """
    from probes.allocator.events import Alloc, Phase

    def stays(event: Any) -> bool:
        if not isinstance(event, Alloc):
            return False
        owner = trace.owners.get(event.id)
        of_optimizer = owner is not None and owner[0] == "optimizer"
        return of_optimizer or str(trace.origins[event.id].op).startswith("cuBLAS")

    persistent = [event for event in trace.events if stays(event)]
    start = next(i for i, event in enumerate(trace.events) if isinstance(event, Phase) and event.name == "forward")
    rest = [event for event in trace.events[start + 1 :] if not stays(event)]
    return replace(trace, events=[*trace.events[: start + 1], *persistent, *rest])


def traced(model_id: str, gpu_key: str, setup: TrainSetup, *, steps: int = 1) -> tuple[dict[str, Any], dict[str, int]]:
    """(phase -> what its peak is made of, attention kernels) of a later step of a setup.

    Raises:
        one of `TRACE_ERRORS`: the point cannot be traced.
    """
    from probes.dryrun.startup import collection_paused

    spec = catalogue.load(model_id)
    assert spec is not None
    with collection_paused():
        from probes.dryrun.analysis import phase_peaks
        from probes.dryrun.depths import plan_depth
        from probes.dryrun.repeat_layers import RepetitionError, repeat_layers
        from probes.dryrun.startup import load_libraries
        from probes.dryrun.trace import trace_run
        from probes.stack.configs import load_config

        load_libraries()
        plan = plan_depth(load_config(spec.config), checkpointing=setup.checkpointing, full_depth=False)
        whole = copy.deepcopy(plan.whole) if plan.layers is not None else plan.config
        run = partial(trace_run, setup=setup, capability=CAPABILITIES[gpu_key], steps=steps)
        trace = run(plan.config, num_layers=plan.depth)
        if plan.layers is not None:
            try:
                trace = repeat_layers(trace, plan.layers, setup).flat()
            except RepetitionError:
                trace = run(whole, num_layers=plan.full)
        peaks = phase_peaks(second_step(trace) if steps == 1 else trace)
    return peaks, dict(trace.log.chosen)


def measure(model_id: str, gpu_key: str, setup: TrainSetup) -> dict[str, Any]:
    """One point: per-phase allocated peaks of the dry run, with what was alive at each, or why it was not traced.

    The allocator's replay is left out: only allocated bytes are compared, and it takes a fifth of the time. The formula
    is computed when tables are made, not here.
    """
    spec = catalogue.load(model_id)
    assert spec is not None
    row: dict[str, Any] = {
        "model": model_id,
        "model_type": spec.model_type,
        "gpu": gpu_key,
        "setup": setup_to_dict(setup),
    }
    started = time.perf_counter()
    try:
        peaks, kernels = traced(model_id, gpu_key, setup)
    except TRACE_ERRORS as error:
        return row | {"dry_run_failure": f"{spec.model_type}: {type(error).__name__}: {error}"}
    sizes = {phase: peak.size_bytes for phase, peak in peaks.items()}
    return row | {
        "dry_run_s": round(time.perf_counter() - started, 3),
        "dry_run_version": VERSION,
        "dry_run_phases": sizes,
        "dry_run_allocated": max(sizes.values()),
        "dry_run_phase": max(sizes, key=lambda phase: sizes[phase]),
        "dry_run_groups": {
            phase: {f"{category}: {name}": size for (category, name), size in peak.groups.items() if size >= 1 << 20}
            for phase, peak in peaks.items()
        },
        "kernels": kernels,
    }


def key_of(model: str, gpu: str, setup: dict[str, Any]) -> str:
    """What makes a point the same one."""
    return json.dumps([model, gpu, setup], sort_keys=True)


def predicted(row: dict[str, Any]) -> MemoryBreakdown:
    """Today's formula for a stored point."""
    spec = catalogue.load(row["model"])
    assert spec is not None
    return predict_memory(spec, find_gpu(row["gpu"]), setup_from_dict(row["setup"]))


def kind_of(model_id: str, setup: TrainSetup, kernels: dict[str, int]) -> str:
    """What decides how well a closed form can follow, one word per point."""
    model = catalogue.load(model_id)
    assert model is not None
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
    errors: dict[tuple[str, str], list[float]] = {}
    named: list[tuple[float, str]] = []
    for row in rows:
        if "dry_run_allocated" not in row:
            continue
        setup, prediction = setup_from_dict(row["setup"]), predicted(row)
        error = prediction.peak_allocated_bytes / row["dry_run_allocated"] - 1.0
        phases = f"{row['dry_run_phase']} | {prediction.peak_phase}"
        size = f"{row['dry_run_allocated'] / GIB:.2f} GiB"
        named.append((error, f"| {row['model']} | {row['gpu']} | {words(setup)} | {phases} | {size} |"))
        for key in (
            ("all", "all points"),
            ("kind", kind_of(row["model"], setup, row["kernels"])),
            ("type", row["model_type"]),
        ):
            errors.setdefault(key, []).append(error)
    lines = []
    for group in ("all", "kind", "type"):
        lines += [f"| {group} | points | median | 90th | 95th | worst | bias |", "|---|--:|--:|--:|--:|--:|--:|"]
        for (_, name), found_errors in sorted(item for item in errors.items() if item[0][0] == group):
            ordered = sorted(abs(error) for error in found_errors)
            at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.95)]
            cells = " | ".join(f"{100 * value:.2f} %" for value in (*at, ordered[-1]))
            lines.append(f"| {name} | {len(ordered)} | {cells} | {100 * statistics.fmean(found_errors):+.2f} % |")
        lines.append("")
    lines += [
        "| error | model | card | setup | peak in the dry run | in the formula | dry run |",
        "|--:" + "|---" * 6 + "|",
    ]
    for error, text in sorted(named, key=lambda entry: -abs(entry[0]))[:NAMED]:
        lines.append(f"| {100 * error:+.1f} % {text}")
    return "\n".join(lines)


def words(setup: TrainSetup) -> str:
    """A setup in a few words."""
    how = [setup.method, setup.precision]
    how += [setup.quantization] if setup.quantized else []
    how += ["k-bit fp32 cast"] if setup.kbit_fp32_cast else []
    how += [f"r{setup.lora_rank}", str(setup.lora_targets)] if setup.method != "full" else []
    how += [f"dropout {setup.lora_dropout:g}"] if setup.lora_dropout else []
    how += [setup.optimizer, setup.attention, f"checkpointing {int(setup.checkpointing)}", setup.loss]
    how += [f"{setup.micro_batch_seqs} x {setup.seq_len_tokens}{' packed' if setup.packing else ''}"]
    return ", ".join(how + ([f"accumulation {setup.accumulation_steps}"] if setup.accumulation_steps > 1 else []))


def main() -> int:
    """Runs or summarises."""
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
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.markdown:
        print(markdown(rows))
        return 0
    done = {key_of(row["model"], row["gpu"], row["setup"]) for row in rows}
    wanted = {name for name in args.models.split(",") if name}
    with args.out.open("a") as file:
        for model, gpu, setup in points(args.seed, parts=args.parts):
            if len(done) >= args.limit:
                break
            spec = catalogue.load(model)
            key = key_of(model, gpu, setup_to_dict(setup))
            if key in done or spec is None or (wanted and spec.model_type not in wanted):
                continue
            done.add(key)
            started = time.perf_counter()
            row = measure(model, gpu, setup)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"{len(done):5} {time.perf_counter() - started:5.1f} s {model:45} "
                f"{row.get('dry_run_failure', '')[:150] or row['dry_run_phase']}",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
