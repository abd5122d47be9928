"""Options for several GPUs, and their way into a `Cluster` and into setup fields."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.choices.spreads import SPLIT_DEGREES
from planner.cli.setup_flags import MAX_GPUS, SPREAD
from planner.errors import UsageError
from planner.hardware.gpu import GpuSpec
from planner.option_values import positive
from planner.records import dataclass

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it

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


def spread_fields(num_gpus: int, **asked: Any) -> dict[str, tuple[Any, ...]]:
    """Setup fields of the spread that the user decided, each with its allowed values; `asked` by option.

    Raises:
        UsageError: an unknown value, or a flag that needs more than one GPU.
    """
    rows = [row for row in SPREAD if asked.get(row.key) not in (None, [])]
    if rows and num_gpus == 1:
        raise UsageError(f"--{rows[0].word} needs more than one GPU", hint="give --gpus 2 or more")
    found = {row.of: row.wished(asked[row.key]) for row in rows}
    if set(found.get("parallel", ())) & {"dp", "device-map"} and found.keys() & set(SPLIT_DEGREES):
        raise UsageError(
            f"--parallel {found['parallel'][0]} does not combine with tensor, context, expert or pipeline parallelism",
            hint="leave the degrees out, or use --parallel ddp or fsdp2",
        )
    return found


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
        within = values.get("context_degree", 1) * values.get("expert_degree", 1)
        only_fsdp2 = "shard_degree" in values or "reshard_after_forward" in values
        fsdp2 = only_fsdp2 or values.get("offload") == "parameters" or split * within > 1
        offloaded = values.get("offload") == "optimizer"
        values["parallel"] = "none" if split == num_gpus else "fsdp2" if fsdp2 else "zero2" if offloaded else "ddp"
    return {"num_gpus": num_gpus, **values}
