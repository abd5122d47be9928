"""Published runs of TRL with sequences cut over GPUs, against the formula and the dry run.

    python -m benchmarks.cut_sequences [--dry-run]

One 8 x H100 node (16 and 32 GPUs: two and four), full fine-tuning of a bf16 model under FSDP2, one sequence per step,
`cp_size` all GPUs. The longer model's checkpoints lie in the host's memory. No figure was fitted on these rows; the
terms of cut sequences were written from PyTorch's source before the rows were found.

Source: huggingface/trl pull requests 6845 and 6846 (21 August 2026), `examples/sft_qwen3_8b_1m_context` and the first
form of it, `examples/sft_long_context`. Other rows there (Qwen3-30B-A3B, Qwen3-32B, 4 M tokens of Qwen3-0.6B) do not
say what lay in the host's memory.
"""

import argparse
from typing import NamedTuple

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import rank_memories
from planner.models import catalogue
from planner.setup import TrainSetup
from planner.speed.several_gpus.speed import layout_step_time

GB = 1e9


class Run(NamedTuple):
    """One published run: `peak_gb` as torch counts it (allocated), None where only the time was given."""

    model: str
    tokens: int
    num_gpus: int
    offloaded: bool
    step_s: float
    peak_gb: float | None


RUNS = (
    Run("Qwen/Qwen3-0.6B", 1 << 20, 8, False, 137, 27.9),
    Run("Qwen/Qwen3-8B", 1 << 20, 8, True, 380, 56.2),
    Run("Qwen/Qwen3-8B", 1 << 21, 16, True, 696, None),
    Run("Qwen/Qwen3-8B", 1 << 22, 32, True, 1346, None),
)


def setup_of(run: Run) -> TrainSetup:
    """The run's setup: TRL's defaults under the example's Accelerate file."""
    return TrainSetup(
        method="full", lora_rank=0, precision="bf16-autocast", loss="chunked", num_gpus=run.num_gpus, parallel="fsdp2",
        context_degree=run.num_gpus, seq_len_tokens=run.tokens, activation_offload=run.offloaded,
    )  # fmt: skip


def dry_run_gb(model_id: str, setup: TrainSetup) -> float:
    """The dry run's allocated peak."""
    from benchmarks.layout_formula_vs_dryrun import measure

    return float(measure(model_id.lower(), setup)["allocated"]) / GB


def main() -> None:
    """Prints one line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="also the dry run's memory (seconds each)")
    dry = parser.parse_args().dry_run
    gpu = find_gpu("h100-sxm")
    print("| run | peak, measured | formula | dry run | step, measured | formula |\n|---|--:|--:|--:|--:|--:|")
    for run in RUNS:
        model, setup = catalogue.load(run.model), setup_of(run)
        assert model is not None
        peak = rank_memories(model, gpu, setup)[0].breakdown.peak_allocated_bytes / GB
        step = layout_step_time(model, gpu, setup, make_cluster(gpu, run.num_gpus)).step_time_s
        sizes = (run.peak_gb, peak, dry_run_gb(run.model, setup) if dry else None)
        cells = [f"{size:.1f} GB" if size is not None and run.peak_gb else "-" for size in sizes]
        cells += [f"{run.step_s:,.0f} s", f"{step:,.0f} s ({100 * (step / run.step_s - 1):+.0f} %)"]
        print(f"| {run.model}, {run.tokens:,} tokens on {run.num_gpus} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
