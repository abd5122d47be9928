"""The step time of a job on several GPUs: compute of the slowest rank, and what communication adds to it.

Compute is the one-GPU speed model's for the part of the model that a rank holds. Communication is hidden behind compute
where the engine prefetches or reduces in the background, unit by unit; what is not hidden, and a share of what is
(`overlap_cost`), lengthens the step. `spread_profile(...).at(micro, accumulation)` ranks whole spaces.
"""

from collections.abc import Mapping
from typing import NamedTuple

from planner.choices.kernels import speed_band
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.parallel import offload
from planner.parallel.collectives import Collectives
from planner.parallel.compute import Rank
from planner.parallel.exchange import DataParallel, context_s, experts_s, hand_over_s, tensor_s
from planner.parallel.schedule import pipeline_s
from planner.setup import SPREAD_FIELDS, TrainSetup
from planner.throughput import CURRENT, PARTS, Calibration, Conditions, StepTime
from planner.throughput.calibration import load_calibration
from planner.throughput.family import family_key
from planner.throughput.types import WITHOUT_GRADIENTS

SPREAD_PARTS = (*PARTS, "communication", "bubble", "offload")
"""communication: what of it compute does not hide, and what hiding it costs; bubble: waiting for other pipeline
stages; offload: copies to and from the host, and the optimizer step on its CPUs."""

DEALT_BAND = 0.5
"""Half-width of the band of speeds with experts dealt out over GPUs. Judgement: transformers' own exchange was measured
nowhere; with other kernels six runs were 6 to 16 % slower than counted, one 2.1 times as fast (benchmarks/
dealt_experts.py)."""


class Stage(NamedTuple):
    """One micro-batch on one rank with all that it waits for.

    Attributes:
        parts: seconds by part, communication of every micro-batch included.
        forward_s, backward_s: their sum, split.
        reducing: further seconds by part of the micro-batch whose gradients are reduced.
    """

    parts: Mapping[str, float]
    forward_s: float
    backward_s: float
    reducing: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class Loop:
    """The micro-batches of a spread, whatever the optimizer: the distinct ranks and what each waits for.

    Attributes:
        ranks: one of each kind; `order` says which kind every stage is.
        wires: their data-parallel communication, and the same with offloading in between.
    """

    __slots__ = ("_collectives", "_micro_s", "_setup", "_stages", "order", "ranks", "wires")

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: Cluster, used: Calibration, stack: Conditions
    ) -> None:
        constants = used.spread_constants
        self._setup, self._collectives = setup, Collectives(cluster, constants)
        self._micro_s = used.constants_for(gpu).micro_overhead_s if stack.trainer_overhead else 0.0
        alike: dict[ModelSpec, int] = {}  # most pipeline stages hold the same
        self.order = [alike.setdefault(part.model, len(alike)) for part in rank_parts(model, setup)]
        self.ranks = [Rank(part, gpu, setup, used, stack) for part in alike]
        rates = [0.0] if setup.offload == "none" else [0.0, offload.host_rate(cluster, constants)]
        self.wires = [
            [
                DataParallel(setup, self._collectives, rank.traffic, constants, fsdp_1=stack.fsdp_1, host_rate=rate)
                for rate in rates
            ]
            for rank in self.ranks
        ]
        self._stages: dict[int, list[Stage]] = {}

    def at(self, seqs: int) -> list[Stage]:
        """Every distinct rank's micro-batch of so many sequences."""
        found = self._stages.get(seqs)
        if found is None:
            pairs = zip(self.ranks, self.wires, strict=True)
            found = self._stages[seqs] = [self._stage(rank, wires, seqs) for rank, wires in pairs]
        return found

    def _stage(self, rank: Rank, wires: list[DataParallel], seqs: int) -> Stage:
        setup = self._setup
        micro = rank.micro(seqs)
        forward, backward = tensor_s(rank.part, setup, self._collectives, seqs)
        ahead, back = context_s(rank.part, setup, self._collectives, seqs)
        forward, backward = forward + ahead, backward + back
        ahead, back = experts_s(rank.part, setup, self._collectives, rank.bandwidth, seqs)
        forward, backward = forward + ahead, backward + back
        if len(self.order) > 1:
            over = hand_over_s(setup, rank.part.hidden_size, self._collectives, seqs)
            forward, backward = forward + over, backward + over
        exposed = wires[0].micro(micro, seqs)
        parts = {**micro.parts, "trainer": self._micro_s, "communication": forward + backward + exposed.quiet_s}
        reducing = {"communication": exposed.reducing_s - exposed.quiet_s}
        if len(wires) > 1:  # what the copies to and from the host add to the communication
            hosted = wires[1].micro(micro, seqs)
            parts["offload"] = hosted.quiet_s - exposed.quiet_s
            reducing["offload"] = hosted.reducing_s - hosted.quiet_s - reducing["communication"]
        forward_s = micro.forward_s + forward
        return Stage(parts, forward_s, sum(parts.values()) - forward_s, reducing)

    def total_s(self, stages: list[Stage], steps: int) -> float:
        """Seconds of `steps` micro-batches: in turn, through the GPUs one by one, or through a pipeline."""
        if len(self.order) == 1:
            return steps * stages[0].total_s
        if self._setup.parallel == "device-map":
            return steps * sum(stages[index].total_s for index in self.order)
        forward = [stages[index].forward_s for index in self.order]
        backward = [stages[index].backward_s for index in self.order]
        return pipeline_s(self._setup.pipeline_schedule, forward, backward, steps)


class SpreadProfile:
    """Step times of all setups that differ only in micro-batch and accumulation."""

    __slots__ = ("_calibration", "_cluster", "_loop", "_setup", "_step_parts", "_step_s")

    def __init__(self, loop: Loop, setup: TrainSetup, cluster: Cluster, used: Calibration, stack: Conditions) -> None:
        self._loop, self._setup, self._cluster, self._calibration = loop, setup, cluster, used
        step_s = used.constants_for(cluster.gpu).step_overhead_s
        self._step_parts = self._after(step_s if stack.trainer_overhead else 0.0)
        self._step_s = sum(self._step_parts.values())

    def _after(self, trainer_s: float) -> dict[str, float]:
        """Seconds by part after the last backward: the longest of the ranks' optimizer steps, and the trainer."""
        parts: dict[str, float] = {}
        for rank, wires in zip(self._loop.ranks, self._loop.wires, strict=True):
            mine = {"communication": wires[0].step_s()}
            if self._setup.offload != "none":
                mine["offload"] = self._offloaded_s(rank)
            else:
                gpu_s, host_s = rank.optimizer_s(self._setup.optimizer)
                mine |= {"optimizer": gpu_s, "host": max(host_s - gpu_s, 0.0)}
            if sum(mine.values()) >= sum(parts.values()):
                parts = mine
        return {**parts, "trainer": trainer_s}

    def _offloaded_s(self, rank: Rank) -> float:
        setup, cluster, constants = self._setup, self._cluster, self._calibration.spread_constants
        seconds = offload.optimizer_s(setup, rank.traffic.trained_params / setup.shards, cluster, constants)
        share = rank.traffic.gradient_bytes / setup.shards
        return seconds + offload.back_s(setup, share, offload.host_rate(cluster, constants))

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds, and tokens/s of all GPUs together."""
        loop, setup = self._loop, self._setup
        stages = loop.at(micro_batch_seqs)
        index = _slowest(stages)
        step = (
            loop.total_s(stages, accumulation_steps) + self._step_s + (accumulation_steps - 1) * loop.ranks[index].add_s
        )
        step += sum(stages[index].reducing.values())
        seqs = micro_batch_seqs * setup.seqs_per_sample
        tokens = seqs * setup.seq_len_tokens * accumulation_steps * setup.data_degree
        return step, tokens / step

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this profile: the parts are those of the slowest rank."""
        loop, steps = self._loop, setup.accumulation_steps
        stages = loop.at(setup.micro_batch_seqs)
        index = _slowest(stages)
        parts: dict[str, float] = {}
        for turn in loop.order if setup.parallel == "device-map" else (index,):
            _add(parts, stages[turn].parts, steps)
        if setup.pipeline_degree > 1:
            parts["bubble"] = loop.total_s(stages, steps) - sum(parts.values())
        _add(parts, stages[index].reducing)
        _add(parts, {"optimizer": (steps - 1) * loop.ranks[index].add_s})
        _add(parts, self._step_parts)
        total = sum(parts.values())
        profile = loop.ranks[index].profile
        flops = profile.flops(setup.micro_batch_seqs, steps)
        band = max(self._calibration.band_for(self._cluster.gpu), DEALT_BAND if setup.expert_degree > 1 else 0.0)
        unmeasured = 0.0 if setup.aim.supervised else (parts["loss"] + parts.get(WITHOUT_GRADIENTS, 0.0)) / total
        return StepTime(
            step_time_s=total,
            parts_s=parts,
            flops=flops,
            mfu_fraction=profile.mfu_fraction(flops, total),
            tokens_per_s=setup.tokens_per_step / total,
            band_fraction=speed_band(
                max(band, self._calibration.bands.get("spread", band)),
                setup.kernels,
                self._cluster.gpu.key,
                compiled=setup.compiled,
            )
            + unmeasured,
            notes=(*profile.notes(), *self._notes()),
        )

    def _notes(self) -> list[str]:
        if self._setup.expert_degree > 1:
            return [
                "Nobody has published a speed of transformers' own exchange of tokens: it is counted at the links' "
                "rate with balanced routing, the band is judgement. Fused kernels (DeepEP) are about twice as fast."
            ]
        if self._setup.offload == "none":
            return []
        rate = self._calibration.spread_constants.cpu_adam_bytes_per_s
        return [f"The optimizer runs on the CPUs of each node, taken to move {rate / 1e9:.0f} GB/s."]


def _slowest(stages: list[Stage]) -> int:
    return max(range(len(stages)), key=lambda index: stages[index].total_s)


def _add(parts: dict[str, float], more: Mapping[str, float], times: int = 1) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + seconds * times


def spread_profile(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    conditions: Conditions = CURRENT,
) -> SpreadProfile:
    """The family of `setup` on a cluster: the same answer object for every micro-batch and accumulation of it."""
    used = calibration if calibration is not None else load_calibration()
    parties: tuple[object, ...] = ("spread", id(gpu), id(cluster), id(used))
    model.once(parties, lambda _: (gpu, cluster, used))  # held, so that no other object can take their identity
    key = (*parties, conditions, family_key(setup), setup.objective, setup.loss, setup.num_gpus, setup.parallel)
    key += tuple(getattr(setup, name) for name in SPREAD_FIELDS)
    loop = model.once(key, lambda one: Loop(one, gpu, setup, cluster, used, conditions))
    return model.once((*key, setup.optimizer), lambda _: SpreadProfile(loop, setup, cluster, used, conditions))


def spread_step_time(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    conditions: Conditions = CURRENT,
) -> StepTime:
    """Predicted time of one optimizer step of a job on several GPUs; `tokens_per_s` is of all of them.

    Measured: docs/accuracy/multi-gpu.md.
    """
    profile = spread_profile(model, gpu, setup, cluster, calibration=calibration, conditions=conditions)
    return profile.step_time(setup)
