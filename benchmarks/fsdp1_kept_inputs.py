"""FSDP version 1 keeps the inputs of frozen layers, and their gradients, until the backward ends; version 2 does not.

    python -m benchmarks.fsdp1_kept_inputs

Two gloo processes on the CPU train adapters on eight frozen blocks under activation checkpointing and count the live
tensors of the size of a hidden state at the end of the backward. This is why published LoRA and QLoRA runs under FSDP 1
with reentrant checkpointing peaked higher than the same runs would under FSDP2 (docs/accuracy/multi-gpu.md).
"""

import functools
import os
import socket
from typing import Any

TOKENS, HIDDEN, BLOCKS = 64, 128, 8
FORMS = tuple((sharding, reentrant) for sharding in ("none", "fsdp1", "fsdp2") for reentrant in (True, False))


def live_at_end(rank: int, sharding: str, reentrant: bool, port: int) -> None:
    """One process: builds the blocks, runs one step, and prints the count on rank 0."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    known: dict[int, StorageWeakRef] = {}

    class Track(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() == TOKENS * HIDDEN * 4:
                    storage = value.untyped_storage()
                    known[storage._cdata] = StorageWeakRef(storage)
            return out

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            return x + torch.tanh(self.base(x) + self.up(self.down(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block.__call__, x, use_reentrant=reentrant)
            return x

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    net: Any = Net()
    if sharding == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

        def apart(module: nn.Module) -> bool:
            return isinstance(module, Block) or (isinstance(module, nn.Linear) and module.weight.requires_grad)

        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=apart)
        net = FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    elif sharding == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    inputs = torch.randn(TOKENS, HIDDEN).requires_grad_()
    counts: list[int] = []
    inputs.register_hook(lambda _: counts.append(sum(not reference.expired() for reference in known.values())))
    with Track():
        net(inputs).sum().backward()
    if rank == 0:
        form = "reentrant" if reentrant else "non-reentrant"
        print(f"{sharding:6s} {form:14s} {counts[0]:3d} live hidden states at the end of the backward", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """All forms, one after another."""
    import torch.multiprocessing as mp

    for sharding, reentrant in FORMS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(live_at_end, (sharding, reentrant, port), 2)


if __name__ == "__main__":
    main()
