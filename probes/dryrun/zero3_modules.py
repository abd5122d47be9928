"""What a model is made of, as ZeRO-3 sees it: parameters before they were cut, and which of them a module has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from planner.parallel.zero import ZERO3_PERSISTENT_ELEMENTS
from probes.dryrun.splice import Block
from probes.dryrun.trace import Trace
from probes.dryrun.zero_gather import Coordinator, Limits, Store, Weight

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter before it was cut."""

    num: int
    shape: torch.Size
    dtype: torch.dtype
    trained: bool

    def weight(self) -> Weight:
        return Weight(num=self.num, persistent=self.num <= ZERO3_PERSISTENT_ELEMENTS, trained=self.trained)


LEAVES = frozenset(
    {
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    }
)
"""Modules that DeepSpeed gathers as one. Source: DeepSpeed 0.19.8 runtime/zero/leaf_module_config.py."""


@dataclass(kw_only=True)
class Modules:
    """What a model is made of, by name.

    Attributes:
        parameters: every one, in order.
        modules: which of them every hooked module has itself; of a leaf, with all below it.
        within: which of them every hooked module has with all below it.
    """

    parameters: dict[str, Parameter] = field(default_factory=dict)
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    within: dict[str, tuple[str, ...]] = field(default_factory=dict)
    leaves: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "Modules":
        names = {one: name for name, one in model.named_parameters()}
        parameters = {
            name: Parameter(num=one.numel(), shape=one.shape, dtype=one.dtype, trained=one.requires_grad)
            for one, name in names.items()
        }
        found = cls(parameters=parameters)
        for path, module in model.named_modules():
            if any(path.startswith(f"{leaf}.") for leaf in found.leaves):
                continue
            if f"{type(module).__module__}.{type(module).__qualname__}" in LEAVES:
                found.leaves[path] = None
            own = module.parameters(recurse=path in found.leaves)
            found.modules[path] = tuple(dict.fromkeys(names[one] for one in own))
            found.within[path] = tuple(dict.fromkeys(names[one] for one in module.parameters()))
        return found

    def coordinator(self, store: Store, limits: Limits | None) -> Coordinator:
        """Of these modules."""
        return Coordinator(
            weights={name: one.weight() for name, one in self.parameters.items()},
            modules=dict(self.modules),
            store=store,
            limits=limits,
            leaves=frozenset(self.leaves),
            within=self.within if self.leaves else {},
        )

    def repeated(self, trace: Trace, block: Block | None) -> "Modules":
        """The full model's: what belongs to the block's layers once per copy."""
        if block is None:
            return self

        def moved(own: tuple[str, ...], shift: int) -> tuple[str, ...]:
            return tuple(deeper(trace, name, shift) for name in own)

        return Modules(
            parameters=_repeated(self.parameters, trace, block, lambda one, shift: one),
            modules=_repeated(self.modules, trace, block, moved),
            within=self._within(trace, block),
            leaves=_repeated(self.leaves, trace, block, lambda one, shift: one),
        )

    def _within(self, trace: Trace, block: Block) -> dict[str, tuple[str, ...]]:
        """Of the full model: what lies above the layers has all of their copies."""
        if not self.leaves:
            return {}
        full: dict[str, tuple[str, ...]] = {}
        for path, names in self.within.items():
            layer = trace.layer_of(path)
            if layer is not None:
                for shift in block.shifts(layer):
                    full[deeper(trace, path, shift)] = tuple(deeper(trace, name, shift) for name in names)
                continue
            full[path] = tuple(
                deeper(trace, name, shift)
                for name in names
                for shift in ((0,) if trace.layer_of(name) is None else block.shifts(trace.layer_of(name)))
            )
        return full


def _repeated(found: dict[str, T], trace: Trace, block: Block, moved: Callable[[T, int], T]) -> dict[str, T]:
    full: dict[str, T] = {}
    pending: list[tuple[str, T]] = []

    def flush() -> None:
        for shift in block.shifts(block.start) if pending else ():
            full.update((deeper(trace, name, shift), moved(one, shift)) for name, one in pending)
        pending.clear()

    for name, one in found.items():
        layer = trace.layer_of(name)
        if layer is not None and block.start <= layer < block.end:
            pending.append((name, one))
            continue
        flush()
        (shift,) = block.shifts(layer)
        full[deeper(trace, name, shift)] = moved(one, shift)
    flush()
    return full


def deeper(trace: Trace, name: str, shift: int) -> str:
    """The name of the same thing `shift` layers deeper; outside the layers the name itself."""
    layer = trace.layer_of(name)
    if layer is None or not shift:
        return name
    _, dot, rest = name[len(trace.layer_prefix) :].partition(".")
    return f"{trace.layer_prefix}{layer + shift}{dot}{rest}"
