"""Published runs with experts dealt out over the GPUs of a node, against the formula.

    python -m benchmarks.dealt_experts

Whole training in 16-bit weights under FSDP2 or FSDP, eight experts' GPUs of eight. None is transformers' own dispatch:
IBM's runs have ScatterMoE's kernels and MegaBlocks' exchange (fms-acceleration), padded batches of 210 tokens in the
mean; NVIDIA's has DeepEP's exchange and Transformer Engine's kernels, on mock data. No figure was fitted on these rows.
Memory of IBM's is what nvidia-smi saw, the mean over the GPUs; NVIDIA's row gives none.

Source: foundation-model-stack/fms-acceleration `scripts/benchmarks/refs/a100_80gb_moe.csv` (commits of 2024 to 2025;
moe-scattermoe-granite-ep8, with and without foak); NVIDIA-NeMo/Automodel `docs/performance-summary.md`.
"""

from typing import NamedTuple

from planner.hardware.cluster import make_cluster
from planner.hardware.gpus import find_gpu
from planner.memory.model import rank_memories
from planner.models import catalogue
from planner.setup import TrainSetup
from planner.speed.several_gpus.speed import layout_step_time


class Run(NamedTuple):
    """One published run on eight GPUs; `gib` on the device, None where it was not given; speed of one GPU."""

    what: str
    model: str
    gpu: str
    tokens: int
    micro_batch: int
    accumulation: int
    gib: float | None
    tokens_per_s: float


MIXTRAL = ("mistralai/mixtral-8x7b-v0.1", "a100-80gb", 210, 1)
RUNS = (
    Run("IBM, ScatterMoE", *MIXTRAL, 1, 50.8, 314),
    Run("the same, fused norms", *MIXTRAL, 1, 50.7, 322),
    Run("IBM, ScatterMoE", *MIXTRAL, 16, 55.5, 431),
    Run("the same, fused norms", *MIXTRAL, 16, 55.4, 458),
    Run("the same, June 2025", *MIXTRAL, 16, 55.4, 414),
    Run("the same, fused norms", *MIXTRAL, 16, 55.4, 433),
    Run("NVIDIA, DeepEP and TE", "qwen/qwen3-30b-a3b", "h100-sxm", 4096, 4, 16, None, 12040),
)


def main() -> None:
    """Prints one line per run."""
    print("| run | accumulation | device, measured | formula | tokens/s a GPU, measured | formula | not dealt out |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for run in RUNS:
        model, gpu = catalogue.load(run.model), find_gpu(run.gpu)
        assert model is not None
        setup = TrainSetup(
            method="full", lora_rank=0, precision="bf16-pure", optimizer="adamw", attention="flash-attention-2",
            num_gpus=8, parallel="fsdp2", expert_degree=8, seq_len_tokens=run.tokens, micro_batch_seqs=run.micro_batch,
            accumulation_steps=run.accumulation,
        )  # fmt: skip
        peak = rank_memories(model, gpu, setup)[0].breakdown.peak_device_bytes / (1 << 30)
        cluster = make_cluster(gpu, 8)
        found, whole = (
            layout_step_time(model, gpu, one, cluster).tokens_per_s / 8
            for one in (setup, setup.replace(expert_degree=1))
        )
        cells = [f"{run.gib:.1f} GiB", f"{peak:.1f} GiB"] if run.gib else ["-", "-"]
        cells += [f"{run.tokens_per_s:,.0f}", f"{found:,.0f} ({100 * (found / run.tokens_per_s - 1):+.0f} %)"]
        print(f"| {run.what}: {run.model} | {run.accumulation} | {' | '.join(cells)} | {whole:,.0f} |")


if __name__ == "__main__":
    main()
