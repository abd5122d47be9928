"""The options of a wish, declared once for every command that plans: `plan MODEL`, `plan tune`, `plan which-gpu`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from planner.cli import cluster_options, options
from planner.errors import UsageError
from planner.hardware.gpu import GpuSpec
from planner.option_values import amount, choices, parse_targets, positive
from planner.records import dataclass
from planner.wish import Wish
from planner.workload import Data

if TYPE_CHECKING:
    from planner.hardware.cluster import Cluster  # late: one GPU needs none of it


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """Which values of the setup's fields may be planned; None: all of them."""

    method: options.Methods = None
    rank: options.Rank = None
    targets: options.Targets = None
    adapter: options.Adapter = None
    optimizer: options.Optimizer = None
    precision: options.Precision = None
    quantization: options.Quantization = None
    attention: options.Attention = None
    checkpointing: options.Checkpointing = None
    checkpoint_every: options.CheckpointEvery = None
    packing: options.Packing = None
    loss: options.Loss = None
    kernels: options.Kernels = None
    activation_offload: options.ActivationOffload = None
    selective_checkpointing: options.SelectiveCheckpointing = None
    compile: options.Compile = None
    quantize_experts: options.QuantizeExperts = None
    no_extra_packages: options.NoExtraPackages = False

    def fixed(self) -> dict[str, tuple[Any, ...]]:
        """Setup fields that the user decided, each with its allowed values.

        Raises:
            UsageError: unknown values, or flags that contradict each other.
        """
        fixed: dict[str, tuple[Any, ...]] = {
            name: choices(name, values, known)
            for name, known in options.CHOICES.items()
            if (values := getattr(self, name))
        }
        said = {
            "lora_rank": positive("rank", self.rank, maximum=65_536),
            "lora_targets": None if self.targets is None else parse_targets(self.targets),
            "checkpointing": options.checkpointing_value(self.checkpointing, self.checkpoint_every),
            "packing": self.packing,
            "adapter": None if self.adapter is None else options.adapter_kind(self.adapter),
            "activation_offload": self.activation_offload,
            "compile": self.compile,
            "selective_checkpointing": self.selective_checkpointing,
            "quantize_experts": self.quantize_experts,
        }
        fixed |= {name: (value,) for name, value in said.items() if value is not None}
        if self.no_extra_packages:
            options.without_packages(fixed)
        return fixed | self._method(fixed)

    def _method(self, fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """The methods that the other flags leave: a quantization other than none means QLoRA unless a method was given;
        a rank, targets or a kind of adapter rule full fine-tuning out."""
        flags = (("--rank", self.rank), ("--targets", self.targets), ("--adapter", self.adapter))
        of_adapters = [flag for flag, value in flags if value is not None]
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
class WishOptions(SpaceOptions, options.RolloutOptions, options.AimOptions, options.ImageOptions):
    """What a person asks for on the command line, beside model and GPU; None: planned, or a stated default."""

    objective: options.Objective = None
    gpus: cluster_options.Gpus = None
    nodes: cluster_options.Nodes = None
    interconnect: cluster_options.Interconnect = None
    seq_len: options.SeqLen = None
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            "--batch-size",
            help="Sequences per optimizer step, kept constant. Default 32, less for small data.",
        ),
    ] = None
    parallel: cluster_options.Parallels = None
    tensor_degree: cluster_options.TensorDegrees = None
    context_degree: cluster_options.ContextDegrees = None
    pipeline_degree: cluster_options.PipelineDegrees = None
    schedule: cluster_options.Schedule = None
    shard_degree: cluster_options.ShardDegree = None
    reshard: cluster_options.Reshard = None
    offload: cluster_options.Offloads = None
    prefer: Annotated[
        str | None, typer.Option("--prefer", help="quality (default) or speed: 4-bit where LoRA fits but is slower.")
    ] = None
    min_rank: Annotated[int | None, typer.Option("--min-rank", help="LoRA rank never falls below this.")] = None
    memory_gib: options.MemoryGib = None
    headroom: options.Headroom = None
    dataset_tokens: Annotated[
        int | None,
        typer.Option(
            "--dataset-tokens",
            "--tokens",
            parser=amount,
            help="Tokens of one epoch (20M): steps, time, cost.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", parser=amount, help="Samples of one epoch (50k), of full length unless --tokens is given."
        ),
    ] = None
    price: Annotated[float | None, typer.Option("--price", help="US dollars per GPU hour.")] = None
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Passes over the data. Default 1, up to 3 for small data.")
    ] = None
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate for the launch files instead of the rule's.")
    ] = None

    def fixed(self) -> dict[str, tuple[Any, ...]]:
        """With the objective and the fields of the spread.

        Raises:
            UsageError: unknown values, or flags that contradict each other.
        """
        options.check_ranks(self.rank, self.min_rank)
        num_gpus = self.gpus or 1
        aim = options.objective_fields(self.objective, packing=self.packing, num_gpus=num_gpus)
        if rollout := self.rollout(self.objective, self.seq_len):
            aim["rollout"] = (rollout,)
        if images := self.images():
            aim["images"] = (images,)
        aim |= {name: (value,) for name, value in self.of_aim().items()}
        return (
            aim
            | super().fixed()
            | cluster_options.spread_fields(
                num_gpus,
                parallel=self.parallel,
                tensor_degree=self.tensor_degree,
                context_degree=self.context_degree,
                pipeline_degree=self.pipeline_degree,
                schedule=self.schedule,
                shard_degree=self.shard_degree,
                reshard=self.reshard,
                offload=self.offload,
            )
        )

    def on_links_of(self, name: str, gpu: GpuSpec) -> Self:
        """The same wish with the links that this machine has, where its GPUs are meant and no link was named."""
        num = self.gpus or 1
        if num == 1 or name.lower() != "local" or self.interconnect is not None:
            return self
        from planner.app.machine import local_link

        link = local_link(num)
        return replace(self, interconnect=link) if link == "pcie" or (link and gpu.nvlink_bytes_per_s) else self

    def cluster(self, gpu: GpuSpec) -> "Cluster | None":
        """The GPUs and their links, None for one GPU.

        Raises:
            UsageError: counts or links that cannot be meant.
        """
        return cluster_options.cluster_of(gpu, self.gpus, self.nodes, self.interconnect)

    def wish(self) -> Wish:
        """What the options ask for.

        Raises:
            UsageError: an option that makes no sense.
        """
        return Wish(
            fixed=self.fixed(),
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            memory_gib=self.memory_gib,
            headroom_gib=self.headroom,
            min_rank=self.min_rank,
            data=Data(epoch_tokens=self.dataset_tokens, num_samples=self.samples),
            price=self.price,
            prefer=self.prefer or "quality",
            num_epochs=self.epochs,
            learning_rate=self.lr,
        )
