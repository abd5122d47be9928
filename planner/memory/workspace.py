"""Memory that belongs to no tensor of the model: cuBLAS workspaces, dequantized weights, the CUDA context."""

from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES
from planner.models.spec import LinearSpec
from planner.setup import TrainSetup
from planner.units import KIB, MIB


def cublas_workspace_bytes(gpu: GpuSpec) -> int:
    """Workspaces that PyTorch allocates for cuBLAS, one for the forward's and one for the backward's thread.

    32 MiB each on compute capability 9.0, else 8,320 KiB (`:4096:2:16:8`).

    Source: PyTorch `aten/src/ATen/cuda/CublasHandlePool.cpp`, `getChosenWorkspaceSize`.
    """
    hopper = gpu.compute_capability is not None and gpu.compute_capability[0] == 9
    return 2 * (32 * MIB if hopper else 8320 * KIB)


def dequantized_bytes(linear: LinearSpec, setup: TrainSetup, input_dtype: str) -> int:
    """The copy of one quantized matrix that its multiplication makes, alive only within it: in the compute type for
    NF4, in its input's type for int8 (in the backward only).

    Source: bitsandbytes 0.50 `MatMul4Bit`, `MatMul8bitLt` backward.
    Shapes: [out_features, in_features].
    """
    if not setup.quantized or not linear.quantizes:
        return 0
    dtype = input_dtype if setup.quantization == "int8" else setup.compute_dtype
    return linear.in_features * linear.out_features * SIZE_BYTES[dtype]


CONTEXT_BYTES = 512 * MIB
"""CUDA context, kernels and libraries outside PyTorch's count. An assumption (hundreds of MB are reported; it differs
by driver, card and loaded libraries); a probe measures it. Source: ../shared/FINDINGS.md, "What decides memory"."""


MEASURED_CONTEXT_BYTES = {(7, 5): 141 * MIB}
"""By compute capability, where it was measured after training steps: of a T4. Source: fitcheck-llm 0.3.1
data/measurements, `cuda_context_mib` 140.875 in 75 runs of three sessions (torch 2.10 and 2.14)."""


def context_bytes(gpu: GpuSpec) -> int:
    """Device memory that the driver holds for a training process besides PyTorch's segments."""
    if gpu.vendor == "Apple":
        return 0
    return MEASURED_CONTEXT_BYTES.get(gpu.compute_capability or (0, 0), CONTEXT_BYTES)


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
    data = [setup.copies]
    if setup.shard_degree:
        data = [setup.shard_degree, setup.copies // setup.shard_degree]
    total = 0
    for ranks in (*data, setup.tensor_degree, setup.context_degree, setup.pipeline_degree):
        total += group_bytes(gpu.nvlink_bytes_per_s > 0, ranks)
    return total


def group_bytes(nvlink: bool, ranks: int) -> int:
    """Device memory of one communicator of `ranks` GPUs."""
    if ranks == 1:
        return 0
    if not nvlink:
        return NCCL_PCIE_BYTES
    return NCCL_NVLINK_BYTES if ranks > 2 else NCCL_NVLINK_PAIR_BYTES
