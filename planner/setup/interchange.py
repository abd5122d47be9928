"""JSON in and out: one setup as data (the interchange form), and every outcome as plain JSON values.

The same form is spoken by `plan estimate --setups`, the measurement store, the search and the tests.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from planner.core.errors import SetupError
from planner.options.adapters import ADAPTERS
from planner.options.images import Images
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import Rollout
from planner.options.stacks import DEFAULT as DEFAULT_STACK
from planner.options.stacks import STACKS
from planner.options.zero_buffers import ZeroBuffers
from planner.setup import AROUND_FIELDS, DEFAULTS, FIELDS, LATER_FIELDS, LAYOUT_FIELDS, TrainSetup

SCHEMA_VERSION = 1

_ALWAYS = tuple(name for name in FIELDS if name not in (*LAYOUT_FIELDS, *LATER_FIELDS))
_OBJECTS: Mapping[str, Any] = {"images": Images, "zero_buffers": ZeroBuffers}
_LISTS = ("lora_targets", "modules_to_save", "trained_layers")
_SWITCHES = tuple(name for name, default in DEFAULTS.items() if isinstance(default, bool))


def setup_to_dict(setup: TrainSetup) -> dict[str, Any]:
    """All fields of a setup as JSON values; `checkpointing` is false, true or n (every n-th layer).

    The fields of LAYOUT_FIELDS and LATER_FIELDS only where they differ from their defaults.
    """
    values = {name: getattr(setup, name) for name in _ALWAYS} | setup.seldom
    if setup.checkpointing <= 1:
        values["checkpointing"] = bool(setup.checkpointing)
    for name in _LISTS:
        if isinstance(values.get(name), tuple):
            values[name] = list(values[name])
    for name in ("rollout", *_OBJECTS):
        if name in values:
            values[name] = values[name].values
    return values


def setup_from_dict(values: Mapping[str, Any]) -> TrainSetup:
    """A validated setup from JSON values; absent keys take the defaults of the method and of the objective.

    Defaults that depend on the method: full has rank 0; qlora has quantization "nf4-double". On the objective: the
    loss. On the adapter: its usual size.

    Raises:
        SetupError: an unknown key, a wrong type, or a combination that cannot exist.
    """
    if not isinstance(values, Mapping):
        raise SetupError(f"a setup must be an object, got {type(values).__name__}")
    unknown = sorted(set(map(str, values)) - set(FIELDS))
    if unknown:
        from planner.core.close import close_names  # late: only for a mistake

        within = [name for name in FIELDS if unknown[0] in name or name in unknown[0]]
        close = close_names(unknown[0], within, cutoff=0.4) or close_names(unknown[0], FIELDS)
        hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(FIELDS)}"
        raise SetupError(f"unknown setup key {unknown[0]!r:.80}", hint=hint)
    clean = dict(values)
    # what the method, the objective and the adapter bring along
    method = clean.get("method", "lora")
    if method == "full":
        clean["lora_rank"] = clean.get("lora_rank") or 0
    elif method == "qlora":
        clean.setdefault("quantization", "nf4-double")
    row = OBJECTIVES.get(str(clean.get("objective", "")))
    if row is not None and row.name != DEFAULTS["objective"]:
        clean.setdefault("loss", row.losses[0])
        clean.setdefault("stack", row.stack(DEFAULT_STACK))
    if clean.get("lora_rank", 0) is None:
        del clean["lora_rank"]
    kind = ADAPTERS.get(str(clean.get("adapter", "lora")))
    if kind is not None and kind.name != "lora":
        clean.setdefault("lora_rank", kind.usual_size)
    if "checkpointing" in clean:
        if not isinstance(layers := clean["checkpointing"], int) or layers < 0:
            raise SetupError(f"checkpointing must be false, true or a number of layers, got {layers!r}")
        clean["checkpointing"] = int(layers)
    for name in _LISTS:
        if isinstance(clean.get(name), list):
            clean[name] = tuple(clean[name])
    if not isinstance(clean.get("modules_to_save", ()), tuple):
        raise SetupError("modules_to_save must be a list of module names", hint='["embed_tokens", "lm_head"]')
    for name in _SWITCHES:
        if name in clean and not isinstance(clean[name], bool):
            raise SetupError(f"{name} must be true or false, got {clean[name]!r}")
    if clean.get("rollout") is not None:
        length = clean.get("seq_len_tokens", DEFAULTS["seq_len_tokens"])
        clean["rollout"] = Rollout.read(clean["rollout"], length if isinstance(length, int) else 2)
    for name, record in _OBJECTS.items():
        if clean.get(name) is not None:
            clean[name] = record.read(clean[name])
    _check_types(clean)
    setup = TrainSetup(**clean)
    if setup.cached_seqs > setup.micro_batch_seqs:  # branches of a walk have no micro-batch yet
        raise SetupError(
            f"cached_seqs {setup.cached_seqs} is more than the {setup.micro_batch_seqs} pairs of a micro-batch",
            hint="give fewer, or 0 for no gradient cache",
        )
    return setup


def _check_types(clean: Mapping[str, Any]) -> None:
    for name, value in clean.items():
        if name in ("rollout", *_OBJECTS):
            continue
        if name in _LISTS and isinstance(value, (tuple, str)):
            continue  # TrainSetup looks at the names
        if isinstance(DEFAULTS[name], str) and not isinstance(value, str):
            raise SetupError(f"{name} must be text, got {value!r:.80}")
        if not isinstance(value, (str, int, float)):
            raise SetupError(f"{name} must be a plain value, got {value!r:.80}")
    dropout = clean.get("lora_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise SetupError(f"lora_dropout must be a number, got {dropout!r}")


def request_form(setup: TrainSetup) -> dict[str, Any]:
    """A setup as `setup_from_request` reads it back: the allocator and the form of checkpointing stand where they are
    not the stack's own default."""
    usual = _stack_defaults(setup.stack).items()
    return setup_to_dict(setup) | {name: getattr(setup, name) for name, value in usual if getattr(setup, name) != value}


def setup_from_request(values: Mapping[str, Any]) -> TrainSetup:
    """`setup_from_dict` of a run that anybody may have started: what it does not say of the allocator and the form of
    checkpointing is the stack's own default, not what the launch files of a plan set.

    Raises:
        SetupError: as there.
    """
    return setup_from_dict({**_stack_defaults(str(values.get("stack", DEFAULTS["stack"]))), **values})


def _stack_defaults(stack: str) -> dict[str, Any]:
    """What a stack sets by itself around its step; nothing of one that is not known."""
    row = STACKS.get(stack)
    return {} if row is None else {name: getattr(row, name) for name in AROUND_FIELDS if name != "stack"}


def to_jsonable(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as JSON values; setups in their interchange form.

    Fields that hold a raw model configuration are left out (it is on disk already, and large).
    """
    if isinstance(value, TrainSetup):
        return setup_to_dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in fields(value) if f.name != "config"}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    return value
