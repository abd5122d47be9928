"""The options that name one setup, declared once: `plan estimate` and `plan probe`."""

from typing import Annotated, Any

import typer

from planner.cli import cluster_options, options
from planner.option_values import parse_targets, positive
from planner.records import dataclass
from planner.setup_fields import STACK_NAMES


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """One setup as flags; None: the setup's own default."""

    method: Annotated[str | None, typer.Option("--method", help="full, lora or qlora.")] = None
    rank: options.Rank = None
    targets: options.Targets = None
    optimizer: Annotated[str | None, typer.Option("--optimizer")] = None
    precision: Annotated[str | None, typer.Option("--precision")] = None
    quantization: Annotated[str | None, typer.Option("--quantization")] = None
    attention: Annotated[str | None, typer.Option("--attention")] = None
    checkpointing: options.Checkpointing = None
    checkpoint_every: options.CheckpointEvery = None
    loss: Annotated[str | None, typer.Option("--loss")] = None
    kernels: options.OneKernels = None
    activation_offload: options.ActivationOffload = None
    selective_checkpointing: options.SelectiveCheckpointing = None
    compile: options.Compile = None
    quantize_experts: options.QuantizeExperts = None
    seq_len: options.SeqLen = None
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences per forward.")] = None
    accumulation: Annotated[int | None, typer.Option("--accumulation", help="Micro-batches per step.")] = None
    packing: options.Packing = None
    gpus: cluster_options.Gpus = None
    parallel: cluster_options.Parallel = None
    shard_degree: cluster_options.ShardDegree = None
    reshard: cluster_options.Reshard = None
    offload: cluster_options.Offload = None

    def num_gpus(self) -> int:
        """GPUs of the whole job.

        Raises:
            UsageError: a count that cannot be meant.
        """
        return positive("gpus", self.gpus, maximum=cluster_options.MAX_GPUS) or 1

    def values(self) -> dict[str, Any]:
        """What was given, as fields of the interchange form; a quantized base is QLoRA's.

        Raises:
            UsageError: values out of range, or flags that contradict each other.
        """
        given = {name: value for name, value in self._fields().items() if value is not None}
        if "method" not in given and given.get("quantization", "none") != "none":
            given["method"] = "qlora"
        num_gpus = self.num_gpus()
        return given | cluster_options.one_setup(num_gpus, cluster_options.spread_fields(num_gpus, **self._spread()))

    def _fields(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "lora_rank": positive("rank", self.rank, maximum=65_536),
            "lora_targets": None if self.targets is None else parse_targets(self.targets),
            "optimizer": self.optimizer,
            "precision": self.precision,
            "quantization": self.quantization,
            "attention": self.attention,
            "checkpointing": options.checkpointing_value(self.checkpointing, self.checkpoint_every),
            "loss": self.loss,
            "kernels": self.kernels,
            "activation_offload": self.activation_offload,
            "selective_checkpointing": self.selective_checkpointing,
            "compile": self.compile,
            "quantize_experts": self.quantize_experts,
            "seq_len_tokens": positive("seq-len", self.seq_len),
            "micro_batch_seqs": positive("micro-batch", self.micro_batch),
            "accumulation_steps": positive("accumulation", self.accumulation),
            "packing": self.packing,
        }

    def _spread(self) -> dict[str, Any]:
        return {
            "parallel": _listed(self.parallel),
            "offload": _listed(self.offload),
            "shard_degree": self.shard_degree,
            "reshard": self.reshard,
        }


@dataclass(frozen=True, kw_only=True)
class AnySetupOptions(SetupOptions, options.RolloutOptions, options.AimOptions, options.ImageOptions):
    """With what a formula can say and no probe here runs: split matrices and layers, other stacks."""

    tensor_degree: cluster_options.TensorDegree = None
    context_degree: cluster_options.ContextDegree = None
    pipeline_degree: cluster_options.PipelineDegree = None
    schedule: cluster_options.Schedule = None
    objective: options.Objective = None
    adapter: options.Adapter = None
    kbit_fp32_cast: Annotated[
        bool | None, typer.Option("--kbit-fp32-cast/--no-kbit-fp32-cast", help="peft's k-bit preparation.")
    ] = None
    adapter_dtype: Annotated[str | None, typer.Option("--adapter-dtype", help="auto, fp32, bf16 or fp16.")] = None
    lora_dropout: Annotated[float | None, typer.Option("--lora-dropout")] = None
    stack: Annotated[
        str | None, typer.Option("--stack", help="Whose training step: " + ", ".join(STACK_NAMES) + ".")
    ] = None
    expandable_segments: Annotated[
        bool | None,
        typer.Option(
            "--expandable-segments/--no-expandable-segments",
            help="As in PYTORCH_ALLOC_CONF; the stack's own default otherwise.",
        ),
    ] = None
    reentrant: Annotated[
        bool | None,
        typer.Option("--reentrant/--no-reentrant", help="use_reentrant of checkpointing; the stack's own otherwise."),
    ] = None

    def _fields(self) -> dict[str, Any]:
        return super()._fields() | {
            "objective": self.objective,
            "adapter": None if self.adapter is None else options.adapter_kind(self.adapter),
            "kbit_fp32_cast": self.kbit_fp32_cast,
            "adapter_dtype": self.adapter_dtype,
            "lora_dropout": self.lora_dropout,
            "stack": self.stack,
            "expandable_segments": self.expandable_segments,
            "reentrant_checkpointing": self.reentrant,
            "rollout": self.rollout(self.objective, self.seq_len),
            "images": self.images(),
            **self.of_aim(),
        }

    def _spread(self) -> dict[str, Any]:
        return super()._spread() | {
            "tensor_degree": _listed(self.tensor_degree),
            "context_degree": _listed(self.context_degree),
            "pipeline_degree": _listed(self.pipeline_degree),
            "schedule": self.schedule,
        }


def _listed(value: Any) -> list[Any] | None:
    return None if value is None else [value]
