"""What kernels allocate for themselves: memory that no tensor of the model stands for."""

from collections.abc import Callable, Iterable
from itertools import count
from math import gcd, prod
from typing import Any

import torch

from probes.dryrun.tracker import WORKSPACE, Args, Outputs, Temporaries
from probes.stack.images import SEPARATE

_FLOAT = 4


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _at_once(query: torch.Tensor) -> tuple[int, ...]:
    """Sequences, heads, rows and head size of one call."""
    shape = tuple(query.shape)
    return (1, *shape[1:]) if shape in SEPARATE else shape


def flash_backward(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """fp32 query-gradient accumulator, per-row softmax sums, and for grouped queries the expanded key and value
    gradients.

    Source: PyTorch 2.13 flash_attn/flash_api.cpp `mha_bwd` (softmax_d, dq_accum, dk_expanded, dv_expanded).
    """
    _, query, key = args[0], args[1], args[2]
    seqs, heads, rows, head = _at_once(query)
    kv_heads, columns = key.shape[1], key.shape[2]
    rows_rounded = _round_up(rows, 128)
    head_rounded = _round_up(head, 32) if head <= 128 else _round_up(head, 64)
    yield seqs * heads * rows_rounded * _FLOAT
    yield seqs * heads * rows_rounded * head_rounded * _FLOAT
    if kv_heads != heads:
        expanded = seqs * columns * heads * head * key.element_size()
        yield expanded
        yield expanded


def efficient_backward(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """fp32 accumulators of the gradients that do not stay in registers, and the row sums.

    Source: PyTorch 2.13 mem_eff_attention/kernel_backward.h `workspace_elements_gq/gk/gv`: none for fp32 input;
    16-bit input accumulates the query gradient, and key and value gradients where the head size is above 128.
    """
    query, key = args[1], args[2]
    seqs, heads, rows, head = _at_once(query)
    columns = key.shape[2]
    yield seqs * heads * _round_up(rows, 32) * _FLOAT
    if query.dtype is torch.float32:
        return
    block = 128 if head > 64 else 64
    total = _round_up(rows, block) * _round_up(head, 32) * _FLOAT
    if head > 128:
        total += 2 * _round_up(columns, block) * _round_up(head, 32) * _FLOAT
    yield seqs * heads * total


def embedding_backward(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """Sorted indices and their origins, int64 each, twice (Embedding.cu `embedding_dense_backward_cuda`)."""
    tokens = args[1].numel()
    if tokens <= 3072:
        return
    for _ in range(4):
        yield tokens * 8


def softmax_backward(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """The product of gradient and output, before it is summed up.

    Source: PyTorch 2.11 SoftMax.cu `softmax_backward_cuda_out` (`grad * output`); its log form has none.
    Measured: eager attention of Llama-3.2-1B, 2 x 2,048, on an H100: -2.78 % without it, 0.00 % with it
    (benchmarks/data/h100, l1-lora-eager-attention).
    """
    yield args[0].numel() * args[0].element_size()


def gemm_4bit(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """The weight dequantized to the input's type, and with double quantization its fp32 statistics.

    Source: bitsandbytes 0.50 backends/cuda/ops.py: above 1,536 rows (and below for most shapes) the matrix is
    dequantized and multiplied by cuBLAS; only tiny inputs run a fused kernel.
    """
    hidden, shape, block = args[0], args[2], args[4]
    rows = hidden.numel() // hidden.shape[-1]
    if rows <= 8:
        return
    elements = shape[0] * shape[1]
    yield elements * hidden.element_size()
    if kwargs.get("absmax_8bit") is not None or (len(args) > 7 and args[7] is not None):
        yield -(-elements // block) * _FLOAT


def foreach_norm(args: Args, kwargs: dict[str, Any], outputs: Outputs) -> Iterable[int]:
    """One partial norm per tensor and chunk of 65,536 elements, chunks counted for the largest tensor.

    Source: PyTorch 2.13 ForeachReduceOp.cu `foreach_tensor_norm_cuda` (output_per_tensor).
    """
    largest = max((tensor.numel() for tensor in args[0]), default=0)
    yield len(args[0]) * -(-largest // 65536) * _FLOAT


TEMPORARIES: dict[Any, Temporaries] = {
    torch.ops.aten._foreach_norm.Scalar: foreach_norm,
    torch.ops.aten._softmax_backward_data.default: softmax_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    torch.ops.aten.embedding_dense_backward.default: embedding_backward,
}


def cublas_workspaces(size_bytes: int, take: Callable[[int, str], object]) -> Callable[[Any], None]:
    """What is told of every operator and takes a workspace at the first product of either thread."""
    seen: set[str] = set()

    def on_op(func: Any) -> None:
        if len(seen) < 2 and func in _MATMULS:
            thread = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            if thread not in seen:
                seen.add(thread)
                take(size_bytes, f"{WORKSPACE} ({thread})")

    return on_op


_PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]
_MATMULS = frozenset((*_PRODUCTS, torch.ops.aten.mm.out))


def temporaries() -> dict[Any, Temporaries]:
    """The table, with bitsandbytes' operators where they are registered (quantized setups import it)."""
    packet = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)
    return TEMPORARIES if packet is None else {**TEMPORARIES, packet.default: gemm_4bit}


_ACCUMULATOR = 4  # bytes: 16-bit and 32-bit floats are summed in fp32
_THREADS = 512  # MAX_NUM_THREADS
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread


def reductions(num_sms: int, threads_per_sm: int) -> dict[Any, Temporaries]:
    """The operators that sum over some dimensions (a gradient of a bias or a norm's weight), for a card of so many
    multiprocessors: partial sums of every output, one per group of blocks that shares it, at most about 1 MiB for each
    multiprocessor, and twice the summed fp32 tensor.

    Source: PyTorch 2.13 ATen/native/cuda/Reduce.cuh `setReduceConfig`, `ReduceConfig.global_memory_size`.
    Measured: the twelve RMS norms of Liger's benchmark on A100 and H100, within 0.1 % (benchmarks/trace_liger.py at
    e34acc15).
    Not counted: tensors beyond 2**31 elements, which PyTorch sums in parts.
    """

    def partial_sums(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]) -> Iterable[int]:
        tensor, dims = args[0], args[1]
        if not dims or not tensor.numel() or tensor.numel() >= 1 << 31:
            return ()
        return buffers(tensor.shape, tensor.stride(), {dim % tensor.dim() for dim in dims}, num_sms * threads_per_sm)

    return {torch.ops.aten.sum.dim_IntList: partial_sums, torch.ops.aten.mean.dim: partial_sums}


def buffers(shape: Iterable[int], strides: Iterable[int], dims: set[int], num_threads: int) -> tuple[int, ...]:
    """Bytes of the partial sums and of their semaphores, none where each output has one block; `num_threads` run on the
    card at once."""
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
