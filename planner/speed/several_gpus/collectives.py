"""Seconds of collectives, of a pipeline's schedule, and of the host's link."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, exp, hypot, log

from planner.core.records import dataclass
from planner.hardware.cluster import Cluster, Link, host_link
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines.fsdp2 import sharded_dtype
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import LayoutConstants

# Seconds of collectives over a `Cluster`: a ring over all ranks, links within a node and between nodes.


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange something with each other.

    Attributes:
        size: ranks of the group.
        per_node: of them in one node.
        sharing: like groups that use the same node's network at the same time.
    """

    size: int
    per_node: int
    sharing: int = 1

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return ceil(self.size / self.per_node)


def group_of(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """The group of ranks 0, stride, 2 stride, ...: consecutive ranks fill a node before the next one begins.

    Source: the order of dimensions of torch's `init_device_mesh` and of Megatron-LM (tensor innermost, then data, then
    pipeline).
    """
    per_node = max(1, min(size, cluster.gpus_per_node // stride))
    return Group(size=size, per_node=per_node, sharing=max(1, cluster.gpus_per_node // per_node))


def gather_volume(size: int) -> float:
    """Bytes that each rank sends in a ring all-gather or reduce-scatter, per byte of the whole tensor: (N - 1) / N."""
    return (size - 1) / size


def reduce_volume(size: int) -> float:
    """The same for a ring all-reduce, a reduce-scatter and an all-gather: 2 (N - 1) / N."""
    return 2.0 * (size - 1) / size


class Collectives:
    """Times on one cluster with the fitted shares of its links' nominal rates."""

    __slots__ = ("_between", "_constants", "_within", "cluster")

    def __init__(self, cluster: Cluster, constants: LayoutConstants) -> None:
        self.cluster = cluster
        self._constants = constants
        self._within = link_rate(cluster, cluster.within, constants)
        self._between = link_rate(cluster, cluster.between, constants) if cluster.between is not None else 0.0

    def all_gather_s(self, size_bytes: float, group: Group) -> float:
        """Everyone receives what the others hold of `size_bytes`; a reduce-scatter, an exchange from all to all and a
        gather by one rank send as much over the busiest link."""
        return self._ring_s(size_bytes * gather_volume(group.size), group)

    def all_reduce_s(self, size_bytes: float, group: Group) -> float:
        """A reduce-scatter and an all-gather. NCCL's trees, faster for small messages, change no measured step."""
        return self._ring_s(size_bytes * reduce_volume(group.size), group, rounds=2)

    def send_s(self, size_bytes: float, group: Group) -> float:
        """From each rank of the group to the next one, or from one through all of them (broadcast)."""
        return self._ring_s(size_bytes, group)

    def _ring_s(self, sent_bytes: float, group: Group, rounds: int = 1) -> float:
        """Every rank sends so many bytes, in `rounds` along the ring."""
        if group.size == 1:
            return 0.0
        between = self.cluster.between.latency_s if self.cluster.between is not None else 0.0
        across = group.nodes - 1
        latency = (group.size - 1 - across) * self.cluster.within.latency_s + across * between
        return self._constants.collective_s + rounds * latency + self._move_s(sent_bytes, group)

    def _move_s(self, sent_bytes: float, group: Group) -> float:
        """Seconds for every rank of a ring to send so many bytes: the slower of the two kinds of link."""
        within = sent_bytes / self._within if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return within
        return max(within, sent_bytes * group.sharing / self._between)


PCIE_SPREAD = 3.4
"""How many times slower or faster collectives over PCIe may be than counted: nine in ten of the figures that people
published lie within, by board, CPU, lanes, and whether NCCL finds a PCIe switch (it goes through the host across a
CPU's root ports: NCCL 2.28 `graph/paths.cc`).

Bus bandwidth of large messages over the nominal rate, nccl-tests, all staged by the host: 2080 Ti 0.25 (2 cards on one
switch, PCIe 3), RTX 4090 0.05 (2, over two CPUs), 0.07, 0.12 and 0.08 (2, 2, 4), RTX 5090 0.56 and 0.44 (4, 8:
NVIDIA/nccl issue 1639), A40 0.12 and 0.04 (2, 4), A100 0.17 (4, NCCL_P2P_DISABLE); of training over FSDP RTX 3090 0.18
(fsdp_qlora-572, 570), RTX 4090 0.49 (fsdp_qlora-584) and 0.17 (peft_experiments-005). Geometric mean 0.16 to 0.17,
which is `pcie_staged_share`. Cards that reach each other: A100 PCIe 0.82 and 0.63 (nccl-tests issue 178), RTX 4090 and
5090 with a patched driver 0.78 and 0.72; RTX 6000 Ada by its training about 0.2, RTX A5000 0.45.
"""


NETWORK_SPREAD = 1.35
"""The same between nodes, beside `network_share` of the nominal rate: eight InfiniBand, RoCE and EFA clusters reached
0.59 to 0.96 of it, geometric mean 0.79 (nccl-tests issues 119, 175, 252: 0.96, 0.86, 0.95 with A100s; NVIDIA/nccl issue
495: RoCE 0.75, 527: EFA of p4d 0.63 and 0.59; two DGX Spark 0.86; EFA of p5 0.83)."""


def link_spread(link: Link | None) -> float:
    """How many times slower or faster collectives on a link may be than counted."""
    return {"pcie": PCIE_SPREAD, "network": NETWORK_SPREAD}.get(link.kind, 1.0) if link is not None else 1.0


def at_spread(cluster: Cluster, *, slow: bool, network: bool = True) -> Cluster:
    """The same with links as slow, or as fast, as they may be; `network`: those between nodes too."""

    def moved(link: Link) -> Link:
        spread = link_spread(link)
        return replace(link, bytes_per_s=link.bytes_per_s / spread if slow else link.bytes_per_s * spread)

    between = moved(cluster.between) if network and cluster.between is not None else cluster.between
    return replace(cluster, within=moved(cluster.within), between=between)


def wider(band: float, ratio: float) -> float:
    """A step's band where links of another rate, which nobody knows, make it so many times as long: both are
    independent."""
    return exp(hypot(log(1 + band), log(ratio))) - 1


def link_rate(cluster: Cluster, link: Link, constants: LayoutConstants) -> float:
    """Bytes per second that collectives reach on a link: of one GPU within a node, of a whole node between nodes.

    GeForce cards exchange nothing directly over PCIe: the driver stages it in the host's memory.
    """
    if link.kind == "nvlink":
        return link.bytes_per_s * constants.nvlink_share
    if link.kind == "network":
        return link.bytes_per_s * constants.network_share
    if link.kind == "measured":
        return link.bytes_per_s
    staged = "GeForce" in cluster.gpu.driver_name
    return link.bytes_per_s * (constants.pcie_staged_share if staged else constants.pcie_share)


# Pipeline schedules: how long one step takes, and how much of it is bubble. What is in flight: `rank.in_flight`.


def pipeline_s(schedule: str, forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of one step over stages of unequal length: fill, then the slowest stage sets the pace, then drain.

    Each of m equal jobs passes all stages in order: sum + (m - 1) x longest. GPipe does so twice (all forwards, then
    all backwards), 1F1B once with forward and backward together. Equal stages give m (f + b) / (1 - bubble fraction).
    """
    if schedule == "gpipe":
        return _flow_s(forward_s, micro_batches) + _flow_s(backward_s, micro_batches)
    return _flow_s([forward + other for forward, other in zip(forward_s, backward_s, strict=True)], micro_batches)


def _flow_s(stage_s: Sequence[float], jobs: int) -> float:
    return sum(stage_s) + (jobs - 1) * max(stage_s)


# Offloading: the link to the host, and the optimizer step on its CPUs.


def optimizer_bytes(setup: TrainSetup) -> int:
    """Bytes per parameter that an optimizer step moves on the host: gradient, weight and two moments read, three
    written. ZeRO's CPU-Adam has all of them in fp32 and writes a 16-bit copy of the weights; FSDP2 steps each shard in
    the shard's own type, moments too.

    Source: DeepSpeed 0.16 `ops/adam/cpu_adam.py` (master parameters in fp32, fp32_optimizer_states), `runtime/zero/
    stage3.py` _reassign_or_swap_out_partitioned_parameters; PyTorch 2.13 `optim/adam.py` (zeros_like of the parameter).
    """
    return 7 * SIZE_BYTES[sharded_dtype(setup)] if setup.parallel == "fsdp2" else 7 * SIZE_BYTES["fp32"] + 2


def host_rate(cluster: Cluster, constants: LayoutConstants) -> float:
    """Bytes per second of pinned copies between one GPU and its host, one direction."""
    return host_link(cluster.gpu).bytes_per_s * constants.host_copy_share


def optimizer_s(setup: TrainSetup, params: float, cluster: Cluster, constants: LayoutConstants) -> float:
    """Seconds of the optimizer step over `params` parameters per GPU, all GPUs of a node sharing its CPUs.

    DeepSpeed runs its vectorised CPU-Adam; FSDP2 runs PyTorch's optimizer on CPU tensors, fused or a loop.
    """
    seconds = params * cluster.gpus_per_node * optimizer_bytes(setup) / constants.cpu_adam_bytes_per_s
    looped = setup.parallel == "fsdp2" and OPTIMIZERS[setup.optimizer].cpu_looped
    return seconds * (constants.cpu_adam_loop if looped else 1.0)


def back_s(setup: TrainSetup, weight_bytes: float, rate: float) -> float:
    """Seconds to bring this GPU's share of the new 16-bit weights back; weights that stay on the host need none."""
    return weight_bytes / rate if setup.offload == "optimizer" else 0.0
