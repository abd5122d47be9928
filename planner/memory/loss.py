"""The loss chain: logits, their fp32 copies, log-softmax and gradients. It dominates for modern vocabularies."""

from dataclasses import replace
from typing import NamedTuple

from planner.choices.losses import LOSSES, LossChain, LossShape
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.in_flight import in_flight_losses_bytes
from planner.memory.micro_batch import cached_bytes, step_dtype_policy
from planner.memory.parts import ActivationParts
from planner.memory.rank_part import RankPart
from planner.memory.reference import ReferenceForward
from planner.memory.state import RankState
from planner.memory.types import Term, total_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup_fields import SAVED_HEADS


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch, as the setup's stack runs it."""
    dtypes, by, aim = step_dtype_policy(model, setup), setup.by, setup.aim
    shape = LossShape(
        tokens=setup.forward_tokens if aim.head == "none" else setup.scored_tokens,
        vocab_size=model.vocab_size if aim.head == "vocabulary" else 1,
        hidden_size=model.hidden_size,
        logit_bytes=SIZE_BYTES[dtypes.autocast or dtypes.table],
        hidden_bytes=SIZE_BYTES[dtypes.residual],
        head_trained=setup.trains_everything or bool(set(setup.modules_to_save) & set(SAVED_HEADS)),
        softcap=model.logit_softcap,
        head_cast=dtypes.autocast is not None and dtypes.table == "fp32",
        upcast=by.upcasts_logits and not model.is_encoder_decoder,
        narrow=model.is_encoder_decoder and dtypes.autocast is not None,
        chunks=by.num_chunks(setup.tokens_per_micro_batch),
        in_place=by.in_place_loss,
        shifted=by.shifted_loss,
        kept=by.keeps_outputs,
        compiled=setup.compiled and by.compiles_loss,
        asked=setup.asks_reference,
        widened=by.widens_outputs and dtypes.autocast is not None,
        upcast_early=by.transformers_loss and setup.before_transformers(4, 46),
        copies_shifted=by.transformers_loss and setup.before_transformers(4, 49),
    )
    if aim.whole_logits is not None and LOSSES[setup.loss].whole_logits:
        return aim.whole_logits(shape, setup.stack)
    chain = LOSSES[setup.loss].memory(shape)
    if not (setup.use_cache and by.keeps_outputs):
        return chain
    return replace(chain, kept_bytes=chain.kept_bytes + cached_bytes(model, setup))


def loss_beside(part: RankPart, setup: TrainSetup, inner: TrainSetup, flight: int) -> tuple[LossChain, int, int]:
    """(loss chain, bytes of gathered outputs, bytes of logits and losses of other micro-batches) of a last part."""
    chain = loss_parts(part.model, inner)
    outputs = setup.num_gpus * chain.logits_bytes if setup.parallel == "dp" and not part.follower else 0
    return chain, outputs, in_flight_losses_bytes(part, setup, chain.logits_bytes, inner.tokens_per_micro_batch, flight)


class LossMoment(NamedTuple):
    """What the loss holds at each of its moments, but for what the forward's activations hold then; in bytes.

    Attributes:
        within: in the model's forward (autocast's cache is still alive).
        forward: its own forward; backward: its own backward.
        head: the head's gradient beside 16-bit logits (with accumulation too: it is made, then added).
        asked: while a reference's layers run; arriving: of it, the next layer's weights.
    """

    within: int
    forward: int
    backward: int
    head: int
    asked: int
    arriving: int

    @classmethod
    def of(cls, state: RankState, chain: LossChain, outputs_bytes: int) -> "LossMoment":
        """Of a rank.

        Args:
            outputs_bytes: logits of other GPUs that are gathered here before the backward.
        """
        return cls(
            chain.within_bytes + outputs_bytes + state.loss_forward_bytes,
            chain.loss_bytes + outputs_bytes,
            chain.backward_bytes + state.loss_backward_bytes,
            state.trained.head * state.trained.outer_bytes + chain.logits_bytes,
            chain.reference_forward_bytes + state.reference_forward_bytes,
            state.arriving_bytes,
        )

    def largest(self, until_loss: int, asked: ReferenceForward) -> int:
        """Bytes of the largest of them beside activations of which this is gone in the loss's own backward, and what a
        reference holds."""
        found = max(self.within + until_loss, self.forward, self.backward, self.head)
        if not asked.frames:
            return found
        return max(found, self.asked + asked.frames + asked.cached + max(asked.layer, self.arriving))


def loss_terms(
    state: RankState, chain: LossChain, parts: ActivationParts, outputs_bytes: int, loss: str
) -> tuple[Term, ...]:
    """The loss chain's largest moment (`LossMoment`).

    Args:
        outputs_bytes: logits of other GPUs that are gathered here before the backward.
    """
    name, beside = f"loss chain ({loss})", "weights and buffers beside the loss"
    moment = LossMoment.of(state, chain, outputs_bytes)
    within = moment.within + parts.until_loss
    asked = _asking(state, chain, parts, loss)
    if total_bytes(asked) > max(within, moment.forward, moment.backward, moment.head):
        return asked
    if within >= moment.forward and within > max(moment.backward, moment.head):
        return (
            ("loss", name, chain.within_bytes + outputs_bytes),
            ("activations", "autocast's cache in the loss", parts.until_loss),
            ("loss", beside, state.loss_forward_bytes),
        )
    if max(moment.forward, moment.head) > moment.backward:
        return (("loss", name, max(moment.forward, moment.head)),)
    return ("loss", name, chain.backward_bytes), ("loss", beside, state.loss_backward_bytes)


def _asking(state: RankState, chain: LossChain, parts: ActivationParts, loss: str) -> tuple[Term, ...]:
    """What is there while a reference's layers run: one layer's temporaries, or the next one's weights arriving."""
    if not parts.asked.frames:
        return ()
    return (
        ("loss", f"what the loss keeps ({loss})", chain.reference_forward_bytes),
        ("activations", "what the reference's forward holds", parts.asked.frames + parts.asked.cached),
        ("activations", "one layer of it, or the next one's weights", max(parts.asked.layer, state.arriving_bytes)),
        ("weights", "weights and buffers beside it", state.reference_forward_bytes),
    )
