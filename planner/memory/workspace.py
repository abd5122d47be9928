"""Memory that belongs to no tensor of the model: cuBLAS workspaces, dequantized weights, the CUDA context."""

from planner.gpu import GpuSpec
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
    if not setup.quantized or linear.module == "parameter":
        return 0
    dtype = input_dtype if setup.quantization == "int8" else setup.compute_dtype
    return linear.in_features * linear.out_features * SIZE_BYTES[dtype]


CONTEXT_BYTES = 512 * MIB
"""CUDA context, kernels and libraries outside PyTorch's count. An assumption (hundreds of MB are reported; it differs
by driver, card and loaded libraries); a probe measures it. Source: ../shared/FINDINGS.md, "What decides memory"."""


def context_bytes(gpu: GpuSpec) -> int:
    """Device memory that the driver holds for a training process besides PyTorch's segments."""
    return CONTEXT_BYTES if gpu.vendor != "Apple" else 0
