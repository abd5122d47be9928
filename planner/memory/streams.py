"""What several residual streams side by side keep: AltUp, in Gemma 3n.

Source: transformers 5.23 `models/gemma3n` Gemma3nTextAltUp.predict and .correct; Baykal et al. 2023, Alternating
Updates for Efficient Transformers, https://arxiv.org/abs/2301.13310.
"""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.layer_context import LayerContext


def kept_by_streams(context: LayerContext) -> int:
    """Bytes that one layer's AltUp keeps: all streams as the prediction's factor, the innovation repeated to each, and
    fp32 streams (under autocast) as they came and as they were predicted.

    Shapes: [streams, tokens, hidden].
    """
    streams, dtypes = context.traits.streams, context.dtypes
    wide = SIZE_BYTES[dtypes.residual]
    per_row = streams * (SIZE_BYTES[dtypes.autocast or dtypes.residual] + wide) + (
        2 * wide * streams if wide == 4 else 0
    )
    return context.tokens * context.hidden * per_row * (streams > 1)
