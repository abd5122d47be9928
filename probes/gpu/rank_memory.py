"""Memory of one rank of several on the CPU: real tensors, parts of sharded ones, storages that change their size."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from probes.dryrun.spread_tracker import SpreadTracker


class RankTracker(SpreadTracker):
    """Follows real tensors only: DTensor tries its operators on fake ones first, which claim to be on the CPU."""

    def track(self, tensor: torch.Tensor, op: str) -> int | None:
        return None if isinstance(tensor, FakeTensor) else super().track(tensor, op)
