"""Which layer of a run stands for each layer of the full model."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class LayerMap:
    """The run's layer that stands for each layer of the full model."""

    of: tuple[int, ...]

    @cached_property
    def full(self) -> tuple[tuple[int, ...], ...]:
        """The full model's layers that each layer of the run stands for."""
        layers: dict[int, list[int]] = defaultdict(list)
        for layer, run in enumerate(self.of):
            layers[run].append(layer)
        return tuple(tuple(layers[run]) for run in range(len(layers)))

    def unrolled(self, items: Iterable[T], layer_of: Callable[[T], int | None]) -> Iterator[tuple[T, int | None]]:
        """What the run has in the order of its layers (ascending or descending), as the full model has it: each with
        its layer there. What belongs to no layer stays where it is."""
        for in_layers, repetition in groupby(items, lambda item: layer_of(item) is not None):
            if not in_layers:
                yield from ((item, None) for item in repetition)
                continue
            by_layer: dict[Any, list[T]] = defaultdict(list)
            for member in repetition:
                by_layer[layer_of(member)].append(member)
            first, last = next(iter(by_layer)), next(reversed(by_layer))
            for layer in range(len(self.of)) if first <= last else reversed(range(len(self.of))):
                yield from ((item, layer) for item in by_layer.get(self.of[layer], ()))
