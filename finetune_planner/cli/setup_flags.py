"""Options declared once. A command names one parameter and gets all of a class's (`takes_options`); a class names rows
and gets one option each (`takes_flags`). The rows here are the flags that name fields of a setup.

A request may name several values of a field, a setup one. To put a further field on the command line, add its row.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args

import typer

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.options.adapters import refusal as adapter_refusal
from planner.options.rollouts import GENERATORS, Rollout
from planner.planning.option_values import choices, length, named, parse_targets, positive
from planner.setup import TrainSetup
from planner.setup import allowed as fields

R = TypeVar("R")
T = TypeVar("T")
MAX_GPUS = 4096
MAX_RANK = 65_536
PARALLELS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "dp", "device-map")
"""`planner.setup.PARALLELS` without "none" (which follows from the degrees), the usual ones first."""


def takes_options(command: Callable[..., R]) -> Callable[..., R]:
    """A command whose parameters annotated with a dataclass become the options that its fields declare, in that place:
    typer reads a command's options from its signature."""
    classes: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    one_gpu: inspect.Parameter | None = None
    for parameter in inspect.signature(command).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and is_dataclass(annotation):
            classes[parameter.name] = annotation
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
                )
                for field in fields_of(annotation)
            ]
        else:
            if parameter.name == "gpu" and get_args(annotation)[0] in (str, str | None):
                one_gpu = parameter  # asked for as a list: of several the parser takes the last
                default = [parameter.default] if isinstance(parameter.default, str) else parameter.default
                parameter = parameter.replace(annotation=Annotated[list[str], get_args(annotation)[1]], default=default)
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> R:
        if one_gpu is not None and not isinstance(values["gpu"], str):
            names = values["gpu"] or [one_gpu.default]
            if len(names) > 1:
                from planner.hardware.gpus import of_kinds

                raise of_kinds(names)
            values["gpu"] = names[0]
        if isinstance(values.get("gpu"), str) and "gpus" in values:  # "8xH100" is --gpu H100 --gpus 8
            from planner.hardware.gpus import card_and_count

            values["gpu"], values["gpus"] = card_and_count(values["gpu"], values["gpus"])
        groups = {
            name: of_class(**{field.name: values.pop(field.name) for field in fields_of(of_class)})
            for name, of_class in classes.items()
        }
        return command(**values, **groups)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


KINDS = {field.name: type(field.default) for of in (TrainSetup, Rollout) for field in fields_of(of)}
"""Field -> the kind of its values."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One field of a setup on the command line.

    Attributes:
        of: the field of `TrainSetup`.
        name: the option, as a Python name; "": the field's.
        help: for people, without what follows from the others.
        values: the words that it may have; (): any.
        kind: of one value, where it is not the field's own; a bool has two options, --name and --no-name, unless
            `single`.
        many: whether a request may name several.
        read: (option, one value) -> what the field is.
        parse: what is typed -> one value; None: as its kind is.
    """

    of: str
    name: str = ""
    help: str = ""
    values: tuple[str, ...] = ()
    kind: type | None = None
    many: bool = False
    single: bool = False
    read: Callable[[str, Any], Any] = lambda _, value: value
    parse: Callable[[str], Any] | None = None

    @property
    def key(self) -> str:
        return self.name or self.of

    @property
    def word(self) -> str:
        return self.key.replace("_", "-")

    def annotation(self, *, several: bool) -> Any:
        field_kind = self.kind or KINDS[self.of]
        kind = field_kind if field_kind in (bool, int, float) else str
        pair = f"/--no-{self.word}" if kind is bool and not self.single else ""
        text = self.help or "/".join(self.values)
        if several and self.many:
            return Annotated[list[kind] | None, typer.Option(f"--{self.word}", help=f"{text}; repeatable.")]  # type: ignore[valid-type]
        return Annotated[kind | None, typer.Option(f"--{self.word}{pair}", parser=self.parse, help=f"{text}.")]

    def values_of(self, value: Any) -> tuple[Any, ...]:
        """The values of the field that a request allows.

        Raises:
            UsageError: one that the field cannot have.
        """
        several = value if self.many else [value]
        if self.values:
            return choices(self.word, several, self.values)
        return tuple(dict.fromkeys(self.read(self.word, raw) for raw in several))


@dataclass_transform(frozen_default=True, kw_only_default=True)
def takes_flags(*rows: Flag, several: bool) -> Callable[[type[T]], type[T]]:
    """A class of options with one for every row before those that it declares itself; None: not given.

    Of the rows it declares those that code asks for by name, with what they are where they are given.
    """

    def declare(cls: type[T]) -> type[T]:
        annotations = {row.key: row.annotation(several=several) for row in rows}
        cls.__annotations__ = annotations | {
            key: kind for key, kind in vars(cls).get("__annotations__", {}).items() if key not in annotations
        }
        for row in rows:
            setattr(cls, row.key, None)
        return dataclass(frozen=True, kw_only=True)(cls)

    return declare


def given(options: object, rows: Iterable[Flag]) -> dict[Flag, Any]:
    """The rows of which somebody said something, with what was said.

    Raises:
        UsageError: --no-checkpointing together with --checkpoint-every.
    """
    values = {row: getattr(options, row.key) for row in rows}
    if values.get(CHECKPOINT_EVERY) is not None and values.get(CHECKPOINTING) is False:
        raise UsageError("--no-checkpointing contradicts --checkpoint-every", hint="give one of the two")
    return {row: value for row, value in values.items() if value is not None and value != []}


def adapter_kind(flag: str, name: str) -> str:
    """The name of a kind of adapter.

    Raises:
        UsageError: unknown, or known and refused.
    """
    if refused := adapter_refusal(name):
        raise UsageError(f"--{flag} {name} is not planned: {refused}")
    return str(choices(flag, (name,), fields.ADAPTER_KINDS)[0])


_gpus = partial(positive, maximum=MAX_GPUS)
_counted = partial(positive, least=0)

CHECKPOINTING = Flag(
    of="checkpointing", kind=bool, help="Gradient checkpointing on or off", read=lambda _, value: int(value)
)
CHECKPOINT_EVERY = Flag(
    of="checkpointing",
    name="checkpoint_every",
    help="Checkpoint every n-th layer",
    read=partial(positive, maximum=100_000),
)
"""The other flag of the same field; it decides where both are given."""

SPACE = (
    Flag(of="method", help="full, lora or qlora", values=fields.METHODS, many=True),
    Flag(of="lora_rank", name="rank", help="LoRA rank, fixed", read=partial(positive, maximum=MAX_RANK)),
    Flag(
        of="lora_targets",
        name="targets",
        help="attention, all-linear, or module names a,b,c",
        read=lambda _, value: parse_targets(value),
    ),
    Flag(of="optimizer", values=fields.OPTIMIZERS, many=True),
    Flag(of="precision", values=fields.PRECISIONS, many=True),
    Flag(of="quantization", values=fields.QUANTIZATIONS, many=True),
    Flag(of="attention", values=fields.ATTENTIONS, many=True),
    Flag(of="micro_batch_seqs", name="micro_batch", help="Sequences per forward", read=positive),
    CHECKPOINTING,
    CHECKPOINT_EVERY,
    Flag(of="packing", help="Fill sequences with several samples"),
    Flag(of="loss", values=fields.LOSSES, many=True),
    Flag(of="kernels", values=fields.KERNEL_FAMILIES, many=True),
    Flag(
        of="linear_attention", values=fields.LINEAR_ATTENTIONS, many=True, help="Gated delta rule: fla (package), torch"
    ),
    Flag(of="activation_offload", help="Checkpoints in host memory or on the GPU"),
    Flag(of="selective_checkpointing", help="Checkpointed layers keep their attention (TRL, Axolotl)"),
    Flag(of="compile", help="torch.compile on or off. Default: on where its gain was compared"),
    Flag(of="quantize_experts", help="A mixture's stacked experts in 4 bits (Axolotl)"),
)
"""Of a setup on one GPU."""
ADAPTER = Flag(
    of="adapter", help="/".join(fields.ADAPTER_KINDS) + "; LoRA unless given (docs/adapters.md)", read=adapter_kind
)
SHARED = (
    Flag(of="parallel", values=PARALLELS, many=True),
    Flag(of="shard_degree", help="FSDP2 shards in groups of so many GPUs (hybrid). Default: all", read=_gpus),
    Flag(of="reshard_after_forward", name="reshard", help="FSDP2 frees gathered weights after the forward"),
    Flag(of="offload", values=fields.OFFLOADS, many=True, help="/".join(fields.OFFLOADS) + " in the host's memory"),
)
"""What the copies of several GPUs share."""
SPLIT = (
    Flag(of="tensor_degree", many=True, help="GPUs that share every matrix", read=_gpus),
    Flag(of="context_degree", many=True, help="GPUs that share every sequence: fsdp2, or zero3 (Ulysses)", read=_gpus),
    Flag(of="expert_degree", many=True, help="GPUs over which experts are distributed: fsdp2", read=_gpus),
    Flag(of="pipeline_degree", many=True, help="Stages the layers are cut into", read=_gpus),
    Flag(of="pipeline_schedule", name="schedule", values=fields.PIPELINE_SCHEDULES, help="1f1b (default), gpipe"),
)
"""Over how many of them the model, its sequences and its experts are cut."""
LAYOUT = (*SHARED, *SPLIT)
AIM = (
    Flag(
        of="precomputed_reference",
        help="dpo, kto: the reference runs once, before the first step. Default: in every step",
    ),
    Flag(of="hard_negatives", help="embedding: negative texts of each pair. Default 0", read=_counted),
    Flag(
        of="cached_seqs", help="embedding: sequences at once of a cached loss; 0: none. Default: planned", read=_counted
    ),
    Flag(
        of="trained_layers",
        help="So many of the last layers train, or carry adapters; negative: of the first. Default: all",
    ),
    Flag(of="frozen_encoder", single=True, help="Whisper: the encoder is not trained. Default: it is"),
)
"""Of single objectives and models: a reference, a contrastive batch and how much of it runs at once, an encoder."""
ROLLOUT = (
    Flag(of="num_generations", help="GRPO: completions of a prompt. Default 8"),
    Flag(of="completion_tokens", name="completion_len", help="GRPO: tokens of a completion, of --seq-len. Default 512"),
    Flag(of="generation_batch_seqs", name="generation_batch", help="GRPO: completions made at once. Default: planned"),
    Flag(of="generator", help="GRPO: " + ", ".join(GENERATORS) + ". Default: planned"),
    Flag(of="vllm_fraction", help="GRPO: share of the card that vLLM takes. Default: planned"),
    Flag(of="reference", help="GRPO: hold to a reference (beta above 0)"),
)
"""Of a rollout (`planner.options.rollouts`)."""
RUN = (
    Flag(
        of="seq_len_tokens",
        name="seq_len",
        help="Tokens per sequence (8k: 8192). Default 2048",
        read=positive,
        parse=named("seq-len", length),
    ),
    Flag(of="accumulation_steps", name="accumulation", help="Micro-batches per step", read=positive),
)
"""What a plan finds by itself."""
FORMULA_ALONE = (
    Flag(of="kbit_fp32_cast", help="peft's k-bit preparation"),
    Flag(of="adapter_dtype", help="auto, fp32, bf16 or fp16"),
    Flag(
        of="modules_to_save",
        kind=str,
        help="Embeddings and head trained whole beside adapters: embed_tokens,lm_head",
        read=lambda _, value: tuple(part.strip() for part in value.split(",") if part.strip()),
    ),
    Flag(of="lora_dropout", help="Share of the adapters' inputs that is dropped"),
    Flag(of="stack", help="Whose training step: " + ", ".join(fields.STACK_NAMES)),
    Flag(of="expandable_segments", help="As in PYTORCH_ALLOC_CONF; the stack's own default otherwise"),
    Flag(of="fsdp_version", help="1: FSDP version 1 (with --parallel fsdp2), whose hooks keep layers' inputs"),
    Flag(of="sync_each_batch", help="FSDP2 cuts every micro-batch's gradients; off: whole ones wait for the last"),
    Flag(
        of="reentrant_checkpointing", name="reentrant", help="use_reentrant of checkpointing; the stack's own otherwise"
    ),
)
"""What a formula can say and no probe here runs."""
