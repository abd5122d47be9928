"""What a kept profile says against a dry run of the same setup."""

from collections.abc import Iterator

from planner.hardware.gpu import GpuSpec
from planner.memory.engines import engine_of
from planner.memory.profiles import profiled_breakdown, profiled_step
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from probes.dryrun import dry_run_report
from probes.dryrun.report import DryRunReport

SAMPLES = ((1, 1, 1024, 16), (3, 1, 1536, 8), (4, 2, 2048, 32))
"""Micro-batch, accumulation, length, of no more tokens than the model has positions for, and rank."""


def deviations(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Iterator[tuple[str, float, float]]:
    """(words, profile / dry run - 1 of the allocated peak, of the reserved one) of a structure at some sizes; nothing
    where either has none."""
    for micro, steps, tokens, rank in SAMPLES:
        length = min(tokens, model.learned_positions or tokens)
        sizes = {"micro_batch_seqs": micro, "accumulation_steps": steps, "seq_len_tokens": length}
        sample = setup.replace(**sizes, lora_rank=rank if setup.method != "full" else 0)
        step = profiled_step(model, gpu, sample)
        report = dry_run_report(model, gpu, sample, use_cache=False)
        if step is None or not isinstance(report, DryRunReport):
            continue
        state = engine_of(sample).state(rank_parts(model, sample)[0], sample, accumulated=sample.adds_gradients)
        mine, seen = profiled_breakdown(step, gpu, sample, state), report.prediction
        reserved = mine.peak_reserved_bytes / seen.peak_reserved_bytes - 1
        yield f"{micro} x {length}, {steps} steps", mine.peak_allocated_bytes / seen.peak_allocated_bytes - 1, reserved
