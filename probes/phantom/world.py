"""Rank 0 of a job of several processes: a fake process group answers every collective at once, and the other ranks end
before they begin. All ranks are taken to be alike; what only rank 0 holds is counted.

DistributedDataParallel runs as it is, with its buckets, and PyTorch's own `fully_shard` and DTensors in the fake group;
others are refused.

Measured: TRL's full and LoRA fine-tuning under `accelerate launch` on 4 GPUs, against the dry run of the same setups
(benchmarks/trace_shards.py at e34acc15).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import distributed

from planner.core.units import gib
from planner.memory.workspace import group_bytes
from probes.dryrun.fakeworld import of_ddp
from probes.dryrun.layout_tracker import untracked_trials
from probes.dryrun.streams import Exchanges, Stream
from probes.patching import Replacement, nothing, replaced
from probes.phantom.cuda import Refused
from probes.phantom.imports import Hook
from probes.phantom.mode import Phantom


@contextmanager
def fake_world(phantom: Phantom) -> Iterator[None]:
    """Within it process groups are fake, of whatever size the program asks for."""
    c10d = distributed.distributed_c10d
    owners = (distributed, c10d, distributed.device_mesh)
    groups = (
        (owner, name, replacement)
        for name, replacement in _of_groups(phantom).items()
        for owner in owners
        if hasattr(owner, name)
    )
    with replaced((*groups, *_of_ddp(phantom))):
        yield
        if distributed.is_initialized() and distributed.get_backend() == "fake":
            distributed.destroy_process_group()


def _of_groups(phantom: Phantom) -> dict[str, Callable[..., Any]]:
    true_group = distributed.distributed_c10d.new_group

    @wraps(true_group)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return true_group(ranks, backend="fake")

    def fill(objects: Any, value: Any) -> None:
        if objects is not None:
            objects[:] = [value] * len(objects)

    return {
        "init_process_group": _beginning(phantom),
        "new_group": new_group,
        "is_nccl_available": lambda: True,
        "barrier": nothing,
        "monitored_barrier": nothing,
        "broadcast_object_list": nothing,
        "all_gather_object": lambda object_list, obj, group=None: fill(object_list, obj),
        "gather_object": lambda obj, object_gather_list=None, *args, **kwargs: fill(object_gather_list, obj),
        "scatter_object_list": lambda output, given=None, *args, **kwargs: fill(output, (given or [None])[0]),
    }


def _beginning(phantom: Phantom) -> Callable[..., None]:
    """`init_process_group`: this process is rank 0, any other one ends."""
    true = distributed.distributed_c10d.init_process_group

    @wraps(true)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        import torch.distributed._tools.fake_collectives  # noqa: F401 - registers the collectives' meta forms
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
        mine = rank if rank >= 0 else int(os.environ.get("RANK") or 0)
        if mine > 0:  # a program that starts its processes itself
            os._exit(0)
        if size > 1:
            phantom.memory.join(group_bytes(phantom.card.nvlink, size))
            phantom.note(
                f"rank 0 of {size} processes was followed, the others are taken to be alike; NCCL's own buffers are "
                f"taken as {gib(phantom.memory.group_bytes)} of the card, outside PyTorch's count"
            )
            phantom.issued.exchanges = Stream.exchanges = Exchanges(phantom.issued)
        true("fake", rank=0, world_size=size, store=FakeStore())

    return init_process_group


def _of_ddp(phantom: Phantom) -> list[Replacement]:
    from torch.nn.parallel import DistributedDataParallel as wrapper

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Refused("a communication hook of DistributedDataParallel cannot be followed")

    def with_buckets(name: str) -> Callable[..., Any]:
        true = getattr(wrapper, name)

        @wraps(true)
        def call(*args: Any, **kwargs: Any) -> Any:
            with phantom.making_its_own():  # C++ makes the buckets where the gradients truly are: on meta
                return true(*args, **kwargs)

        return call

    def reduced(gradients: torch.Tensor) -> None:
        if phantom.issued.exchanges is not None:
            phantom.issued.exchanges.bucket(gradients)

    return [
        (wrapper, "_ddp_init_helper", with_buckets("_ddp_init_helper")),
        (wrapper, "_pre_forward", with_buckets("_pre_forward")),
        (wrapper, "register_comm_hook", hook),
        *of_ddp(reduced),
    ]


def hooks(stack: ExitStack) -> dict[str, Hook]:
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
