"""The loss chain: logits, their fp32 copies, log-softmax and gradients. It dominates for modern vocabularies."""

from dataclasses import dataclass

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import step_flow
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

TRL_TOKEN_CHUNK = 4096
"""Tokens per tile of TRL's fused head. Source: TRL 1.16 `trl/kernels/chunked_logprob.py` TOKEN_CHUNK_SIZE."""
TRL_VOCAB_CHUNK = 32768
"""Vocabulary width of a tile. Source: TRL 1.16 `trl/trainer/utils.py` _CHUNKED_LOGPROB_CHUNK_SIZE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossChain:
    """Bytes of the loss chain at its peak in the forward ("loss") and at the start of the backward ("backward").

    `logits_bytes`: the logits' gradient in the head's type, alive beside the head's own gradient (full loss only).
    """

    loss_bytes: int
    backward_bytes: int
    logits_bytes: int = 0


def loss_chain(
    *,
    loss: str,
    tokens: int,
    vocab_size: int,
    hidden_size: int,
    logits_dtype: str,
    hidden_dtype: str,
    head_trained: bool,
    softcap: bool,
    head_cast: bool = False,
    upcast: bool = True,
) -> LossChain:
    """Memory of the loss for one micro-batch of `tokens`.

    "full" (transformers' ForCausalLMLoss): logits [tokens, vocab] in the compute type, their fp32 copy, the fp32
    log-softmax that autograd keeps; at the start of the backward the log-softmax, the gradient of the log-probabilities
    and the gradient of the logits, all fp32: 12 bytes per logit. A soft cap keeps its tanh and makes one more copy.
    "chunked" (TRL's fused head): one tile of 4096 x 32768 logits, and fp32 gradients of the hidden states (and of the
    head's weight where it is trained). "liger": a chunk of tokens so that its logits are about tokens x hidden, plus
    the hidden gradient (and the head's, where trained) held from the forward on. `head_cast`: autocast copies an fp32
    head to 16 bit. `upcast`: the full loss is computed in fp32; T5's own, where no autocast widens it, is not.

    Source: transformers 5.23 `loss/loss_utils.py`; TRL 1.16 `kernels/chunked_logprob.py`; Hsu et al. 2024, Liger
    Kernel, section 3.2, https://arxiv.org/abs/2410.10989.
    Shapes: logits [tokens, vocab].
    """
    logit = SIZE_BYTES[logits_dtype]
    cast = logit * vocab_size * hidden_size if head_cast else 0  # alive until the head's own backward is done
    if loss == "full":
        elements = tokens * vocab_size
        kept = logit * elements if softcap else 0
        wide = 4 if upcast else logit
        # without a 16-bit type the fp32 "copy" is the logits themselves
        copy = wide * elements if wide != logit else 0
        forward = logit * elements + copy + wide * elements + kept
        return LossChain(
            loss_bytes=forward + cast,
            backward_bytes=3 * wide * elements + kept + cast,
            logits_bytes=logit * elements,
        )
    head_elements = vocab_size * hidden_size
    hidden_elements = tokens * hidden_size
    if loss == "chunked":
        tile = min(tokens, TRL_TOKEN_CHUNK) * min(vocab_size, TRL_VOCAB_CHUNK) * logit
        if head_cast:  # the casts of two neighbouring tiles of the head
            tile += logit * hidden_size * min(vocab_size, 2 * TRL_VOCAB_CHUNK)
        gradients = 4 * hidden_elements + (4 * head_elements if head_trained else 0)
        result = SIZE_BYTES[hidden_dtype] * hidden_elements
        # the head's fp32 gradient is cast to the weight's type at the end, when no tile is alive any more
        cast_gradient = SIZE_BYTES[hidden_dtype] * head_elements if head_trained and hidden_dtype != "fp32" else 0
        return LossChain(loss_bytes=tile, backward_bytes=max(tile, cast_gradient) + gradients + result)
    chunk = _power_of_two(-(-tokens // -(-vocab_size // hidden_size)))
    chunk_bytes = chunk * vocab_size * (2 * logit + 4)
    held = cast + SIZE_BYTES[hidden_dtype] * hidden_elements + (4 * head_elements if head_trained else 0)
    return LossChain(loss_bytes=chunk_bytes + held, backward_bytes=held + SIZE_BYTES[hidden_dtype] * hidden_elements)


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch."""
    flow = step_flow(model, setup)
    return loss_chain(
        loss=setup.loss,
        tokens=setup.tokens_per_micro_batch,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        logits_dtype=flow.autocast or flow.table,
        hidden_dtype=flow.residual,
        head_trained=setup.method == "full",
        softcap=model.logit_softcap,
        head_cast=flow.autocast is not None and flow.table == "fp32",
        upcast=not model.is_encoder_decoder or flow.autocast is not None,
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
