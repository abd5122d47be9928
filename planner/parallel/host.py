"""What offloading puts into the hosts' memory."""

from functools import lru_cache

from planner.models.spec import ModelSpec
from planner.parallel.rank import rank_parts
from planner.parallel.share import share_of
from planner.setup import TrainSetup
from planner.workload import Workload

HOST_MEMORY_RATIO = 4
"""A node's memory over its GPUs', where nobody says: a DGX A100 has 2 TB for 640 GB, a DGX H100 2 TB for 640 GB; a
workstation with two 24 GB cards and 192 GB. An assumption, stated in the walk."""


@lru_cache(maxsize=256)
def host_bytes_per_node(model: ModelSpec, setup: TrainSetup, num_nodes: int) -> int:
    """Bytes of states that lie in the memory of every node's host; pinned buffers and the loader are not counted."""
    if setup.offload == "none":
        return 0
    total = 0
    for part in rank_parts(model, setup):
        share = share_of(part, setup, accumulated=setup.accumulation_steps > 1)
        total += part.num_ranks * (share.host_bytes + share.host_state_bytes(setup.optimizer))
    return -(-total // num_nodes)


def assumed_host_bytes(workload: Workload) -> int:
    """Host memory that a node of this workload is taken to have."""
    per_node = workload.cluster.gpus_per_node if workload.cluster is not None else 1
    return HOST_MEMORY_RATIO * per_node * workload.gpu.memory_bytes
