"""The speed of a setup from the operators of its own run: what a dry run adds to its bytes."""

from dataclasses import replace

from planner.hardware.gpu import GpuSpec
from planner.memory.rank_part import headed
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS
from planner.planning.evidence.bands import time_band
from planner.planning.predict import paged_overflow
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from planner.speed.host import host_of
from planner.speed.operators import Program
from planner.speed.rates import card_band, card_rates
from planner.speed.roofline import conditions_of, throughput_profile
from planner.speed.timeline import Loop, RunTime, host_notes, loop_of, run_time


def run_speed(program: Program, gpu: GpuSpec, setup: TrainSetup, *, loop: Loop | None = None) -> RunTime:
    """The time of a step of `program`, the operators of `setup`, on one card.

    Args:
        loop: what goes around them, that of the setup's stack by default.
    """
    apart = setup.packing and setup.attention == "flash-attention-2"
    rates = card_rates(gpu, setup.attention, sample_tokens=setup.seq_len_tokens if apart else 0)
    return run_time(program, rates, loop or loop_of(setup), host_of(gpu))


def with_run_speed(
    prediction: Prediction, program: Program | None, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup
) -> Prediction:
    """`prediction` with the speed of the run's own operators; without one where they do not say all: of several GPUs,
    objectives that generate, activations and optimizer states that travel to the host, steps beyond the card's peak."""
    travels = setup.activation_offload or (
        OPTIMIZERS[setup.optimizer].paged and paged_overflow(model, gpu, setup, prediction.peak_device_bytes)
    )
    if program is None or setup.num_gpus > 1 or setup.objective_spec.rolls_out or travels or gpu.vendor != "NVIDIA":
        return prediction
    run = run_speed(program, gpu, setup)
    headed_model = headed(model, setup.objective_spec.head)
    formula = throughput_profile(headed_model, gpu, setup, conditions=conditions_of(setup))
    flops = formula.flops(setup.micro_batch_seqs, setup.accumulation_steps)
    mfu_fraction = formula.mfu_fraction(flops, run.step_s)
    if mfu_fraction > 1.0:  # no card is so fast: the run left out some of what the step needs
        return prediction
    return replace(
        prediction,
        step_time_s=run.step_s,
        tokens_per_s=setup.tokens_per_step / run.step_s,
        time_band_fraction=max(
            formula.program_band(setup, max(run.band_fraction, card_band(gpu))), time_band(model, gpu)
        ),
        mfu_fraction=mfu_fraction,
        time_parts_s=run.parts_s,
        notes=(*prediction.notes, *host_notes(run)),
    )
