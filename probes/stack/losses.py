"""The loss as each trainer computes it: logits materialised, TRL's chunked head, Liger's fused linear cross-entropy.

The chunked and fused forms are written here from their descriptions, buffer by buffer, because the originals need
Triton: what matters is which tensors live when. The originals need the same memory but not the same time: a probe that
measures speed runs these, where the libraries are installed and a GPU is there (`real_loss`).
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from planner.options.losses import TRL_CHECKPOINTED_CHUNK, TRL_TOKEN_CHUNK, TRL_VOCAB_CHUNK
from planner.setup import TrainSetup
from probes.stack.autocast import State
from probes.stack.kernels import launched

Kernel = Callable[..., None]


def _unseen(name: str, reads: int = 1, *, writes: bool = True) -> Callable[[Kernel], Kernel]:
    """Marks a stand-in for a GPU kernel that allocates nothing: it does nothing on meta, and what it allocates on a CPU
    is hidden from a tracker.

    Args:
        name: the kernel's row in `planner.speed.prices`; `reads`: how many arguments it reads that are as large as what
            it computes; `writes`: whether it writes the first.
    """

    def marked(kernel: Kernel) -> Kernel:
        @wraps(kernel)
        def run(tile: torch.Tensor, *args: Any) -> None:
            if tile.device.type == "meta":
                launched(name, [tile, *args[: reads - 1]], [tile] * writes)
                return
            with torch.no_grad(), _disable_current_modes():
                kernel(tile, *args)

        return run

    return marked


def checkpointed_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    targets: torch.Tensor,
    *,
    widens_head: bool,
    softcap: Any = None,
) -> list[torch.Tensor]:
    """Sums over all tokens of negative log-likelihood, entropy and hits, in pieces that the backward computes again.

    Source: trl 1.10 and 1.14.2 `sft_trainer.py` _chunked_cross_entropy_loss, _chunk.
    """

    def piece(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = rows.float() @ weight.float().t() if widens_head else (rows @ weight.to(rows.dtype).t()).float()
        if bias is not None:
            logits = logits + bias.float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_probs = torch.nn.functional.log_softmax(logits, dim=-1)
        loss = torch.nn.functional.nll_loss(log_probs, wanted, reduction="sum")
        hits = (logits.argmax(dim=-1) == wanted).sum().float()
        return loss, -(log_probs.exp() * log_probs).sum(dim=-1).sum(), hits

    cuts = zip(hidden.split(TRL_CHECKPOINTED_CHUNK), targets.split(TRL_CHECKPOINTED_CHUNK), strict=True)
    pieces = [torch.utils.checkpoint.checkpoint(piece, *cut, use_reentrant=False) for cut in cuts]
    return [torch.stack(parts).sum() for parts in zip(*pieces, strict=True)]


class ChunkedNll(torch.autograd.Function):  # type: ignore[misc]
    """Negative log-likelihood per token of `hidden @ weight.T` in tiles [4096 tokens, 32768 vocabulary].

    Buffers: one 16-bit tile, seven fp32 values per token; in the backward a tile again, the hidden gradient in fp32
    and, where the head is trained, the head's gradient in fp32.

    Source: trl 1.16 `ChunkedLogProbFunction` on a Triton device (the tile kernels allocate nothing).
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        device = hidden.device
        rows, vocab = hidden.shape[0], weight.shape[0]
        dtype = _computed_in(hidden)
        stats = [torch.zeros((rows,), device=device, dtype=torch.float32) for _ in range(7)]
        tile_buffer = torch.empty((min(rows, TRL_TOKEN_CHUNK), TRL_VOCAB_CHUNK), device=device, dtype=dtype)
        maximum, total = stats[0].fill_(float("-inf")), stats[1]
        target_logit = stats[2]
        for first in range(0, rows, TRL_TOKEN_CHUNK):
            last = min(first + TRL_TOKEN_CHUNK, rows)
            part = hidden[first:last].to(dtype)
            for start in range(0, vocab, TRL_VOCAB_CHUNK):
                end = min(start + TRL_VOCAB_CHUNK, vocab)
                tile = tile_buffer[: last - first, : end - start]
                torch.mm(part, weight[start:end].to(dtype).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[start:end].to(dtype))
                _fold(
                    tile, targets[first:last] - start, maximum[first:last], total[first:last], target_logit[first:last]
                )
        log_z = maximum + torch.log(total)
        log_probs = target_logit - log_z
        entropy = log_z - stats[3] / total
        is_top1 = (target_logit >= maximum) & (target_logit > stats[4])
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.compute_dtype = dtype
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_log_probs = grads[0]
        hidden, weight, bias, targets, log_z, _entropy = ctx.saved_tensors
        dtype = ctx.compute_dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows, vocab = hidden.shape[0], weight.shape[0]
        device = hidden.device

        def zeros(like: Any, needed: bool) -> Any:
            return torch.zeros(like.shape, device=device, dtype=torch.float32) if needed else None

        grad_hidden, grad_weight = zeros(hidden, need_hidden), zeros(weight, need_weight)
        grad_bias = zeros(bias, need_bias)
        tile_buffer = torch.empty((min(rows, TRL_TOKEN_CHUNK), TRL_VOCAB_CHUNK), device=device, dtype=dtype)
        grad_log_probs = grad_log_probs.float().contiguous()
        for first in range(0, rows, TRL_TOKEN_CHUNK):
            last = min(first + TRL_TOKEN_CHUNK, rows)
            part = hidden[first:last].to(dtype)
            for start in range(0, vocab, TRL_VOCAB_CHUNK):
                end = min(start + TRL_VOCAB_CHUNK, vocab)
                chunk = weight[start:end].to(dtype)
                tile = tile_buffer[: last - first, : end - start]
                torch.mm(part, chunk.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[start:end].to(dtype))
                _unfold(tile, targets[first:last] - start, log_z[first:last], grad_log_probs[first:last])
                if grad_hidden is not None:
                    _add_product(grad_hidden[first:last], tile, chunk)
                if grad_weight is not None:
                    _add_product(grad_weight[start:end], tile.t(), part)
                if grad_bias is not None:
                    grad_bias[start:end] += tile.sum(dim=0, dtype=torch.float32)
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
        )


@_unseen("aten.addmm", 3)
def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`total += left @ right` in fp32 without fp32 copies of the factors, as cuBLAS does for 16-bit input."""
    if total.device.type == "cuda" and left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return
    total.addmm_(left.float(), right.float())


@_unseen("trl.logprob_tile", writes=False)
def _fold(tile: torch.Tensor, local: torch.Tensor, maximum: Any, total: Any, target_logit: Any) -> None:
    """One tile into the running log-sum-exp. The GPU's kernel does this without memory; on meta nothing happens, and
    elsewhere it runs row block by row block so that memory stays small."""
    for row in range(0, tile.shape[0], 64):
        rows = slice(row, row + 64)
        values = tile[rows].float()
        new = torch.maximum(maximum[rows], values.amax(-1))
        total[rows] = total[rows] * torch.exp(maximum[rows] - new) + torch.exp(values - new[:, None]).sum(-1)
        maximum[rows] = new
        here = (local[rows] >= 0) & (local[rows] < tile.shape[1])
        picked = values.gather(-1, local[rows].clamp(0, tile.shape[1] - 1)[:, None]).squeeze(-1)
        target_logit[rows] = torch.where(here, picked, target_logit[rows])


@_unseen("trl.logprob_tile_backward")
def _unfold(tile: torch.Tensor, local: torch.Tensor, log_z: Any, grad: Any) -> None:
    """The tile of logits becomes the tile of their gradients, in place."""
    columns = torch.arange(tile.shape[1], device=tile.device)
    for row in range(0, tile.shape[0], 64):
        rows = slice(row, row + 64)
        probabilities = torch.exp(tile[rows].float() - log_z[rows, None])
        hot = (columns == local[rows, None]).float()
        tile[rows] = (grad[rows, None] * (hot - probabilities)).to(tile.dtype)


class FusedLinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Liger's fused linear cross-entropy: the gradients are computed in the forward, chunk of tokens by chunk.

    Chunks: vocabulary / hidden rounded up to a power of two many, so that one chunk's logits are about as large as the
    input. Where input and weight have the type that is computed in, all chunks share one buffer of logits and the
    products are written in place; else autocast casts the weight for each product and keeps one copy of a trained one.
    The head's gradient accumulates in the weight's own type, for 16-bit logits without another copy of it.

    Source: liger-kernel 0.8.5 `ops/fused_linear_cross_entropy.py`, from compute capability 8.0 on; its `custom_fwd`
    casts no inputs and leaves autocast on. On older cards each chunk has a copy of the head's gradient more.
    Measured: traced beside it, benchmarks/trace_vs_dryrun.py.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> Any:
        rows, width = hidden.shape
        vocab = weight.shape[0]
        increase = -(-vocab // width)
        chunk = min(rows, 1 << max(0, (-(-rows // increase) - 1).bit_length()))
        in_place = hidden.dtype is weight.dtype and _computed_in(hidden) is hidden.dtype
        grad_input = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        grad_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        losses = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        buffer = hidden.new_empty(chunk, vocab) if in_place and (bias is None or bias.dtype is hidden.dtype) else None
        for first in range(0, rows, chunk):
            last = min(first + chunk, rows)
            part = hidden[first:last]
            if buffer is not None:
                logits = torch.mm(part, weight.t(), out=buffer[: last - first])
                if bias is not None:
                    logits.add_(bias)
            else:
                logits = part @ weight.t()
                if bias is not None:
                    logits = logits + bias
            logits = logits.contiguous()
            _liger_kernel(logits, targets[first:last], losses[first:last], rows)
            if in_place and logits.dtype is hidden.dtype:
                torch.mm(logits, weight, out=grad_input[first:last])
            else:
                grad_input[first:last] = logits @ weight
            if grad_weight is not None:
                _accumulate(grad_weight, logits, part)
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0)
            del logits
        loss = torch.sum(losses)
        ctx.save_for_backward(grad_input.detach(), grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_input, grad_weight, grad_bias = ctx.saved_tensors
        # Liger multiplies in place by the incoming gradient.
        for grad in (grad_input, grad_weight, grad_bias):
            if grad is not None and grad.device.type != "meta":
                grad.mul_(grads[0].to(grad.dtype))
        return grad_input, grad_weight, grad_bias, None


def _computed_in(tensor: torch.Tensor) -> torch.dtype:
    """The type in which a product with this tensor is computed here: autocast's, real or emulated, or its own."""
    if State.enabled:
        return State.dtype
    kind = tensor.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else tensor.dtype


def _accumulate(gradient: torch.Tensor, logits: torch.Tensor, part: torch.Tensor) -> None:
    """Adds a chunk's share to the head's gradient: one product into it for 16-bit logits, else one beside it."""
    if logits.dtype is torch.float32 or gradient.dtype not in (torch.float32, logits.dtype):
        gradient += torch.mm(logits.t(), part).to(gradient.dtype)
    else:
        _add_share(gradient, logits.t(), part.to(logits.dtype))


@_unseen("aten.addmm", 3)
def _add_share(gradient: torch.Tensor, logits: torch.Tensor, part: torch.Tensor) -> None:
    """cuBLAS adds the product into the gradient, of 16-bit factors into fp32 too."""
    gradient += torch.mm(logits, part).to(gradient.dtype)


@_unseen("liger.cross_entropy")
def _liger_kernel(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, rows: int) -> None:
    """Loss and gradient of one chunk in place of its logits; the GPU's kernel needs no memory for it."""
    for row in range(0, logits.shape[0], 64):
        part = slice(row, row + 64)
        values = logits[part].float()
        log_probs = torch.log_softmax(values, -1)
        picked = targets[part].clamp(min=0)[:, None]
        valid = (targets[part] >= 0).float()
        losses[part] = -log_probs.gather(-1, picked).squeeze(-1) * valid / rows
        gradient = log_probs.exp().scatter_add_(-1, picked, -torch.ones_like(picked, dtype=torch.float32))
        logits[part] = (gradient * valid[:, None] / rows).to(logits.dtype)


class InPlaceCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Unsloth's cross-entropy over whole logits: a loss and a log-sum-exp per row in fp32, and a backward that writes
    the gradient over the logits. The mean over the rows that count.

    Source: unsloth 2026.10 `kernels/cross_entropy_loss.py` Fast_CrossEntropyLoss.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
        normalizers = torch.zeros_like(losses)
        _row_losses(logits, targets, losses, normalizers)
        ctx.save_for_backward(logits, normalizers, targets)
        total: torch.Tensor = losses.sum() / targets.ne(-100).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, normalizers, targets = ctx.saved_tensors
        _row_gradients(logits.detach(), targets, normalizers, grads[0])
        return logits.detach(), None


@_unseen("unsloth.cross_entropy", writes=False)
def _row_losses(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, normalizers: torch.Tensor) -> None:
    for row in range(0, logits.shape[0], 64):
        part = slice(row, row + 64)
        values, wanted = logits[part].float(), targets[part]
        normalizers[part] = torch.logsumexp(values, -1)
        picked = values.gather(-1, wanted.clamp(min=0)[:, None]).squeeze(-1)
        losses[part] = torch.where(wanted >= 0, normalizers[part] - picked, 0.0)


@_unseen("unsloth.cross_entropy_backward")
def _row_gradients(logits: torch.Tensor, targets: torch.Tensor, normalizers: torch.Tensor, outer: torch.Tensor) -> None:
    scale = outer / targets.ne(-100).sum()
    for row in range(0, logits.shape[0], 64):
        part = slice(row, row + 64)
        wanted = targets[part]
        gradient = (logits[part].float() - normalizers[part, None]).exp()
        gradient.scatter_add_(-1, wanted.clamp(min=0)[:, None], torch.full_like(gradient[:, :1], -1.0))
        logits[part] = (gradient * (wanted >= 0)[:, None] * scale).to(logits.dtype)


_MODULES = {"chunked": ("trl", "datasets"), "liger": ("liger_kernel", "triton")}
"""trl imports datasets in its backward."""


def loss_is_emulated(setup: TrainSetup) -> bool:
    """Whether a GPU would run this setup's loss by a form of this module, for want of the library."""
    return setup.loss != "full" and real_loss(setup.loss) is None


@cache
def real_loss(kind: str) -> Any | None:
    """The library's function with the arguments of the form above; None where the library is missing.

    "chunked": (hidden, weight, bias, targets) -> log-probabilities, entropy, is_top1; "liger": the same arguments ->
    loss.

    Source: trl 1.16 `trl.kernels.ChunkedLogProbFunction`, as `SFTTrainer` calls it; liger-kernel 0.8
    `liger_kernel.transformers.functional.liger_fused_linear_cross_entropy`.
    """
    if any(find_spec(name) is None for name in _MODULES[kind]):
        return None
    try:
        if kind == "chunked":
            from trl.kernels import ChunkedLogProbFunction
        else:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:  # an older or newer library that keeps its kernel elsewhere
        return None

    def chunked(hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
        outputs = ("entropy", "is_top1")
        values = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 1.0, TRL_VOCAB_CHUNK, None, 1.0, outputs)
        return values[0], values[1], values[4]

    def liger(hidden: Any, weight: Any, bias: Any, targets: Any) -> Any:
        loss = liger_fused_linear_cross_entropy(hidden, weight, targets, bias=bias)
        return loss[0] if isinstance(loss, tuple) else loss

    return chunked if kind == "chunked" else liger
