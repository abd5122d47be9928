"""Options for several GPUs, and their way into a `Cluster` and into setup fields."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner import setup_fields as fields
from planner.errors import UsageError
from planner.hardware.gpu import GpuSpec
from planner.option_values import choices, positive
from planner.records import dataclass

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it

MAX_GPUS = 4096
PARALLELS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "dp", "device-map")
"""`planner.setup.PARALLELS` without "none" (which follows from the degrees), the usual ones first."""

Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs of the whole job, over all nodes. Default 1.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes they are in. Default: at most 8 GPUs in each.")]
Interconnect = Annotated[
    str | None,
    typer.Option(
        "--interconnect",
        help="Within a node nvlink or pcie; between nodes ib-400, ethernet-25, ...; both joined: pcie+ethernet-25.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Links:
    """How the GPUs of a job are linked."""

    nodes: Nodes = None
    interconnect: Interconnect = None


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """The GPUs of a job and their links."""

    gpus: Gpus = None
    nodes: Nodes = None
    interconnect: Interconnect = None

    def of(self, card: GpuSpec) -> "Cluster | None":
        """The cluster of such cards, None for one."""
        return cluster_of(card, self.gpus, self.nodes, self.interconnect)


Parallels = Annotated[list[str] | None, typer.Option("--parallel", help="/".join(PARALLELS) + "; repeatable.")]
Parallel = Annotated[str | None, typer.Option("--parallel", help="/".join(PARALLELS) + ".")]
TensorDegrees = Annotated[
    list[int] | None, typer.Option("--tensor-degree", help="GPUs that share every matrix; repeatable.")
]
PipelineDegrees = Annotated[
    list[int] | None, typer.Option("--pipeline-degree", help="Stages the layers are cut into; repeatable.")
]
ContextDegrees = Annotated[
    list[int] | None, typer.Option("--context-degree", help="GPUs that share every sequence; repeatable.")
]
ContextDegree = Annotated[
    int | None, typer.Option("--context-degree", help="GPUs that share every sequence: fsdp2, or zero3 (Ulysses).")
]
Schedule = Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule: 1f1b or gpipe.")]
TensorDegree = Annotated[int | None, typer.Option("--tensor-degree", help="GPUs that share every matrix.")]
PipelineDegree = Annotated[int | None, typer.Option("--pipeline-degree", help="Stages the layers are cut into.")]
ShardDegree = Annotated[
    int | None, typer.Option("--shard-degree", help="FSDP2 shards in groups of so many GPUs (hybrid). Default: all.")
]
Reshard = Annotated[
    bool | None, typer.Option("--reshard/--no-reshard", help="FSDP2 frees gathered weights after the forward.")
]
Offloads = Annotated[
    list[str] | None, typer.Option("--offload", help="/".join(fields.OFFLOADS) + " in the host's memory; repeatable.")
]
Offload = Annotated[str | None, typer.Option("--offload", help="/".join(fields.OFFLOADS) + " in the host's memory.")]


def cluster_of(gpu: GpuSpec, gpus: int | None, nodes: int | None, interconnect: str | None) -> "Cluster | None":
    """The cluster that the flags describe, None for one GPU.

    Raises:
        UsageError: counts that cannot be meant, an unknown link, or cluster flags with one GPU.
    """
    num = positive("gpus", gpus, maximum=MAX_GPUS) or 1
    check_vendor(gpu, num)
    if num == 1:
        for name, value in (("nodes", nodes if nodes != 1 else None), ("interconnect", interconnect)):
            if value is not None:
                raise UsageError(f"--{name} needs more than one GPU", hint="give --gpus 2 or more")
        return None
    from planner.hardware.cluster import make_cluster

    return make_cluster(gpu, num, num_nodes=positive("nodes", nodes, maximum=MAX_GPUS), interconnect=interconnect)


def check_vendor(gpu: GpuSpec, num_gpus: int) -> None:
    """Refuses several GPUs where no engine can use them together.

    Raises:
        UsageError: several Apple GPUs (PyTorch's process groups know no MPS backend).
    """
    if num_gpus > 1 and gpu.vendor == "Apple":
        raise UsageError(f"no engine spreads a job over several {gpu.name}", hint="leave --gpus out")


def spread_fields(
    num_gpus: int,
    *,
    parallel: Sequence[str] | None = None,
    tensor_degree: Sequence[int] | None = None,
    pipeline_degree: Sequence[int] | None = None,
    context_degree: Sequence[int] | None = None,
    schedule: str | None = None,
    shard_degree: int | None = None,
    reshard: bool | None = None,
    offload: Sequence[str] | None = None,
) -> dict[str, tuple[Any, ...]]:
    """Setup fields of the spread that the user decided, each with its allowed values.

    Raises:
        UsageError: an unknown value, or a flag that needs more than one GPU.
    """
    found: dict[str, tuple[Any, ...]] = {}
    if parallel:
        found["parallel"] = choices("parallel", parallel, PARALLELS)
    asked = {"tensor_degree": tensor_degree, "pipeline_degree": pipeline_degree, "context_degree": context_degree}
    for name, degrees in asked.items():
        if degrees:
            flag = name.replace("_", "-")
            found[name] = tuple(dict.fromkeys(positive(flag, degree, maximum=MAX_GPUS) or 1 for degree in degrees))
    if schedule is not None:
        found["pipeline_schedule"] = choices("schedule", [schedule], fields.PIPELINE_SCHEDULES)
    if shard_degree is not None:
        found["shard_degree"] = (positive("shard-degree", shard_degree, maximum=MAX_GPUS),)
    if reshard is not None:
        found["reshard_after_forward"] = (reshard,)
    if offload:
        found["offload"] = choices("offload", offload, fields.OFFLOADS)
    if found and num_gpus == 1:
        flag = _FLAGS[next(iter(found))]
        raise UsageError(f"--{flag} needs more than one GPU", hint="give --gpus 2 or more")
    if set(found.get("parallel", ())) & {"dp", "device-map"} and set(asked) & set(found):
        raise UsageError(
            f"--parallel {found['parallel'][0]} does not combine with tensor, context or pipeline parallelism",
            hint="leave the degrees out, or use --parallel ddp or fsdp2",
        )
    return found


_FLAGS = {
    "parallel": "parallel",
    "tensor_degree": "tensor-degree",
    "pipeline_degree": "pipeline-degree",
    "context_degree": "context-degree",
    "pipeline_schedule": "schedule",
    "shard_degree": "shard-degree",
    "reshard_after_forward": "no-reshard",
    "offload": "offload",
}


def one_setup(num_gpus: int, spread: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The spread's fields of one setup: what was not said is plain DDP over the copies that are left.

    FSDP2 where a flag belongs to it alone, and beside tensor parallelism and pipelines, where Accelerate and torchtitan
    know no other.
    """
    if num_gpus == 1:
        return {}
    values = {name: allowed[0] for name, allowed in spread.items()}
    if "parallel" not in values:
        split = values.get("tensor_degree", 1) * values.get("pipeline_degree", 1)
        only_fsdp2 = "shard_degree" in values or "reshard_after_forward" in values
        fsdp2 = only_fsdp2 or values.get("offload") == "parameters" or split * values.get("context_degree", 1) > 1
        offloaded = values.get("offload") == "optimizer"
        values["parallel"] = "none" if split == num_gpus else "fsdp2" if fsdp2 else "zero2" if offloaded else "ddp"
    return {"num_gpus": num_gpus, **values}
