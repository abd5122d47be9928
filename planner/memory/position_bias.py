"""Learned position biases (T5): matrices of heads x tokens x tokens that every layer adds to its scores."""

from planner.hardware.kernels import Kernel
from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.records import dataclass
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBias:
    """Bytes of one micro-batch's position biases: kept from the forward on, and beyond that at the backward of the
    first decoder layer, where their gradients and the recomputed ones meet."""

    stored: int = 0
    at_first_decoder_layer: int = 0


def position_bias(
    model: ModelSpec, setup: TrainSetup, flow: Flow, kernel: Kernel, *, row_tokens: int, num_kept: int
) -> PositionBias:
    """Biases of an encoder-decoder whose first encoder and first decoder layer make one for all others.

    A bias is [1, heads, tokens, tokens] in the table's type, the cross attention's one zeros in the compute type. The
    memory-efficient kernel keeps each self-attention's own contiguous copy as its mask; single operations keep none.
    A checkpointed layer has all three as inputs. At the first decoder layer's backward there are the encoder's bias,
    the zeros and their gradient, the recomputed bias and zeros, the gradient of a trained bias, and what SDPA makes of
    them for its mask.

    Args:
        row_tokens: tokens of one row (all of the micro-batch where packing flattens it).
        num_kept: layers that keep their activations.

    Source: transformers 5.23 `T5Attention.forward`, `integrations/sdpa_attention.py` `create_position_bias_mask`; seen
    in the dry run's events at the peak.
    Shapes: [1, heads, tokens, tokens].
    """
    spec = model.layer_kinds[0].attention
    if not traits_of(model).position_bias or spec is None:
        return PositionBias()
    scores = spec.num_heads * row_tokens * row_tokens
    bias, zeros = SIZE_BYTES[flow.table], SIZE_BYTES[flow.linear_out(flow.residual)]
    mask = SIZE_BYTES[flow.autocast or flow.table] if kernel == "efficient" else 0
    stored = num_kept * mask + zeros
    if not setup.checkpointing:
        return PositionBias(stored=scores * stored)
    stored += 2 * bias
    if kernel == "eager":
        made = 0
    elif kernel == "math":
        made = zeros
    else:
        made = 2 * zeros if flow.autocast else bias
    trained = bias if setup.method == "full" else 0
    backward = 2 * bias + 3 * zeros + trained + made
    buckets = (8 + 1) * row_tokens * row_tokens  # int64 indices of the table, the causal mask
    extra = scores * (backward - 2 * bias - zeros) + buckets
    return PositionBias(stored=scores * stored, at_first_decoder_layer=extra)
