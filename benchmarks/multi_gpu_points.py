"""Loads `benchmarks/data/multi_gpu_points.jsonl`: published runs on several GPUs with their cluster and setup."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from benchmarks.shared import DATA, rows_of
from benchmarks.speed_points import model_of
from planner.core.units import GIB
from planner.hardware.cluster import Cluster, make_cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from planner.speed.roofline.types import Conditions

FILE = DATA / "multi_gpu_points.jsonl"


@dataclass(frozen=True, kw_only=True)
class LayoutPoint:
    """One configuration on several GPUs.

    Attributes:
        source: whose runs these are; `at` where they are published.
        tokens_per_s: of one GPU, the median of `repeats`; None where unknown.
        memory_what: "allocated" or "reserved", of the worst rank; `memory_bytes` None where unknown.
        oom: it went out of memory; there is no figure then.
        loose_speed, loose_memory: the figure rests on a guess that matters, see `assumed`.
    """

    key: str
    source: str
    at: str
    model: ModelSpec
    gpu: GpuSpec
    cluster: Cluster
    setup: TrainSetup
    speed_setup: TrainSetup
    conditions: Conditions
    tokens_per_s: float | None = None
    repeats: tuple[float, ...] = ()
    memory_what: str = ""
    memory_bytes: int | None = None
    assumed: tuple[str, ...] = ()
    oom: bool = False
    loose_speed: bool = False
    loose_memory: bool = False
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """The spread in words: "FSDP, offloaded", "ZeRO-3"."""
        setup = self.setup
        names = {"fsdp2": "FSDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "ddp": "DDP", "device-map": "device map"}
        name = names[setup.parallel]
        if not setup.reshard_after_forward:
            name += ", kept gathered"
        if setup.shard_degree:
            name += ", hybrid"
        if setup.offload != "none":
            name += ", offloaded"
        return name


def load_points() -> list[LayoutPoint]:
    return [_point(row) for row in rows_of(FILE)]


def _point(row: dict[str, Any]) -> LayoutPoint:
    setup = setup_from_dict(row["setup"])
    gpu = _gpu(row["gpu"])
    memory = row.get("memory", {})
    length = row.get("speed_seq_len_tokens")
    return LayoutPoint(
        key=row["id"],
        source=row["source"],
        at=row["at"],
        model=model_of(row),
        gpu=gpu,
        cluster=_cluster(row["gpu"], setup.num_gpus, row.get("num_nodes"), row.get("interconnect")),
        setup=setup,
        speed_setup=setup if length is None else setup.replace(seq_len_tokens=length),
        conditions=Conditions(**row.get("conditions", {})),
        tokens_per_s=row.get("tokens_per_s"),
        repeats=tuple(row.get("repeats", ())),
        memory_what=memory.get("what", ""),
        memory_bytes=memory.get("bytes"),
        oom=row.get("oom", False),
        assumed=tuple(row.get("assumed", ())),
        loose_speed=row.get("loose", False) or row.get("loose_speed", False),
        loose_memory=row.get("loose", False) or row.get("loose_memory", False),
        labels={"model": row["model"], "variant": row.get("variant", "")},
    )


@cache
def _gpu(key: str) -> GpuSpec:
    """A card of the table, or the H100 with HBM2e of torchtitan's hosts.

    Source: pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md (96 GB, 2.4 TB/s; 500 W not modelled).
    """
    if key == "h100-96gb-500w":
        return replace(find_gpu("h100-sxm"), memory_bandwidth_bytes_per_s=2.4e12, memory_bytes=95 * GIB)
    return find_gpu(key)


@cache
def _cluster(gpu: str, num_gpus: int, num_nodes: int | None, interconnect: str | None) -> Cluster:
    return make_cluster(_gpu(gpu), num_gpus, num_nodes=num_nodes, interconnect=interconnect)
