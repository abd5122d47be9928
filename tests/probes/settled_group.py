"""A gloo process group whose collectives are over, and forgotten, when they return.

Gloo's own thread keeps a finished collective's tensors until the scheduler lets it run again, so on a loaded machine
any buffer may be counted a little longer in any phase. CUDA's allocator knows no such thread. Here gloo only ever sees
copies that nobody follows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # what PyTorch's own Python groups return
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

NAME = "settled"


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, Sequence) else []


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copy(part) for part in value] if isinstance(value, Sequence) else value


class Settled(dist.ProcessGroup):
    """Every collective on copies of its tensors, waited for, copied back."""

    def __init__(self, gloo: Any, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._gloo = gloo
        self._sent: list[Any] = []

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            copies = [_copy(arg) for arg in args]
            call(*copies).wait()
            for tensor, copy in zip(_tensors(args), _tensors(copies), strict=True):
                tensor.copy_(copy)
        return _done(args[0])

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        """Under way when it returns: the receiver may first have to send something itself."""
        with _disable_current_modes(), torch.no_grad():
            copies = _copy(tensors)
            self._sent.append((self._gloo.send(copies, to, tag), copies))
        return _done(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        """Waited for."""
        return self._run(lambda copies: self._gloo.recv(copies, source, tag), tensors)

    def settle(self) -> None:
        """Waits for all that was sent."""
        while self._sent:
            self._sent.pop(0)[0].wait()

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:
        return NAME


def _collective(name: str) -> Callable[..., Any]:
    def run(self: Settled, *args: Any, **options: Any) -> Any:
        return self._run(getattr(self._gloo, name), *args, *options.values())

    return run


GLOOS_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
for _name in (
    "allreduce", "allgather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "broadcast", "barrier",
):  # fmt: skip
    setattr(Settled, _name, _collective(GLOOS_NAMES.get(_name, _name)))


def settle() -> None:
    """Waits for all that was sent in any group."""
    for group in dist.distributed_c10d._world.pg_names:
        if isinstance(group, Settled):
            group.settle()


def register() -> str:
    """Makes the group known to `init_process_group` and returns its name."""

    def create(store: Any, rank: int, world_size: int, timeout: Any) -> Settled:
        return Settled(dist.ProcessGroupGloo(store, rank, world_size, timeout), rank, world_size)

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    _functional.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    return NAME


_functional = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather_into_tensor(tensor: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    """DTensor's all-gather, which asks the group for a collective that no Python group can offer; as PyTorch's kernel
    it makes one tensor."""
    name = group if isinstance(group, str) else group.group_name
    out = tensor.new_empty((group_size * tensor.shape[0], *tensor.shape[1:]))
    dist.distributed_c10d._resolve_process_group(name).all_gather_single(out, tensor.contiguous()).wait()
    return out
