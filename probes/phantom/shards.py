"""Models in shards: PyTorch's own `fully_shard` and DTensors in the fake group, rank 0's part on the phantom GPU.

Measured: TRL's full and LoRA fine-tuning under `accelerate launch` on 4 GPUs, against the dry run of the same setups
(`python -m benchmarks.trace_shards`).
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from probes.dryrun.spread_tracker import untracked_trials
from probes.phantom.imports import Hook


def hooks(stack: ExitStack) -> dict[str, Hook]:
    """Module -> what is done to it once it is imported."""

    def tensors(module: Any) -> None:
        from torch.distributed.tensor import _dispatch, _op_schema

        stack.enter_context(untracked_trials())
        stack.enter_context(mock.patch.object(_op_schema, "_rebuild_tensor_from_dtensor_meta", _on_meta))
        # its generators would ask the driver for their state
        stack.enter_context(mock.patch.object(_dispatch, "is_rng_supported_mesh", return_value=False))

    return {"torch.distributed.tensor": tensors}


def _on_meta(spec: Any) -> torch.Tensor:
    """What DTensor tries an operator out on: it would be on the mesh's device, which this build has not."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
