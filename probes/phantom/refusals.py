"""What is refused by name: several processes, and attention whose memory nobody here knows."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import distributed

from probes.phantom.cuda import Refused
from probes.phantom.imports import Hook

_ATTENTION = re.compile(r"flash_attn\w*_func|memory_efficient_attention\w*")


@contextmanager
def several_processes() -> Iterator[None]:
    """Within it a process group of more than one process, and wrappers that need one, are refused."""
    true = distributed.init_process_group

    @wraps(true)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
        if size > 1:
            raise Refused(
                f"it trains in {size} processes, and one phantom GPU is one process; plan trace follows the program "
                "started as one"
            )
        if "nccl" in str(backend or "nccl"):
            raise Refused(
                "it makes a process group, which needs NCCL; start the program without torchrun or its like, as one "
                "process"
            )
        made = true(backend, init_method, timeout, world_size, *args, **kwargs)
        if distributed.get_world_size() > 1:  # said by the rendezvous alone
            raise Refused(f"it trains in {distributed.get_world_size()} processes")
        return made

    with ExitStack() as stack:
        for owner in (distributed, distributed.distributed_c10d, distributed.device_mesh):
            stack.enter_context(mock.patch.object(owner, "init_process_group", init_process_group))
        wrapper = torch.nn.parallel.DistributedDataParallel
        stack.enter_context(mock.patch.object(wrapper, "__init__", _refused("DistributedDataParallel's buckets")))
        yield


def hooks(stack: ExitStack) -> dict[str, Hook]:
    """Module -> what is refused of it once it is imported."""

    def refuse(names: Callable[[str], Any], why: str) -> Hook:
        def hook(module: Any) -> None:
            for name in [one for one in vars(module) if names(one)]:
                said = _refused(f"{module.__name__}.{name}: {why}")
                stack.enter_context(mock.patch.object(module, name, said))

        return hook

    def sharded(module: Any) -> None:
        said = _refused("FullyShardedDataParallel")
        stack.enter_context(mock.patch.object(module.FullyShardedDataParallel, "__init__", said))
        stack.enter_context(mock.patch.object(module, "fully_shard", _refused("fully_shard")))

    kernel = refuse(_ATTENTION.fullmatch, "the buffers of this package's kernels are not known here; SDPA is followed")
    return {
        "deepspeed": refuse({"initialize"}.__contains__, "DeepSpeed's engine allocates outside PyTorch's operators"),
        "torch.distributed.fsdp": sharded,
        "torch.nn.attention.flex_attention": refuse(
            {"flex_attention"}.__contains__, "it runs eagerly here and would hold the scores; SDPA is followed"
        ),
        "flash_attn.flash_attn_interface": kernel,
        "flash_attn.cute.interface": kernel,
        "flash_attn_interface": kernel,
        "xformers.ops.fmha": kernel,
    }


def _refused(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Refused(f"{what} cannot be followed" if ": " not in what else what)

    return refused
