"""Attention of a rank whose sequence is cut over several GPUs: PyTorch's own ring, on meta tensors.

PyTorch's context parallelism makes queries, keys and values DTensors, whose dispatch ends in the functions called here
and whose autograd keeps what is kept here: each rank's own part of them, of the output and of the log-sum-exp.

Source: PyTorch 2.13 `torch/distributed/tensor/experimental/_context_parallel/_attention.py` _sdpa_handler.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.experimental._context_parallel import _attention as own


class RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """Flash or memory-efficient attention, causal, over the pieces of all ranks of `group`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str, scale: Any, group: Any
    ) -> torch.Tensor:
        mesh: Any = SimpleNamespace(get_group=lambda: group)
        run: Any = getattr(own, f"_scaled_dot_product_ring_{kernel}_attention")
        out, sums, *rest = run(mesh, query, key, value, is_causal=True, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.rest, ctx.kernel, ctx.scale, ctx.mesh = rest, kernel, scale, mesh
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        if ctx.kernel == "flash":
            starts, ends, most_q, most_k, seed, offset, *_ = ctx.rest
            run: Any = own._scaled_dot_product_ring_flash_attention_backward
            args = (out, sums, starts, ends, most_q, most_k, 0.0, True, seed, offset)
        else:
            run = own._scaled_dot_product_ring_efficient_attention_backward
            args = (None, out, sums, *ctx.rest[:2], 0.0, (True, True, True, False), True)
        grads = run(ctx.mesh, grad_out, query, key, value, *args, scale=ctx.scale)
        return *grads[:3], None, None, None
