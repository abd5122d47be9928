"""Temporaries inside one layer: what its forward and backward hold beyond what autograd keeps."""

from planner.memory.activations import keeps_stream, norm_output_dtype, score_bytes
from planner.memory.adapter_kinds import forward_bytes, gradient_bytes, norm_moment
from planner.memory.context_parallel import exchanged_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.matrix_inputs import adapter_input
from planner.memory.mlp import ACTIVATION_COPIES, activation_dtype, gated_fused, lora_mlp
from planner.memory.workspace import dequantized_bytes
from planner.models.earlier import has_expert_modules
from planner.models.spec import LayerSpec


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
    direct = flow.quantized and flow.autocast is not None
    adapter = dtype if direct else flow.adapter
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
    each [tokens * active experts, hidden].

    Source: transformers 5.23 `integrations/moe.py` `grouped_mm_experts_forward`; PyTorch `index_backward`.
    """
    mlp, flow = layer.mlp, context.flow
    if mlp is None or mlp.kind != "moe" or context.traits.dense_experts:
        return 0
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
    width = mlp_width(layer)
    hidden_dtype = flow.linear_out(flow.residual)
    size = SIZE_BYTES[hidden_dtype]
    gated = mlp.kind != "plain"
    composed = ACTIVATION_COPIES.get(mlp.activation, 1) == 4 and mlp.kind != "moe"
    if composed:  # the product of the two halves of a composed GELU, in its output's type, and what comes in
        gradients = 3 * SIZE_BYTES[activation_dtype(mlp.activation, flow, hidden_dtype)] * width
    elif gated_fused(mlp, context):  # written over gate and up, but for the product's own
        gradients = size * width
        if lora_mlp(layer, context):  # at the recomputed end: the product, its copy and the last matrix's result
            return 2 * gradients + size * context.hidden, gradients
    else:
        gradients = (3 if gated else 2) * size * width
    downs = [one for one in layer.linears if one.role == "down" and not one.is_expert]
    if mlp.kind == "moe" or not downs:
        return gradients, gradients
    gone = saved.down // context.tokens
    down = downs[0]
    activated = activation_dtype(mlp.activation, flow, hidden_dtype)
    wide = SIZE_BYTES[activated]
    if down.name not in context.adapted:
        return max(wide * width, gradients - gone), wide * width
    _, backward = adapter_temporaries(width, activated, context)
    end = at_last_matrix(layer, context, saved) if context.setup.checkpointing else 0
    together = (wide + SIZE_BYTES[flow.autocast or activated]) * width - gone  # the base multiplies in 16 bits
    return max(end, backward - gone, together + wide * width, gradients - gone), together


def at_last_matrix(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Bytes per token beside what the layer keeps when a recomputed forward comes to its last matrix's adapter: the
    copies of that matrix's input, and what stands on the stream then; 0 where that matrix has none."""
    mlp, flow = layer.mlp, context.flow
    down = next((one for one in layer.linears if one.role == "down" and one.name in context.adapted), None)
    if mlp is None or down is None:
        return 0
    activated = activation_dtype(mlp.activation, flow, flow.linear_out(flow.residual))
    copies, _ = adapter_temporaries(down.in_features, activated, context)
    kept = context.trained or saved.pinned or mlp.activation == "relu"  # the input itself
    shared = kept or (not copies and context.setup.lora_dropout == 0)
    product = 0 if shared else SIZE_BYTES[activated] * down.in_features
    return copies + product + _beside_last_matrix(layer, context)


def _magnitude_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> list[tuple[int, int]]:
    """DoRA at the MLP's last matrix in a recomputed forward, as `constant_transients`: finding its norm, when nothing
    of what it keeps is there yet, and weighing its two results beside the norm's identity and two copies of the matrix.

    fp32 adapters on a 16-bit stream make the weighed result fp32, and its gradient in two steps.
    """
    flow, mlp = context.flow, layer.mlp
    norms, _ = magnitude_moment(layer, context, graph=True)
    downs = [one for one in layer.linears if one.role == "down" and not one.is_expert and one.name in context.adapted]
    if mlp is None or not downs:
        return [(context.tokens * SIZE_BYTES[flow.residual] * context.hidden, norms)] * 2
    down = downs[0]
    activated = activation_dtype(mlp.activation, flow, flow.linear_out(flow.residual))
    copies, _ = adapter_temporaries(down.in_features, activated, context)
    wide = SIZE_BYTES[activated] * down.in_features
    beside = SIZE_BYTES[flow.residual] * context.hidden + copies + _beside_last_matrix(layer, context)
    direct, _ = adapter_input(flow, activated)
    beside += 6 * context.hidden * (copies > 0)
    left = SIZE_BYTES[flow.autocast or flow.adapter] * down.in_features**2
    left += 2 * SIZE_BYTES[flow.adapter] * down.num_weights
    return [
        (context.tokens * (beside + wide) - saved.down, norms),
        (context.tokens * (beside + wide * (not direct)), left),
    ]


def _beside_last_matrix(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes per token of the hidden size when a recomputed forward comes to its last matrix's adapter: that matrix's
    result and the gradient of its adapter's product, and where the layer does not keep them the sum before the second
    norm and that norm's result, which the layer's own frame holds.

    Seen in the dry run's events; the frame is that of every decoder layer in transformers 5.23.
    """
    flow = context.flow
    result = SIZE_BYTES[flow.linear_out(flow.residual)]
    norms = [one for one in layer.norms if one.rows_per_token == 1]
    if not norms:
        return 2 * result * context.hidden
    normed = norm_output_dtype(norms[-1], context, flow.residual)
    direct, _ = adapter_input(flow, normed)
    held = 0 if keeps_stream(norms[-1], context) else SIZE_BYTES[flow.residual]
    held += 0 if direct and context.setup.lora_dropout == 0 else SIZE_BYTES[normed]
    return (2 * result + held) * context.hidden


def backward_transient(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Gradients of activations alive at once in one layer's backward, beside everything that the layer keeps, where no
    matrix is being dequantized.

    RMSNorm's backward holds three fp32 tensors of the hidden size (a fused one two of the type that comes);
    attention's the gradients of q, k, v and, with a
    kernel that keeps tokens x tokens matrices, their gradient before and after the softmax, when what stands behind the
    attention is gone (`saved.late`). The gradient of the residual is alive all along.

    Shapes: [tokens, hidden] and [tokens, intermediate].
    """
    flow = context.flow
    residual = SIZE_BYTES[flow.residual] * context.hidden
    size = SIZE_BYTES[flow.linear_out(flow.residual)]
    mlp, _ = _mlp_moments(layer, context, saved)
    if context.setup.adapter != "lora" and context.adapted:
        adapted = [one for one in layer.linears if one.name in context.adapted]
        mlp += gradient_bytes(adapted, context.setup, flow)
    plain = context.traits.norm == "layer" and not flow.autocast  # one kernel in the stream's own type
    norm = (2 * size if "norm" in context.fused else 3 * (SIZE_BYTES[flow.residual] if plain else 4)) * context.hidden
    attention = exchange = 0
    if layer.attention is not None:
        spec = layer.attention
        exchange = exchanged_bytes(spec, context)[1]
        width = spec.num_heads * (spec.head_dim + spec.value_head_dim)
        attention = size * 2 * width
        qkv = flow.linear_out(flow.residual)
        attention += score_bytes(spec, context, qkv).backward * spec.num_heads * context.row_tokens
    return max(
        context.tokens * (residual + max(mlp, norm, routed_gradients(layer, context))),
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
    found = []
    if context.setup.adapter == "dora" and context.setup.checkpointing and context.adapted:
        found += _magnitude_moments(layer, context, saved)
    if context.stacks:
        found.append((context.tokens * (residual + mlp) + stack, 0))
    if context.setup.quantized:
        copy = max(dequantized_bytes(one, context.setup, context.flow.residual) for one in layer.linears)
        found.append((context.tokens * (residual + at_matrix) + stack, copy))
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
    if context.setup.adapter == "lora" or not context.adapted:
        return max(exchange, context.tokens * max(mlp, scores))
    mlp += forward_bytes([one for one in layer.linears if one.name in context.adapted], context.setup, flow)
    norms = 0
    if context.setup.adapter == "dora":
        norms = magnitude_moment(layer, context, graph=not context.setup.checkpointing)[0] + context.tokens * mlp
    return max(context.tokens * max(mlp, scores), norms, exchange)


def magnitude_moment(layer: LayerSpec, context: LayerContext, *, graph: bool) -> tuple[int, int]:
    """(bytes of DoRA's largest norm of a matrix, bytes of the copies of that matrix's input that stand beside it)."""
    adapted = [one for one in layer.linears if one.name in context.adapted]
    norms, width = max((norm_moment(one, context.flow, graph=graph), one.in_features) for one in adapted)
    copies, _ = adapter_temporaries(width, context.flow.compute, context)
    if copies:  # and the input itself, which nothing keeps
        copies += SIZE_BYTES[context.flow.compute] * width
    return norms, context.tokens * copies


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
