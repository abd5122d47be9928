"""Learned position biases (T5): matrices of heads x tokens x tokens that every layer adds to its scores."""

from planner.hardware.kernels import Kernel
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


def position_bias_bytes(
    model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy, kernel: Kernel, *, row_tokens: int, num_kept: int
) -> int:
    """Bytes of one micro-batch's biases: of the encoder, of the decoder, and the cross attention's zeros, each with its
    gradient under checkpointing; the memory-efficient kernel keeps each layer's own contiguous copy as its mask.

    Args:
        row_tokens: tokens of one row (all of the micro-batch where packing flattens it).
        num_kept: layers that keep their activations.

    Source: transformers 5.23 `T5Attention.forward`, `integrations/sdpa_attention.py` `create_position_bias_mask`.
    Shapes: [1, heads, tokens, tokens].
    """
    spec = model.layer_kinds[0].attention
    if not traits_of(model).position_bias or spec is None:
        return 0
    one, zeros = SIZE_BYTES[dtypes.table], SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
    mask = SIZE_BYTES[dtypes.autocast or dtypes.table] if kernel == "efficient" else 0
    shared = 3 * one + 2 * zeros if setup.checkpointing else zeros
    return spec.num_heads * row_tokens * row_tokens * (num_kept * mask + shared)
