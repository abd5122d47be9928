"""Experts dealt out over GPUs: transformers' own token dispatch, on meta tensors.

How many tokens go where is read back to the host from counts that meta tensors have not: the sizes are those of
balanced routing, as many (token, expert) pairs to every rank.

Source: transformers 5.23 `distributed/expert_parallel.py` AllToAllEP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class _Balanced:
    """What `AllToAllEP` reads its split sizes from: [sent, received], each as many to every rank."""

    def __init__(self, pairs: int, ranks: int) -> None:
        self._sizes = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]

    def tolist(self) -> list[list[int]]:
        """The sizes, for sent and for received pairs."""
        return [list(self._sizes), list(self._sizes)]


class _Torch:
    """`torch` for that module: what counts nothing on meta is answered for balanced routing."""

    def __init__(self) -> None:
        self._pairs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def argsort(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The order of the pairs, whose number is noted."""
        self._pairs = expert_ids.numel()
        return torch.argsort(expert_ids)

    def stack(self, counts: list[torch.Tensor]) -> Any:
        """Pairs sent and received by rank: made as on a GPU, answered by their sizes."""
        stacked = torch.stack(counts)
        return _Balanced(self._pairs, stacked.shape[1])


@contextmanager
def balanced_dispatch() -> Iterator[None]:
    """Within it transformers' dispatch sends as many pairs to every rank."""
    from transformers.distributed import expert_parallel

    with mock.patch.object(expert_parallel, "torch", _Torch()):
        yield
