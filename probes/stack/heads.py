"""The head of a model in its trainer's own form: from the last hidden states to a loss, or to log-probabilities."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from planner.speed.operators import WAIT
from probes.stack.configs import layers_of
from probes.stack.kernels import launched
from probes.stack.losses import ChunkedNll, FusedLinearCrossEntropy, checkpointed_nll, real_loss


def head_loss(
    inner: Any, kind: str, hidden: torch.Tensor, labels: torch.Tensor, scored: int | None = None
) -> dict[str, torch.Tensor]:
    """What a fused head returns for the hidden states of a micro-batch: TRL's ("chunked") or Liger's.

    Args:
        scored: tokens at the end of every sequence whose labels count; None: all.
    """
    head = inner.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if kind == "chunked":
        if hasattr(weight, "full_tensor"):  # sharded by FSDP2: TRL gathers the head once (trl 1.16 trainer/utils.py)
            weight = weight.full_tensor()
            bias = bias.full_tensor() if bias is not None else None
        shifted, wanted = hidden[:, :-1], labels[:, 1:]
        if scored is not None:
            shifted, wanted = shifted[:, -scored:], wanted[:, -scored:]
        valid = wanted != -100
        launched(WAIT, ())  # how many tokens count: the boolean index below needs it
        rows = shifted.reshape(-1, shifted.shape[-1])  # every label counts, so boolean indexing copies all of them
        if rows.data_ptr() == hidden.data_ptr() and shifted.shape[0] == 1 and rows._is_view():
            rows = rows.clone()
        real = real_loss("chunked") if rows.device.type == "cuda" else None
        outputs = (real or ChunkedNll.apply)(rows, weight, bias, wanted.reshape(-1).clone())
        names = ("log_probs", "entropy", "is_top1")
        return {
            name: output.new_zeros(valid.shape).masked_scatter(valid, output)
            for name, output in zip(names, outputs, strict=True)
        }
    padded = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    rows = hidden.view(-1, hidden.shape[-1])
    real = real_loss("liger") if rows.device.type == "cuda" else None
    return {"loss": (real or FusedLinearCrossEntropy.apply)(rows, weight, bias, padded.view(-1))}


def checkpointed_loss(
    inner: Any, hidden: torch.Tensor, labels: torch.Tensor, *, widens_head: bool
) -> dict[str, torch.Tensor]:
    """What TRL's chunked loss returned before 1.15: of a copy of the rows, with what it counts beside the loss."""
    head = inner.get_output_embeddings()
    wanted = labels[:, 1:].flatten()
    valid = wanted != -100
    order = valid.to(torch.int8).argsort(descending=True, stable=True)
    rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])[order]
    bias, softcap = getattr(head, "bias", None), getattr(inner.config, "final_logit_softcapping", None)
    scored = wanted[order]
    loss, entropy, hits = checkpointed_nll(rows, head.weight, bias, scored, widens_head=widens_head, softcap=softcap)
    return {"loss": loss / valid.sum(), "entropy_sum": entropy, "num_correct_tokens": hits}


def headless(inner: Any, head_loss: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within it, the model's forward runs the backbone and `head_loss(hidden, labels)` in place of its head."""

    backbone = inner.base_model
    if backbone is inner:  # Llama 4's text class names its parts otherwise than its prefix says
        backbone = backbone_of(inner)

    def forward(*args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        if inner.config.is_encoder_decoder:
            raise ValueError(f"{inner.config.model_type}: a fused head exists for decoders only")
        kwargs["use_cache"] = False
        outputs = backbone(*args, **kwargs)
        return head_loss(outputs[0], labels)

    return mock.patch.object(inner, "forward", forward)


def pooled(inner: Any) -> AbstractContextManager[Any]:
    """Within it, a model without a head returns its hidden states and their mean over each sequence.

    Source: sentence-transformers 6.2 `Transformer.forward`, `Pooling._forward_padded`: the product with the mask in the
    hidden states' type, the sum in fp32.
    """
    plain = inner.forward

    def forward(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = plain(*args, **kwargs)[0]
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device).unsqueeze(-1).to(hidden.dtype)
        num = torch.clamp(mask.sum(dim=1, dtype=torch.float32), min=1e-9)
        mean = ((hidden * mask).sum(dim=1, dtype=torch.float32) / num).to(hidden.dtype)
        return {"token_embeddings": hidden, "sentence_embedding": mean}

    return mock.patch.object(inner, "forward", forward)


def backbone_of(model: Any) -> Any:
    """The module that holds the list of (the decoder's) layers and runs it, whatever wraps it."""
    last = layers_of(model)[-1]
    path = next(name for name, module in model.named_modules() if module is last)
    return model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
