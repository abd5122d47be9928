"""Temporaries inside one layer: what its forward and backward hold beyond what autograd keeps."""

from planner.memory.activations import LayerContext, Saved, score_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.models.spec import LayerSpec


def _mlp_width(layer: LayerSpec) -> int:
    """Intermediate elements per token of the layer's MLP, routed experts counted as often as they are active."""
    if layer.mlp is None:
        return 0
    if layer.mlp.kind == "moe":
        return layer.mlp.num_active_experts * layer.mlp.intermediate_size + layer.mlp.shared_intermediate_size
    return layer.mlp.intermediate_size


def backward_transient(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Gradients of activations alive at once in one layer's backward, beside everything that the layer keeps.

    The MLP's backward holds the gradients of the product, of the activated gate and of the up projection; RMSNorm's
    holds three fp32 tensors of the hidden size; attention's the gradients of q, k, v and, with a kernel that keeps
    tokens x tokens matrices, their fp32 gradient before and after the softmax, when what stands behind the attention is
    gone (`saved.late`). The gradient of the residual is alive all along.

    Shapes: [tokens, hidden] and [tokens, intermediate].
    """
    flow = context.flow
    residual = SIZE_BYTES[flow.residual] * context.hidden
    size = SIZE_BYTES[flow.linear_out(flow.residual)]
    mlp = (3 if layer.mlp is not None and layer.mlp.kind != "plain" else 2) * size * _mlp_width(layer)
    norm = 3 * 4 * context.hidden
    attention = 0
    if layer.attention is not None:
        spec = layer.attention
        width = spec.num_heads * (spec.head_dim + spec.value_head_dim)
        attention = size * 2 * width
        qkv = flow.linear_out(flow.residual)
        attention += score_bytes(spec, context, qkv).backward * spec.num_heads * context.row_tokens
    return max(context.tokens * (residual + max(mlp, norm)), context.tokens * (residual + attention) - saved.late)


def forward_transient(layer: LayerSpec, context: LayerContext) -> int:
    """Temporaries of one layer's forward at their largest: the MLP's tensors before autograd keeps or drops them.

    With checkpointing nothing of the layer is kept, so these are all that the forward adds.
    """
    flow = context.flow
    size = SIZE_BYTES[flow.linear_out(flow.residual)]
    mlp = 3 * size * _mlp_width(layer)
    scores = 0
    if layer.attention is not None:
        parts = score_bytes(layer.attention, context, flow.linear_out(flow.residual)).forward
        scores = parts * layer.attention.num_heads * context.row_tokens
    return context.tokens * max(mlp, scores)


def stack_transient(layer: LayerSpec, context: LayerContext) -> int:
    """The gradient of a stack of experts that peft has merged with its adapter, alive until the adapter's own gradients
    are computed: of the down stack, or of the gate_up stack once the down stack is gone.

    Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `_grouped_mm`'s backward.
    Shapes: [experts, out_features, in_features].
    """
    if not context.stacks:
        return 0
    size = SIZE_BYTES[context.flow.table]
    stacks = {one.role: one.num_weights for one in layer.linears if one.module == "parameter" and one.num > 1}
    if not stacks:
        return 0
    down = stacks.pop("down", 0)
    return size * max(down, max(stacks.values(), default=0) - down)


def merged_stacks(layer: LayerSpec, context: LayerContext) -> int:
    """Merged stacks of experts that live through a checkpointed layer's forward, where nothing is kept.

    Source: peft 0.21 ParamWrapper: `parametrize.cached` holds the merged parameter while the module runs.
    """
    if not context.stacks:
        return 0
    size = SIZE_BYTES[context.flow.table]
    return size * sum(one.num_weights for one in layer.linears if one.module == "parameter" and one.num > 1)
