"""Operators that have no meta form, or another one than a GPU has: grouped products, int8 layers, dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from planner.speed.operators import WAIT
from probes.dryrun.fastmeta import register_in_place
from probes.patching import replaced
from probes.stack.kernels import launched


class _GroupedMm(torch.autograd.Function):  # type: ignore[misc]
    """[rows, in] times [experts, in, out] by groups of rows: what autograd keeps and makes, without a kernel.

    Source: PyTorch derivatives.yaml `_grouped_mm`: each gradient only where it is needed.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(
            rows if weight.requires_grad else None, weight if ctx.needs_input_grad[0] else None, offsets
        )
        ctx.shapes = (rows.shape, weight.shape, rows.dtype, weight.dtype)
        out = rows.new_empty((rows.shape[0], weight.shape[-1]))
        launched("aten._grouped_mm", [rows, weight], [out])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_shape, weight_shape, rows_dtype, weight_dtype = ctx.shapes
        need_rows, need_weight = ctx.needs_input_grad[:2]
        rows, weight, _ = ctx.saved_tensors
        grad = grads[0]
        of_rows = of_weight = None
        if need_rows:
            of_rows = grad.new_empty(rows_shape, dtype=rows_dtype)
            launched("aten._grouped_mm", [grad, weight.transpose(1, 2)], [of_rows])
        if need_weight:
            of_weight = grad.new_empty(weight_shape, dtype=weight_dtype)
            launched("aten._grouped_mm", [rows.t(), grad], [of_weight])
        return of_rows, of_weight, None


def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """transformers' grouped product by its buffers."""
    return _GroupedMm.apply(input.to(weight.dtype), weight, offs)


class _Int8Linear(torch.autograd.Function):  # type: ignore[misc]
    """bitsandbytes' LLM.int8() layer by its buffers: the fp16 copy of the input, its int8 codes, the int32 product.

    Source: bitsandbytes 0.50 autograd/_functions.py `MatMul8bitLt` (threshold 6.0; no outlier column is assumed, as
    their number depends on the data).
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: Any) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        half = flat.to(torch.float16)
        quantized = torch.empty(flat.shape, dtype=torch.int8, device=hidden.device)
        row_stats = torch.empty(flat.shape[0], dtype=torch.float32, device=hidden.device)
        launched("aten.abs", [half], [half])  # the search for outliers; the codes are as large as its mask
        launched("aten.ge", [half], [quantized])
        launched("aten.any", [quantized])
        launched(WAIT, ())  # whether there are any
        launched("bitsandbytes.int8_vectorwise_quant", [half], [quantized, row_stats])
        launched(WAIT, ())  # columns of outliers, even none, are set to a number that comes from the host
        del half
        product = torch.empty((flat.shape[0], codes.shape[0]), dtype=torch.int32, device=hidden.device)
        launched("bitsandbytes.int8_linear_matmul", [quantized, codes], [product])
        # in its last shape: old PEFT adds to it in place, which autograd allows of no view made here
        output = torch.empty((*hidden.shape[:-1], codes.shape[0]), dtype=torch.float16, device=hidden.device)
        launched("bitsandbytes.int8_mm_dequant", [product], [output])
        del product, quantized, row_stats
        ctx.saved = (flat, codes, scales)
        ctx.shape = hidden.shape
        return output.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat, codes, scales = ctx.saved
        grad = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        weight = codes.to(flat.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(flat.dtype), weight).view(ctx.shape), None, None, None


def int8_matmul(a: torch.Tensor, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None):  # type: ignore[no-untyped-def]
    """bitsandbytes' `matmul` of LLM.int8() by its buffers."""
    return _Int8Linear.apply(a, state.CB, state.SCB, bias)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0.0 or input.numel() == 0:
        return input
    if p == 1.0:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    output: torch.Tensor = torch.ops.aten.native_dropout.default(input, p, train)[0]
    return output


_slow_check_with = torch._check_with


def _check_with(error_type: Any, cond: Any, message: Any) -> None:
    """PyTorch's own check without its look at symbolic shapes: meta kernels ask tens of thousands of times."""
    if cond is not True:
        _slow_check_with(error_type, cond, message)


def quick_checks() -> Any:
    """Within it PyTorch's meta kernels check plain conditions without importing anything."""
    return mock.patch.object(torch, "_check_with", _check_with)


@contextmanager
def fused_dropout(device: str) -> Iterator[None]:
    """Within it, dropout on `device` is the fused kernel that CUDA takes: an output and a mask of a byte per element.

    Elsewhere PyTorch keeps the mask in the input's type. Registered at the dispatcher, so that dropout inside composite
    operators (SDPA's math kernel) is covered too.

    Source: PyTorch 2.13 aten/src/ATen/native/Dropout.cpp `is_fused_kernel_acceptable`, `dropout`.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, f"Autograd{'CPU' if device == 'cpu' else 'Meta'}")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def meta_operators() -> Iterator[None]:
    """Stand-ins for what meta tensors cannot run, installed for the length of one dry run."""
    import bitsandbytes as bnb
    import transformers.integrations.moe as moe

    in_place_updates()
    with quick_checks(), replaced([(moe, "_grouped_mm", grouped_mm), (bnb, "matmul", int8_matmul)], create=True):
        yield


def in_place_updates() -> None:
    """Tells that bitsandbytes' optimizers change their arguments in place."""
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        if hasattr(torch.ops.bitsandbytes, name):  # from 0.47 on
            register_in_place(getattr(torch.ops.bitsandbytes, name).default)
