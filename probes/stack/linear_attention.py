"""The gated delta rule of hybrids as flash-linear-attention computes it, by what its autograd function allocates.

Like the kernel families (`probes.stack.kernels`), the function here computes nothing: fla's own needs a GPU and Triton,
which a dry run has not. Its launches are told to whoever listens.

Source: fla-core 0.6.0 `ops/gated_delta_rule/chunk.py` ChunkGatedDeltaRuleFunction and what it calls: `chunk_fwd.py`,
`wy_fast.py`, `ops/common/chunk_delta_h.py`, `ops/common/chunk_o.py`, `ops/utils/cumsum.py`, `modules/norm/l2norm.py`.
Measured: tests/probes/test_linear_attention.py holds every allocation and launch equal to fla's own code.
Not counted: what Triton's autotuner allocates in the first step while it times candidates.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.core.install import packages_command
from planner.setup import TrainSetup
from planner.setup.packages import DELTA
from probes.stack.kernels import KernelsMissing, launched

CHUNK = 64
"""Tokens of one chunk: transformers' and fla's default."""
_TORCH_NAME = "torch_chunk_gated_delta_rule"


@contextmanager
def gated_delta_rule(inner: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it a model computes its gated delta rule by the setup's path, whichever is installed here.

    Raises:
        KernelsMissing: fla's kernels on a real device without the package, or in a class that does not ask for it.
    """
    module = sys.modules[type(inner).__module__]
    wrapped = getattr(module, _TORCH_NAME, None)
    fla, real = setup.linear_attention == "fla", next(inner.parameters()).device.type != "meta"
    if fla and wrapped is None:
        raise KernelsMissing(f"{type(inner).__name__} of this transformers does not ask for {DELTA}")
    if fla and real and any(find_spec(name) is None for name in ("fla", "triton")):
        raise KernelsMissing(f"linear_attention 'fla' needs {DELTA} and Triton: {packages_command(DELTA)}")
    if wrapped is None or (fla and real):
        yield
        return
    with mock.patch.object(module, _TORCH_NAME, chunk_gated_delta_rule if fla else wrapped.__wrapped__):
        yield


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """fla's function of this name in training: queries and keys normalized within, no state before or after.

    Shapes: query, key [seqs, tokens, key heads, key size]; value [seqs, tokens, value heads, value size]; g, beta
    [seqs, tokens, value heads]; returns [seqs, tokens, value heads, value size].
    """
    return _ChunkGatedDeltaRule.apply(query, key, value, g, beta), None


class _ChunkGatedDeltaRule(torch.autograd.Function):  # type: ignore[misc]
    """Keeps normalized queries and keys, values, the decay's sums, beta and each chunk's 64-wide inverse; the states of
    all chunks are made again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # copies live to the end, as in fla's `input_guard`
        given = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, q_rows = _l2norm(given[0])
        k, k_rows = _l2norm(given[1])
        v, g, beta = given[2], _chunk_sums(given[3]), given[4]
        inverse = torch.zeros(*beta.shape, CHUNK, device=k.device, dtype=k.dtype)
        launched("fla.chunk_gated_delta_rule_fwd_kkt_solve", [k, g, beta], [inverse])
        _w, _u, h, new_values = _states(k, v, beta, inverse, g)
        out = torch.empty_like(new_values)
        launched("fla.chunk_fwd_o", [q, k, new_values, h, g], [out])
        ctx.save_for_backward(q, q_rows, k, k_rows, v, g, beta, inverse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, q_rows, k, k_rows, v, g, beta, inverse = ctx.saved_tensors
        do = grads[0].contiguous()
        dq, dk, dv, dg, dbeta = _gradients(q, k, v, g, beta, inverse, do)
        dq = _l2norm_backward(q, q_rows, dq)
        dk = _l2norm_backward(k, k_rows, dk)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(g.dtype), dbeta.to(beta.dtype)


def _l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """(the rows normalized, one fp32 a row)."""
    out = torch.empty_like(x)
    rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launched("fla.l2norm_fwd", [x], [out, rows])
    return out, rows


def _l2norm_backward(normed: Tensor, rows: Tensor, gradient: Tensor) -> Tensor:
    out = torch.empty_like(normed)
    launched("fla.l2norm_bwd", [normed, rows, gradient], [out])
    return out


def _chunk_sums(g: Tensor) -> Tensor:
    out = torch.empty_like(g, dtype=torch.float32)
    launched("fla.chunk_local_cumsum_scalar", [g], [out])
    return out


def _states(k: Tensor, v: Tensor, beta: Tensor, inverse: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The WY form's w and u (keys and values of every value head times the chunk's inverse), the state before each
    chunk [seqs, chunks, heads, key size, value size], and the values less what it foretells."""
    w, u = k.new_empty(*beta.shape, k.shape[-1]), torch.empty_like(v)
    launched("fla.recompute_w_u_fwd", [k, v, beta, inverse, g], [w, u])
    seqs, tokens, heads, size = u.shape
    h = k.new_empty(seqs, -(-tokens // CHUNK), heads, k.shape[-1], size)
    new_values = torch.empty_like(u)
    launched("fla.chunk_gated_delta_rule_fwd_h", [k, w, u, g], [h, new_values])
    return w, u, h, new_values


KEY_TILE = 64
"""Columns of a key that one block of fla's gradient kernels takes where all is 16-bit on an A100, or on newer cards:
64 to 128. Their partial sums of the decay's gradient are so many fp32 rows."""


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Those of normalized queries and keys, values, decays and beta; key heads that share are summed over their value
    heads."""
    w, _u, h, new_values = _states(k, v, beta, inverse, g)
    dv = torch.empty_like(do)
    launched("fla.chunk_bwd_dv_local", [q, k, g, do], [dv])
    dh, of_u = torch.empty_like(h), torch.empty_like(dv)
    launched("fla.chunk_gated_delta_rule_bwd_dhu", [q, k, w, g, do, dv], [dh, of_u])
    dv = of_u
    del of_u
    # by the output
    dq, dk = torch.empty_like(w), torch.empty_like(w)
    sums = torch.empty(-(-k.shape[-1] // KEY_TILE), *g.shape, dtype=torch.float32, device=g.device)
    dw = torch.empty_like(w)
    launched("fla.chunk_bwd_dqkwg", [q, k, new_values, w, g, h, dv, do, dh], [dq, dk, sums, dw])
    dq = _to_key_heads(dq, k)
    dk = _to_key_heads(dk, k)
    dg = sums.sum(0)
    del sums
    # by the WY form
    dk2 = torch.empty_like(dw)
    dv2, dg2, dbeta = torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    launched("fla.prepare_wy_repr_bwd", [k, v, beta, g, inverse, dw, dv], [dk2, dv2, dbeta, dg2])
    dk2 = _to_key_heads(dk2, k)
    dv = dv2
    dk.add_(dk2)
    dg.add_(dg2)
    return dq, dk, dv, _chunk_sums(dg), dbeta


def _to_key_heads(gradient: Tensor, k: Tensor) -> Tensor:
    """A gradient of every value head, summed over those that share a key head."""
    heads = k.shape[2]
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(*k.shape[:2], heads, gradient.shape[2] // heads, k.shape[3]).sum(3)
