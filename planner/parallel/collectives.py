"""Seconds of collectives over a `Cluster`: a ring over all ranks or a tree, links within a node and between nodes.

NCCL pipelines a collective in chunks through both kinds of link, so the slower kind decides and the two do not add up.
Bytes here are those of the whole tensor (what every rank holds after an all-gather, or before a reduce-scatter).

Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, doi:10.1016/j.jpdc.2008.09.002 (the ring's
volume); NVIDIA nccl-tests doc/PERFORMANCE.md (bus bandwidth); Sanders et al. 2009, doi:10.1016/j.parco.2009.09.001 (two
binary trees, NCCL's tree).
"""

from math import ceil, log2

from planner.hardware.cluster import Cluster, Link
from planner.records import dataclass
from planner.throughput.calibration import SpreadConstants


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

    def __init__(self, cluster: Cluster, constants: SpreadConstants) -> None:
        self.cluster = cluster
        self._constants = constants
        self._within = link_rate(cluster, cluster.within, constants)
        self._between = link_rate(cluster, cluster.between, constants) if cluster.between is not None else 0.0

    def all_gather_s(self, size_bytes: float, group: Group) -> float:
        """Ring: everyone receives what the others hold; `size_bytes` is the whole."""
        if group.size == 1:
            return 0.0
        return (
            self._start_s() + self._ring_latency_s(group) + self._move_s(size_bytes * gather_volume(group.size), group)
        )

    def reduce_scatter_s(self, size_bytes: float, group: Group) -> float:
        """Ring: everyone ends with the sum of its share; as long as an all-gather of the same tensor."""
        return self.all_gather_s(size_bytes, group)

    def all_to_all_s(self, size_bytes: float, group: Group) -> float:
        """Everyone sends a part of its `size_bytes` to each other rank and keeps one."""
        if group.size == 1:
            return 0.0
        return self._start_s() + self._latency_s(group) + self._move_s(size_bytes * gather_volume(group.size), group)

    def all_reduce_s(self, size_bytes: float, group: Group) -> float:
        """The faster of a ring (least volume) and a double tree (fewest hops, for small messages), as NCCL chooses."""
        if group.size == 1:
            return 0.0
        ring = 2 * self._ring_latency_s(group) + self._move_s(size_bytes * reduce_volume(group.size), group)
        tree = 2 * self._tree_latency_s(group) + self._move_s(2.0 * size_bytes, group)
        return self._start_s() + min(ring, tree)

    def broadcast_s(self, size_bytes: float, group: Group) -> float:
        """Pipelined through the ranks: each sends the whole once."""
        if group.size == 1:
            return 0.0
        return self._start_s() + self._ring_latency_s(group) + self._move_s(size_bytes, group)

    def gather_s(self, size_bytes: float, group: Group) -> float:
        """One rank receives the others' shares of `size_bytes`: its own link is what they all pass."""
        if group.size == 1:
            return 0.0
        return self._start_s() + self._latency_s(group) + self._move_s(size_bytes * gather_volume(group.size), group)

    def send_s(self, size_bytes: float, group: Group) -> float:
        """From one rank of the group to the next one."""
        if group.size == 1:
            return 0.0
        return self._start_s() + self._latency_s(group) + self._move_s(size_bytes, group)

    def _move_s(self, sent_bytes: float, group: Group) -> float:
        """Seconds for every rank of a ring to send so many bytes: the slower of the two kinds of link."""
        within = sent_bytes / self._within if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return within
        return max(within, sent_bytes * group.sharing / self._between)

    def _start_s(self) -> float:
        return self._constants.collective_s

    def _latency_s(self, group: Group) -> float:
        """Of the slowest hop."""
        between = self.cluster.between
        return between.latency_s if group.nodes > 1 and between is not None else self.cluster.within.latency_s

    def _ring_latency_s(self, group: Group) -> float:
        hops = group.size - 1
        across = group.nodes - 1
        between = self.cluster.between.latency_s if self.cluster.between is not None else 0.0
        return (hops - across) * self.cluster.within.latency_s + across * between

    def _tree_latency_s(self, group: Group) -> float:
        """A chain within the node, two binary trees over the nodes."""
        between = self.cluster.between.latency_s if self.cluster.between is not None else 0.0
        return (group.per_node - 1) * self.cluster.within.latency_s + ceil(log2(group.nodes)) * between


def link_rate(cluster: Cluster, link: Link, constants: SpreadConstants) -> float:
    """Bytes per second that collectives reach on a link: of one GPU within a node, of a whole node between nodes.

    GeForce cards exchange nothing directly over PCIe: the driver stages it in the host's memory.
    """
    if link.kind == "nvlink":
        return link.bytes_per_s * constants.nvlink_share
    if link.kind == "network":
        return link.bytes_per_s * constants.network_share
    staged = "GeForce" in cluster.gpu.driver_name
    return link.bytes_per_s * (constants.pcie_staged_share if staged else constants.pcie_share)
