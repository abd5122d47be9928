"""The speed of a setup from the operators of its own run: what a dry run adds to its bytes."""

from dataclasses import replace

from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.rank_part import headed
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS
from planner.planning.evidence.bands import time_sides
from planner.planning.predict import paged_overflow
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from planner.speed import cluster_of
from planner.speed.host import host_of
from planner.speed.operators import Program
from planner.speed.rank_timeline import rank_program
from planner.speed.rates import setup_rates
from planner.speed.roofline import conditions_of, load_calibration, throughput_profile
from planner.speed.roofline.bands import Uncertainty, base_of
from planner.speed.several_gpus.collectives import at_spread, link_spread
from planner.speed.sized import run_uncertainty
from planner.speed.timeline import Loop, RunTime, host_notes, loop_of, run_time


def run_speed(
    program: Program, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, *, loop: Loop | None = None
) -> RunTime:
    """The time of a step of `program`, the operators of `setup`, on one card.

    Args:
        loop: what goes around them, that of the setup's stack by default.
    """
    return run_time(program, setup_rates(model, gpu, setup), loop or loop_of(setup), host_of(gpu))


def rank_speed(program: Program, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: Cluster) -> RunTime:
    """The time of a step of `program`, the operators and collectives of a rank of `setup`."""
    each = setup.parallel == "fsdp2" and not setup.defers_reduction
    rates = setup_rates(model, gpu, setup)
    return rank_program(program, rates, cluster, reduces_each=each).time(loop_of(setup), host_of(gpu))


def rank_uncertainty(
    run: RunTime, program: Program, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: Cluster
) -> Uncertainty:
    """How far off `rank_speed` may be: the host and the links are as fast as the machine's."""
    sides: list[tuple[float, ...]] = [(ratio,) for ratio in run.host_sides]
    if not link_spread(cluster.within) == link_spread(cluster.between) == 1.0:
        for side, slow in enumerate((True, False)):
            other = rank_speed(program, model, gpu, setup, at_spread(cluster, slow=slow))
            sides[side] += (other.step_s / run.step_s,)
    base = base_of("operators", gpu, load_calibration(), several=True)
    return Uncertainty(base=base, slower=sides[0], faster=sides[1])


def with_run_speed(
    prediction: Prediction,
    program: Program | None,
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster | None = None,
) -> Prediction:
    """`prediction` with the speed of the run's own operators; without one where they do not say all: of ranks of other
    engines than DDP and FSDP2, objectives that generate, models of single operations of the trainer's own (a dry run
    has transformers'), activations and optimizer states that travel to the host, steps beyond the card's peak."""
    travels = setup.activation_offload or (
        OPTIMIZERS[setup.optimizer].paged and paged_overflow(model, gpu, setup, prediction.peak_device_bytes)
    )
    others = setup.objective_spec.rolls_out or setup.trainer.single_operations
    if program is None or others or travels or gpu.vendor != "NVIDIA":
        return prediction
    if setup.single_gpu:
        run = run_speed(program, model, gpu, setup)
        headed_model = headed(model, setup.objective_spec.head)
        formula = throughput_profile(headed_model, gpu, setup, conditions=conditions_of(setup))
        flops = formula.flops(setup.micro_batch_seqs, setup.accumulation_steps)
        mfu_fraction = formula.mfu_fraction(flops, run.step_s)
        uncertainty = run_uncertainty(run, formula, setup)
    elif _exchanges_alone(setup):
        from planner.speed.several_gpus.speed import layout_step_time  # late: one GPU never needs it

        cluster = cluster_of(gpu, setup, cluster)
        run = rank_speed(program, model, gpu, setup, cluster)
        step = layout_step_time(model, gpu, setup, cluster, conditions=conditions_of(setup))
        mfu_fraction = step.mfu_fraction * step.step_time_s / run.step_s
        uncertainty = rank_uncertainty(run, program, model, gpu, setup, cluster)
        uncertainty = replace(uncertainty, unmeasured=step.uncertainty.unmeasured, judged=step.uncertainty.judged)
    else:
        return prediction
    if mfu_fraction > 1.0:  # no card is so fast: the run left out some of what the step needs
        return prediction
    fraction, sides = time_sides(uncertainty, model, gpu)
    return replace(
        prediction,
        step_time_s=run.step_s,
        tokens_per_s=setup.tokens_per_step / run.step_s,
        time_band_fraction=fraction,
        bands={**prediction.bands, "tokens_per_s": sides},
        mfu_fraction=mfu_fraction,
        time_parts_s=run.parts_s,
        notes=(*prediction.notes, *host_notes(run)),
    )


def _exchanges_alone(setup: TrainSetup) -> bool:
    """Whether all that a rank does beside one GPU's step is what its streams exchange: under tensor and expert
    parallelism DTensor's Python, whose time nobody measured, decides; what is offloaded travels on other streams."""
    alone = setup.data_degree == setup.num_gpus and setup.expert_degree == 1 and not setup.sharded_at_loading
    return alone and setup.parallel in ("ddp", "fsdp2") and setup.offload == "none"
