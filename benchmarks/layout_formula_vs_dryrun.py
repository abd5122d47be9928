"""Per-rank formula against per-rank dry run over (model, strategy, world size) points, one JSON line per point.

    python -m benchmarks.layout_formula_vs_dryrun --out spread.jsonl [--parallel fsdp2] [--limit 320] [--seed 0]
    python -m benchmarks.layout_formula_vs_dryrun --out spread.jsonl --markdown   # tables of today's formula

Points already in the file are skipped, so a run can be stopped and taken up again. Setups are drawn at random (seeded)
from the space below, the same list for every run with one seed, models in rotation. The formula is
`planner.memory.model.rank_memories`, its worst rank by allocated bytes.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import collect, dry_run_row, error_table, loaded, rows_of
from planner.core.errors import SetupError
from planner.hardware.gpus import find_gpu
from planner.memory.engines import why_not
from planner.memory.model import rank_memories
from planner.options.objectives import OBJECTIVES as ROWS
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict

GPU = "a100-80gb"
CAPABILITY = (8, 0)
MODELS = (
    "qwen/qwen2.5-0.5b",
    "qwen/qwen2.5-7b",
    "meta-llama/llama-3.2-1b",
    "meta-llama/llama-3.1-8b",
    "meta-llama/llama-3.1-70b",
    "mistralai/mistral-7b-v0.3",
    "google/gemma-2-9b",
    "mistralai/mixtral-8x7b-v0.1",
    "microsoft/phi-4",
    "qwen/qwen3-8b",
    "qwen/qwen3-32b",
)
MIXTURES = (
    "qwen/qwen3-30b-a3b",
    "mistralai/mixtral-8x7b-v0.1",
    "allenai/olmoe-1b-7b-0924",
    "deepseek-ai/deepseek-v2-lite",
    "openai/gpt-oss-20b",
    "microsoft/phi-3.5-moe-instruct",
    "qwen/qwen1.5-moe-a2.7b",
    "zai-org/glm-4.5-air",
    "google/gemma-4-26b-a4b-it",
    "qwen/qwen3.5-35b-a3b",
    "qwen/qwen3-next-80b-a3b-instruct",
)
OBJECTIVES = ("dpo", "kto", "orpo", "reward", "classification")
"""Those that are planned on several GPUs beside supervised training."""
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0, "lora_targets": "all-linear", "quantization": "none"}
FSDP2: tuple[dict[str, Any], ...] = tuple(
    {"parallel": "fsdp2"} | more for more in ({}, {"reshard_after_forward": False}, {"shard_degree": 8})
)
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "ddp": ({"parallel": "ddp"},),
    "fsdp2": FSDP2,
    "context": tuple({"parallel": "fsdp2", "context_degree": degree} for degree in (2, 4, 8)),
    "experts": tuple(FULL | {"parallel": "fsdp2", "expert_degree": degree} for degree in (2, 4, 8)),
    "objectives": ({"parallel": "ddp"}, *FSDP2),
    "offload": tuple(way | {"offload": "parameters"} for way in FSDP2),
    "tensor": tuple(FULL | {"parallel": "none", "num_gpus": n, "tensor_degree": n} for n in (2, 4, 8)),
    "tensor in fsdp2": (
        FULL | {"parallel": "fsdp2", "num_gpus": 8, "tensor_degree": 2},
        FULL | {"parallel": "fsdp2", "num_gpus": 16, "tensor_degree": 8},
        FULL | {"parallel": "fsdp2", "num_gpus": 16, "tensor_degree": 4, "shard_degree": 2},
    ),
    "pipeline": tuple(
        FULL
        | {"parallel": "none", "num_gpus": n, "pipeline_degree": n, "pipeline_schedule": schedule, "loss": "full"}
        | {"precision": "bf16-pure"}
        for n in (2, 4, 8)
        for schedule in ("1f1b", "gpipe")
    ),
    "pipeline in fsdp2": tuple(
        FULL
        | {"parallel": "fsdp2", "num_gpus": 2 * n, "pipeline_degree": n, "pipeline_schedule": schedule, "loss": "full"}
        for n in (2, 4)
        for schedule in ("1f1b", "gpipe")
    ),
    "device map": ({"parallel": "device-map", "num_gpus": 2}, {"parallel": "device-map", "num_gpus": 4}),
    "dp": ({"parallel": "dp", "num_gpus": 2}, {"parallel": "dp", "num_gpus": 4}),
}
"""What `--parallel` names: several GPUs that hold a part each, sequences, experts or a model that are cut."""
SEQ_LENS = (512, 1024, 2048, 4096)
METHODS = (
    {"method": "full", "lora_rank": 0, "precision": "bf16-mixed"},
    {"method": "full", "lora_rank": 0, "precision": "bf16-autocast"},
    {"method": "full", "lora_rank": 0, "precision": "bf16-pure"},
    {"method": "lora", "precision": "bf16-autocast"},
    {"method": "lora", "precision": "bf16-autocast"},
    {"method": "qlora", "quantization": "nf4-double", "precision": "bf16-autocast"},
)
OTHER: dict[str, tuple[Any, ...]] = {
    "optimizer": ("adamw-fused", "adamw-fused", "adamw", "sgd"),
    "checkpointing": (0, 1, 1),
    "loss": ("full", "full", "chunked", "liger"),
    "kernels": ("eager", "liger"),
    "accumulation_steps": (1, 1, 4),
    "micro_batch_seqs": (1, 2, 4),
    "num_gpus": (2, 4, 8, 16, 64),
    "lora_targets": ("all-linear", "all-linear", "attention"),
    "lora_rank": (8, 16, 64),
}


def points(kind: str, seed: int, models: Sequence[str] = ()) -> Iterator[tuple[str, TrainSetup]]:
    """Endless (model id, setup) of one of KINDS, models in rotation: what an engine runs."""
    draw = random.Random(f"{seed} {kind}")
    while True:
        for model in models or (MIXTURES if kind == "experts" else MODELS):
            fields: dict[str, Any] = {name: draw.choice(values) for name, values in OTHER.items()}
            fields["seq_len_tokens"] = draw.choice(SEQ_LENS) * (16 if kind == "context" else 1)
            fields |= draw.choice(METHODS) | draw.choice(KINDS[kind])
            if fields["method"] == "full":
                fields |= FULL
            if kind.startswith("pipeline"):
                fields["accumulation_steps"] = draw.choice((4, 8))
            if kind == "objectives":
                objective = draw.choice(OBJECTIVES)
                row, loss = ROWS[objective], draw.choice(ROWS[objective].losses)
                stack = "axolotl" if row.reference and loss == "full" else row.stack("trl")
                fields |= {"objective": objective, "loss": loss, "stack": stack}
                fields["precomputed_reference"] = row.reference and draw.random() < 0.2
                fields["micro_batch_seqs"] = max(row.least_samples, fields["micro_batch_seqs"])
            try:
                setup = TrainSetup(**fields)
            except SetupError:  # a degree does not divide the GPUs, or a setting that the stack has not
                continue
            if not why_not(loaded(model), setup):
                yield model, setup


def measure(model: str, setup: TrainSetup) -> dict[str, Any]:
    """One point's dry run: per-phase allocated peaks of a rank and what was alive at them."""
    return dry_run_row(model, CAPABILITY, setup, 1 << 24)


def formula(model_id: str, setup: TrainSetup) -> Any:
    """The breakdown of the formula's rank with the largest allocated peak."""
    ranks = rank_memories(loaded(model_id), find_gpu(GPU), setup)
    return max((rank.breakdown for rank in ranks), key=lambda breakdown: breakdown.peak_allocated_bytes)


def strategy_of(setup: TrainSetup) -> str:
    name = setup.parallel
    if not setup.reshard_after_forward:
        name += ", no reshard"
    for field in ("context", "expert", "tensor", "pipeline"):
        degree = getattr(setup, f"{field}_degree")
        name += f", {field} {degree}" * (degree > 1)
    if setup.shards != setup.shardable_ranks and setup.parallel == "fsdp2":
        name += ", hybrid"
    if setup.offload != "none":
        name += f", {setup.offload} offloaded"
    return name


def markdown(rows: list[dict[str, Any]], worst: int = 4) -> str:
    """Errors of today's formula against the stored dry runs, by strategy and objective, and the worst by name."""
    errors: dict[str, dict[str, list[float]]] = {}
    by_error: list[tuple[float, str]] = []
    for row in rows:
        if "allocated" not in row:
            continue
        setup = setup_from_dict(row["setup"])
        breakdown = formula(row["model"], setup)
        error = breakdown.peak_allocated_bytes / row["allocated"] - 1.0
        keys = (
            ("all", "all points"),
            ("strategy", strategy_of(setup)),
            *[("objective", setup.objective)] * (setup.objective != "sft"),
        )
        for group, name in keys:
            errors.setdefault(group, {}).setdefault(name, []).append(error)
        by_error.append((error, describe(row, setup, breakdown)))
    lines = [line for group, by_name in errors.items() for line in error_table(group, by_name)]
    lines += ["| error | dry run, formula | point |", "|--:|---|---|"]
    lines += [text for _, text in sorted(by_error, key=lambda entry: -abs(entry[0]))[:worst]]
    return "\n".join(lines) + "\n"


def describe(row: dict[str, Any], setup: TrainSetup, breakdown: Any) -> str:
    """One point as a row of a table: error, both peaks, the setup in words."""
    error = breakdown.peak_allocated_bytes / row["allocated"] - 1.0
    point = (
        f"{row['model']}, {strategy_of(setup)} x {setup.num_gpus}, {setup.method} {setup.precision}, "
        f"{setup.micro_batch_seqs} x {setup.seq_len_tokens} tokens, accumulation {setup.accumulation_steps}, "
        f"checkpointing {setup.checkpointing}, {setup.optimizer}, loss {setup.loss}"
    )
    gib = 1 << 30
    sizes = f"{row['allocated'] / gib:.2f} GiB ({row['phase']}), {breakdown.peak_allocated_bytes / gib:.2f} GiB"
    return f"| {100 * error:+.1f} % | {sizes} ({breakdown.peak_phase}) | {point} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parallel", default="fsdp2", choices=KINDS)
    parser.add_argument("--limit", type=int, default=320, help="points in the file when done")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=4, help="points to list")
    parser.add_argument("--markdown", action="store_true", help="print tables of today's formula and stop")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(rows_of(args.out), args.worst))
        return 0
    drawn = points(args.parallel, args.seed)
    collect(args.out, args.limit, (({"model": model}, setup) for model, setup in drawn), measure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
