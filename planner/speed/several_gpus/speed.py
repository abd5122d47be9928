"""The step time of a job on several GPUs: compute of the slowest rank, and what communication adds to it.

Compute is the one-GPU speed model's for the part of the model that a rank holds. Communication is hidden behind compute
where the engine prefetches or reduces in the background, unit by unit; what is not hidden, and a share of what is
(`overlap_cost`), lengthens the step. `layout_profile(...).at(micro, accumulation)` ranks whole spaces.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import exp
from operator import attrgetter
from typing import NamedTuple

from planner.core.notes import risk
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.engines.base import ONE_GPU
from planner.memory.rank_part import rank_parts
from planner.models.spec import ModelSpec
from planner.setup import FIELDS, TrainSetup
from planner.speed.host import SLOW_HOST_BAND, moving_words
from planner.speed.roofline import CURRENT, PARTS, Calibration, Conditions, StepTime
from planner.speed.roofline.bands import Uncertainty, base_of
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.rented import HOST_SPREAD, collated_s
from planner.speed.several_gpus import collectives as offload
from planner.speed.several_gpus.collectives import (
    Collectives,
    at_spread,
    link_rate,
    link_spread,
    pipeline_s,
    wider,
)
from planner.speed.several_gpus.compute import Rank, by_dtensor
from planner.speed.several_gpus.exchange import DataParallel, context_s, experts_s, hand_over_s, tensor_s
from planner.speed.several_gpus.traffic import computed, traffic_of
from planner.speed.sized import ProgramSpeed, ScaledSpeed, program_speed, speed_by_program

LAYOUT_PARTS = (*PARTS, "communication", "bubble", "offload")
"""communication: what of it compute does not hide, and what hiding it costs; bubble: waiting for other pipeline
stages; offload: copies to and from the host, and the optimizer step on its CPUs."""

EXPERT_PARALLEL_BAND = 0.5
"""Half-width of the band of speeds under expert parallelism. Judgement: transformers' own exchange was measured
nowhere; with other kernels six runs were 6 to 16 % slower than counted, one 2.1 times as fast (benchmarks/
dealt_experts.py at e34acc15)."""


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


class Links:
    """What the ranks of one layout exchange, whatever their layers cost.

    Attributes:
        model: the whole of it.
        parts: its distinct parts; `order` says which of them every stage holds.
        wires: data-parallel communication of each part, and the same with offloading in between.
    """

    __slots__ = ("cluster", "collectives", "constants", "model", "order", "parts", "wires")

    def __init__(self, model: ModelSpec, setup: TrainSetup, cluster: Cluster, used: Calibration, stack: Conditions):
        self.cluster, self.constants, self.model = cluster, used.layout_constants, model
        self.collectives = Collectives(cluster, self.constants)
        alike: dict[ModelSpec, int] = {}  # most pipeline stages hold the same
        self.order = [alike.setdefault(part.model, len(alike)) for part in rank_parts(model, setup)]
        self.parts = tuple(alike)
        rates = [0.0] if setup.offload == "none" else [0.0, self.host_rate]
        self.wires = [
            [
                DataParallel(setup, self.collectives, traffic, self.constants, fsdp_1=stack.fsdp_1, host_rate=rate)
                for rate in rates
            ]
            for traffic in [traffic_of(part, setup, stack) for part in self.parts]
        ]

    @property
    def host_rate(self) -> float:
        """Bytes per second between one GPU and its host, one direction."""
        return offload.host_rate(self.cluster, self.constants)


_layout = attrgetter("loss", "checkpointing", "activation_offload", "selective_checkpointing")


class Loop:
    """All setups of a layout that differ only in optimizer, micro-batch and accumulation: the distinct ranks, what each
    waits for, and what follows the last backward."""

    __slots__ = (
        "_after",
        "_collates",
        "_given",
        "_like",
        "_links",
        "_micro_s",
        "_setup",
        "_siblings",
        "_stages",
        "_step_s",
        "order",
        "ranks",
    )  # fmt: skip

    def __init__(
        self,
        links: Links,
        gpu: GpuSpec,
        setup: TrainSetup,
        used: Calibration,
        stack: Conditions,
        like: "Loop | None" = None,
    ) -> None:
        self._given, self._siblings = (gpu, used, stack), {_layout(setup): self}
        self._setup, self._links, self.order = setup, links, links.order
        profiles = [rank.profile for rank in like.ranks] if like is not None else [None] * len(links.parts)
        pairs = zip(links.parts, profiles, strict=True)
        self.ranks: list[Rank] = [Rank(part, gpu, setup, used, stack, profile) for part, profile in pairs]
        families = [rank.profile.family for rank in self.ranks]
        self._micro_s = max(family.trainer_micro_s for family in families)
        self._step_s = max(family.trainer_s for family in families)
        self._collates = any(family.trainer_micro_s for family in families)
        self._like = _program_beside(links.model, gpu, setup) if stack == CURRENT else None
        self._stages: dict[int, list[Stage]] = {}
        self._after: dict[str, Mapping[str, float]] = {}

    def sibling(self, setup: TrainSetup) -> "Loop":
        """The (remembered) loop of a setup with all else the same but what is recomputed, and the loss."""
        key = _layout(setup)
        loop = self._siblings.get(key)
        if loop is None:
            gpu, used, stack = self._given
            loop = self._siblings[key] = Loop(self._links, gpu, setup, used, stack, self)
        return loop

    def at_links(self, *, slow: bool, network: bool = True) -> "Loop":
        """The same with links as slow, or as fast, as they may be; `network`: those between nodes too."""
        gpu, used, stack = self._given
        cluster = at_spread(self._links.cluster, slow=slow, network=network)
        links = Links(self._links.model, self._setup, cluster, used, stack)
        return Loop(links, gpu, self._setup, used, stack, self)

    def at(self, seqs: int) -> list[Stage]:
        """Every distinct rank's micro-batch of so many sequences."""
        stages = self._stages.get(seqs)
        if stages is None:
            pairs = zip(self.ranks, self._links.wires, strict=True)
            stages = self._stages[seqs] = [self._stage(rank, wires, seqs) for rank, wires in pairs]
        return stages

    def _stage(self, rank: Rank, wires: list[DataParallel], seqs: int) -> Stage:
        setup, collectives = self._setup, self._links.collectives
        # a rank computes what one GPU does, whose program knows the host and experts' rows; fits are of older stacks
        micro = rank.micro(seqs, self._like.ratio_to_formula(seqs) if self._like is not None else 1.0)
        forward, backward = tensor_s(rank.part, setup, collectives, seqs)
        ahead, back = context_s(rank.part, setup, collectives, seqs)
        forward, backward = forward + ahead, backward + back
        ahead, back = experts_s(rank.part, setup, collectives, rank.bandwidth, seqs)
        forward, backward = forward + ahead, backward + back
        if len(self.order) > 1:
            over = hand_over_s(setup, rank.part.hidden_size, collectives, seqs)
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

    def after(self, optimizer: str) -> Mapping[str, float]:
        """Seconds by part after the last backward: the longest of the ranks' optimizer steps, and the trainer."""
        by_part = self._after.get(optimizer)
        if by_part is None:
            each = [
                self._rank_after(rank, wires, optimizer)
                for rank, wires in zip(self.ranks, self._links.wires, strict=True)
            ]
            longest = max(reversed(each), key=lambda parts: sum(parts.values()))
            by_part = self._after[optimizer] = {**longest, "trainer": self._step_s}
        return by_part

    def _rank_after(self, rank: Rank, wires: list[DataParallel], optimizer: str) -> dict[str, float]:
        parts = {"communication": wires[0].step_s()}
        if self._setup.offload != "none":
            return {**parts, "offload": self._offloaded_s(rank, optimizer)}
        gpu_s, host_s = rank.optimizer_s(optimizer)
        return {**parts, "optimizer": gpu_s, "host": max(host_s - gpu_s, 0.0)}

    def _offloaded_s(self, rank: Rank, optimizer: str) -> float:
        links, setup = self._links, self._setup.replace_trusted(optimizer=optimizer)
        seconds = offload.optimizer_s(setup, rank.traffic.trained_params / setup.shards, links.cluster, links.constants)
        return seconds + offload.back_s(setup, rank.traffic.gradient_bytes / setup.shards, links.host_rate)

    def step_s(self, optimizer: str, micro_batch_seqs: int, steps: int) -> float:
        """Seconds of an optimizer step of so many micro-batches."""
        stages = self.at(micro_batch_seqs)
        index = _slowest(stages)
        seconds = self.total_s(stages, steps) + sum(self.after(optimizer).values())
        seconds += self.between_s(micro_batch_seqs, steps)
        seconds += self.ranks[index].profile.generation_s(micro_batch_seqs * steps, self._setup.data_degree)
        return seconds + (steps - 1) * self.ranks[index].add_s + sum(stages[index].reducing.values())

    def between_s(self, micro_batch_seqs: int, steps: int) -> float:
        """Seconds in which a rank makes its next step's batch."""
        setup = self._setup
        tokens = micro_batch_seqs * setup.seqs_per_sample * setup.seq_len_tokens * steps
        return collated_s(tokens) if self._collates else 0.0

    def tokens_per_s(self, optimizer: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
        """Tokens/s of all GPUs together at every (micro-batch, accumulation)."""
        setup = self._setup
        tokens = setup.seqs_per_sample * setup.seq_len_tokens * setup.data_degree
        return [micro * tokens * steps / self.step_s(optimizer, micro, steps) for micro, steps in pairs]


LINK_MATTERS = 1.5
"""How many times its own band a step's band by the links within a node must be for people to be told that these
decide."""
DTENSOR_BAND = 0.25
"""The same of the host's part under tensor parallelism, whose dispatch was timed on a CPU alone: of two runs that wait
for it one took 15 % less and one 15 % longer than said (tp_benchmark)."""


class LayoutProfile:
    """Step times of all setups that differ only in micro-batch and accumulation."""

    __slots__ = ("_calibration", "_cluster", "_loop", "_setup")

    def __init__(self, loop: Loop, setup: TrainSetup, cluster: Cluster, used: Calibration) -> None:
        self._loop, self._setup, self._cluster, self._calibration = loop, setup, cluster, used

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds, and tokens/s of all GPUs together."""
        optimizer, pair = self._setup.optimizer, (micro_batch_seqs, accumulation_steps)
        return self._loop.step_s(optimizer, *pair), self._loop.tokens_per_s(optimizer, [pair])[0]

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this profile: the parts are those of the slowest rank."""
        loop, steps = self._loop, setup.accumulation_steps
        stages = loop.at(setup.micro_batch_seqs)
        index = _slowest(stages)
        parts: dict[str, float] = {}
        for position in loop.order if setup.parallel == "device-map" else (index,):
            _add(parts, stages[position].parts, steps)
        if setup.pipeline_degree > 1:
            parts["bubble"] = loop.total_s(stages, steps) - sum(parts.values())
        _add(parts, stages[index].reducing)
        _add(parts, {"optimizer": (steps - 1) * loop.ranks[index].add_s})
        _add(parts, loop.after(setup.optimizer))
        _add(parts, {"trainer": loop.between_s(setup.micro_batch_seqs, steps)})
        profile = loop.ranks[index].profile
        if generation := profile.generation_s(setup.micro_batch_seqs * steps, setup.data_degree):
            parts["generation"] = generation
        total = sum(parts.values())
        flops = profile.flops(setup.micro_batch_seqs, steps)
        expert_band = EXPERT_PARALLEL_BAND if setup.expert_degree > 1 else 0.0
        unmeasured = profile.unmeasured_fraction(setup.micro_batch_seqs, steps, parts)
        unmeasured += SLOW_HOST_BAND * parts.get("offload", 0.0) / total
        unmeasured += DTENSOR_BAND * by_dtensor(setup) * parts.get("host", 0.0) / total
        more_s = partial(loop.ranks[index].with_host_s, parts, setup.micro_batch_seqs, steps)
        gpu, used = self._cluster.gpu, self._calibration
        base, gained = base_of("formula", gpu, used, several=True), 1 + profile.gained_s(setup) / total
        return StepTime(
            step_time_s=total,
            parts_s=parts,
            flops=flops,
            mfu_fraction=profile.mfu_fraction(flops, total),
            tokens_per_s=setup.tokens_per_step / total,
            uncertainty=Uncertainty(
                base=base,
                slower=(1 + more_s(HOST_SPREAD) / total, self._at_links(setup, total, slow=True), gained),
                faster=(1 + more_s(1 / HOST_SPREAD) / total, self._at_links(setup, total, slow=False), 1 / gained),
                unmeasured=unmeasured,
                judged=max(profile.judged, expert_band),
            ),
            notes=(*profile.notes(), *self._notes(), *self._link_note(setup, total, exp(base.width) - 1)),
        )

    def _link_note(self, setup: TrainSetup, total: float, band: float) -> list[str]:
        if self._cluster.within.kind != "pcie":
            return []
        if wider(band, self._at_links(setup, total, slow=True, network=False)) <= LINK_MATTERS * band:
            return []
        rate = link_rate(self._cluster, self._cluster.within, self._calibration.layout_constants)
        return [
            risk(
                f"how fast PCIe is between these GPUs decides the speed, and only the machine says: {rate / 1e9:.0f} "
                "GB/s are counted, others reach a third to three times that; --interconnect 6GB/s gives what nccl-tests"
                " measures (busbw)"
            )
        ]

    def _at_links(self, setup: TrainSetup, total: float, *, slow: bool, network: bool = True) -> float:
        """How many times as long the step takes with links as slow, or as fast, as they may be."""
        if link_spread(self._cluster.within) == link_spread(self._cluster.between) == 1.0:
            return 1.0
        other = self._loop.at_links(slow=slow, network=network)
        return other.step_s(setup.optimizer, setup.micro_batch_seqs, setup.accumulation_steps) / total

    def _notes(self) -> list[str]:
        if self._setup.expert_degree > 1:
            return [
                "Nobody has published a speed of experts spread as here: their exchange of tokens is counted at the "
                "links' rate with balanced routing, the band is judgement. Fused kernels (DeepEP) are about twice as "
                "fast."
            ]
        if self._setup.offload == "none":
            return []
        moved = f"{offload.optimizer_bytes(self._setup)} bytes a parameter"
        rate = moving_words(self._calibration.layout_constants.cpu_adam_bytes_per_s)
        return [f"The optimizer runs on the CPUs of each node: {moved}, {rate}."]


def _program_beside(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ProgramSpeed | ScaledSpeed | None:
    """The speeds by program of what a rank computes, or where an engine's own types have none, of what one GPU does
    (with a whole sequence where this is cut): found once for all that differ in what no micro-batch asks. None of
    distributed experts."""
    if setup.expert_degree > 1:
        return None
    setup = setup.replace_trusted(micro_batch_seqs=1, accumulation_steps=1, optimizer="sgd")
    inner, alone = computed(setup), setup.replace_trusted(**ONE_GPU, context_degree=1)
    key = "program beside", id(gpu), inner, alone

    def timed_program(spec: ModelSpec) -> tuple[GpuSpec, ProgramSpeed | ScaledSpeed | None]:
        by_program = program_speed(spec, gpu, inner) or speed_by_program(spec, gpu, alone)
        return gpu, by_program  # held, so that no other object can take its identity

    return model.once(key, timed_program)[1]


def _slowest(stages: list[Stage]) -> int:
    if len(stages) == 1:
        return 0
    return max(range(len(stages)), key=lambda index: stages[index].total_s)


def _add(parts: dict[str, float], more: Mapping[str, float], times: int = 1) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + seconds * times


_OPEN = ("optimizer", "micro_batch_seqs", "accumulation_steps")
_OF_LAYERS = ("attention", "kernels", "checkpointing", "activation_offload", "selective_checkpointing", "loss")
_loop_key = attrgetter(*[name for name in FIELDS if name not in _OPEN], "extra_forwards")
_links_key = attrgetter(*[name for name in FIELDS if name not in (*_OPEN, *_OF_LAYERS)], "extra_forwards")


def layout_loop(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, cluster: Cluster, used: Calibration, conditions: Conditions
) -> Loop:
    """The loop of a setup on a cluster: the same for every optimizer, micro-batch and accumulation."""
    parties = ("spread", id(gpu), id(cluster), id(used), conditions)

    def links(spec: ModelSpec) -> Links:
        spec.once(parties, lambda _: (gpu, cluster, used))  # held, so that no other object can take their identity
        return Links(spec, setup, cluster, used, conditions)

    def loop(spec: ModelSpec) -> Loop:
        return Loop(spec.once((*parties, _links_key(setup)), links), gpu, setup, used, conditions)

    return model.once((*parties, "loop", _loop_key(setup)), loop)


def layout_profile(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    conditions: Conditions = CURRENT,
) -> LayoutProfile:
    """The family of `setup` on a cluster, for every micro-batch and accumulation of it."""
    used = calibration if calibration is not None else load_calibration()
    return LayoutProfile(layout_loop(model, gpu, setup, cluster, used, conditions), setup, cluster, used)


def layout_step_time(
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
    profile = layout_profile(model, gpu, setup, cluster, calibration=calibration, conditions=conditions)
    return profile.step_time(setup)
