"""A rank of a tensor-parallel job: transformers' own plan, hooks and DTensors, alone or inside its FSDP2.

Rank 0 is traced. Column and row splits, the gathered head and FSDP2's groups are transformers' own code (`probes.stack.
spread`), in a fake process group on meta tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from probes.dryrun.data_parallel import JobWorld, OnHost
from probes.dryrun.full_step import Shards
from probes.dryrun.layout_tracker import LayoutTracker, untracked_trials
from probes.dryrun.trace import Owners, Trainable, load
from probes.dryrun.tracker import local
from probes.stack import step
from probes.stack.parallelize import Layout, layout_model


class TensorWorld(JobWorld):
    """A job of tensor-parallel ranks."""

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        """Every rank reads only its part of a weight from the files (transformers 5.23
        `core_model_loading`), so that loading holds nothing more."""
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
        from transformers.distributed import expert_parallel

        setup, device = self._setup, next(model.parameters()).device
        # what DTensor's caches hold of an earlier job in this process names its groups, which are gone
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _clear_sharding_prop_cache()
        # transformers' own token dispatch, with as many (token, expert) pairs to every rank: how many go where is read
        # back to the host from counts that meta tensors have not. Source: transformers 5.23
        # `distributed/expert_parallel.py` AllToAllEP
        dispatch = mock.patch.object(expert_parallel, "torch", _BalancedTorch())
        balanced = dispatch if setup.expert_degree > 1 else nullcontext()
        with _strides_without_tensors(), balanced, tracker.following_shards():
            layout = layout_model(model, setup, device=device)
            if setup.offload == "parameters" and device.type == "meta":
                tracker.keep_all_on_host(model.parameters())
            yield layout, load(tracker, model)

    def _shards(self) -> Shards:
        return OnHost(_Steps()) if self._setup.offload == "parameters" else _Steps()


@contextmanager
def _strides_without_tensors() -> Iterator[None]:
    """Within it, transformers' hooks compute a whole tensor's strides by arithmetic: they ask a tensor on meta, which
    a dry run would count."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor import DTensor, Shard
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    def from_local(part: torch.Tensor, mesh: Any, size: int) -> Any:
        shape = torch.Size((*part.shape[:-1], size))
        stride = make_contiguous_strides_for(shape)
        return DTensor.from_local(part, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    with mock.patch.object(TensorParallelLayer, "_from_local_last_dim_shard", staticmethod(from_local)):
        yield


class _BalancedTorch:
    """`torch` for that module: what counts nothing on meta is answered for balanced routing."""

    def __init__(self) -> None:
        self._pairs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def argsort(self, expert_ids: torch.Tensor) -> torch.Tensor:
        self._pairs = expert_ids.numel()
        return torch.argsort(expert_ids)

    def stack(self, counts: list[torch.Tensor]) -> Any:
        """Pairs sent and received by rank: made as on a GPU, read as equally many to every rank."""
        ranks = torch.stack(counts).shape[1]
        sizes = [self._pairs // ranks + (rank < self._pairs % ranks) for rank in range(ranks)]
        return SimpleNamespace(tolist=lambda: [list(sizes), list(sizes)])


class _StepTracker(LayoutTracker):
    """Runs every operator on lists on the local tensors, as some are plain tensors that stand for DTensors."""

    def takes_local(self, func: Any) -> bool:
        return bool(func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")))


class _Steps:
    tracker = _StepTracker

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Each mesh's norm is summed up over its ranks as DTensor does it."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._ops._math_ops import _NormPartial

        def norm_of(parameters: list[Any]) -> torch.Tensor:
            norms = torch._foreach_norm([local(parameter.grad) for parameter in parameters])
            stacked = torch.stack(norms)
            mesh = getattr(parameters[0], "device_mesh", None)
            if mesh is None:
                return torch.linalg.vector_norm(stacked)
            parts = DTensor.from_local(stacked, mesh, [_NormPartial(2.0)] * mesh.ndim, run_check=False)
            whole: torch.Tensor = torch.linalg.vector_norm(parts).full_tensor()
            return whole

        with mock.patch.object(step, "norm_of", norm_of), untracked_trials():
            yield

    def parameter(self, trainable: Trainable) -> torch.nn.Parameter:
        """This rank's part, as a plain tensor that knows its mesh, or as a DTensor
        where the gradient is laid out otherwise."""
        part: Any = torch.empty(trainable.local_shape, dtype=trainable.dtype, device="meta")
        if trainable.gradient is not None:
            from torch.distributed.tensor import DTensor

            shape, stride = trainable.shape, torch.empty(trainable.shape, device="meta").stride()
            part = DTensor.from_local(
                part, trainable.mesh, trainable.placements, run_check=False, shape=shape, stride=stride
            )
        parameter = torch.nn.Parameter(part)
        if trainable.gradient is None and trainable.mesh is not None:
            parameter.device_mesh = trainable.mesh
        return parameter
