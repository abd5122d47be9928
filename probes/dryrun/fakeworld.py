"""One rank of a job of any size in one process: PyTorch's fake process group on meta tensors.

The group answers every collective without communicating. What PyTorch's own DDP and FSDP2 need beyond it to run on
meta (a device handle with streams, collectives that return at once) stands here; all of it is installed for the length
of one dry run.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from probes.patching import Replacement, nothing, replaced
from probes.stack.notices import errors_only


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
        with _on_meta(), errors_only("torch.distributed.tensor"):  # not: this takes two collectives
            yield
    finally:
        dist.destroy_process_group()


class _Stream(torch.cpu.Stream):  # type: ignore[misc]
    """A stream that does nothing but whose events exist, as FSDP2 asks of devices other than CPUs."""

    def record_event(self) -> torch.cpu.Event:
        """An event that has happened."""
        return torch.cpu.Event()


_HANDLE = SimpleNamespace(
    Stream=_Stream,
    Event=torch.cpu.Event,
    stream=torch.cpu.stream,
    current_stream=torch.cpu.current_stream,
    current_device=nothing,  # meta has no indices
    get_rng_state=nothing,  # nothing draws random numbers on meta
    set_rng_state=nothing,
    device_count=lambda: 1,
    is_initialized=lambda: True,
)
"""What `torch.cuda` is to CUDA tensors: streams and events, which do nothing here."""


def _on_meta() -> AbstractContextManager[None]:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    replacements = [
        (torch, "meta", _HANDLE),
        (torch.accelerator, "current_stream", torch.cpu.current_stream),
        (groups.FSDPParamGroup, "_validate_no_meta_params", nothing),
        *of_ddp(),
    ]
    return replaced(replacements, create=True)


def of_ddp() -> list[Replacement]:
    """What lets DistributedDataParallel run in the fake group: buckets that are reduced at once, and ranks whose shapes
    are not compared by values, which meta tensors have not."""
    import torch.nn.parallel.distributed as ddp

    wrapper = ddp.DistributedDataParallel
    plain_init, plain_hook = wrapper.__init__, wrapper.register_comm_hook

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        plain_hook(self, None, lambda state, bucket: _done(bucket.buffer()))

    return [(wrapper, "__init__", init), (ddp, "_verify_param_shape_across_processes", nothing)]


def _done(buffer: torch.Tensor) -> Any:
    """The end of DDP's all-reduce of one bucket in place; the fake group's own gives DDP no result to read."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
