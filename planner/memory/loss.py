"""The loss chain: logits, their fp32 copies, log-softmax and gradients. It dominates for modern vocabularies."""

from planner.choices.losses import LOSSES, LossChain, LossShape
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import step_flow
from planner.models.spec import ModelSpec
from planner.setup import SAVED_HEADS, TrainSetup


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch, as the setup's stack runs it."""
    flow, by = step_flow(model, setup), setup.by
    shape = LossShape(
        tokens=setup.tokens_per_micro_batch,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        logit_bytes=SIZE_BYTES[flow.autocast or flow.table],
        hidden_bytes=SIZE_BYTES[flow.residual],
        head_trained=setup.method == "full" or bool(set(setup.modules_to_save) & set(SAVED_HEADS)),
        softcap=model.logit_softcap,
        head_cast=flow.autocast is not None and flow.table == "fp32",
        upcast=by.upcasts_logits and (not model.is_encoder_decoder or flow.autocast is not None),
        chunks=by.num_chunks(setup.tokens_per_micro_batch),
        in_place=by.in_place_loss,
        kept=by.keeps_outputs,
    )
    return LOSSES[setup.loss].memory(shape)
