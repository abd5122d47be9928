"""The loss chain: logits, their fp32 copies, log-softmax and gradients. It dominates for modern vocabularies."""

from planner.choices.losses import LOSSES, LossChain, LossShape
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import step_flow
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup_fields import SAVED_HEADS


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch, as the setup's stack runs it."""
    flow, by, aim = step_flow(model, setup), setup.by, setup.aim
    shape = LossShape(
        tokens=setup.forward_tokens if aim.head == "none" else setup.scored_tokens,
        vocab_size=model.vocab_size if aim.head == "vocabulary" else 1,
        hidden_size=model.hidden_size,
        logit_bytes=SIZE_BYTES[flow.autocast or flow.table],
        hidden_bytes=SIZE_BYTES[flow.residual],
        head_trained=setup.method == "full"
        or bool(set(setup.modules_to_save) & set(SAVED_HEADS))
        or aim.head == "score",
        softcap=model.logit_softcap,
        head_cast=flow.autocast is not None and flow.table == "fp32",
        upcast=by.upcasts_logits and not model.is_encoder_decoder,
        narrow=model.is_encoder_decoder and flow.autocast is not None,
        chunks=by.num_chunks(setup.tokens_per_micro_batch),
        in_place=by.in_place_loss,
        shifted=by.shifted_loss,
        kept=by.keeps_outputs,
        compiled=setup.compiled and by.compiles_loss,
        asked=setup.asks_beside,
        widened=by.widens_outputs and flow.autocast is not None,
    )
    if aim.whole_logits is not None and LOSSES[setup.loss].whole_logits:
        return aim.whole_logits(shape, setup.stack)
    return LOSSES[setup.loss].memory(shape)
