"""What offloading puts into the hosts' memory."""

from functools import lru_cache
from math import ceil

from planner.core.units import GIB
from planner.memory.engines import engine_of
from planner.memory.rank_part import rank_parts
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

HOST_MEMORY_RATIO, HOST_MEMORY_MOST_BYTES = 4, 2048 * GIB
"""A machine's memory over its GPUs', and the most of it, where nobody says: a workstation with two 24 GB cards has 192
GB; DGX A100, H100 and H200 have 2 TB, AWS p5 2 TiB, GCP a3-highgpu-8g 1.87 TB, Azure ND H100 v5 1.9 TB (their pages,
November 2026); AWS p4de and GCP a2-ultragpu-8g have less (1.15, 1.36 TB). An assumption, stated in the walk."""


@lru_cache(maxsize=256)
def host_bytes_per_node(model: ModelSpec, setup: TrainSetup, num_nodes: int) -> int:
    """Bytes of states that lie in the memory of every node's host; pinned buffers and the loader are not counted."""
    if setup.offload == "none":
        return 0
    total = 0
    for part in rank_parts(model, setup):
        state = engine_of(setup).state(part, setup, accumulated=setup.adds_gradients)
        total += part.num_ranks * (state.host_bytes + state.host_state_bytes(setup.optimizer))
    return -(-total // num_nodes)


HOST_SHARE = 0.9
"""Of a machine's memory, what states may take; the rest is the system's, the loader's and pinned buffers'. Judged."""


def host_gib(states_bytes: int) -> int:
    """Whole GiB of a machine whose memory holds so many bytes of states."""
    return ceil(states_bytes / HOST_SHARE / GIB)


def assumed_host_bytes(workload: Workload) -> int:
    """Host memory that states may take on a node of this workload."""
    if workload.host_bytes:
        return int(HOST_SHARE * workload.host_bytes)
    per_node = workload.cluster.gpus_per_node if workload.cluster is not None else 1
    return min(HOST_MEMORY_RATIO * per_node * workload.gpu.memory_bytes, int(HOST_SHARE * HOST_MEMORY_MOST_BYTES))


def host_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Host memory of one rank's offloaded weights, masters, gradients and states, the largest rank's; 0 without."""
    if setup.offload == "none":
        return 0
    engine = engine_of(setup)
    states = [engine.state(part, setup, accumulated=False) for part in rank_parts(model, setup)]
    return max(state.host_bytes + state.host_state_bytes(setup.optimizer) for state in states)
