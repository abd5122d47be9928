"""`ReadConfig`: what a config file says, as a setup, with everything that had to be assumed; what a person says about a
file that leaves settings open: `--set micro_batch=4`, `--assume trl==0.22`."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Self

from planner.core.errors import LayoutAlone, SetupError, Undetermined, UsageError
from planner.core.records import dataclass
from planner.frameworks.tools import LAUNCHERS, PROGRAMS, tool_of
from planner.options.images import Images
from planner.options.objectives import OBJECTIVES
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A setting that decides the answer and that the file does not determine.

    Attributes:
        field: of `TrainSetup`, or "model".
        reason: why, with the place in the file.
    """

    field: str
    reason: str

    @property
    def option(self) -> str:
        """What a person adds to the command to supply it."""
        return OPTIONS.get(self.field, f"--set {self.field}=VALUE")


OPTIONS = {
    "objective": f"--set objective={'|'.join(OBJECTIVES)}",
    "model": "--model MODEL",
    "method": "--set method=full|lora|qlora",
    "quantization": "--set quantization=none|int8|nf4|nf4-double",
    "micro_batch_seqs": "--set micro_batch=N",
    "accumulation_steps": "--set accumulation=N",
    "seq_len_tokens": "--set seq_len=N",
    "lora_rank": "--set rank=N",
    "lora_targets": "--set targets=all-linear",
    "checkpointing": "--set checkpointing=true|false",
    "precision": "--set precision=bf16-autocast",
    "packing": "--set packing=true|false",
    "images": "--set images=NUMxWIDTHxHEIGHT of a sample (1x1024x1024; none: text alone)",
    "loss": "--set loss=full|chunked",
    "num_gpus": "--gpus N",
    "parallel": "--set parallel=none|ddp|fsdp2|zero2|zero3 (or --accelerate FILE)",
    "offload": "--set offload=none|optimizer|parameters",
    "eval_seqs": "--set eval_batch=N (sequences that are evaluated at once; 0: none)",
    "beside": "--set beside=GIB (what the other model holds on this GPU; 0: nothing)",
}
SHORT_NAMES = {
    "micro_batch": "micro_batch_seqs",
    "batch_size": "micro_batch_seqs",
    "accumulation": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
    "per_device_train_batch_size": "micro_batch_seqs",
    "seq_len": "seq_len_tokens",
    "max_length": "seq_len_tokens",
    "rank": "lora_rank",
    "lora_r": "lora_rank",
    "r": "lora_rank",
    "targets": "lora_targets",
    "optim": "optimizer",
    "eval_batch": "eval_seqs",
    "per_device_eval_batch_size": "eval_seqs",
}
"""Words of `--set` for fields of a setup, beside their own names."""
TEXT_ALONE = "pictures are not counted: only the data says whether it shows any (--set images=1x1024x1024)"
"""The assumption about a vision-language model whose file says nothing of its data."""
FROZEN_ENCODER = " keeps the vision encoder frozen: with pictures it is counted as trained"
ON_TEXT = " trains the vision encoder on text too: its gradients and optimizer states are not counted without pictures"
"""Ends of approximations of full fine-tuning with pictures alone, and of that without any."""


class Bound(str):
    """An approximation that counts too much, or too little.

    Attributes:
        categories: of memory terms that it is about.
    """

    __slots__ = ("categories",)
    categories: tuple[str, ...]
    words = ""

    def __new__(cls, sentence: str, *categories: str) -> Self:
        bound = super().__new__(cls, f"{sentence}, {cls.words}")
        bound.categories = categories
        return bound


class UpperBound(Bound):
    """The run holds less of its categories than is counted, perhaps nothing."""

    __slots__ = ()
    words = "an upper bound"


class LowerBound(Bound):
    """The run holds more of its categories than is counted, up to twice as much."""

    __slots__ = ()
    words = "a lower bound"


TRAINED = ("gradients", "optimizer")
"""Categories of what hangs on how much is trained at a time."""
EXPANDABLE = "PYTORCH_ALLOC_CONF is not set: taken with expandable_segments:True (--set expandable_segments=false)"
"""The assumption about the allocator of a file that says nothing of it."""


DEFAULTS = {"liger_kernel_config": ({"fused_linear_cross_entropy": True},)}
"""Setting -> values that say what runs without it."""


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """One existing config, understood.

    Attributes:
        format: a name of `planner.frameworks.tools.TOOLS`.
        model_id: None where the format does not say (Accelerate, DeepSpeed).
        setup: with the tool's own defaults for what is absent; what `missing` names stands there for nothing.
        missing: settings that the file does not determine: no verdict without them.
        origins: TrainSetup field -> where its value was read, "file:line" or the words for a default.
        assumptions: defaults and readings a person should know, one sentence each.
        approximations: features the memory model does not follow exactly; they widen the error band.
        refusals: why its tool ends before it trains, whatever the model.
        keys: TrainSetup field -> (key in the file, value in the file), for `--fix`; nested keys dotted.
        only: TrainSetup field -> the values of it that the versions of this file can run; others: all.
        adapted_tables: names of token tables that get adapters.
        unknown_keys: settings of the file that its tool does not have.
        reentrant: whether the versions of this file checkpoint in the older form unless they are told.
        older: how it is known that transformers 4 runs it; "" where today's does.
        lacks: settings that the version of this file does not have, of those that `--fix` writes.
        call_line: of a program, the line of the call that holds the training arguments.
        eval_seqs: sequences that are evaluated at once between steps; 0 where none are known to be.
        label_tokens: to how many tokens an encoder-decoder's labels are cut, where those are fewer than its inputs', as
            which they are counted; 0: as many.
        eval_logits: whether metrics are computed from their logits.
        beside_bytes: what else lies on the GPU while it trains, as a person said.
        loaded_again: where, and in which type, the program loads the model onto the GPU once more after its training,
            what was trained being there still; "" twice: it does not.
        sources: files that a program takes settings or code from, as it names them.
        started: files that were read because the file's launch starts them, or names them.
        num_nodes: machines that its launch is on, 0 where nothing says.
        planned: whether a plan wrote the file, for versions and an allocator that its launch sets.
    """

    format: str
    path: str
    setup: TrainSetup
    model_id: str | None = None
    missing: tuple[Missing, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    dataset: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    adapted_tables: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    reentrant: bool = False
    older: str = ""
    lacks: tuple[str, ...] = ()
    call_line: int = 0
    eval_seqs: int = 0
    label_tokens: int = 0
    eval_logits: bool = False
    beside_bytes: int = 0
    loaded_again: tuple[str, str] = ("", "")
    sources: tuple[str, ...] = ()
    started: frozenset[Path] = frozenset()
    num_nodes: int = 0
    planned: bool = False

    def allows(self, after: TrainSetup, *, in_place: bool = False) -> bool:
        """Whether the file's tool, in its versions, can run a changed setup; `in_place`: and `--fix` can write it."""
        tool = tool_of(self.format)
        fits = all(getattr(after, name) in values for name, values in self.only.items())
        if not fits or not in_place:
            return fits and tool.runs(self.setup, after)
        if not tool.fixes(self.keys, self.setup, after):
            return False
        edits = tool.edits(self.keys, self.setup, after, self.path) if self.lacks else {}
        return all(edits.get(name, {}) in ({}, *DEFAULTS.get(name, ())) for name in self.lacks)


def canonical(setup: TrainSetup) -> TrainSetup:
    """The setup with everything that two equal runs may write differently put into one form.

    Adapter data type resolved, target lists sorted, fields that the method does not use at their defaults, as well as
    what is decided by what is installed.
    """
    plain = TrainSetup()
    setup = setup.replace(linear_attention=plain.linear_attention, zero_buffers=plain.zero_buffers)
    if setup.accumulation_steps == 1:
        setup = setup.replace(sync_each_batch=plain.sync_each_batch)
    if setup.method == "full":
        return setup.replace(
            lora_targets=plain.lora_targets, lora_dropout=plain.lora_dropout, adapter_dtype=plain.adapter_dtype
        )
    targets = setup.lora_targets
    if isinstance(targets, tuple):
        targets = tuple(sorted(set(targets)))
    return setup.replace(adapter_dtype=setup.resolved_adapter_dtype, lora_targets=targets)


SETTABLE = tuple(TrainSetup.__dataclass_fields__)
BESIDE = "beside"
"""GiB of another model on the same GPU: no field of a setup."""
EVALUATED = "eval_seqs"
"""Sequences evaluated at once: no field of a setup either."""
_WORDS = {"true": True, "false": False, "on": True, "off": False}


def parse_sets(pairs: Sequence[str]) -> dict[str, Any]:
    """--set NAME=VALUE pairs as fields of a setup.

    Raises:
        UsageError: no "=", or a name that no setup has.
    """
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        field = SHORT_NAMES.get(name.strip(), name.strip())
        if not equals or field not in (*SETTABLE, BESIDE, EVALUATED):
            raise UsageError(
                f"--set must be NAME=VALUE with a setting's name; got {pair!r}",
                hint=f"for example --set micro_batch=4; names: {', '.join((*SHORT_NAMES, *SETTABLE))}",
            )
        fields[field] = _value(field, text.strip())
    return fields


def _value(field: str, text: str) -> Any:
    if field == BESIDE:
        return round(_number(field, text.lower().removesuffix("gib"), float) * 2**30)
    default = getattr(TrainSetup(), field, 0)
    if field == "checkpointing":
        return int(_WORDS[text.lower()]) if text.lower() in _WORDS else _number(field, text, int)
    if field == "images":
        return None if text.lower() == "none" else _images(text)
    if field == "lora_targets":
        return tuple(text.split(",")) if "," in text else text
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise UsageError(f"--set {field} must be true or false, got {text!r}", hint=f"--set {field}=true")
        return _WORDS[text.lower()]
    if isinstance(default, (int, float)):
        return _number(field, text, type(default))
    return text


def _images(text: str) -> Images:
    try:
        num, width, height = map(int, text.lower().split("x"))
        return Images(num=num, width=width, height=height)
    except (ValueError, SetupError):
        raise UsageError(
            f"--set images must be NUMxWIDTHxHEIGHT or none, got {text!r}", hint="for example --set images=1x1024x1024"
        ) from None


def _number(field: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"--set {field} must be a number, got {text!r}", hint=f"--set {field}=1") from None


def parse_versions(pairs: Sequence[str]) -> dict[str, str]:
    """--assume PACKAGE==VERSION pairs.

    Raises:
        UsageError: not of that form.
    """
    versions = {}
    for pair in pairs:
        name, equals, version = pair.partition("==")
        if not equals or not name.strip() or not version.strip()[:1].isdigit():
            raise UsageError(f"--assume must be PACKAGE==VERSION, got {pair!r}", hint="for example trl==0.22.2")
        versions[name.strip().lower()] = version.strip()
    return versions


def overrides(config: ReadConfig, given: Mapping[str, Any]) -> ReadConfig:
    """The config with what a person said about it; `missing` loses what was supplied.

    Raises:
        UsageError: a combination that cannot exist.
    """
    if not given:
        return config
    values = {name: value for name, value in given.items() if name not in (BESIDE, EVALUATED)}
    method = values.get("method", config.setup.method)
    if method == "full":
        values = {"lora_rank": 0, "quantization": "none", "kbit_fp32_cast": False, "adapter_dtype": "auto", **values}
    elif method == "lora":
        values = {"quantization": "none", "kbit_fp32_cast": False, **values}
    elif config.setup.quantization == "none":
        values = {"quantization": "nf4-double", **values}
    if method != "full" and not config.setup.lora_rank:
        values.setdefault("lora_rank", TrainSetup().lora_rank)
    if values.get("images") is not None and config.setup.num_gpus == 1:
        values = {"parallel": "none", "offload": "none", **values}  # ZeRO's share of pictures is not modelled
    try:
        setup = config.setup.replace(**values)
    except SetupError as error:
        raise UsageError(f"--set: {error.message}", hint=error.hint) from error
    answered = set(given)
    if method == "full":
        answered |= {"lora_rank", "lora_targets", "quantization"}
    elif "method" in given and method == "lora":
        answered.add("quantization")
    if given.get("parallel") in ("none", "ddp"):
        answered.add("offload")
    missing = tuple(entry for entry in config.missing if entry.field not in answered)
    origins = {**config.origins, **dict.fromkeys(given, "--set")}
    supplied_texts = [text for text, of in ((TEXT_ALONE, "images"), (EXPANDABLE, "expandable_segments")) if of in given]
    assumed = tuple(assumption for assumption in config.assumptions if assumption not in supplied_texts)
    settled = ON_TEXT if setup.images is not None else FROZEN_ENCODER
    approximated = tuple(text for text in config.approximations if "images" not in given or not text.endswith(settled))
    extra_bytes, evaluated = given.get(BESIDE, config.beside_bytes), given.get(EVALUATED, config.eval_seqs)
    supplied = replace(config, setup=setup, missing=missing, origins=origins, assumptions=assumed)
    supplied = replace(supplied, approximations=approximated)
    return replace(supplied, beside_bytes=extra_bytes, eval_seqs=evaluated)


def determined(config: ReadConfig) -> ReadConfig:
    """The config itself, where nothing that decides the answer is open.

    Raises:
        Undetermined: naming each open setting, why, and the option that supplies it.
    """
    if not config.missing:
        return config
    by_reason: dict[str, list[str]] = {}
    for entry in config.missing:
        by_reason.setdefault(entry.reason, []).append(entry.field)
    lines = [f"{', '.join(fields)} ({reason})" for reason, fields in by_reason.items()]
    options = " ".join(dict.fromkeys(entry.option for entry in config.missing))
    words = "; words of its command line go into --args" if config.format in PROGRAMS else ""
    kind = LayoutAlone if config.format in LAUNCHERS else Undetermined
    raise kind(f"{config.path} ({config.format}) does not determine {'; '.join(lines)}", hint=f"add {options}{words}")
