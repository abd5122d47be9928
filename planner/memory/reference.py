"""What the forward of a reference holds that an objective asks beside the activations of the policy's forward."""

from collections.abc import Sequence
from typing import NamedTuple

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.layer_costs import LayerCosts
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


class ReferenceForward(NamedTuple):
    """Bytes of a forward that keeps nothing.

    Attributes:
        frames: what its frames hold: the embeddings, a layer's input, the sum before its second norm, that norm's
            result.
        layer: the largest of one layer's temporaries.
        cached: autocast's copies of a second model's fp32 weights, until its forward ends.
    """

    frames: int = 0
    layer: int = 0
    cached: int = 0


def reference_forward_bytes(
    model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy, costs: Sequence[LayerCosts], weight_casts: int
) -> ReferenceForward:
    """Of one micro-batch; nothing where no reference is asked there.

    Args:
        weight_casts: autocast's copies of the policy's weights in its forward.

    Source: trl 1.16 `DPOTrainer._compute_loss`, `KTOTrainer._compute_loss` (no_grad, without checkpointing).
    """
    if not setup.asks_reference:
        return ReferenceForward()
    frames = 4 * SIZE_BYTES[dtypes.residual] * model.hidden_size * setup.forward_tokens
    return ReferenceForward(
        frames, max(one.forward + one.merged for one in costs), weight_casts if setup.copies_reference else 0
    )
