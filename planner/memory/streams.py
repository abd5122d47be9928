"""What several residual streams side by side keep: AltUp, in Gemma 3n.

Under autocast the streams are fp32 from their making on (a power of an fp32 copy gives their magnitude), and every view
of one that a norm keeps holds all of them.

Source: transformers 5.23 `models/gemma3n` Gemma3nTextAltUp.predict and .correct, Gemma3nTextModel.forward; Baykal et
al. 2023, Alternating Updates for Efficient Transformers, https://arxiv.org/abs/2301.13310.
Shapes: [streams, tokens, hidden].
Measured: within 4 % of the dry run (tests/probes/test_module_tree.py).
"""

from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.models.spec import ModelSpec


def kept_in_a_layer(context: LayerContext) -> int:
    """Bytes that one layer's AltUp keeps: all streams as the prediction's factor, the innovation repeated to each, the
    router's norm and its matrix's input a second time (of what is corrected); fp32 streams as they came and as they
    were predicted, of which the layer's norms count one each."""
    streams, flow = context.traits.streams, context.flow
    if streams == 1:
        return 0
    wide, copy = SIZE_BYTES[flow.residual], SIZE_BYTES[flow.autocast or flow.adapter]
    per_row = streams * (SIZE_BYTES[flow.autocast or flow.residual] + wide) + 4 + copy
    if wide == 4:
        per_row += 2 * wide * (streams - 1)
    return context.tokens * context.hidden * per_row


def kept_around_the_layers(model: ModelSpec, flow: Flow, tokens: int, streams: int) -> int:
    """Bytes that making the streams and joining them keep: of each but the first, at both ends, its matrix's input,
    itself for its magnitude (autocast: an fp32 copy more), and the product that is divided; the last layer's streams;
    and the inputs that every layer adds, normed and as they are."""
    if streams == 1:
        return 0
    wide, narrow = SIZE_BYTES[flow.residual], SIZE_BYTES[flow.linear_out(flow.residual)]
    one_end = SIZE_BYTES[flow.autocast or flow.adapter] + narrow + wide + (4 if flow.autocast else 0)
    inputs = sum(linear.out_features for linear in model.outer_linears if "per_layer" in linear.name)
    return tokens * (model.hidden_size * (2 * (streams - 1) * one_end + streams * wide) + inputs * (4 + narrow))
