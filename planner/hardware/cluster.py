"""`Cluster`: so many GPUs of one kind, in nodes, and the links between them. Facts only; fitted shares of them live in
`planner/data/calibration.json`.

The latencies of the table are typical figures from memory, the rates are nominal and one-directional.
"""

import csv
import re
from functools import lru_cache

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.hardware.gpu import GpuSpec

_PATH = DATA / "links.csv"
GPUS_PER_NODE = 8
"""Most that one node is taken to hold when the user does not say."""
GB10_NETWORK = "roce-200"
"""Of a DGX Spark: one ConnectX-7 of 200 Gbit/s, over Ethernet alone. Source: servethehome.com, "The NVIDIA GB10
ConnectX-7 200GbE Networking is Really Different" (160 to 198 Gbit/s measured)."""
NVLINK_LATENCY_S = 3e-6
_NDR_NODES = (
    "h100-sxm", "h100-sxm-94gb", "h100-sxm-96gb", "h200", "h20", "h20-141gb", "b200", "b300",
    "mi300x", "mi325x", "mi355x",
)  # fmt: skip
"""Cards whose nodes of eight have a 400 Gbit/s adapter for each. Source: NVIDIA DGX H100, H200 and B200 (eight
ConnectX-7); Azure ND MI300X v5."""
_MEASURED = re.compile(r"([1-9]\d{0,3}(?:\.\d+)?|0?\.\d*[1-9]\d*)gb/s")
"""Bus bandwidth of collectives, as nccl-tests prints it (busbw of large messages)."""
_BRIDGED = (
    "a30", "a40", "rtx-a6000", "rtx-a5000", "rtx-3090", "rtx-3090-ti", "rtx-2080-ti",
    "a100-pcie-40gb", "a100-80gb-pcie", "h100-pcie",
)  # fmt: skip
"""Cards whose NVLink is a bridge between two of them, bought apart: who has one says so. Two RTX 3090 without ran at a
third of the speed that one would give (titan_3090, benchmarks/data/gathered.jsonl)."""
_SOLD_IN_PAIRS = ("h100-nvl",)
"""Cards that come with that bridge: beyond a pair, traffic goes over PCIe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One kind of connection.

    Attributes:
        kind: "nvlink", "pcie" or "measured" (within a node), or "network" (between nodes).
        bytes_per_s: nominal, one direction: of one GPU within a node, of one whole node between nodes.
        latency_s: of one message.
    """

    key: str
    name: str
    kind: str
    bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The GPUs of one job.

    Attributes:
        within: between the GPUs of a node.
        between: between nodes; None with one node.
    """

    gpu: GpuSpec
    num_gpus: int
    num_nodes: int
    within: Link
    between: Link | None

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


@lru_cache(maxsize=1)
def links() -> dict[str, Link]:
    """Every named link of the table by its key."""
    with open(_PATH, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["key"]: Link(
            key=row["key"],
            name=row["name"],
            kind=row["kind"],
            bytes_per_s=float(row["gb_per_s"]) * 1e9,
            latency_s=float(row["latency_us"]) * 1e-6,
            source=row["source"],
        )
        for row in rows
    }


def host_link(gpu: GpuSpec) -> Link:
    """The link between a GPU and its host: PCIe of the generation in the GPU table."""
    link = links().get("pcie-" + gpu.pcie.replace(" ", "-"))
    return link if link is not None else links()["pcie-gen4-x16"]


def nvlink(gpu: GpuSpec) -> Link:
    """NVLink (or Infinity Fabric) of a GPU, one direction: half of the total that vendors print."""
    return Link(
        key="nvlink",
        name="NVLink" if gpu.vendor == "NVIDIA" else "Infinity Fabric",
        kind="nvlink",
        bytes_per_s=gpu.nvlink_bytes_per_s / 2,
        latency_s=NVLINK_LATENCY_S,
        source=gpu.source,
    )


def make_cluster(
    gpu: GpuSpec, num_gpus: int, *, num_nodes: int | None = None, interconnect: str | None = None
) -> Cluster:
    """The cluster that flags describe.

    Args:
        num_gpus: of the whole job.
        num_nodes: default: as few as hold the GPUs (`most_per_node`).
        interconnect: "nvlink", "pcie" or what nccl-tests measured, "6GB/s" (within a node), a key of the table (between
            nodes), or two joined by "+" ("pcie+ethernet-25"). Default: NVLink where the card comes with it, else PCIe;
            between nodes `default_network`.

    Raises:
        UsageError: counts that do not divide, an unknown link, NVLink on a card without, or several MIG slices in a
            node: a process sees one of them, and `cuda:LOCAL_RANK` is another (pytorch/pytorch issue 130181; NCCL takes
            two of one card for the same without NCCL_MULTI_RANK_GPU_ENABLE, NVIDIA/nccl issue 1716).
    """
    if num_gpus < 1:
        raise UsageError(f"--gpus must be at least 1, got {num_gpus}", hint="give --gpus a positive whole number")
    nodes = num_nodes if num_nodes is not None else max(1, -(-num_gpus // most_per_node(gpu)))
    if nodes < 1 or num_gpus % nodes:
        raise UsageError(
            f"{num_gpus} GPUs cannot be spread evenly over {nodes} nodes",
            hint="--gpus counts all GPUs of the job, over all nodes: give a multiple of --nodes",
        )
    if gpu.is_slice and num_gpus > nodes:
        raise UsageError(
            f"several MIG slices of a machine do not train together: a process sees one of them ({gpu.name})",
            hint="leave --gpus out, or --nodes as many as --gpus",
        )
    per_node = num_gpus // nodes
    apart = gpu.key in _BRIDGED or (gpu.key in _SOLD_IN_PAIRS and per_node > 2)
    within = host_link(gpu) if apart or not gpu.nvlink_bytes_per_s else nvlink(gpu)
    between: Link | None = links()[default_network(gpu, per_node)] if nodes > 1 else None
    for part in interconnect.lower().split("+") if interconnect else ():
        link = _named(gpu, part.strip())
        if link.kind != "network":
            within = link
        elif nodes == 1:
            raise UsageError(
                f"--interconnect {part}: one node has no network between nodes", hint="give --nodes, or nvlink or pcie"
            )
        else:
            between = link
    return Cluster(gpu=gpu, num_gpus=num_gpus, num_nodes=nodes, within=within, between=between)


def most_per_node(gpu: GpuSpec) -> int:
    """Most GPUs that a machine is taken to hold."""
    return 1 if gpu.shares_host_memory else GPUS_PER_NODE


def default_network(gpu: GpuSpec, per_node: int) -> str:
    """The link between nodes when the user does not say, stated in the plan: an adapter for each GPU as in an eight-GPU
    node of the card, else of A100s; between machines whose memory is the GPU's, a DGX Spark's or usual Ethernet.

    Source: four GPUs and four adapters of 200 Gbit/s a node have Perlmutter, Leonardo and JUWELS Booster (A100) and
    JUPITER and Alps (GH200), by their own pages.
    """
    if gpu.shares_host_memory:
        return GB10_NETWORK if gpu.key == "gb10" else "ethernet-10"
    modules = -(-min(per_node, GPUS_PER_NODE) // (2 if "two dies" in gpu.name else 1))  # LUMI-G, Frontier: four
    adapters = 1 << (modules.bit_length() - 1)  # as many as the table has links of
    return f"ib-{adapters * (400 if gpu.key in _NDR_NODES else 200)}"


def _named(gpu: GpuSpec, key: str) -> Link:
    if key == "nvlink":
        if not gpu.nvlink_bytes_per_s:
            raise UsageError(f"{gpu.name} has no NVLink", hint="--interconnect pcie")
        return nvlink(gpu)
    if key == "pcie":
        return host_link(gpu)
    known_link(key)
    if rate := _MEASURED.fullmatch(key):
        rate_bytes = float(rate[1]) * 1e9
        return Link(key=key, name="a measured link", kind="measured", bytes_per_s=rate_bytes, latency_s=1e-5, source="")
    return links()[key]


def known_link(key: str) -> None:
    """Refuses a word that names no link.

    Raises:
        UsageError: with those that do.
    """
    names = ("nvlink", "pcie", *links())
    if key not in names and not _MEASURED.fullmatch(key):
        raise UsageError(f"unknown interconnect {key!r}", hint=f"one of {', '.join(names)}, or as measured: 6GB/s")
