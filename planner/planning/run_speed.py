"""The speed of a setup from the operators of its own run: what a dry run adds to its bytes."""

from dataclasses import replace

from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.rank_part import headed
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS
from planner.planning.evidence.bands import time_band
from planner.planning.predict import paged_overflow
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from planner.speed import cluster_of
from planner.speed.host import host_of
from planner.speed.operators import Program
from planner.speed.rank_timeline import rank_program
from planner.speed.rates import CardRates, card_band, card_rates
from planner.speed.roofline import conditions_of, throughput_profile
from planner.speed.timeline import Loop, RunTime, host_notes, loop_of, run_time


def run_speed(program: Program, gpu: GpuSpec, setup: TrainSetup, *, loop: Loop | None = None) -> RunTime:
    """The time of a step of `program`, the operators of `setup`, on one card.

    Args:
        loop: what goes around them, that of the setup's stack by default.
    """
    return run_time(program, _rates(gpu, setup), loop or loop_of(setup), host_of(gpu))


def _rates(gpu: GpuSpec, setup: TrainSetup) -> CardRates:
    apart = setup.packing and setup.attention == "flash-attention-2"
    return card_rates(gpu, setup.attention, sample_tokens=setup.seq_len_tokens if apart else 0)


def rank_speed(program: Program, gpu: GpuSpec, setup: TrainSetup, cluster: Cluster) -> RunTime:
    """The time of a step of `program`, the operators and collectives of a rank of `setup`."""
    each = setup.parallel == "fsdp2" and not setup.defers_reduction
    return rank_program(program, _rates(gpu, setup), cluster, reduces_each=each).time(loop_of(setup), host_of(gpu))


def with_run_speed(
    prediction: Prediction,
    program: Program | None,
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster | None = None,
) -> Prediction:
    """`prediction` with the speed of the run's own operators; without one where they do not say all: of ranks of other
    engines than DDP and FSDP2, objectives that generate, activations and optimizer states that travel to the host,
    steps beyond the card's peak."""
    travels = setup.activation_offload or (
        OPTIMIZERS[setup.optimizer].paged and paged_overflow(model, gpu, setup, prediction.peak_device_bytes)
    )
    if program is None or setup.objective_spec.rolls_out or travels or gpu.vendor != "NVIDIA":
        return prediction
    if setup.single_gpu:
        run = run_speed(program, gpu, setup)
        headed_model = headed(model, setup.objective_spec.head)
        formula = throughput_profile(headed_model, gpu, setup, conditions=conditions_of(setup))
        flops = formula.flops(setup.micro_batch_seqs, setup.accumulation_steps)
        mfu_fraction = formula.mfu_fraction(flops, run.step_s)
        band = max(formula.program_band(setup, max(run.band_fraction, card_band(gpu))), time_band(model, gpu))
    elif _exchanges_alone(setup):
        from planner.speed.several_gpus.speed import layout_step_time  # late: one GPU never needs it

        cluster = cluster_of(gpu, setup, cluster)
        run = rank_speed(program, gpu, setup, cluster)
        step = layout_step_time(model, gpu, setup, cluster, conditions=conditions_of(setup))
        mfu_fraction = step.mfu_fraction * step.step_time_s / run.step_s
        band = max(run.band_fraction, step.band_fraction, time_band(model, gpu))
    else:
        return prediction
    if mfu_fraction > 1.0:  # no card is so fast: the run left out some of what the step needs
        return prediction
    return replace(
        prediction,
        step_time_s=run.step_s,
        tokens_per_s=setup.tokens_per_step / run.step_s,
        time_band_fraction=band,
        mfu_fraction=mfu_fraction,
        time_parts_s=run.parts_s,
        notes=(*prediction.notes, *host_notes(run)),
    )


def _exchanges_alone(setup: TrainSetup) -> bool:
    """Whether all that a rank does beside one GPU's step is what its streams exchange: under tensor and expert
    parallelism DTensor's Python, whose time nobody measured, decides; what is offloaded travels on other streams."""
    alone = setup.data_degree == setup.num_gpus and setup.expert_degree == 1 and not setup.sharded_at_loading
    return alone and setup.parallel in ("ddp", "fsdp2") and setup.offload == "none"
