"""`TrainSetup`: one point of the space. Impossible combinations cannot be built.

`model` and `gpu` are not part of it: the same setup is tried on any. The interchange form (one JSON object with model,
gpu and the setup's fields) lives in `planner.setup.interchange`.
"""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, Self

from planner.core.records import dataclass
from planner.options.layouts import LAYOUT_FIELDS as LAYOUT_FIELDS
from planner.options.stacks import STACKS
from planner.setup.allowed import check
from planner.setup.values import SetupValues

AROUND_FIELDS = ("stack", "expandable_segments", "reentrant_checkpointing")
"""Whose code runs a setup and how it is started: no plan chooses them."""
OF_OTHERS = ("transformers_version", "bitsandbytes_version", "trl_version", "use_cache")
"""What only other people's runs have: every launch file says today's."""
LATER_FIELDS = (
    "kernels",
    "activation_offload",
    "quantize_experts",
    "modules_to_save",
    "trained_layers",
    "objective",
    "adapter",
    "rollout",
    "images",
    "selective_checkpointing",
    "precomputed_reference",
    "hard_negatives",
    "cached_seqs",
    "frozen_encoder",
    "linear_attention",
    "uneven",
    "zero_buffers",
    *OF_OTHERS,
    *AROUND_FIELDS,
)
"""Fields that came after the first studies and plans; left out of JSON and keys at their defaults as well."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SetupValues)}
FIELDS = tuple(DEFAULTS)
"""The names of all fields."""


@dataclass(frozen=True, kw_only=True)
class TrainSetup(SetupValues):
    """One complete training setup that some step can be: its fields and their meaning are those of `SetupValues`."""

    def __post_init__(self) -> None:
        check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:  # at run time too: it is a key, and `replace` checks what is changed
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def run_by(self, target: str) -> Self:
        """The setup as a launch target's own stack runs it from a file written here; itself where it is no stack."""
        around: dict[str, Any] = {
            "stack": target,
            "expandable_segments": True,
            "reentrant_checkpointing": False,
            "fsdp_version": 2,
            "sync_each_batch": True,
            "zero_buffers": None,
            **{name: DEFAULTS[name] for name in OF_OTHERS},
        }
        if target not in STACKS or all(getattr(self, name) == value for name, value in around.items()):
            return self
        moved = self.replace(**around)
        if moved.resolved_adapter_dtype != self.resolved_adapter_dtype:
            moved = moved.replace(adapter_dtype=self.resolved_adapter_dtype)
        return moved

    @property
    def layout(self) -> dict[str, Any]:
        """The fields of LAYOUT_FIELDS that differ from their defaults."""
        values = {name: getattr(self, name) for name in LAYOUT_FIELDS}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}

    @property
    def seldom(self) -> dict[str, Any]:
        """The fields of LAYOUT_FIELDS and LATER_FIELDS that differ from their defaults."""
        later = {name: getattr(self, name) for name in LATER_FIELDS}
        return {name: value for name, value in later.items() if value != DEFAULTS[name]} | self.layout

    def replace_trusted(self, **changes: Any) -> Self:
        """A copy with some fields changed, not validated: for walks over values that are known to combine."""
        copy = object.__new__(type(self))
        values = copy.__dict__
        values.update(self.__dict__)
        values.update(changes)
        assert len(values) == len(DEFAULTS), changes
        return copy

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew."""
        copy = self.replace_trusted(**changes)
        check(copy)
        return copy

    def of_length(self, tokens: int) -> Self:
        """A copy with sequences of so many tokens; completions take at most half of shorter ones."""
        roll = self.rollout
        if roll is not None and tokens < self.seq_len_tokens:
            roll = replace(roll, completion_tokens=max(1, min(roll.completion_tokens, tokens // 2)))
        return self.replace(seq_len_tokens=tokens, rollout=roll)
