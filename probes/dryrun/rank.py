"""One rank's step of a multi-GPU job, traced: PyTorch's own DDP, FSDP2 or tensor parallelism around the same model and
step as on one GPU.

Rank 0 is traced: it holds the largest shards (FSDP2 pads the last ranks); of a ring of ranks that share a sequence one
in the middle (`traced_rank`). What collectives write to are tensors and counted; NCCL's own buffers are outside
PyTorch's allocator.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from planner.setup import TrainSetup
from probes.dryrun.data_parallel import DdpWorld, FsdpWorld
from probes.dryrun.fakeworld import fake_world
from probes.dryrun.followed import traced_rank, why_not_traced
from probes.dryrun.tensor import TensorWorld
from probes.dryrun.trace import World


@contextmanager
def fake_job(setup: TrainSetup) -> Iterator[World]:
    """One rank of the job of `setup`, on meta tensors in a fake process group.

    Raises:
        ValueError: a way to spread the job that is not traced, with the reason.
    """
    if refusal := why_not_traced(setup):
        raise ValueError(refusal)
    with fake_world(setup.num_gpus, rank=traced_rank(setup)):
        yield world_of(setup)


def world_of(setup: TrainSetup) -> World:
    """What follows a rank of the job of `setup`, whose default process group exists."""
    if setup.sharded_at_loading:
        return TensorWorld(setup)
    return FsdpWorld(setup) if setup.parallel == "fsdp2" else DdpWorld(setup)
