"""What kernels allocate for themselves: memory that no tensor of the model stands for."""

from collections.abc import Callable, Iterable
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
