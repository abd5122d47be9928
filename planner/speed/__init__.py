"""The speed of a setup on any number of GPUs: by its structure's step program, by the one-GPU model's closed forms
where it has none, or that of a layout with its communication."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from planner.hardware.gpu import GpuSpec
from planner.memory.rank_part import headed
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline import StepTime, ThroughputProfile, conditions_of, load_calibration, throughput_profile
from planner.speed.sized import PaddedSpeed, ProgramSpeed, ScaledSpeed, speed_by_program
from planner.speed.step_program import programmed_kind, programs_of

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it


Pairs = Sequence[tuple[int, int]]
"""(micro-batch, accumulation)."""


class Speeds(Protocol):
    """The speeds of setups that differ only in optimizer, micro-batch and accumulation."""

    def tokens_per_s(self, optimizer: str, pairs: Pairs, /) -> list[float]:
        """Tokens/s of all GPUs at every pair."""


class SpeedProfile(Protocol):
    """Step times of all setups that differ only in micro-batch and accumulation."""

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds, and tokens/s of all GPUs together."""

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this profile."""


def speed_profile(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: "Cluster | None" = None) -> SpeedProfile:
    """The profile of a setup.

    Args:
        cluster: None: one GPU, or the cluster that the setup's number of GPUs suggests.
    """
    if setup.single_gpu:
        model = headed(model, setup.objective_spec.head)
        by_program = _by_program(model, gpu, setup)
        return by_program or throughput_profile(model, gpu, setup, conditions=conditions_of(setup))
    from planner.speed.several_gpus.speed import layout_profile  # one GPU never needs it

    conditions = conditions_of(setup)
    return layout_profile(model, gpu, setup, cluster_of(gpu, setup, cluster), conditions=conditions)


def _by_program(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProgramSpeed | ScaledSpeed | PaddedSpeed | None:
    """The speeds of a structure that has a step program, or nearly."""
    full = setup.replace_trusted(uneven=False) if setup.pads else setup
    if programs_of(model, setup.objective) is None or not programmed_kind(full.replace_trusted(compile=False)):
        return None
    speed = speed_by_program(model, gpu, full)
    if speed is None or full is setup:
        return speed
    closed = (throughput_profile(model, gpu, each, conditions=conditions_of(each)) for each in (setup, full))
    return PaddedSpeed(speed, *closed)


def family_speeds(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: "Cluster | None" = None,
    like: Speeds | None = None,
) -> Speeds:
    """The speeds of a setup with any optimizer, micro-batch and accumulation.

    Args:
        like: those of a setup with all else the same but what is recomputed and the loss, where some are at hand.
    """
    if setup.single_gpu:
        model = headed(model, setup.objective_spec.head)
        by_program = _by_program(model, gpu, setup)
        if by_program is not None:
            return by_program
        if isinstance(like, ThroughputProfile):
            return like.sibling(setup)
        return throughput_profile(model, gpu, setup, conditions=conditions_of(setup))
    from planner.speed.several_gpus.speed import Loop, layout_loop  # one GPU never needs it

    if isinstance(like, Loop):
        return like.sibling(setup)
    cluster, used = cluster_of(gpu, setup, cluster), load_calibration()
    return layout_loop(model, gpu, setup, cluster, used, conditions_of(setup))


def cluster_of(gpu: GpuSpec, setup: TrainSetup, cluster: "Cluster | None") -> "Cluster":
    """The cluster that is given, or, where it does not hold the setup's GPUs, the one that their number suggests."""
    if cluster is not None and cluster.num_gpus == setup.num_gpus:
        return cluster
    from planner.hardware.cluster import make_cluster  # one GPU never needs it

    return make_cluster(gpu, setup.num_gpus)
