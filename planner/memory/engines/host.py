"""What offloading puts into the hosts' memory."""

from functools import lru_cache
from math import ceil

from planner.core.units import GIB
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.engines import engine_of
from planner.memory.engines.fsdp2 import sharded_dtype
from planner.memory.micro_batch import checkpointed_inputs_bytes
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
    """Bytes that offloading takes of every node's host: of states, or of loading where that is more (each process's own
    copy, and the shards that are made of them), and of checkpoints.

    Not counted: the processes themselves, page cache, DeepSpeed's rounding of what it pins.
    Measured: Llama-2-70B, QLoRA, FSDP1 on 2 GPUs 88 of a published 107 GB (huggingface/peft docs/source/accelerate/
    fsdp.md), Llama-3-70B on 4 GPUs 93 of 127 GB (philschmid.de/fsdp-qlora-llama3): 8 to 9 GB a process are left.
    """
    processes = -(-setup.num_gpus // num_nodes)
    checkpoints = processes * offloaded_checkpoints_bytes(model, setup) if setup.activation_offload else 0
    if setup.offload == "none":
        return checkpoints
    total = weights = 0
    for part in rank_parts(model, setup):
        state = engine_of(setup).state(part, setup, accumulated=setup.adds_gradients)
        total += part.num_ranks * (state.host_bytes + state.host_state_bytes(setup.optimizer))
    loading = loading_host_bytes(model, setup, processes)
    if loading and setup.offload == "parameters":
        weights = SIZE_BYTES["fp32"] * model.num_params
    return checkpoints + max(-(-total // num_nodes), loading + weights // num_nodes)


def offloaded_checkpoints_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of one rank's checkpoints in pinned memory: of its part of a cut sequence, in the types it computes in."""
    return checkpointed_inputs_bytes(model, engine_of(setup).computes(setup))


def loading_host_bytes(model: ModelSpec, setup: TrainSetup, num_processes: int) -> int:
    """The host's memory that the processes of a node fill with copies of a model of 16 bits while they load it.

    What is read in the type of its file stays that file's pages, which all processes share; what is cast to fp32 is a
    copy of its own in each of them: transformers reads every value in every process of FSDP too, and Accelerate widens
    what trains under mixed precision before it cuts it. 4 bits are made on the GPU; ZeRO-3 gathers tensor by tensor.

    Source: transformers 5.23 `_load_pretrained_model`, `core_model_loading.py` _materialize_copy (huggingface/
    transformers issue 43749); accelerate 1.15 `fsdp2_prepare_model` (original_sd).
    Measured: two processes under ACCELERATE_USE_FSDP and FSDP_CPU_RAM_EFFICIENT_LOADING, 30 November 2026: RssAnon of
    both grows by 1.00 of the model in fp32, by 0.01 read in its file's bf16.
    """
    if setup.quantized or setup.parallel in ("none", "dp", "device-map", "zero3") or setup.sharded_at_loading:
        return 0
    if model.config.get("dtype", model.config.get("torch_dtype")) == "float32":  # read as its file is
        return 0
    if setup.trainer.own_models:  # made on meta, its checkpoint cut as it is read
        return 0
    widened = setup.parallel == "fsdp2" and setup.method == "full" and sharded_dtype(setup) == "fp32"
    return SIZE_BYTES["fp32"] * model.num_params * num_processes if widened or setup.weight_dtype == "fp32" else 0


HOST_SHARE = 0.9
"""Of a machine's memory, what states may take; the rest is the system's, the loader's and pinned buffers'. Judged."""


def host_gib(states_bytes: int) -> int:
    """Whole GiB of a machine whose memory holds so many bytes of states."""
    return ceil(states_bytes / HOST_SHARE / GIB)


def assumed_host_bytes(workload: Workload) -> int:
    """Host memory that states may take on a node of this workload; 0 where it is the GPU's own."""
    if workload.gpu.shares_host_memory:
        return 0
    if workload.host_bytes:
        return int(HOST_SHARE * workload.host_bytes)
    per_node = workload.cluster.gpus_per_node if workload.cluster is not None else 1
    return min(HOST_MEMORY_RATIO * per_node * workload.gpu.memory_bytes, int(HOST_SHARE * HOST_MEMORY_MOST_BYTES))
