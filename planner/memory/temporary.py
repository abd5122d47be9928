"""Temporaries inside one layer: what its forward and backward hold beyond what autograd keeps, in closed form.

The moments that decide a peak are here; what moves it by a few per cent is left to the runs of the real step (step
profiles, the dry run). Against the frozen dry runs: docs/accuracy/formula-vs-dry-run.md.
"""

from planner.memory.activations import input_dtype, looked_at_dtype, norm_behind, score_bytes
from planner.memory.context_parallel import exchanged_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.expert_parallel import dispatched_moments
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.matrix_inputs import handed_on
from planner.memory.mlp import ACTIVATION_COPIES, activation_dtype, gated_fused, lora_mlp
from planner.memory.workspace import dequantized_bytes
from planner.models.earlier import has_expert_modules
from planner.models.spec import LayerSpec, MlpSpec


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
    adapter = handed_on(context.dtypes, dtype)
    cast, again = adapter != dtype, (context.dtypes.autocast or adapter) != adapter
    dropout, size = context.setup.lora_dropout > 0, SIZE_BYTES[adapter]
    copies = size * (cast and (dropout or again)) + size * (dropout and again)
    backward = 2 * size if dropout else size + SIZE_BYTES[dtype] * cast
    return width * copies, width * backward


def _mlp_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[int, int]:
    """Bytes per token of the MLP's backward, net of what is gone by then: (without, at) the last matrix's own
    multiplication.

    In order: the recomputed forward's end at the last matrix's adapter, that adapter's backward, the base's beside it,
    and the activation's gradients, when that matrix's input is gone.
    """
    dtypes, mlp = context.dtypes, layer.mlp
    if mlp is None:
        return 0, 0
    width, hidden_dtype = mlp_width(layer), dtypes.linear_out(dtypes.residual)
    gradients = width * _activation_gradients(mlp, context)
    if gated_fused(mlp, context) and lora_mlp(layer, context) and not _composed(mlp):
        # at the recomputed end: the product, its copy and the last matrix's result
        return 2 * gradients + SIZE_BYTES[hidden_dtype] * context.hidden, gradients
    down = next((one for one in layer.linears if one.role == "down" and not one.is_expert), None)
    if mlp.kind == "moe" or down is None:
        if mlp.kind == "moe" and not context.traits.dense_experts:  # the experts' weighted outputs sorted back
            rows = 3 * SIZE_BYTES[dtypes.table] * _rows_at_once(layer, context.hidden)
            rows = 12 * context.hidden if has_expert_modules(layer) else rows  # each adds its rows to those of all
            return max(gradients, rows), gradients
        return gradients, gradients
    # a multiplication that keeps its input on the node itself, which lives as long as the layer's graph
    kept_on = context.setup.pins_inputs and down.quantizes and not context.trained
    pinned = SIZE_BYTES[input_dtype(down, layer, context)] * down.in_features if kept_on else 0
    gone = max(0, saved.down // context.tokens - pinned)
    activated = activation_dtype(mlp.activation, dtypes, hidden_dtype)
    wide = SIZE_BYTES[activated]
    if down.name not in context.adapted:
        return max(wide * width, gradients - gone), wide * width
    _, backward = adapter_temporaries(width, activated, context)
    end = at_last_matrix(layer, context, saved) if context.setup.checkpointing else 0
    together = (wide + SIZE_BYTES[dtypes.autocast or activated]) * width - gone  # the base multiplies in 16 bits
    return max(end, backward - gone, together + wide * width, gradients - gone), together


def _composed(mlp: MlpSpec) -> bool:
    """Whether the activation is made of single operations (a composed GELU)."""
    return ACTIVATION_COPIES.get(mlp.activation, 1) == 4 and mlp.kind != "moe"


def _activation_gradients(mlp: MlpSpec, context: LayerContext) -> int:
    """Bytes of the gradients of one element of the activation."""
    dtype = context.dtypes.linear_out(context.dtypes.residual)
    if _composed(mlp):  # the product of its two halves, in its output's type, and what comes in
        return 3 * SIZE_BYTES[activation_dtype(mlp.activation, context.dtypes, dtype)]
    if gated_fused(mlp, context):  # written over gate and up, but for the product's own
        return SIZE_BYTES[dtype]
    return (3 if mlp.kind != "plain" else 2) * SIZE_BYTES[dtype]


def at_last_matrix(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Bytes per token beside what the layer keeps when a recomputed forward comes to its last matrix's adapter: the
    copies of that matrix's input, its result, the gradient of its adapter's product, and the stream before the MLP with
    its norm's result; 0 where that matrix has no adapter."""
    mlp, dtypes = layer.mlp, context.dtypes
    down = next((one for one in layer.linears if one.role == "down" and one.name in context.adapted), None)
    if mlp is None or down is None:
        return 0
    activated = activation_dtype(mlp.activation, dtypes, dtypes.linear_out(dtypes.residual))
    copies, _ = adapter_temporaries(down.in_features, activated, context)
    kept = context.trained or saved.pinned or mlp.activation == "relu"  # the input itself
    shared = kept or (not copies and context.setup.lora_dropout == 0)
    product = 0 if shared else SIZE_BYTES[activated] * down.in_features
    results = SIZE_BYTES[dtypes.linear_out(dtypes.residual)] + SIZE_BYTES[dtypes.autocast or dtypes.adapter]
    return copies + product + (results + HELD * SIZE_BYTES[dtypes.residual]) * context.hidden


HELD = 1
"""Tensors of the stream that a layer's frame holds while its MLP runs: one or two, by the norm."""


def backward_temporary(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Gradients of activations alive at once in one layer's backward, beside everything that the layer keeps, where no
    matrix is being dequantized.

    RMSNorm's backward holds five fp32 tensors of the hidden size (a fused one two of the type that comes), when the MLP
    is gone, or behind the MLP when all is there; attention's the gradients of q, k, v or, with a
    kernel that keeps tokens x tokens matrices, their gradient before and after the softmax, when what stands behind the
    attention is gone (`saved.late`). The gradient of the residual is alive all along.

    Shapes: [tokens, hidden] and [tokens, intermediate].
    """
    dtypes = context.dtypes
    residual = SIZE_BYTES[dtypes.residual] * context.hidden
    seen = SIZE_BYTES[looked_at_dtype(dtypes)] * context.looked_at  # features of pictures, in their type
    fed = context.tokens * (residual + _mlp_moments(layer, context, saved)[0]) - saved.behind
    return seen * context.hidden + max(fed, *_outside_the_mlp(layer, context, saved))


def _outside_the_mlp(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[int, int]:
    """As `backward_transient`, of the norm's backward and of the attention's alone."""
    dtypes = context.dtypes
    residual = SIZE_BYTES[dtypes.residual] * context.hidden
    size = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
    plain = context.traits.norm == "layer" and not dtypes.autocast  # one kernel in the stream's own type
    norms = 5 * 4 if context.traits.norm.startswith("rms") else 3 * (SIZE_BYTES[dtypes.residual] if plain else 4)
    norm = (2 * size if "norm" in context.fused else norms) * context.hidden
    gone = 0 if norm_behind(layer) else saved.fed
    attention = exchange = 0
    if layer.attention is not None:
        spec = layer.attention
        exchange = exchanged_bytes(spec, context)[1]
        # where there are scores their gradient is the most, when of the others the values' stands in the values' place
        scores = score_bytes(spec, context, dtypes.linear_out(dtypes.residual)).backward
        of_keys = context.of_keys.tokens * spec.num_heads * (spec.head_dim + spec.value_head_dim) // context.tokens
        attention = scores * spec.num_heads * context.row_tokens
        attention = attention or size * (spec.num_heads * (spec.head_dim + spec.value_head_dim) + of_keys)
        if (
            context.looked_at and looked_at_dtype(dtypes) != dtypes.attention_input
        ):  # before the kernel's copies of them
            attention = max(attention, SIZE_BYTES["fp32"] * of_keys)
    return (
        context.tokens * (residual + norm) - gone,
        context.tokens * (residual + attention) + exchange - saved.late,
    )


def constant_transients(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[tuple[int, int], ...]:
    """Moments of one layer's backward beside something that does not grow with the tokens, as (gradients of activations
    and of merged stacks, a matrix): a stack of experts' gradient, DoRA's largest matrix, the MLP's last matrix
    dequantized.

    Apart from `backward_transient`, so that each moment is a straight line in the micro-batch.
    """
    residual = SIZE_BYTES[context.dtypes.residual] * context.hidden
    mlp, at_matrix = _mlp_moments(layer, context, saved)
    stack, found = stack_temporary(layer, context), []
    if context.stacks:
        found.append((context.tokens * (residual + mlp) - saved.behind + stack, 0))
    if context.setup.adapter == "dora":
        found.append((context.tokens * residual, magnitude_bytes(layer, context)))
    if context.setup.expert_degree > 1:
        found += dispatched_moments(layer, context, saved)
    if context.setup.quantized:
        lasts = [one for one in layer.linears if one.role == "down" and not one.is_expert]
        copy = max([dequantized_bytes(one, context.setup, context.dtypes.residual) for one in lasts or layer.linears])
        found.append((context.tokens * (residual + at_matrix) - saved.behind + stack, copy))
    return tuple(found)


def forward_temporary(layer: LayerSpec, context: LayerContext) -> int:
    """Temporaries of one layer's forward at their largest: the MLP's tensors before autograd keeps or drops them.

    With checkpointing nothing of the layer is kept, so these are all that the forward adds.
    """
    dtypes = context.dtypes
    size = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
    mlp = 3 * size * mlp_width(layer)
    scores = exchange = 0
    if layer.attention is not None:
        exchange = exchanged_bytes(layer.attention, context)[0]
        held = score_bytes(layer.attention, context, dtypes.linear_out(dtypes.residual))
        scores = held.forward * layer.attention.num_heads * context.row_tokens
        if scores:  # beside queries, keys and values and what they are made of
            width = layer.attention.num_heads * (2 * layer.attention.head_dim + layer.attention.value_head_dim)
            scores += size * (width + context.hidden)
    return max(exchange, context.tokens * max(mlp, scores))


def magnitude_bytes(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes of DoRA's largest norm of a matrix: the product of its two thin matrices by way of an identity, that scaled
    and added to the matrix, in the type that the adapter is handed.

    Source: peft 0.21 `tuners/lora/dora.py` get_lora_weight, get_weight_norm.
    """
    found = []
    for one in layer.linears:
        if one.name in context.adapted:
            handed = SIZE_BYTES[handed_on(context.dtypes, input_dtype(one, layer, context))]
            multiplied = SIZE_BYTES[context.dtypes.autocast or context.dtypes.adapter]
            identity = multiplied * one.in_features**2
            found.append(identity + 4 * handed * one.in_features * one.out_features)
    return max(found, default=0)


def stack_temporary(layer: LayerSpec, context: LayerContext) -> int:
    """The gradient of a stack of experts that peft has merged with its adapter, alive until the adapter's own gradients
    are computed: of the down stack, or of the gate_up stack once the down stack is gone.

    Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `_grouped_mm`'s backward.
    Shapes: [experts, out_features, in_features].
    """
    stacks = {one.role: one.num_weights for one in layer.linears if one.is_stack} if context.stacks else {}
    down = stacks.pop("down", 0)
    return SIZE_BYTES[context.dtypes.table] * max(down, max(stacks.values(), default=0) - down)


def merged_stacks(layer: LayerSpec, context: LayerContext) -> int:
    """Stacks of experts, merged or unpacked, that live through a checkpointed layer's forward, where nothing is kept.

    Source: peft 0.21 ParamWrapper: `parametrize.cached` holds the merged parameter while the module runs; bitsandbytes
    0.50 `nn/parametrize.py` does the same to unpacked ones.
    """
    if not (context.stacks or context.setup.quantize_experts):
        return 0
    size = context.unpacked_bytes if context.setup.quantize_experts else SIZE_BYTES[context.dtypes.table]
    return size * sum(one.num_weights for one in layer.linears if one.is_stack)
