"""Kernels that no operator launches: stand-ins that compute nothing say here what would run, and whoever follows
listens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Listener = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_LISTENERS: list[Listener] = []


def launched(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] = ()) -> None:
    """A kernel (a row of `planner.speed.prices`) would read `inputs` and write `outputs` now."""
    for listener in _LISTENERS:
        listener(name, inputs, outputs)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it `listener` is told of every launch."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
