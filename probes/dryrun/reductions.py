"""What a sum over leading dimensions allocates: partial sums of every output, one per group of blocks that shares it.

A gradient of a bias or a norm's weight is such a sum. Its buffer reaches about 1 MiB for each multiprocessor of the
card, and twice the summed fp32 tensor.

Source: PyTorch 2.13 ATen/native/cuda/Reduce.cuh `setReduceConfig`, `ReduceConfig.global_memory_size`.
Measured: the twelve RMS norms of Liger's benchmark on A100 and H100, within 0.1 % (benchmarks/trace_liger.py at
e34acc15).
Not counted: tensors beyond 2**31 elements, which PyTorch sums in parts.
"""

from collections.abc import Iterable
from itertools import count
from math import gcd, prod
from typing import Any

import torch

from probes.dryrun.tracker import Temporaries

_ACCUMULATOR = 4  # bytes: 16-bit and 32-bit floats are summed in fp32
_THREADS = 512  # MAX_NUM_THREADS
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread


def reductions(num_sms: int, threads_per_sm: int) -> dict[Any, Temporaries]:
    """The operators that sum over some dimensions, for a card of so many multiprocessors."""

    def partial_sums(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]) -> Iterable[int]:
        tensor, dims = args[0], args[1]
        if not dims or not tensor.numel() or tensor.numel() >= 1 << 31:
            return ()
        return buffers(tensor.shape, tensor.stride(), {dim % tensor.dim() for dim in dims}, num_sms * threads_per_sm)

    return {torch.ops.aten.sum.dim_IntList: partial_sums, torch.ops.aten.mean.dim: partial_sums}


def buffers(shape: Iterable[int], strides: Iterable[int], dims: set[int], num_threads: int) -> tuple[int, ...]:
    """Bytes of the partial sums and of their semaphores, none where each output has one block.

    Args:
        num_threads: how many run on the card at once.
    """
    by_stride = sorted(zip(strides, shape, count(), strict=False))
    kept = _joined((stride, size) for stride, size, index in by_stride if index not in dims)
    summed = _joined((stride, size) for stride, size, index in by_stride if index in dims)
    if not kept or not summed or summed[0][0] < kept[0][0]:
        return ()  # summed along the fastest dimension: a few bytes for each output
    num_outputs, num_inputs = prod(size for _, size in kept), prod(size for _, size in summed)
    vector = gcd(4, kept[0][1], *(stride for stride, _ in (*kept[1:], *summed))) if kept[0][0] == 1 else 1
    width, height = _block(num_outputs // vector, num_inputs, _THREADS // vector)
    values = -(-num_inputs // height)
    grid = -(-(num_outputs // vector) // width)
    target = num_threads // (width * height)
    if num_inputs < min(height * _MIN_VALUES, _MAX_VALUES) or values < _MAX_VALUES or grid > target:
        return ()
    shared = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    return (_ACCUMULATOR * num_outputs * shared * width * vector, 4 * grid) if shared > 1 else ()


def _joined(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes, the fastest first, with those that go on where another ends as one."""
    joined: list[tuple[int, int]] = []
    for stride, size in dims:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0], joined[-1][1] * size)
        elif size > 1:
            joined.append((stride, size))
    return joined


def _block(outputs: int, inputs: int, most: int) -> tuple[int, int]:
    """Threads of a block along the outputs and along the inputs (`set_block_dimension`)."""
    width, most_height = (min(1 << (max(size, 1).bit_length() - 1), most) for size in (outputs, inputs))
    height = min(most_height, most // min(width, _WARP))
    return min(width, most // height), height
