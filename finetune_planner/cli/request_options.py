"""The options of a request, declared once for every command that plans (`plan MODEL`, `plan tune`, `plan which-gpu`),
and those that say what is trained on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from finetune_planner.cli import options, setup_flags
from finetune_planner.cli.setup_flags import given, takes_flags
from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Data
from planner.planning.option_values import amount, choices, named
from planner.planning.plan_request import PlanRequest

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it


_SPACE = (*setup_flags.SPACE, setup_flags.ADAPTER)


@takes_flags(*_SPACE, several=True)
class SpaceOptions:
    """Which values of the setup's fields may be planned; None: all of them."""

    rank: int | None = None
    targets: str | None = None
    adapter: str | None = None
    packing: bool | None = None
    objective: options.Objective = None
    no_extra_packages: options.NoExtraPackages = False

    def fixed(self) -> dict[str, tuple[Any, ...]]:
        """Setup fields that the user decided, each with its allowed values.

        Raises:
            UsageError: unknown values, or flags that contradict each other.
        """
        fixed = {row.of: row.values_of(value) for row, value in given(self, _SPACE).items()}
        if self.no_extra_packages:
            options.without_packages(fixed)
        return fixed | self._method(fixed)

    def _method(self, fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """The methods that the other flags leave: a quantization other than none means QLoRA unless a method was given;
        a rank, targets or a kind of adapter rule full fine-tuning out."""
        of_adapters = [f"--{option}" for option in ("rank", "targets", "adapter") if getattr(self, option) is not None]
        if "method" in fixed:
            if of_adapters and fixed["method"] == ("full",):
                flag = of_adapters[0]
                raise UsageError(
                    f"{flag} has no meaning with --method full", hint=f"leave {flag} out, or use --method lora"
                )
            return {}
        quantized = fixed.get("quantization", ("none",))
        if "none" not in quantized:
            return {"method": ("qlora",)}
        return {"method": ("lora", "qlora")} if of_adapters else {}


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How much is trained on, where no file says so; None: not known, or a stated rule."""

    dataset_tokens: Annotated[
        int | None,
        typer.Option(
            "--dataset-tokens",
            "--tokens",
            parser=named("tokens", amount),
            help="Tokens of one epoch (20M): steps, time, cost.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            parser=named("samples", amount), help="Samples of one epoch (50k), of full length unless --tokens is given."
        ),
    ] = None
    epochs: Annotated[float | None, typer.Option(help="Passes over the data. Default 1, up to 3 for small data.")] = (
        None
    )


@takes_flags(*setup_flags.LAYOUT, *setup_flags.AIM, several=True)
class RequestOptions(SpaceOptions, options.RolloutOptions, options.ImageOptions, JobOptions):
    """What a person asks for on the command line, beside model and GPU; None: planned, or a stated default."""

    gpus: options.Gpus = None
    nodes: options.Nodes = None
    interconnect: options.Interconnect = None
    seq_len: options.SeqLen = None
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            "--batch-size",
            help="Sequences per optimizer step, kept constant. Default 32, less for small data.",
        ),
    ] = None
    prefer: Annotated[
        str | None, typer.Option(help="quality (default) or speed: 4-bit where LoRA fits but is slower.")
    ] = None
    min_rank: Annotated[int | None, typer.Option(help="LoRA rank never falls below this.")] = None
    memory_gib: options.MemoryGib = None
    headroom: options.Headroom = None
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of a machine's memory: states go there where nothing fits otherwise.")
    ] = None
    price: Annotated[float | None, typer.Option(help="US dollars per GPU hour.")] = None
    spot: Annotated[bool, typer.Option("--spot", help="Spot prices, of machines that may be taken back.")] = False
    lr: Annotated[float | None, typer.Option(help="Learning rate for the launch files instead of the rule's.")] = None

    def fixed(self) -> dict[str, tuple[Any, ...]]:
        """With the objective and the fields of the layout.

        Raises:
            UsageError: unknown values, or flags that contradict each other.
        """
        if self.rank is not None and self.min_rank is not None and self.rank < self.min_rank:
            raise UsageError(f"--rank {self.rank} is below --min-rank {self.min_rank}", hint="leave one of the two out")
        num_gpus = self.gpus or 1
        fields = options.objective_fields(self.objective, packing=self.packing, num_gpus=num_gpus)
        if rollouts := self.rollouts(self.objective, self.seq_len, packages=not self.no_extra_packages):
            fields["rollout"] = rollouts
        if images := self.images():
            fields["images"] = (images,)
        fields |= {row.of: row.values_of(value) for row, value in given(self, setup_flags.AIM).items()}
        layout = {row.key: value for row, value in given(self, setup_flags.LAYOUT).items()}
        return fields | super().fixed() | options.layout_fields(num_gpus, **layout)

    def on_links_of(self, name: str, gpu: GpuSpec) -> Self:
        """The same request with the links that this machine has, where its GPUs are meant and no link was named."""
        num = self.gpus or 1
        if num == 1 or name.lower() != "local" or self.interconnect is not None:
            return self
        from finetune_planner.app.machine import local_link

        link = local_link(num)
        return replace(self, interconnect=link) if link == "pcie" or (link and gpu.nvlink_bytes_per_s) else self

    def cluster(self, gpu: GpuSpec) -> "Cluster | None":
        """The GPUs and their links, None for one GPU.

        Raises:
            UsageError: counts or links that cannot be meant.
        """
        return options.cluster_of(gpu, self.gpus, self.nodes, self.interconnect)

    def request(self) -> PlanRequest:
        """What the options ask for.

        Raises:
            UsageError: an option that makes no sense.
        """
        tokens, samples = self.dataset_tokens, self.samples
        if tokens and samples and 0 < tokens < samples:
            raise UsageError(
                f"--tokens {tokens:,} of --samples {samples:,} are less than one a sample: they are those of an epoch",
                hint=f"if that is of a sample: --tokens {tokens * samples}",
            )
        return PlanRequest(
            fixed=self.fixed(),
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            memory_gib=self.memory_gib,
            headroom_gib=self.headroom,
            host_gib=self.host_memory,
            min_rank=self.min_rank,
            data=Data(epoch_tokens=self.dataset_tokens, num_samples=self.samples),
            price=self.price,
            spot=self.spot,
            prefer=self.prefer or "quality",
            num_epochs=self.epochs,
            learning_rate=self.lr,
        )


NAMES = (
    "messages", "question", "answer", "context", "system", "prompt", "completion", "text", "chosen", "rejected",
    "anchor", "positive", "negative", "label",
)  # fmt: skip
"""What `--columns` gives a column to."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set, its columns, and what of it the loss is on."""

    dataset: Annotated[
        str | None, typer.Option(help="File (.jsonl .json .csv .parquet .txt, .gz), directory or hub id to train on.")
    ] = None
    columns: Annotated[
        str | None, typer.Option(help="Columns with other names: question=Frage,answer=Antwort; text=NAME; ...")
    ] = None
    loss_on: Annotated[str | None, typer.Option(help="answers (default where the data have any) or all tokens.")] = None

    @property
    def words(self) -> tuple[str, ...]:
        """As they were typed."""
        given = (("--dataset", self.dataset), ("--columns", self.columns), ("--loss-on", self.loss_on))
        return tuple(word for option, value in given if value is not None for word in (option, value))

    def checked(self) -> "DataOptions":
        """These options.

        Raises:
            UsageError: one that makes no sense.
        """
        if self.loss_on is not None:
            choices("loss-on", (self.loss_on,), ("answers", "all"))
        if self.columns is not None and self.dataset is None:
            raise UsageError("--columns names columns of a data set", hint="add --dataset FILE")
        _ = self.names
        return self

    @property
    def names(self) -> Mapping[str, str]:
        """Known name -> the column that has it, empty where every column says what it is.

        Raises:
            UsageError: something else than NAME=COLUMN,..., or a name that is not known.
        """
        if not self.columns:
            return {}
        pairs = [part.partition("=") for part in self.columns.split(",")]
        for name, _, column in pairs:
            if name.strip() not in NAMES or not column.strip():
                raise UsageError(
                    f"--columns takes NAME=COLUMN,... of the names {', '.join(NAMES)}; got {self.columns!r}",
                    hint="for example --columns question=Frage,answer=Antwort",
                )
        return {name.strip(): column.strip() for name, _, column in pairs}


NO_DATA_OPTIONS = DataOptions()
