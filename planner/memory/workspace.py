"""Memory that belongs to no tensor of the model: cuBLAS workspaces, dequantized weights, the CUDA context."""

from functools import lru_cache

from planner.core.units import KIB, MIB
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import takes_cudnn
from planner.memory.dtypes import SIZE_BYTES
from planner.models.spec import LinearSpec
from planner.setup import TrainSetup


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of one cuBLAS workspace, by compute capability: 32 MiB on Hopper and data-centre Blackwell, else 8,320 KiB
    (`:4096:2:16:8`).

    Source: PyTorch 2.13 `aten/src/ATen/cuda/CublasHandlePool.cpp`, `parseChosenWorkspaceSize`; its newest source has
    32 MiB on RTX 50 too, where an RTX 5090 was measured at 21.91 GiB (test_streamed_experts, FP1): 21.90 so.
    """
    return 32 * MIB if capability is not None and capability[0] in (9, 10) else 8320 * KIB


def cublas_workspace_bytes(gpu: GpuSpec) -> int:
    """Workspaces that PyTorch allocates for cuBLAS, one for the forward's and one for the backward's thread."""
    return 2 * workspace_bytes(gpu.compute_capability)


def dequantized_bytes(linear: LinearSpec, setup: TrainSetup, input_dtype: str) -> int:
    """The copy of one quantized matrix that its multiplication makes, alive only within it: in the compute type for
    NF4, in its input's type for int8 (in the backward only).

    Source: bitsandbytes 0.50 `MatMul4Bit`, `MatMul8bitLt` backward; torchao `dtypes/nf4tensor.py` get_original_weight:
    as its values are interleaved, their codes (int64), looked-up and scaled values still lie beside them.
    Shapes: [out_features, in_features].
    """
    if not setup.quantized or not linear.quantizes:
        return 0
    if setup.four_bit and setup.trainer.torch_nf4 and not setup.compiled:
        return linear.in_features * linear.out_features * (8 + 3 * SIZE_BYTES[setup.compute_dtype])
    dtype = input_dtype if setup.quantization == "int8" else setup.compute_dtype
    return linear.in_features * linear.out_features * SIZE_BYTES[dtype]


CONTEXT_BYTES = 512 * MIB
"""The CUDA context with kernels and libraries, of a GPU about which nothing is known (AMD's): an assumption."""
BARE_PER_SM_BYTES = int(3.1 * MIB)
"""A process's context before its first kernel, per multiprocessor, up to Ada. Measured: 256 MiB on an RTX 3090 (82;
invoke-ai/InvokeAI issue 9413), 426 on an RTX 6000 Ada (142; unslothai/unsloth-zoo pull request 1053), both 2026."""
BARE_PER_SM_HOPPER_BYTES = int(3.94 * MIB)
"""The same from Hopper on. Measured: 520 MiB on an H200 (132 multiprocessors, driver 580): by what device memory was
larger where `trl sft` ran, whose launcher keeps a context of its own. That Blackwell is like it is an assumption."""
LIBRARIES_BYTES, LIBRARIES_HOPPER_BYTES = 164 * MIB, 234 * MIB
"""PyTorch's kernels and cuBLAS, loaded as they are first called, before Hopper and from it on. Measured on an H100 by
step (torch 2.11, CUDA 13): 90 MiB with PyTorch's first kernel, 66 with cuBLAS's, 78 in training (Liger's Triton kernels
and bitsandbytes within them: 4 MiB). Before Hopper: an assumption between those and the 17 MiB of a T4, what vLLM says
of an H100 (0.16 GiB beyond PyTorch's first kernels; vllm-project/vllm pull request 12126)."""
CUDNN_BYTES = 16 * MIB
"""cuDNN, where attention runs on it. Measured on the H100: 770 MiB in four of TRL's runs, 754 in one with eager
attention; 764 to 774 in 15 of 16 on an H200."""
MEASURED_CONTEXT_BYTES = {(7, 5): 141 * MIB}
"""By compute capability, where the whole was measured after training steps: of a T4. Source: fitcheck-llm 0.3.1
data/measurements, `cuda_context_mib` 140.875 in 75 runs of three sessions (torch 2.10 and 2.14)."""


@lru_cache(maxsize=128)
def context_bytes(gpu: GpuSpec) -> int:
    """Device memory that the driver holds for a training process besides PyTorch's segments: its context, and the
    libraries whose kernels it calls.

    Source: CONTEXT_BYTES to MEASURED_CONTEXT_BYTES.
    Not counted: a launcher's own context (the launch files' commands start none), other processes on the card.
    """
    if gpu.measured_context_bytes is not None:
        return gpu.measured_context_bytes
    if gpu.vendor == "Apple":
        return 0
    if (whole := MEASURED_CONTEXT_BYTES.get(gpu.compute_capability or (0, 0))) is not None:
        return whole
    if gpu.vendor != "NVIDIA" or gpu.sm_count is None:
        return CONTEXT_BYTES
    from_hopper = (gpu.compute_capability or (0, 0))[0] >= 9
    each = BARE_PER_SM_HOPPER_BYTES if from_hopper else BARE_PER_SM_BYTES
    libraries = LIBRARIES_HOPPER_BYTES if from_hopper else LIBRARIES_BYTES
    return gpu.sm_count * each + libraries + CUDNN_BYTES * takes_cudnn(gpu, "sdpa")


NCCL_NVLINK_BYTES = 688 * MIB
NCCL_NVLINK_PAIR_BYTES = 544 * MIB
"""Device memory of one NCCL communicator over NVLink, of more than two GPUs and of a pair, outside PyTorch's count.
Source: measured by a user on 4 A100 after one all-reduce, NVIDIA/nccl issue 964."""
NCCL_PCIE_BYTES = 128 * MIB
"""The same without NVLink, where a ring has few channels: an assumption (buffers grow with the channels, NVIDIA/nccl
issue 986; 110 MB reported in issue 34)."""


def communicator_bytes(gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device memory that the communication library holds for one rank: one communicator for every group it talks to.

    Nothing within one process by device map. A hybrid shard has two groups (its shard and its replicas).

    Source: NCCL_NVLINK_BYTES, NCCL_PCIE_BYTES.
    """
    if setup.num_gpus == 1 or setup.parallel == "device-map" or gpu.vendor == "Apple":
        return 0
    data = [setup.shardable_ranks]
    if setup.shard_degree:
        data = [setup.shard_degree, setup.shardable_ranks // setup.shard_degree]
    groups = (*data, setup.tensor_degree, setup.context_degree, setup.pipeline_degree)
    return sum(group_bytes(gpu.nvlink_bytes_per_s > 0, ranks) for ranks in groups)


def group_bytes(nvlink: bool, ranks: int) -> int:
    """Device memory of one communicator of `ranks` GPUs."""
    if ranks == 1:
        return 0
    if not nvlink:
        return NCCL_PCIE_BYTES
    return NCCL_NVLINK_BYTES if ranks > 2 else NCCL_NVLINK_PAIR_BYTES
