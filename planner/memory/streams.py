"""What several residual streams side by side keep: AltUp, in Gemma 3n.

Under autocast the streams are fp32 from their making on (a power of an fp32 copy gives their magnitude), and every view
of one that a norm keeps holds all of them.

Source: transformers 5.23 `models/gemma3n` Gemma3nTextAltUp.predict and .correct, Gemma3nTextModel.forward; Baykal et
al. 2023, Alternating Updates for Efficient Transformers, https://arxiv.org/abs/2301.13310.
Shapes: [streams, tokens, hidden].
Measured: within 1 % of the dry run, 12 cases of Gemma 3n's text and 16 with pictures (benchmarks/data/images.jsonl).
"""

from planner.memory.dtypes import SIZE_BYTES, Flow
from planner.memory.layer_context import LayerContext
from planner.models.spec import LayerSpec, ModelSpec


def kept_in_a_layer(context: LayerContext) -> int:
    """Bytes that one layer's AltUp keeps: all streams as the prediction's factor, the innovation repeated to each, the
    router's norm and its matrix's input a second time (of what is corrected); fp32 streams as they came and as they
    were predicted, of which the layer's norms count one each. Trained also the router's normed rows a second time, what
    the scale of the corrected stream multiplies, and two inputs of matrices that others of their width do not share."""
    streams, flow = context.traits.streams, context.flow
    if streams == 1:
        return 0
    wide, copy = SIZE_BYTES[flow.residual], SIZE_BYTES[flow.autocast or flow.adapter]
    per_row = streams * (SIZE_BYTES[flow.autocast or flow.residual] + wide) + 4 + copy
    if wide == 4:
        per_row += 2 * wide * (streams - 1)
    if context.trained:
        per_row += 4 + SIZE_BYTES[flow.table] + 2 * SIZE_BYTES[flow.autocast or flow.residual]
    return context.tokens * context.hidden * per_row


def moment_of_a_layer(context: LayerContext, transient: int) -> int:
    """Bytes of a layer's backward beyond what it keeps, given those of its attention or MLP: at its beginning the
    gradient of all its streams, and that of the innovation repeated to each; what AltUp keeps behind the MLP is gone
    when its turn comes."""
    streams, flow = context.traits.streams, context.flow
    if streams == 1:
        return transient
    wide = SIZE_BYTES[flow.residual]
    gone = streams * wide + 8 + SIZE_BYTES[flow.autocast or flow.adapter]
    row = context.tokens * context.hidden
    return max(transient - row * gone, row * 2 * streams * wide)


def kept_around_the_layers(model: ModelSpec, flow: Flow, tokens: int, streams: int) -> tuple[int, int]:
    """Bytes that (making the streams, joining them) keep: of each but the first its matrix's input, itself for its
    magnitude (autocast: an fp32 copy more), and the product that is divided; the last layer's streams, which are gone
    when the layers' backward begins; and the inputs that every layer adds, normed and as they are."""
    if streams == 1:
        return 0, 0
    wide, narrow = SIZE_BYTES[flow.residual], SIZE_BYTES[flow.linear_out(flow.residual)]
    one_end = SIZE_BYTES[flow.autocast or flow.adapter] + narrow + wide + (4 if flow.autocast else 0)
    one_end *= model.hidden_size * (streams - 1)
    inputs = _layer_inputs(model)
    behind = one_end + model.hidden_size * streams * wide
    return tokens * (one_end + inputs * (4 + narrow)), tokens * behind


def _layer_inputs(model: ModelSpec) -> int:
    """Numbers of a token that all layers add, each its own."""
    return sum(linear.out_features for linear in model.outer_linears if "per_layer" in linear.name)


def held_by_the_forward(model: ModelSpec, flow: Flow, tokens: int, streams: int) -> int:
    """Bytes that the forward holds at its end beside what is kept before its layers and in them: what joining the
    streams keeps, the streams as they were made, and the lookups that became every layer's inputs."""
    if streams == 1:
        return 0
    inputs = _layer_inputs(model)
    made = streams * SIZE_BYTES[flow.residual] * model.hidden_size + SIZE_BYTES[flow.table] * inputs
    return kept_around_the_layers(model, flow, tokens, streams)[1] + tokens * made


def kept_by_embedders(embedders: list[tuple[LayerSpec, bool]], flow: Flow, tokens: int, *, trained: bool) -> int:
    """Bytes that the embedders of pictures and sound keep of tokens of text, all of which pass through them: of each
    with its matrix trained or adapted, that matrix's input and an fp32 copy of what it gives; trained also what its
    norms keep.

    Source: transformers 5.23 `Gemma3nModel.forward`, `Gemma3nMultimodalEmbedder`.
    """
    total = 0
    for layer, adapted in embedders:
        one = layer.linears[0]
        if adapted or trained:
            total += SIZE_BYTES[flow.linear_out(flow.table)] * one.in_features + 4 * one.out_features
        if trained:
            total += 8 * one.in_features
    return tokens * total
