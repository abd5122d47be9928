"""Option declarations that several commands share, and their way into setup fields and into a `Cluster`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from finetune_planner.app.machine import STORE_VARIABLE
from finetune_planner.app.progress import say
from finetune_planner.cli.completion import complete_gpu, complete_model
from finetune_planner.cli.setup_flags import LAYOUT, MAX_GPUS, ROLLOUT, given, takes_flags
from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.options.images import Images
from planner.options.layouts import SPLIT_DEGREES, ZERO
from planner.options.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import GENERATORS, Rollout, open_rollouts
from planner.planning.option_values import choices, length, memory_and_headroom, named, positive
from planner.planning.plan_request import DEFAULT_SEQ_LEN
from planner.setup import allowed as fields
from planner.setup.packages import unpackaged

if TYPE_CHECKING:
    from planner.frameworks.readers.types import ReadConfig
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it
    from planner.models.spec import ModelSpec

Found = TypeVar("Found", "ModelSpec", GpuSpec)
Model = Annotated[
    str,
    typer.Argument(
        help="Hub id, directory with config.json, or what people call it: 'llama 3.1 8b'.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
_GPU = typer.Option(
    "--gpu",
    help="GPU: key, what its box says ('RTX 3060 12GB', 8xH100), 'local', or NAME:12GiB:360GB/s:29TFLOPS.",
    autocompletion=complete_gpu,
)
Gpu = Annotated[str, _GPU]
GpuOrNone = Annotated[str | None, _GPU]
MemoryGib = Annotated[float | None, typer.Option("--memory-gib", help="Usable memory in GiB instead of the table's.")]
Headroom = Annotated[
    float | None, typer.Option("--headroom", help="Reserve in GiB that no plan may touch. Default 4 %.")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", "--batch-size", help="Sequences per optimizer step.")
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len", parser=named("seq-len", length), help="Tokens per sequence (8k). Default: 2048, or the data's."
    ),
]
Objective = Annotated[
    str | None, typer.Option("--objective", help="What the step trains for: " + ", ".join(fields.OBJECTIVE_NAMES) + ".")
]
NoExtraPackages = Annotated[
    bool,
    typer.Option("--no-extra-packages", help="Plan without liger-kernel, flash-attn and other tools' own kernels."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, at most 8 KB; --json=full: all of it.")]
NoDryRun = Annotated[bool, typer.Option("--no-dry-run", help="Formula only: no torch is needed.")]
FormulaAlone = Annotated[bool, typer.Option("--no-dry-run", help="As always here: this command runs none.")]

StorePath = Annotated[
    Path | None, typer.Option("--store", help=f"Store of measurements (default: ${STORE_VARIABLE} or the user's data).")
]
Device = Annotated[str | None, typer.Option("--device", help="cuda:N, or cpu (tiny models). Default: every GPU.")]
Slurm = Annotated[
    Path | None, typer.Option("--slurm", help="Run as cluster jobs through submitit; its folder (shared).")
]
Partition = Annotated[str | None, typer.Option("--partition", help="Slurm partition (with --slurm).")]


def no_partition_alone(slurm: Path | None, partition: str | None) -> None:
    """Raises:
    UsageError: --partition without --slurm, which would be ignored.
    """
    if partition is not None and slurm is None:
        raise UsageError("--partition is for jobs of a cluster", hint="add --slurm FOLDER, or leave it out")


DEFAULT_IMAGE_SIZE = "1024"


def announced(spec: Found) -> Found:
    """A model or a card; what its name was taken for is told."""
    if spec.taken_as:
        say(spec.taken_as)
    return spec


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Where a model's configuration is looked for."""

    revision: Annotated[str | None, typer.Option(help="Hub revision; asks the hub first.")] = None
    hub: Annotated[bool, typer.Option("--hub", help="Ask the hub before the catalogue and the cache.")] = False
    like: Annotated[
        str | None,
        typer.Option(help="llama or mixture: the geometry of a model_type that nobody knows; wide band, no dry run."),
    ] = None

    @property
    def words(self) -> tuple[str, ...]:
        """As they were typed."""
        given = (("--revision", self.revision), ("--like", self.like))
        named = (word for option, value in given if value is not None for word in (option, value))
        return (*(("--hub",) * self.hub), *named)

    def model(self, name: str) -> "ModelSpec":
        from planner.models.resolve import resolve_model

        return resolve_model(name, revision=self.revision, ask_hub=self.hub, like=self.like or "")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What of a card's memory may be used."""

    memory_gib: MemoryGib = None
    headroom: Headroom = None

    def of(self, card: GpuSpec) -> tuple[int, int]:
        """(usable, reserved) in bytes."""
        return memory_and_headroom(card, self.memory_gib, self.headroom)


@takes_flags(*ROLLOUT, several=False)
class RolloutOptions:
    """How an objective that generates its completions (GRPO) does so; None: as TRL by itself."""

    def _given_values(self, objective: str | None) -> dict[str, Any]:
        values = {row.of: value for row, value in given(self, ROLLOUT).items()}
        if values and (objective is None or objective not in OBJECTIVES or not OBJECTIVES[objective].rolls_out):
            name = next(iter(values)).replace("_", " ")
            raise UsageError(f"{name} is for objectives that generate", hint="give --objective grpo")
        return values

    def rollout(self, objective: str | None, seq_len: int | None) -> Rollout | None:
        """The rollout that was asked for, None where nothing was.

        Raises:
            UsageError: of an objective that generates nothing.
            SetupError: a value that makes no sense.
        """
        values = self._given_values(objective)
        return Rollout.read(values, seq_len or DEFAULT_SEQ_LEN) if values else None

    def rollouts(self, objective: str | None, seq_len: int | None, *, packages: bool) -> tuple[Rollout, ...]:
        """Every rollout that what was asked for leaves a plan, () where nothing was; raises as `rollout` does.

        Args:
            packages: whether vLLM may be one.
        """
        values = self._given_values(objective)
        if not packages and objective is not None and objective in OBJECTIVES and OBJECTIVES[objective].rolls_out:
            values = {"generator": GENERATORS[0], **values}
        rollouts = open_rollouts(Rollout.read(values, seq_len or DEFAULT_SEQ_LEN), values) if values else ()
        if not packages and any(rollout.by_vllm for rollout in rollouts):
            raise UsageError("--no-extra-packages contradicts --generator vllm", hint="leave one of the two out")
        return rollouts


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The pictures of a sample; None: text alone."""

    images_per_sample: Annotated[
        int | None, typer.Option(help="Images of a sample, for vision-language models. Default: none.")
    ] = None
    image_size: Annotated[str | None, typer.Option(help="Their pixels: PX or WIDTHxHEIGHT. Default 1024.")] = None

    def images(self) -> Images | None:
        """The pictures that were asked for, None where none were.

        Raises:
            UsageError: a size that is none.
            SetupError: a value that makes no sense.
        """
        if self.images_per_sample is None and self.image_size is None:
            return None
        text = self.image_size or DEFAULT_IMAGE_SIZE
        width, by, height = text.lower().partition("x")
        height = height if by else width
        if not (width.isdecimal() and height.isdecimal() and text.isascii()):
            raise UsageError(f"--image-size {text:.80}: expected pixels", hint="for example 1024 or 1280x720")
        num = 1 if self.images_per_sample is None else self.images_per_sample
        return Images(num=num, width=int(width), height=int(height))


def objective_fields(objective: str | None, *, packing: bool | None, num_gpus: int) -> dict[str, tuple[Any, ...]]:
    """The objective as a setup field that the user decided; nothing for supervised training.

    Raises:
        UsageError: not known, or what else was asked for is something that its trainers do not have.
    """
    if objective is None:
        return {}
    row = OBJECTIVES[choices("objective", (objective,), fields.OBJECTIVE_NAMES)[0]]
    if row.name == DEFAULT_OBJECTIVE:
        return {}
    if packing and not row.packs:
        raise UsageError(f"--packing contradicts --objective {row.name}: no trainer packs {row.sample}s")
    if num_gpus > 1 and row.alone:
        raise UsageError(f"--objective {row.name} is planned on one GPU: {row.alone}", hint="leave --gpus out")
    return {"objective": (row.name,)}


def without_packages(fixed: dict[str, tuple[Any, ...]]) -> None:
    """Keeps of the fields' values those that need no further package.

    Raises:
        UsageError: a flag asks for nothing else.
    """
    for name, bare in unpackaged().items():
        left = tuple(value for value in fixed.get(name, bare) if value in bare)
        if not left:
            flag = f"--{name.replace('_', '-')} {fixed[name][0]}"
            raise UsageError(f"--no-extra-packages contradicts {flag}", hint="leave one of the two out")
        fixed[name] = left


Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs of the whole job, over all nodes. Default 1.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Nodes they are in. Default: at most 8 GPUs in each.")]
Interconnect = Annotated[
    str | None,
    typer.Option(
        "--interconnect",
        help="Within a node nvlink, pcie or nccl-tests' busbw (6GB/s); between nodes ib-3200, ethernet-25, ... (Gbit/s "
        "of a whole node: eight 400G adapters are ib-3200); both joined: pcie+ethernet-25.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Links:
    nodes: Nodes = None
    interconnect: Interconnect = None


@dataclass(frozen=True, kw_only=True)
class JobGpus:
    gpus: Gpus = None
    nodes: Nodes = None
    interconnect: Interconnect = None

    def of(self, card: GpuSpec) -> "Cluster | None":
        return cluster_of(card, self.gpus, self.nodes, self.interconnect)

    def of_file(self, card: GpuSpec, config: "ReadConfig") -> "Cluster | None":
        """The cluster of a file's GPUs, in the nodes that its launch names where the command line names none."""
        num_gpus, nodes = config.setup.num_gpus, config.num_nodes
        named = self.nodes or (nodes if nodes and num_gpus % nodes == 0 else None)
        return cluster_of(card, num_gpus, named, self.interconnect)


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


def layout_fields(num_gpus: int, *, one_setup: bool = False, **flags: Any) -> dict[str, tuple[Any, ...]]:
    """Setup fields of the layout that the user decided, each with its allowed values; `flags` by option. One setup may
    be DeepSpeed's on a single GPU, which a plan never chooses: it shards nothing there.

    Raises:
        UsageError: an unknown value, or a flag that needs more than one GPU.
    """
    rows = [row for row in LAYOUT if flags.get(row.key) not in (None, [])]
    offloads = flags.get("offload") not in (None, [], "none", ["none"])
    zero = one_setup and set(flags.get("parallel") or ()) <= {*ZERO}
    alone = ("offload", "parallel") if offloads else ("parallel",) if zero else ()
    several = [row for row in rows if row.of not in alone]
    if num_gpus == 1 and several:
        raise UsageError(f"--{several[0].word} needs more than one GPU", hint="give --gpus 2 or more")
    fixed = {row.of: row.values_of(flags[row.key]) for row in rows}
    if set(fixed.get("parallel", ())) & {"dp", "device-map"} and fixed.keys() & set(SPLIT_DEGREES):
        raise UsageError(
            f"--parallel {fixed['parallel'][0]} does not combine with tensor, context, expert or pipeline parallelism",
            hint="leave the degrees out, or use --parallel ddp or fsdp2",
        )
    return fixed
