"""A process group of one process that stands for many, and the streams of its collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.experimental._context_parallel import _attention as own

from probes.dryrun.streams import Event, Stream
from probes.patching import Replacement, errors_only, nothing, replaced

# Attention of a rank whose sequence is cut over several GPUs: PyTorch's own ring, on meta tensors.


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Flash or memory-efficient attention, causal, over the pieces of all ranks of `group`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str, scale: Any, group: Any
    ) -> torch.Tensor:
        mesh: Any = SimpleNamespace(get_group=lambda: group)
        run: Any = getattr(own, f"_scaled_dot_product_ring_{kernel}_attention")
        out, sums, *rest = run(mesh, query, key, value, is_causal=True, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.rest, ctx.kernel, ctx.scale, ctx.mesh = rest, kernel, scale, mesh
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        if ctx.kernel == "flash":
            starts, ends, most_q, most_k, seed, offset, *_ = ctx.rest
            run: Any = own._scaled_dot_product_ring_flash_attention_backward
            args = (out, sums, starts, ends, most_q, most_k, 0.0, True, seed, offset)
        else:
            run = own._scaled_dot_product_ring_efficient_attention_backward
            args = (None, out, sums, *ctx.rest[:2], 0.0, (True, True, True, False), True)
        grads = run(ctx.mesh, grad_out, query, key, value, *args, scale=ctx.scale)
        return *grads[:3], None, None, None


# One rank of a job of any size in one process: PyTorch's fake process group on meta tensors.


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Within it, this process is `rank` of `world_size`.

    Raises:
        ValueError: the process belongs to a real group.
    """
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401 - registers the collectives' meta forms
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is a rank of a real job: a dry run of several GPUs needs a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            replaced(_on_meta(), create=True),
            errors_only("torch.distributed.tensor"),
        ):  # not: this takes two collectives
            yield
    finally:
        dist.destroy_process_group()


def current_stream(device: Any = None) -> Stream:
    return Stream.current


_HANDLE = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=lambda stream: stream,
    current_stream=current_stream,
    current_device=nothing,  # meta has no indices
    get_rng_state=nothing,  # nothing draws random numbers on meta
    set_rng_state=nothing,
    device_count=lambda: 1,
    is_initialized=lambda: True,
)
"""What `torch.cuda` is to CUDA tensors: streams and events, which only note what waits for what."""


def _on_meta() -> list[Replacement]:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    return [
        (torch, "meta", _HANDLE),
        (torch.accelerator, "current_stream", current_stream),
        (groups.FSDPParamGroup, "_validate_no_meta_params", nothing),
        *of_ddp(),
    ]


def of_ddp(on_bucket: Callable[[torch.Tensor], None] = nothing) -> list[Replacement]:
    """What lets DistributedDataParallel run in the fake group: buckets that are reduced at once, and ranks whose shapes
    are not compared by values, which meta tensors have not. `on_bucket` is told of every bucket that is reduced.
    """
    import torch.nn.parallel.distributed as ddp

    wrapper = ddp.DistributedDataParallel
    plain_init, plain_hook = wrapper.__init__, wrapper.register_comm_hook

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        plain_hook(self, None, lambda state, bucket: reduced(bucket.buffer()))

    def reduced(buffer: torch.Tensor) -> Any:  # in place; the fake group's own all-reduce gives DDP nothing to read
        on_bucket(buffer)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    return [(wrapper, "__init__", init), (ddp, "_verify_param_shape_across_processes", nothing)]
