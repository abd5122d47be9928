"""`Rank`: what one rank computes, by the one-GPU speed model on the part of the model that it holds."""

from collections.abc import Mapping
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline import Calibration, Conditions, throughput_profile
from planner.speed.roofline.family import GRADIENT_ADD_PASSES
from planner.speed.roofline.profile import ThroughputProfile
from planner.speed.roofline.types import WITHOUT_GRADIENTS
from planner.speed.several_gpus.traffic import Traffic, computed, reduces_each, traffic_of

DTENSOR_HOST = {False: (6.5, 4.1), True: (9.0, 5.9)}
"""Whether the residual stream is cut too -> how many times as long the host takes for layers whose matrices tensor
parallelism cuts, without checkpointing and with it (of some layers in proportion): every operator on them is dispatched
by DTensor. Processor time of Qwen3's and Llama's layers cut in eight (6.0 and 7.0; 3.8 and 4.5; 7.9 and 10.1; 5.2 and
6.6 times that of whole ones), torch 2.13, a fake process group, 30 November 2026."""


def by_dtensor(setup: TrainSetup) -> bool:
    """Whether the host waits for DTensor's dispatch: DeepSpeed's layers are none, and compiled graphs dispatch none."""
    return setup.tensor_degree > 1 and not setup.zero and not setup.compiled


class Micro(NamedTuple):
    """One micro-batch on one rank, without communication.

    Attributes:
        parts: GPU seconds by part, host waiting included.
        forward_s, backward_s: its wall time (the loss is in both), without forwards that keep no gradients;
            recomputation is backward.
    """

    parts: Mapping[str, float]
    forward_s: float
    backward_s: float


class Rank:
    """One rank's part of the job: its compute, its optimizer step, and what it would put on the wire.

    Attributes:
        profile: the one-GPU profile of the part.
        traffic: bytes of its weights and gradients.
        add_s: adding one micro-batch's gradients to the sum.
    """

    __slots__ = ("_host_s", "_reduces_each", "_setup", "_speed", "add_s", "part", "profile", "traffic")

    def __init__(
        self,
        part: ModelSpec,
        gpu: GpuSpec,
        setup: TrainSetup,
        calibration: Calibration,
        conditions: Conditions,
        like: ThroughputProfile | None = None,
    ) -> None:
        self._setup, self.part = setup, part
        inner = computed(setup, conditions)
        self.profile: ThroughputProfile = (
            like.sibling(inner)
            if like is not None
            else throughput_profile(part, gpu, inner, calibration=calibration, conditions=conditions)
        )
        self._speed = self.profile.speed
        self.traffic: Traffic = traffic_of(part, setup, conditions)
        host = self.profile.family.host_s
        if by_dtensor(setup):
            plain, checkpointed = DTENSOR_HOST[setup.stream_degree > 1]
            num = -(-part.num_layers // setup.checkpointing) if setup.checkpointing else 0
            host *= plain + (checkpointed - plain) * num / max(1, part.num_layers)
        if setup.parallel == "dp":  # one process: Python issues the kernels of all GPUs, one after another
            host *= setup.num_gpus
        if setup.parallel in ("zero3", "fsdp2"):
            gathers = 3 if setup.reshard_after_forward else 2  # forward, backward, and the reduction
            units = self.traffic.layers + 1 + self.traffic.small_units
            host += units * gathers * calibration.layout_constants.unit_host_s
        self._host_s = host
        self._reduces_each = reduces_each(setup, fsdp_1=conditions.fsdp_1)
        self.add_s = self._add()

    def optimizer_s(self, optimizer: str) -> tuple[float, float]:
        """GPU and host seconds of the optimizer step over this rank's share of what is trained.

        ZeRO keeps the fp32 masters of its share in one flat tensor per group; FSDP2 steps each tensor's shard, in fp32
        where Accelerate upcast it (mixed precision).
        """
        family, setup = self.profile.family, self._setup
        size, tensors = family.trained_bytes, family.trained_tensors
        if setup.zero:
            size, tensors = 4, 2
        elif setup.parallel == "fsdp2" and setup.autocast_dtype:
            size = 4
        return self._speed.optimizer_s(optimizer, self._stepped(setup.shards), size, tensors, scaled=setup.scales_loss)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the GPU's memory, as reached."""
        return self._speed.bandwidth

    def _stepped(self, shards: int) -> float:
        """Trained elements of this rank's share: a part's experts that are distributed are cut over fewer ranks."""
        more = (self._setup.expert_degree - 1) * (shards > 1) * self.part.num_expert_parallel_weights
        return (self.profile.family.trained_params + more) / shards

    def _add(self) -> float:
        """The whole gradient, or this rank's share where each micro-batch's is reduced."""
        family = self.profile.family
        shards = self._setup.shards if self._reduces_each else 1
        return GRADIENT_ADD_PASSES * family.trained_params * family.trained_bytes / shards / self._speed.bandwidth

    def micro(self, seqs: int, longer: float = 1.0) -> Micro:
        """Compute of one micro-batch, GPU and host joined, so many times as long as counted."""
        busy_parts = self.profile.micro_parts(seqs)
        busy_parts["loss"] += self._gathered_logits_s(seqs)
        busy_parts = {name: longer * seconds for name, seconds in busy_parts.items()}
        busy = sum(busy_parts.values())
        wall = self._wall_s(busy, seqs, longer)
        without_gradients = busy_parts.get(WITHOUT_GRADIENTS, 0.0)
        forward = (busy - without_gradients - busy_parts["recompute"]) * (
            1 / 3 if self._setup.method == "full" else 0.4
        )
        scale = wall / busy if busy else 0.0
        return Micro({**busy_parts, "host": wall - busy}, scale * forward, scale * (busy - without_gradients - forward))

    def _wall_s(self, busy_s: float, seqs: int, host_scale: float) -> float:
        """Seconds of a micro-batch whose device is busy for so many, its host so many times slower than counted."""
        power, host = self.profile.family.work.power, self._host_s + self.profile.encoder_host_s(seqs)
        return float((busy_s**power + (host_scale * host) ** power) ** (1.0 / power))

    def with_host_s(self, parts: Mapping[str, float], seqs: int, steps: int, host_scale: float) -> float:
        """Seconds that a host so many times slower adds to a step of such parts."""
        busy_s = sum(self.profile.micro_parts(seqs).values())
        more = steps * (self._wall_s(busy_s, seqs, host_scale) - self._wall_s(busy_s, seqs, 1.0))
        return more + (host_scale - 1) * parts.get("trainer", 0.0)

    def _gathered_logits_s(self, seqs: int) -> float:
        """A head split by vocabulary gathers its output: every rank runs the loss chain over all logits."""
        head, ways = self.part.head, self._setup.tensor_degree
        if head is None or ways == 1 or self.part.tied or self._setup.stream_degree > 1:
            return 0.0
        dtypes = self.profile.family.dtypes
        others = (ways - 1) * head.out_features
        tokens = seqs * self._setup.seq_len_tokens
        return self._speed.loss_chain_s(self._setup.loss, dtypes.autocast or dtypes.table, tokens, others)
