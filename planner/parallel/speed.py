"""The step time of a job on several GPUs: compute of the slowest rank, and what communication adds to it.

Compute is the one-GPU speed model's for the part of the model that a rank holds. Communication is hidden behind compute
where the engine prefetches or reduces in the background, unit by unit; what is not hidden, and a share of what is
(`overlap_cost`), lengthens the step. `spread_profile(...).at(micro, accumulation)` ranks whole spaces.
"""

from collections.abc import Mapping
from typing import NamedTuple

from planner.cluster import Cluster
from planner.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES
from planner.models.spec import ModelSpec
from planner.parallel.collectives import Collectives, Group, group_of
from planner.parallel.traffic import Traffic, traffic_of, wire_setup
from planner.setup import TrainSetup
from planner.throughput import CURRENT, PARTS, Calibration, Conditions, StepTime, speed_model, throughput_profile
from planner.throughput.calibration import SpreadConstants, load_calibration
from planner.throughput.profile import GRADIENT_ADD_PASSES, ThroughputProfile

SPREAD_PARTS = (*PARTS, "communication", "bubble", "offload")
"""communication: what of it compute does not hide, and what hiding it costs; bubble: waiting for other pipeline
stages or for the GPU whose turn it is; offload: copies to and from the host and its optimizer."""
DDP_BUCKET_BYTES = 25 * 1024 * 1024
ZERO_BUCKET_ELEMENTS = 5e8
_FORWARD_PART = {"attention": 1 / 3.5, "elementwise": 0.35, "lora": 1 / 3, "dequantization": 0.5, "loss": 1 / 3}


class Micro(NamedTuple):
    """One micro-batch on one rank, without communication.

    Attributes:
        parts: GPU seconds by part, host waiting included.
        forward_s, backward_s: its wall time (the loss is in both); recomputation is backward.
    """

    parts: Mapping[str, float]
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.forward_s + self.backward_s


class Exposed(NamedTuple):
    """Communication of one micro-batch that lengthens it: without and with the reduction of gradients."""

    quiet_s: float
    reducing_s: float


class Rank:
    """One rank's part of the job: its compute, its traffic, its optimizer."""

    __slots__ = ("_constants", "_host_s", "_profile", "_setup", "_speed", "optimizer_s", "traffic")

    def __init__(
        self,
        part: ModelSpec,
        gpu: GpuSpec,
        setup: TrainSetup,
        calibration: Calibration,
        conditions: Conditions,
    ) -> None:
        self._setup = setup
        self._constants = calibration.spread_constants
        self._speed = speed_model(part, gpu, calibration=calibration, conditions=conditions)
        self._profile: ThroughputProfile = throughput_profile(
            part, gpu, wire_setup(setup), calibration=calibration, conditions=conditions
        )
        self.traffic: Traffic = traffic_of(part, setup)
        self._host_s = self._profile.family.host_s + self._unit_host_s()
        self.optimizer_s = self._optimizer()

    @property
    def profile(self) -> ThroughputProfile:
        """The one-GPU profile of the part."""
        return self._profile

    def _unit_host_s(self) -> float:
        """Host time of gathering and freeing units: twice forward and backward, with the reduction."""
        if self._setup.parallel not in ("zero3", "fsdp2"):
            return 0.0
        gathers = 3 if self._setup.reshard_after_forward else 2
        return (self.traffic.layers + 1) * gathers * self._constants.unit_host_s

    def _optimizer(self) -> tuple[float, float]:
        """GPU and host seconds of the optimizer step over this rank's share of what is trained.

        ZeRO keeps the fp32 masters of its share in one flat tensor per group; FSDP2 steps each tensor's shard, in fp32
        where Accelerate upcast it (mixed precision).
        """
        family, setup = self._profile.family, self._setup
        size, tensors = family.trained_bytes, family.trained_tensors
        if setup.parallel.startswith("zero"):
            size, tensors = 4, 2
        elif setup.parallel == "fsdp2" and setup.autocast_dtype:
            size = 4
        return self._speed.optimizer_s(setup.optimizer, family.trained_params / setup.shards, size, tensors)

    def micro(self, seqs: int) -> Micro:
        """Compute of one micro-batch, GPU and host joined."""
        busy_parts = self._profile.micro_parts(seqs)
        busy = sum(busy_parts.values())
        power = self._profile.family.power
        wall = float((busy**power + self._host_s**power) ** (1.0 / power))
        matmul = 1 / 3 if self._setup.method == "full" else 1 / 2
        forward = busy_parts["matmul"] * matmul
        forward += sum(busy_parts[name] * share for name, share in _FORWARD_PART.items())
        parts = {**busy_parts, "host": wall - busy}
        return Micro(parts, forward * wall / busy, wall - forward * wall / busy)

    def add_s(self) -> float:
        """Adding a micro-batch's gradients to the sum: whole, or this rank's share where each one is reduced."""
        family = self._profile.family
        shards = self._setup.shards if self._setup.parallel in ("zero2", "zero3") else 1
        moved = GRADIENT_ADD_PASSES * family.trained_params * family.trained_bytes
        return moved / shards / self._speed.bandwidth


class DataParallel:
    """Communication of the data-parallel copies: what one micro-batch and one step expose."""

    __slots__ = ("_collectives", "_constants", "_replicas", "_setup", "_shards", "_traffic")

    def __init__(
        self, setup: TrainSetup, collectives: Collectives, traffic: Traffic, constants: SpreadConstants
    ) -> None:
        cluster, inner = collectives.cluster, setup.tensor_degree
        self._setup, self._collectives, self._traffic, self._constants = setup, collectives, traffic, constants
        self._shards: Group = group_of(cluster, setup.shards if setup.shards > 1 else setup.data_degree, inner)
        self._replicas: Group = group_of(cluster, setup.data_degree // self._shards.size, inner * self._shards.size)

    def micro(self, micro: Micro) -> Exposed:
        """Exposed communication of one micro-batch whose compute takes `micro`."""
        if self._setup.data_degree == 1:
            return Exposed(0.0, 0.0)
        if self._setup.parallel in ("zero3", "fsdp2"):
            return Exposed(self._sharded(micro, self._setup.parallel == "zero3"), self._sharded(micro, True))
        reducing = self._reduced(micro)
        return Exposed(reducing if self._setup.parallel == "zero2" else 0.0, reducing)

    def step_s(self) -> float:
        """Exposed communication after the optimizer: ZeRO 1 and 2 gather the new weights."""
        if self._setup.parallel not in ("zero1", "zero2"):
            return 0.0
        return self._collectives.all_gather_s(self._traffic.gradient_bytes, self._shards)

    def _reduced(self, micro: Micro) -> float:
        """Gradients in buckets, all-reduced behind the rest of the backward.

        DDP fills 25 MiB; DeepSpeed's stages 1 and 2 fill 5e8 elements and all-reduce them too (each rank then keeps
        its share), which is twice a reduce-scatter's volume. The last bucket has nothing left to hide behind.

        Source: torch 2.13 `nn/parallel/distributed.py`; deepspeed 0.19 `runtime/zero/stage_1_and_2.py` average_tensor
        (use_multi_rank_bucket_allreduce is True).
        """
        traffic = self._traffic
        total = traffic.gradient_bytes
        if total <= 0:
            return 0.0
        bucket = DDP_BUCKET_BYTES
        if self._setup.parallel != "ddp":
            bucket = int(ZERO_BUCKET_ELEMENTS * SIZE_BYTES["bf16"])
        count = max(1.0, total / bucket)
        all_s = count * self._collectives.all_reduce_s(total / count, self._shards)
        last = min(max(traffic.last_gradient_bytes, bucket), total)
        last_s = all_s * last / total
        exposed = last_s + max(0.0, all_s - last_s - micro.backward_s * (1.0 - last / total))
        return exposed + self._constants.overlap_cost * max(all_s - exposed, 0.0)

    def _sharded(self, micro: Micro, reduce: bool) -> float:
        """Weights gathered layer by layer one layer ahead, gradients scattered one layer behind.

        Exposed: the root unit and the first layer, whatever a layer's transfer takes longer than its compute, and the
        reductions after the last layer's backward. FSDP2 keeps the root unit gathered until its backward.

        Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` (implicit prefetch in the forward,
        explicit one in the backward); Zhao et al. 2023, PyTorch FSDP, section 3.3, arXiv:2304.11277.
        """
        collectives, traffic, setup = self._collectives, self._traffic, self._setup
        layers = max(traffic.layers, 1)
        gather = collectives.all_gather_s(traffic.layer_bytes, self._shards)
        root = collectives.all_gather_s(traffic.root_bytes, self._shards)
        scatter = self._scatter_s(traffic.layer_gradient_bytes) if reduce else 0.0
        scatter_root = self._scatter_s(traffic.root_gradient_bytes) if reduce else 0.0
        again = gather if setup.reshard_after_forward else 0.0
        root_again = root if setup.parallel == "zero3" else 0.0
        forward = root + gather + (layers - 1) * max(0.0, gather - micro.forward_s / layers)
        backward = root_again + again + (layers - 1) * max(0.0, again + scatter - micro.backward_s / layers)
        exposed = forward + backward + scatter + scatter_root
        total = root + root_again + layers * (gather + again + scatter) + scatter_root
        return exposed + self._constants.overlap_cost * max(total - exposed, 0.0)

    def _scatter_s(self, size_bytes: float) -> float:
        """Reduce-scatter within the shard group, then an all-reduce of the share over its replicas (hybrid shard)."""
        if size_bytes <= 0:
            return 0.0
        seconds = self._collectives.reduce_scatter_s(size_bytes, self._shards)
        return seconds + self._collectives.all_reduce_s(size_bytes / self._shards.size, self._replicas)


class SpreadProfile:
    """Step times of all setups that differ only in micro-batch and accumulation."""

    __slots__ = (
        "_calibration",
        "_cluster",
        "_conditions",
        "_data",
        "_rank",
        "_setup",
        "_step_parts",
        "_step_s",
        "_times",
    )

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        setup: TrainSetup,
        cluster: Cluster,
        *,
        calibration: Calibration | None = None,
        conditions: Conditions = CURRENT,
    ) -> None:
        used = calibration if calibration is not None else load_calibration()
        self._setup, self._cluster, self._conditions, self._calibration = setup, cluster, conditions, used
        self._rank = Rank(model, gpu, setup, used, conditions)
        self._data = DataParallel(
            setup, Collectives(cluster, used.spread_constants), self._rank.traffic, used.spread_constants
        )
        self._times: dict[int, tuple[float, Exposed]] = {}
        constants = used.constants_for(gpu)
        gpu_s, host_s = self._rank.optimizer_s
        trainer = constants.step_overhead_s if conditions.trainer_overhead else 0.0
        self._step_parts = {
            "optimizer": gpu_s,
            "host": max(host_s - gpu_s, 0.0),
            "trainer": trainer,
            "communication": self._data.step_s(),
        }
        self._step_s = sum(self._step_parts.values())

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds, and tokens/s of all GPUs together."""
        found = self._times.get(micro_batch_seqs)
        if found is None:
            micro = self._rank.micro(micro_batch_seqs)
            found = (micro.total_s + self._trainer_micro_s(), self._data.micro(micro))
            self._times[micro_batch_seqs] = found
        compute, exposed = found
        more = accumulation_steps - 1
        step = accumulation_steps * compute + more * (exposed.quiet_s + self._rank.add_s()) + exposed.reducing_s
        step += self._step_s
        setup = self._setup
        tokens = micro_batch_seqs * setup.seq_len_tokens * accumulation_steps * setup.data_degree
        return step, tokens / step

    def _trainer_micro_s(self) -> float:
        constants = self._calibration.constants_for(self._cluster.gpu)
        return constants.micro_overhead_s if self._conditions.trainer_overhead else 0.0

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this profile."""
        steps = setup.accumulation_steps
        micro = self._rank.micro(setup.micro_batch_seqs)
        exposed = self._data.micro(micro)
        parts = {name: seconds * steps for name, seconds in micro.parts.items()}
        parts["optimizer"] = (steps - 1) * self._rank.add_s()
        parts["trainer"] = steps * self._trainer_micro_s()
        parts["communication"] = (steps - 1) * exposed.quiet_s + exposed.reducing_s
        for name, seconds in self._step_parts.items():
            parts[name] += seconds
        total = sum(parts.values())
        profile = self._rank.profile
        flops = profile.flops(setup.micro_batch_seqs, steps)
        return StepTime(
            step_time_s=total,
            parts_s=parts,
            flops=flops,
            mfu_fraction=profile.mfu_fraction(flops, total),
            tokens_per_s=setup.tokens_per_step / total,
            band_fraction=self._calibration.band_for(self._cluster.gpu),
            notes=tuple(profile.notes()),
        )


def spread_profile(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    cluster: Cluster,
    *,
    calibration: Calibration | None = None,
    conditions: Conditions = CURRENT,
) -> SpreadProfile:
    """The family of `setup` on a cluster: one answer object for every micro-batch and accumulation of it."""
    return SpreadProfile(model, gpu, setup, cluster, calibration=calibration, conditions=conditions)


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
