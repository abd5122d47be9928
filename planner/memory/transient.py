"""Temporaries inside one layer: what its forward and backward hold beyond what autograd keeps."""

from planner.memory.activations import (
    input_dtype,
    keeps_stream,
    looked_at_dtype,
    norm_behind,
    norm_output_dtype,
    qkv_dtype,
    score_bytes,
)
from planner.memory.adapter_kinds import (
    NormBytes,
    forward_bytes,
    norm_bytes,
    rotated_bytes,
    summed_bytes,
    unsummed_bytes,
    waiting_bytes,
    weighed_bytes,
)
from planner.memory.context_parallel import exchanged_bytes
from planner.memory.dtypes import SIZE_BYTES, promote
from planner.memory.expert_parallel import dispatched_moments
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.matrix_inputs import adapter_input, handed_on
from planner.memory.mlp import ACTIVATION_COPIES, activation_dtype, gated_fused, lora_mlp
from planner.memory.workspace import dequantized_bytes
from planner.models.earlier import has_expert_modules
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec


def mlp_width(layer: LayerSpec) -> int:
    """Intermediate elements per token of the layer's MLP that are worked on at once."""
    mlp = layer.mlp
    if mlp is None:
        return 0
    if mlp.kind != "moe":
        return mlp.intermediate_size
    return _rows_at_once(layer, mlp.intermediate_size) + mlp.shared_intermediate_size


def _rows_at_once(layer: LayerSpec, width: int) -> int:
    """Elements per token of a tensor so wide that holds routed rows: of all active experts where they are stacked,
    of one expert after another where they are modules. Tokens are taken to spread evenly over the experts."""
    assert layer.mlp is not None
    rows = layer.mlp.num_active_experts * width
    return -(-rows // layer.mlp.num_experts) if has_expert_modules(layer) else rows


def adapter_temporaries(width: int, dtype: str, context: LayerContext) -> tuple[int, int]:
    """(forward, backward) bytes per token of one adapted matrix beyond what it keeps, given its input's width and type.

    peft casts the input to the adapter's type (not for 4-bit layers under autocast), drops out in it, and autocast
    casts the result, which is what is kept. The backward goes the same way back, one copy in and one out at a time.

    Source: peft 0.21 `tuners/lora/layer.py` `Linear.forward`, `lora/bnb.py`.
    """
    flow = context.flow
    adapter = handed_on(flow, dtype)
    cast = adapter != dtype
    multiplied = flow.autocast or adapter
    dropout = context.setup.lora_dropout > 0
    size = SIZE_BYTES[adapter]
    copies = 0
    if cast and (dropout or multiplied != adapter):
        copies += size
    if dropout and multiplied != adapter:
        copies += size
    backward = 2 * size if dropout else (size + SIZE_BYTES[dtype] if cast else size)
    return width * copies, width * backward


def routed_gradients(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token when the experts' weighted outputs are sorted back: their gradient, its zeros and its scatter,
    each [tokens * active experts, hidden]; of experts that are modules each one's rows go into gradients of all tokens.

    Measured: the latter, 12 bytes per hidden element of 16-bit experts (benchmarks/experts_of_transformers_4.py).
    Source: transformers 5.23 `integrations/moe.py` `grouped_mm_experts_forward`; PyTorch `index_backward`.
    """
    mlp, flow = layer.mlp, context.flow
    if mlp is None or mlp.kind != "moe" or context.traits.dense_experts:
        return 0
    if has_expert_modules(layer):
        return 12 * context.hidden
    fp32 = ("autocast" if flow.autocast else "plain") in context.traits.fp32_routed
    size = 4 if fp32 else SIZE_BYTES[flow.table]
    return 3 * size * _rows_at_once(layer, context.hidden)


def _mlp_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[int, int]:
    """Bytes per token of the MLP's backward, net of what is gone by then: (without, at) the last matrix's own
    multiplication.

    In order: the recomputed forward's end, the last matrix's adapter, its base, their sum, and the product's or the
    activation's gradients, when that matrix's input is gone.
    """
    flow, mlp = context.flow, layer.mlp
    if mlp is None:
        return 0, 0
    width, hidden_dtype = mlp_width(layer), flow.linear_out(flow.residual)
    gradients = width * _activation_gradients(mlp, context)
    if gated_fused(mlp, context) and lora_mlp(layer, context) and not _composed(mlp):
        # at the recomputed end: the product, its copy and the last matrix's result
        return 2 * gradients + SIZE_BYTES[hidden_dtype] * context.hidden, gradients
    downs = [one for one in layer.linears if one.role == "down" and not one.is_expert]
    if mlp.kind == "moe" or not downs:
        return gradients, gradients
    down = downs[0]
    # bitsandbytes' int8 multiplication keeps its input on the node itself, which lives as long as the layer's graph
    kept_on = context.setup.quantization == "int8" and down.quantizes and not context.trained
    pinned = SIZE_BYTES[input_dtype(down, layer, context)] * down.in_features if kept_on else 0
    gone = max(0, saved.down // context.tokens - pinned)
    activated = activation_dtype(mlp.activation, flow, hidden_dtype)
    wide = SIZE_BYTES[activated]
    if down.name not in context.adapted:
        return max(wide * width, gradients - gone), wide * width
    if context.setup.adapter == "ia3":  # two gradients, of what is scaled and of the vector, beside what comes
        return max(3 * SIZE_BYTES[promote(activated, flow.adapter)] * width, gradients - gone), wide * width
    _, backward = adapter_temporaries(width, activated, context)
    end = at_last_matrix(layer, context, saved) if context.setup.checkpointing else 0
    together = (wide + SIZE_BYTES[flow.autocast or activated]) * width - gone  # the base multiplies in 16 bits
    return max(end, backward - gone, together + wide * width, gradients - gone), together


def _composed(mlp: MlpSpec) -> bool:
    """Whether the activation is made of single operations (a composed GELU)."""
    return ACTIVATION_COPIES.get(mlp.activation, 1) == 4 and mlp.kind != "moe"


def _activation_gradients(mlp: MlpSpec, context: LayerContext) -> int:
    """Bytes of the gradients of one element of the activation."""
    dtype = context.flow.linear_out(context.flow.residual)
    if _composed(mlp):  # the product of its two halves, in its output's type, and what comes in
        return 3 * SIZE_BYTES[activation_dtype(mlp.activation, context.flow, dtype)]
    if gated_fused(mlp, context):  # written over gate and up, but for the product's own
        return SIZE_BYTES[dtype]
    return (3 if mlp.kind != "plain" else 2) * SIZE_BYTES[dtype]


def at_last_matrix(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Bytes per token beside what the layer keeps when a recomputed forward comes to its last matrix's adapter: the
    copies of that matrix's input, and what stands on the stream then; 0 where that matrix has none."""
    mlp, flow = layer.mlp, context.flow
    down = next((one for one in layer.linears if one.role == "down" and one.name in context.adapted), None)
    if mlp is None or down is None:
        return 0
    activated = activation_dtype(mlp.activation, flow, flow.linear_out(flow.residual))
    if context.setup.adapter == "oft" and (not flow.quantized or ends_behind(layer, context)):
        rotated = rotated_bytes(flow, activated) * down.in_features
        return rotated + _held_by_frame(layer, context) + _waiting(layer, context)
    copies, _ = adapter_temporaries(down.in_features, activated, context)
    kept = context.trained or saved.pinned or mlp.activation == "relu"  # the input itself
    shared = kept or (not copies and context.setup.lora_dropout == 0)
    product = 0 if shared else SIZE_BYTES[activated] * down.in_features
    return copies + product + _beside_last_matrix(layer, context)


def _magnitude_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> list[tuple[int, int]]:
    """DoRA in a recomputed forward, as `constant_transients`: finding the norms of the MLP's first matrix (a fused one
    is the largest of all) and of its last, when nothing of what they keep is there yet, and weighing the last one's two
    results beside what is left of its norm.
    """
    flow, residual = context.flow, SIZE_BYTES[context.flow.residual] * context.hidden
    adapted = [one for one in layer.linears if one.name in context.adapted and not one.is_expert]
    downs = [one for one in adapted if one.role == "down"]
    firsts = [one for one in adapted if one.role in ("gate", "up", "gate_up")]
    if layer.mlp is None or not downs:
        norms, _ = magnitude_moment(layer, context, graph=True)
        return [(context.tokens * residual, norms)] * 3
    down, held = downs[0], residual + _held_by_frame(layer, context)
    taken = input_dtype(down, layer, context)
    held += _waiting(layer, context)
    found = []
    for one, gone in ((max(firsts or downs, key=lambda linear: linear.num_weights), saved.fed), (down, saved.down)):
        taken = input_dtype(one, layer, context)
        copies, _ = adapter_temporaries(one.in_features, taken, context)
        made = SIZE_BYTES[taken] * one.in_features + SIZE_BYTES[flow.linear_out(taken)] * one.out_features
        norm = _norm_of(one, layer, context, graph=True)
        found.append((context.tokens * (held + copies + made) - gone - saved.behind, norm.largest))
    direct, _ = adapter_input(flow, taken)
    product = 0 if direct else SIZE_BYTES[taken] * down.in_features
    whole = ends_behind(layer, context)
    weighed = weighed_bytes(down, flow, handed_on(flow, taken), taken, whole=whole)
    return [*found, (context.tokens * (held + copies + product + weighed) - saved.behind, norm.left)]


def ends_behind(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether something behind the MLP's last matrix keeps a tensor, so that a recomputed forward runs through it."""
    return context.traits.residual_dropout or norm_behind(layer) is not None


def _waiting(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token of gradients that wait for the layer to be recomputed, beside the stream's own."""
    down = next((one for one in layer.linears if one.role == "down" and one.name in context.adapted), None)
    if down is None or ends_behind(layer, context):
        return 0
    taken = input_dtype(down, layer, context)
    return waiting_bytes(down, context.setup, context.flow, handed_on(context.flow, taken), taken)


def _base_of_last_matrix(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[int, int]:
    """When a recomputed forward multiplies the MLP's last matrix itself, as `constant_transients`: its input, that cast
    to the multiplied type, its result, and what the layer's frame holds; the adapter keeps nothing yet.

    A recomputed forward ends where the last tensor is kept: not here, where neither an adapter, nor a dropout, nor a
    norm keeps something behind it.

    Source: torch 2.13 `utils/checkpoint.py` _StopRecomputationError.
    """
    flow, setup = context.flow, context.setup
    down = next((one for one in layer.linears if one.role == "down" and not one.is_expert), None)
    if down is None or not setup.checkpointing or setup.quantization == "int8":  # which dequantizes in the backward
        return 0, 0
    adapted = down.name in context.adapted and setup.kind.form in ("low-rank", "shared")
    if not (adapted or ends_behind(layer, context)):
        return 0, 0
    taken = input_dtype(down, layer, context)
    multiplied = SIZE_BYTES[setup.compute_dtype]
    inputs = SIZE_BYTES[taken] + (multiplied if setup.compute_dtype != taken else 0)
    stream = (SIZE_BYTES[flow.residual] + multiplied) * context.hidden + _held_by_frame(layer, context)
    held = context.tokens * (inputs * down.in_features + stream) - saved.down - saved.behind
    return held, dequantized_bytes(down, setup, flow.residual)


def _last_of_firsts(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[LinearSpec | None, int]:
    """The last of the matrices that a dense MLP begins with, and what of all that the layer keeps is not there yet when
    it is multiplied, or gone when its gradient comes: of two their activation's gradient stands for what it kept."""
    firsts = [one for one in layer.linears if one.role in ("gate", "up", "gate_up") and not one.is_expert]
    if not firsts or context.fused & {"lora", "inputs"}:
        return None, 0
    result = SIZE_BYTES[context.flow.linear_out(input_dtype(firsts[-1], layer, context))] * firsts[-1].out_features
    kept = saved.mlp if len(firsts) == 1 else context.tokens * result
    return firsts[-1], saved.down + saved.behind + kept


def _first_matrix_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> list[tuple[int, int]]:
    """The last of the matrices that the MLP begins with, as `constant_transients`, where it is adapted: its result and
    the adapter's added up in a recomputed forward, and their gradient; where it is quantized, its own product in
    either."""
    flow, setup = context.flow, context.setup
    one, gone = _last_of_firsts(layer, context, saved)
    if one is None:
        return [(0, 0)] * 2
    taken, residual = input_dtype(one, layer, context), SIZE_BYTES[flow.residual] * context.hidden
    returned, multiplied = SIZE_BYTES[flow.linear_out(taken)], SIZE_BYTES[setup.compute_dtype]
    stream = residual + _held_by_frame(layer, context)
    summed = unsummed = 0
    if one.name in context.adapted:
        copies, _ = adapter_temporaries(one.in_features, taken, context)
        summed = stream + copies + _waiting(layer, context)
        summed += returned * one.out_features * (setup.adapter != "dora")  # which keeps it
        summed += summed_bytes(one, setup, flow, handed_on(flow, taken), taken)
        unsummed = residual + unsummed_bytes(one, setup, flow, taken)
    left = 0
    if setup.adapter == "dora" and one.name in context.adapted:
        left = _norm_of(one, layer, context, graph=True).left
    moments = [(context.tokens * max(summed * (setup.checkpointing > 0), unsummed) - gone, left)]
    cast = multiplied * (multiplied != returned)
    forward = stream + cast * context.hidden + multiplied * one.out_features
    backward = residual + (returned + cast) * one.out_features + multiplied * context.hidden
    held = max(forward * (setup.checkpointing > 0 and setup.quantization != "int8"), backward)
    copy = dequantized_bytes(one, setup, flow.residual) if setup.quantized else 0
    return [*moments, (context.tokens * held - gone, copy) if copy else (0, 0)]


def _beside_last_matrix(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token of the hidden size when a recomputed forward comes to its last matrix's adapter: that matrix's
    result and the gradient of its adapter's product, and what the layer's own frame holds."""
    flow, multiplied = context.flow, context.flow.autocast or context.flow.adapter
    results = SIZE_BYTES[flow.linear_out(flow.residual)] + SIZE_BYTES[multiplied]
    if context.setup.adapter == "adalora":  # the gradient in fp32, and the product scaled
        results += SIZE_BYTES[multiplied] + SIZE_BYTES["fp32"]
    if context.setup.kind.form == "shared":
        results += SIZE_BYTES[promote(multiplied, flow.adapter)] - SIZE_BYTES[multiplied]
    return results * context.hidden + _held_by_frame(layer, context)


def _held_by_frame(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token that a layer's own frame holds while its MLP runs, where nothing else keeps them: the sum before
    the second norm and that norm's result; in a parallel block, and in some classes beside these, the attention's
    output; and an eager attention's dropped probabilities in fp32, which are kept in 16 bits.

    Seen in the dry run's events; the frame is that of the decoder layers of transformers 5.23.
    """
    flow = context.flow
    norms = [one for one in layer.norms if one.rows_per_token == 1]
    if not norms:
        return held_probabilities(layer, context)
    normed = norm_output_dtype(norms[-1], context, flow.residual)
    direct, _ = adapter_input(flow, normed)
    held = 0 if keeps_stream(norms[-1], context) else SIZE_BYTES[flow.residual]
    held += 0 if direct and context.setup.lora_dropout == 0 else SIZE_BYTES[normed]
    if context.traits.holds_attention or layer.parallel_residual:
        held += SIZE_BYTES[flow.linear_out(flow.autocast or flow.linear_out(normed))]
    return held * context.hidden + held_probabilities(layer, context)


def held_probabilities(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token of the fp32 probabilities that an eager layer holds to its end (`Traits.holds_probabilities`)."""
    traits = context.traits
    held = traits.holds_probabilities or (traits.holds_wide_probabilities and qkv_dtype(layer, context) == "fp32")
    if not held or layer.attention is None or context.kernel != "eager" or not context.flow.autocast:
        return 0
    return SIZE_BYTES["fp32"] * layer.attention.num_heads * context.row_tokens


def backward_transient(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Gradients of activations alive at once in one layer's backward, beside everything that the layer keeps, where no
    matrix is being dequantized.

    RMSNorm's backward holds five fp32 tensors of the hidden size (a fused one two of the type that comes), when the MLP
    is gone, or behind the MLP when all is there; attention's the gradients of q, k, v or, with a
    kernel that keeps tokens x tokens matrices, their gradient before and after the softmax, when what stands behind the
    attention is gone (`saved.late`). The gradient of the residual is alive all along.

    Shapes: [tokens, hidden] and [tokens, intermediate].
    """
    flow = context.flow
    residual = SIZE_BYTES[flow.residual] * context.hidden
    seen = SIZE_BYTES[looked_at_dtype(flow)] * context.looked_at  # features of pictures, in their type
    mlp, _ = _mlp_moments(layer, context, saved)
    fed = context.tokens * (residual + max(mlp, routed_gradients(layer, context))) - saved.behind
    return seen * context.hidden + max(fed, *_outside_the_mlp(layer, context, saved))


def _outside_the_mlp(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[int, int]:
    """As `backward_transient`, of the norm's backward and of the attention's alone."""
    flow = context.flow
    residual = SIZE_BYTES[flow.residual] * context.hidden
    size = SIZE_BYTES[flow.linear_out(flow.residual)]
    plain = context.traits.norm == "layer" and not flow.autocast  # one kernel in the stream's own type
    norms = 5 * 4 if context.traits.norm.startswith("rms") else 3 * (SIZE_BYTES[flow.residual] if plain else 4)
    norm = (2 * size if "norm" in context.fused else norms) * context.hidden
    gone = 0 if norm_behind(layer) else saved.fed
    attention = exchange = 0
    if layer.attention is not None:
        spec = layer.attention
        exchange = exchanged_bytes(spec, context)[1]
        qkv = flow.linear_out(flow.residual)
        # where there are scores their gradient is the most, when of the others the values' stands in the values' place
        attention = score_bytes(spec, context, qkv).backward * spec.num_heads * context.row_tokens
        width = spec.num_heads * (spec.head_dim + spec.value_head_dim)
        of_keys = context.of_keys.tokens * width // context.tokens
        attention = attention or size * (width + of_keys)
        if context.looked_at and looked_at_dtype(flow) != flow.attention_input:  # before the kernel's copies of them
            attention = max(attention, SIZE_BYTES["fp32"] * of_keys)
    return (
        context.tokens * (residual + norm) - gone,
        context.tokens * (residual + attention) + exchange - saved.late,
    )


def constant_transients(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[tuple[int, int], ...]:
    """Moments of one layer's backward beside something that does not grow with the tokens, as (gradients of activations
    and of merged stacks, dequantized matrix): a stack of experts' gradient, the MLP's last matrix dequantized.

    Apart from `backward_transient`, so that each moment is a straight line in the micro-batch.
    """
    residual = SIZE_BYTES[context.flow.residual] * context.hidden
    mlp, at_matrix = _mlp_moments(layer, context, saved)
    stack = stack_transient(layer, context)
    found = _first_matrix_moments(layer, context, saved)
    if context.setup.adapter == "dora" and context.setup.checkpointing and context.adapted:
        found += _magnitude_moments(layer, context, saved)
    if context.stacks:
        found.append((context.tokens * (residual + mlp) - saved.behind + stack, 0))
    if context.setup.expert_degree > 1:
        found += dispatched_moments(layer, context, saved, _outside_the_mlp(layer, context, saved))
    if context.setup.quantized:
        lasts = [one for one in layer.linears if one.role == "down" and not one.is_expert]
        copies = [dequantized_bytes(one, context.setup, context.flow.residual) for one in lasts or layer.linears]
        copy = max(copies)
        found.append((context.tokens * (residual + at_matrix) - saved.behind + stack, copy))
        found.append(_base_of_last_matrix(layer, context, saved))
    return tuple(found)


def forward_transient(layer: LayerSpec, context: LayerContext) -> int:
    """Temporaries of one layer's forward at their largest: the MLP's tensors before autograd keeps or drops them.

    With checkpointing nothing of the layer is kept, so these are all that the forward adds.
    """
    flow = context.flow
    size = SIZE_BYTES[flow.linear_out(flow.residual)]
    mlp = 3 * size * mlp_width(layer)
    scores = exchange = 0
    if layer.attention is not None:
        exchange = exchanged_bytes(layer.attention, context)[0]
        held = score_bytes(layer.attention, context, flow.linear_out(flow.residual))
        parts = held.forward + (held.handed_on if context.setup.checkpointing else 0)
        scores = parts * layer.attention.num_heads * context.row_tokens
        if scores:  # beside queries, keys and values and what they are made of
            width = layer.attention.num_heads * (2 * layer.attention.head_dim + layer.attention.value_head_dim)
            scores += size * (width + context.hidden)
    if context.setup.adapter == "lora" or not context.adapted:
        return max(exchange, context.tokens * max(mlp, scores))
    mlp += forward_bytes([one for one in layer.linears if one.name in context.adapted], context.setup, flow)
    norms = 0
    if context.setup.adapter == "dora":
        norms = magnitude_moment(layer, context, graph=not context.setup.checkpointing)[0] + context.tokens * mlp
    return max(context.tokens * max(mlp, scores), norms, exchange)


def magnitude_moment(layer: LayerSpec, context: LayerContext, *, graph: bool) -> tuple[int, int]:
    """(bytes of DoRA's largest norm of a matrix, bytes of the copies of that matrix's input that stand beside it)."""
    found = []
    for one in layer.linears:
        if one.name in context.adapted:
            taken = input_dtype(one, layer, context)
            copies, _ = adapter_temporaries(one.in_features, taken, context)
            copies += SIZE_BYTES[taken] * one.in_features * (copies > 0)  # and the input itself, which nothing keeps
            found.append((_norm_of(one, layer, context, graph=graph).largest, context.tokens * copies))
    return max(found)


def _norm_of(linear: LinearSpec, layer: LayerSpec, context: LayerContext, *, graph: bool) -> NormBytes:
    handed = handed_on(context.flow, input_dtype(linear, layer, context))
    return norm_bytes(linear, context.flow, handed, graph=graph)


def stack_transient(layer: LayerSpec, context: LayerContext) -> int:
    """The gradient of a stack of experts that peft has merged with its adapter, alive until the adapter's own gradients
    are computed: of the down stack, or of the gate_up stack once the down stack is gone.

    Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `_grouped_mm`'s backward.
    Shapes: [experts, out_features, in_features].
    """
    if not context.stacks:
        return 0
    size = SIZE_BYTES[context.flow.table]
    stacks = {one.role: one.num_weights for one in layer.linears if one.is_stack}
    if not stacks:
        return 0
    down = stacks.pop("down", 0)
    return size * max(down, max(stacks.values(), default=0) - down)


def merged_stacks(layer: LayerSpec, context: LayerContext) -> int:
    """Stacks of experts, merged or unpacked, that live through a checkpointed layer's forward, where nothing is kept.

    Source: peft 0.21 ParamWrapper: `parametrize.cached` holds the merged parameter while the module runs; bitsandbytes
    0.50 `nn/parametrize.py` does the same to unpacked ones.
    """
    if not (context.stacks or context.setup.quantize_experts):
        return 0
    size = SIZE_BYTES[context.flow.table]
    return size * sum(one.num_weights for one in layer.linears if one.is_stack)
