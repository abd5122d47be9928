"""The losses: what their chain holds and moves, how they cut it, what they need. To add one, add its class."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, final

from planner.core.records import dataclass

TRL_TOKEN_CHUNK = 4096
"""Tokens per tile of TRL's fused head. Source: TRL 1.16 `trl/kernels/chunked_logprob.py` TOKEN_CHUNK_SIZE."""
TRL_VOCAB_CHUNK = 32768
"""Vocabulary width of a tile. Source: TRL 1.16 `trl/trainer/utils.py` _CHUNKED_LOGPROB_CHUNK_SIZE."""
TRL_CHECKPOINTED_CHUNK = 256
"""Tokens per piece of its loss before that head. Source: TRL 1.14.2 `sft_trainer.py` _CHUNKED_LM_HEAD_CHUNK_SIZE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossChain:
    """Bytes of the loss chain at its peak in the forward ("loss") and at the start of the backward ("backward").

    `logits_bytes`: the logits' gradient in the head's type, alive beside the head's own gradient (full loss only).
    `kept_bytes`: the logits that the loop's variable holds from one forward to the next, beside all of these.
    `reference_forward_bytes`: kept for the backward while a reference's layers run. `inside_bytes`: what of
    `loss_bytes` is there while the model's forward still runs, where the loss is made behind it; None: all.
    """

    loss_bytes: int
    backward_bytes: int
    logits_bytes: int = 0
    kept_bytes: int = 0
    reference_forward_bytes: int = 0
    inside_bytes: int | None = None

    @property
    def within_bytes(self) -> int:
        """Its largest moment within the model's forward."""
        return self.loss_bytes if self.inside_bytes is None else self.inside_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShape:
    """One micro-batch at the head.

    Attributes:
        logit_bytes, hidden_bytes: size of one logit, and of one element of the hidden states.
        head_trained: whether the head's weight has a gradient.
        softcap: logits are squashed by a scaled tanh.
        head_cast: autocast copies the head, which is of another type.
        upcast: the full loss is computed in fp32; that of an encoder-decoder's own class is not.
        narrow: of such a class under autocast, which widens what comes between log-softmax and loss alone (PyTorch
            `cross_entropy_loss` names the type of its log-softmax).
        chunks: into how many pieces the stack cuts the full loss.
        cut: the logits stay cut by vocabulary over tensor parallelism's GPUs, `vocab_size` being this one's share.
        in_place: the stack's own kernel of the full loss writes the gradient over the logits; shifted: over a copy of
            their fp32 form.
        kept: the loop holds the model's outputs, and with them the logits, until the next forward's.
        with_reference: a reference is asked between its forward and its backward.
        widened: the outputs of the model are cast to fp32.
        compiled: torch.compile makes one kernel of the full loss each way, which keeps the logits as they come.
        handed_out: tensors of the logits' size that kernel's backward has beside them where the compiled forward hands
            them out too, so that it may not write over them: the loss's gradient, and in one graph with the loss the
            zeros that autograd gives it for the logits, of which nobody asked a gradient.
        upcast_early: the model itself upcasts its logits, whose 16-bit form is gone by then (transformers before 4.46).
        log_probs: how an older TRL takes log-probabilities of them (`TrainSetup.log_probs`).
        copies_shifted: the loss copies all logits but the last ones (before 4.49).
        head_bytes: size of one element of the head's weight.
        head_copies: sizes of the copies that each checkpointed piece of the chunked loss makes of that weight, one from
            the other (`TrainSetup.checkpointed_loss`); None: TRL's own kernels. piece_bytes: of one logit there.
    """

    tokens: int
    vocab_size: int
    hidden_size: int
    logit_bytes: int
    hidden_bytes: int
    head_trained: bool
    softcap: bool
    head_cast: bool
    upcast: bool
    narrow: bool = False
    chunks: int = 1
    cut: bool = False
    in_place: bool = False
    shifted: bool = False
    kept: bool = False
    widened: bool = False
    with_reference: bool = False
    compiled: bool = False
    handed_out: int = 0
    upcast_early: bool = False
    copies_shifted: bool = False
    log_probs: str = ""
    head_bytes: int = 2
    head_copies: tuple[int, ...] | None = None
    piece_bytes: int = 4

    @property
    def cast_bytes(self) -> int:
        """The head's 16-bit copy, alive until the head's own backward is done."""
        return self.logit_bytes * self.vocab_size * self.hidden_size if self.head_cast else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How the head's multiplications are cut.

    Attributes:
        tokens: of one tile.
        forwards: how often logits are computed.
        head_traffic_bytes: moved per element of a trained head's weight and tile, where there are several.
    """

    tokens: int
    forwards: int
    head_traffic_bytes: float


class Loss(ABC):
    """One loss.

    Attributes:
        tie_break: breaks ties in speed: fewer packages, nothing lost; smaller is simpler.
        triton: whether its kernels are Triton's.
        whole_logits: whether all logits are there at once; others patch a whole model's forward.
    """

    name: ClassVar[str]
    tie_break: ClassVar[int]
    triton: ClassVar[bool]
    whole_logits: ClassVar[bool]

    @abstractmethod
    def memory(self, shape: LossShape) -> LossChain:
        """Bytes of one micro-batch's chain."""

    @abstractmethod
    def tiling(self, tokens: int, vocab_size: int, hidden_size: int) -> Tiling:
        """How the head's multiplications over so many tokens are cut."""

    @abstractmethod
    def moved_per_logit(self, logit_bytes: int, *, fused: bool, softcap: bool, drag: float) -> float:
        """Bytes that the chain moves per logit, forward and backward, head multiplications not counted.

        Args:
            fused: the software stack fuses the full loss. drag: from bytes as counted (0) to what they take on an A100
            (1), see `planner.speed.roofline.counts.drag_of`.

        Source: linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv, cross_entropy on an A100.
        """


@final
class FullLoss(Loss):
    """transformers' ForCausalLMLoss: logits in the compute type, their fp32 copy, the fp32 log-softmax that autograd
    keeps; at the start of the backward the log-softmax, the gradient of the log-probabilities and the gradient of the
    logits, all fp32: 12 bytes per logit. A soft cap keeps its tanh and makes one more copy. Where a stack cuts the loss
    into pieces only the log-softmax is there of all of them; where its kernel works in place, nothing but the logits.
    A compiled one works in place where it may (PyTorch 2.6 on: `donated_buffer`).

    Moved with fp32 logits: log-softmax 8, gradient of the log-likelihood 4, of log-softmax 12: 24 counted; on an A100
    it takes as long as 49, since long rows are read three times forward and twice backward. 16-bit logits add the
    upcast and the cast back, 12. A soft cap adds three operations each way.

    Source: transformers 5.23 `loss/loss_utils.py`.
    """

    name, tie_break, triton, whole_logits = "full", 1, False, True

    def memory(self, shape: LossShape) -> LossChain:
        elements, logit = shape.tokens * shape.vocab_size, shape.logit_bytes
        wide = 4 if shape.upcast else logit
        # without a 16-bit type the fp32 "copy" is the logits themselves
        copy = wide * elements if wide != logit else 0
        extra_bytes = (logit * elements if shape.softcap else 0) + shape.cast_bytes
        if shape.cut:
            return _cut(shape, extra_bytes)
        logits_bytes = logit * elements
        if shape.in_place and not shape.shifted:
            forward, backward, logits_bytes = logits_bytes, logits_bytes, 0
        elif shape.in_place:
            narrow = 0 if shape.upcast_early else logit  # what the model's own forward still holds
            forward = (4 + 4 * shape.copies_shifted + narrow) * elements
            backward = 8 * elements  # the gradient over the copy, and padded
        elif shape.compiled:
            forward, backward = logits_bytes, (1 + shape.handed_out) * logits_bytes
            logits_bytes //= shape.chunks
        elif shape.narrow:  # logits, log-softmax and its fp32 copy; behind autocast the outputs' fp32 copy too
            there = 2 * logit + 4
            forward, backward = there * elements, max(there + 4 * shape.widened, logit + 8) * elements
        else:
            there = (0 if shape.upcast_early and copy else logit) * elements + wide * elements * shape.copies_shifted
            forward = there + copy // shape.chunks + wide * elements
            backward = wide * elements + 2 * wide * elements // shape.chunks
        return LossChain(
            loss_bytes=forward + extra_bytes,
            backward_bytes=backward + extra_bytes,
            logits_bytes=logits_bytes,
            kept_bytes=(wide if shape.widened or shape.upcast_early else logit) * elements if shape.kept else 0,
        )

    def tiling(self, tokens: int, vocab_size: int, hidden_size: int) -> Tiling:
        return Tiling(tokens=tokens, forwards=1, head_traffic_bytes=0.0)

    def moved_per_logit(self, logit_bytes: int, *, fused: bool, softcap: bool, drag: float) -> float:
        if fused:
            return 4.0 * logit_bytes
        chain = 24 + (49 - 24) * drag + (12.0 if logit_bytes == 2 else 0.0)
        return chain + (13.0 * logit_bytes if softcap else 0.0)


def _cut(shape: LossShape, extra_bytes: int) -> LossChain:
    """The full loss of logits that stay cut: fp32 logits, those less their largest, their exponentials, then the
    log-softmax; in the backward that, the gradient's ones, its exponentials, their sum. The hidden states that the head
    takes are gathered. The same is taken under torch.compile, which nobody measured.

    Source: PyTorch 2.13 `distributed/tensor/parallel/loss.py` _log_softmax, _nll_loss_and_log_softmax_backward.
    """
    elements, logit = shape.tokens * shape.vocab_size, shape.logit_bytes
    held_bytes = extra_bytes + shape.hidden_bytes * shape.tokens * shape.hidden_size
    return LossChain(
        loss_bytes=(logit * (logit != 4) + 12) * elements + held_bytes,
        backward_bytes=16 * elements + held_bytes,
        logits_bytes=logit * elements,
    )


def _checkpointed(shape: LossShape, copies: tuple[int, ...]) -> LossChain:
    """TRL's chunked loss before 1.15. The forward holds all copies of the head at the product, later logits,
    log-softmax, its exponentials and their product; the backward the last copy, which the rows' gradient needs, and
    three of these. A trained head's gradient goes back through every copy and is added to that of the pieces before.

    Source: trl 1.10 and 1.14.2 `sft_trainer.py` _chunk. Measured: 12.01, 11.74 and 6.70 GiB of TRL 1.10 on a T4 and an
    RTX 4060, each within 0.02 GiB (`benchmarks.gathered --list lab21`).
    """
    logits = min(shape.tokens, TRL_CHECKPOINTED_CHUNK) * shape.vocab_size
    head, types = shape.vocab_size * shape.hidden_size, (shape.head_bytes, *copies)
    rows = shape.hidden_bytes * shape.tokens * shape.hidden_size
    product = sum(copies) * head + (copies[-1] if copies else shape.logit_bytes) * logits
    kept = copies[-1] * head if copies else 0
    backward = max(product, kept + (12 + shape.piece_bytes * shape.softcap) * logits)
    if shape.head_trained:
        others = shape.head_bytes if shape.tokens > TRL_CHECKPOINTED_CHUNK else 0
        through = max(kept // head + types[-1], *map(sum, pairwise(types)), 0) + others
        backward = max(backward, max(through, 3 * shape.head_bytes) * head + types[-1] * logits)
    return LossChain(
        loss_bytes=max(product, (12 + shape.piece_bytes) * logits) + rows, backward_bytes=backward + 2 * rows
    )


@final
class ChunkedLoss(Loss):
    """TRL's fused head: one tile of 4096 x 32768 logits, and fp32 gradients of the hidden states (and of the head's
    weight where it is trained). Moved: one pass to read, one to rewrite, tile by tile.

    Source: TRL 1.16 `kernels/chunked_logprob.py`.
    """

    name, tie_break, triton, whole_logits = "chunked", 0, False, False

    def memory(self, shape: LossShape) -> LossChain:
        if shape.head_copies is not None:
            return _checkpointed(shape, shape.head_copies)
        logit, hidden = shape.logit_bytes, shape.tokens * shape.hidden_size
        head = shape.vocab_size * shape.hidden_size
        tile = backward_tile = min(shape.tokens, TRL_TOKEN_CHUNK) * min(shape.vocab_size, TRL_VOCAB_CHUNK) * logit
        if shape.head_cast:  # the cast of one tile of the head within its product, of two neighbours in the backward
            tile += logit * shape.hidden_size * min(shape.vocab_size, TRL_VOCAB_CHUNK)
            backward_tile += logit * shape.hidden_size * min(shape.vocab_size, 2 * TRL_VOCAB_CHUNK)
        gradients = 4 * hidden + (4 * head if shape.head_trained else 0)
        # the head's fp32 gradient is cast to the weight's type at the end, beside the last tile
        cast = shape.hidden_bytes * head if shape.head_trained and shape.hidden_bytes != 4 else 0
        rows = shape.hidden_bytes * hidden  # a copy without each sequence's last; in the backward its gradient too
        reference_rows = rows if shape.with_reference else 0  # the policy's, and the reference's hidden states
        forward = tile + rows + 2 * reference_rows
        return LossChain(
            loss_bytes=forward,
            backward_bytes=backward_tile + cast + gradients + 2 * rows,
            reference_forward_bytes=reference_rows,
        )

    def tiling(self, tokens: int, vocab_size: int, hidden_size: int) -> Tiling:
        return Tiling(tokens=min(tokens, TRL_TOKEN_CHUNK), forwards=2, head_traffic_bytes=8.0)

    def moved_per_logit(self, logit_bytes: int, *, fused: bool, softcap: bool, drag: float) -> float:
        return 4.0 * logit_bytes


@final
class LigerLoss(Loss):
    """Liger's fused linear cross-entropy: a chunk of tokens so that its logits, in one buffer, are about tokens x
    hidden, and the hidden gradient (and the head's, in the weight's type, where trained) held from the forward on.
    Moved: three passes counted, as long as five; each chunk's gradient of the head is added to the sum.

    Source: Hsu et al. 2024, Liger Kernel, section 3.2, https://arxiv.org/abs/2410.10989; liger-kernel 0.8.5
    `ops/fused_linear_cross_entropy.py`, from compute capability 8.0 on.
    """

    name, tie_break, triton, whole_logits = "liger", 2, True, False

    def memory(self, shape: LossShape) -> LossChain:
        hidden = shape.hidden_bytes * shape.tokens * shape.hidden_size
        elements, logit = shape.vocab_size * shape.hidden_size, shape.logit_bytes
        chunk = min(shape.tokens, self._chunk(shape.tokens, shape.vocab_size, shape.hidden_size))
        head = shape.hidden_bytes * elements if shape.head_trained else 0
        tile = chunk * shape.vocab_size * logit
        if shape.head_cast:  # autocast casts the weight for each product and keeps the cast of a trained one
            tile += logit * (elements * (2 if shape.head_trained else 1) + chunk * shape.hidden_size)
        elif shape.head_trained and logit == 4:  # the product is made beside the sum
            tile += 4 * elements
        return LossChain(loss_bytes=tile + hidden + head, backward_bytes=2 * hidden + head)

    def tiling(self, tokens: int, vocab_size: int, hidden_size: int) -> Tiling:
        chunk = self._chunk(tokens, vocab_size, hidden_size)
        return Tiling(tokens=min(tokens, chunk), forwards=1, head_traffic_bytes=6.0)

    def moved_per_logit(self, logit_bytes: int, *, fused: bool, softcap: bool, drag: float) -> float:
        return (3 + (5 - 3) * drag) * logit_bytes

    @staticmethod
    def _chunk(tokens: int, vocab_size: int, hidden_size: int) -> int:
        """Tokens of a chunk: a power of two."""
        return 1 << max(0, -(-tokens // -(-vocab_size // hidden_size)) - 1).bit_length()


LOSSES: Mapping[str, Loss] = {loss.name: loss for loss in (FullLoss(), ChunkedLoss(), LigerLoss())}
"""Every loss by its name."""
PLANNED_LOSSES = ("chunked", "liger", "full")
"""In the order in which a plan tries them."""

if set(PLANNED_LOSSES) != set(LOSSES) or not all(
    name in vars(type(loss)) for loss in LOSSES.values() for name in Loss.__annotations__
):
    raise AssertionError("a loss leaves something open")
