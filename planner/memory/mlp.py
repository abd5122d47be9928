"""What a layer's MLP keeps between its projections: dense, gated or routed to experts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.expert_parallel import dispatch_saved
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.matrix_inputs import by_input, inputs_saved
from planner.models.spec import LayerSpec, LinearSpec, MlpSpec

ACTIVATION_COPIES = {"gelu_new": 4, "gelu_fast": 7, "relu2": 2, "quick_gelu": 2, "sparse-gelu_pytorch_tanh": 2}
"""How many tensors of the intermediate size an activation function keeps for its backward: those composed of single
operations ("gelu_fast" cubes by products, each of which keeps its factors; Gemma 3n's sparse one cuts at a deviation
first, which keeps its input; a quick GELU keeps its input and the sigmoid); every other is one kernel that keeps its
input (relu: its output).
Source: transformers 5.23 `activations.py`."""


def activation_bytes(activation: str, dtypes: DtypePolicy, dtype: str) -> int:
    """Bytes per element that an activation function keeps, given its input's type.

    A power is on autocast's fp32 list: the composed GELU then keeps a 16-bit product, an fp32 copy of its input, the
    fp32 tanh and the fp32 sum.
    """
    copies = ACTIVATION_COPIES.get(activation, 1)
    if copies == 4 and dtypes.autocast:
        return SIZE_BYTES[dtype] + 12
    return copies * SIZE_BYTES[dtype]


def activation_dtype(activation: str, dtypes: DtypePolicy, dtype: str) -> str:
    """Type of the activated tensor: the composed GELU comes out of autocast in fp32."""
    return "fp32" if dtypes.autocast and ACTIVATION_COPIES.get(activation, 1) == 4 else dtype


def gated_fused(mlp: MlpSpec | None, context: LayerContext) -> bool:
    """Whether one kernel computes the activation of a dense gated MLP and its product."""
    return mlp is not None and mlp.kind == "gated" and "gated" in context.fused


def lora_mlp(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether a dense gated MLP runs as one fused LoRA function: all three of its matrices carry adapters."""
    roles = {one.role for one in layer.linears if one.name in context.adapted}
    own = "lora" in context.fused and "inputs" not in context.fused
    return own and gated_fused(layer.mlp, context) and {"gate", "up", "down"} <= roles


def _between_dense(mlp: MlpSpec, down: Sequence[LinearSpec], context: LayerContext, input_dtype: str) -> int:
    """What a dense MLP keeps between its projections.

    Gated: the gate (for the activation's backward), the activated gate and the up projection (for their product).
    Plain: the first projection. A kernel for both keeps gate and up, and recomputes the rest.

    Source: transformers 5.23 `LlamaMLP`, `GPT2MLP`; Shazeer 2020, https://arxiv.org/abs/2002.05202; liger-kernel 0.8.5
    `ops/swiglu.py`, `ops/geglu.py`.
    """
    dtypes = context.dtypes
    dtype = dtypes.linear_out(input_dtype)
    elements = context.tokens * (down[0].in_features if down else mlp.intermediate_size)
    if gated_fused(mlp, context):
        return 2 * SIZE_BYTES[dtype] * elements
    kept = activation_bytes(mlp.activation, dtypes, dtype)
    if mlp.kind != "plain":
        kept += SIZE_BYTES[dtype] + SIZE_BYTES[activation_dtype(mlp.activation, dtypes, dtype)]
    return kept * elements


def _routed_saved(mlp: MlpSpec, layer: LayerSpec, context: LayerContext, input_dtype: str) -> int:
    """What routed experts keep: for each of the top-k experts of a token both projections, the activated gate and the
    down projection's output (for its weighting); where experts are trained also the gathered input and the product.

    peft's `ParamWrapper` keeps the merged stack of expert weights of the layer, and the graph an unpacked 4-bit one.
    Grouped multiplication follows the
    weights' type; Llama 4's batched one is on autocast's list, so its results are 16-bit, and the graph keeps 16-bit
    copies of a frozen fp32 stack (the k-bit cast makes bare parameters fp32) or of a merged one.

    Source: transformers 5.23 `integrations/moe.py` (grouped matrices), `MixtralSparseMoeBlock` and `Llama4TextExperts`;
    peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `autocast_mode.cpp` (`bmm`).
    """
    dtypes, traits = context.dtypes, context.traits
    hidden = next(linear.in_features for linear in layer.linears if linear.role in ("gate_up", "up", "gate"))
    size = SIZE_BYTES[dtypes.table]
    routed = context.tokens * (mlp.num_experts if traits.dense_experts else mlp.num_active_experts)
    copies = 1 + (2 if mlp.gated_experts else 0) + traits.extra_expert_copies
    multiplied = SIZE_BYTES[dtypes.autocast] if traits.dense_experts and dtypes.autocast else size
    kept = routed * (copies * mlp.intermediate_size * multiplied + hidden * size)
    if context.trained or context.stacks:
        kept += routed * (mlp.intermediate_size + hidden) * multiplied
    if context.setup.quantize_experts:
        kept += context.unpacked_bytes * sum(linear.num_weights for linear in layer.linears if linear.is_stack)
    elif context.stacks or (multiplied != size and not context.trained):
        kept += multiplied * sum(linear.num_weights for linear in layer.linears if linear.module == "parameter")
    tokens = context.tokens
    return kept + 40 * routed + 4 * tokens * mlp.num_experts


def _experts_as_modules(saved: Saved, layer: LayerSpec, context: LayerContext) -> None:
    """What experts that are modules of their own keep beside `_routed_saved`: the rows that each adds to the
    result, and with adapters the rows gathered for each expert."""
    experts = [one for one in layer.linears if one.is_expert and not one.is_stack]
    if not experts:
        return
    saved.mlp += SIZE_BYTES[context.dtypes.table] * context.tokens * experts[0].num_active * context.hidden
    if context.trained:
        return
    routed = replace(context, tokens=context.tokens * experts[0].num_active)
    dtype = (
        context.dtypes.residual
        if context.dtypes.autocast is None
        else context.dtypes.linear_out(context.dtypes.residual)
    )
    for group in by_input(experts):
        one_of_each = [replace(one, num=1, num_active=1) for one in group]
        saved.add("mlp", inputs_saved(one_of_each, routed, dtype))


def add_mlp(
    saved: Saved, layer: LayerSpec, by_role: Mapping[str, Sequence[LinearSpec]], context: LayerContext, normed: str
) -> None:
    """Adds what the MLP keeps, whose input has the type `normed`; nothing where the layer has none."""
    if layer.mlp is None:
        return
    dense = [one for role in ("gate", "up", "gate_up") for one in by_role.get(role, ()) if not one.is_expert]
    if dense:
        shares = layer.parallel_residual  # its input with the attention
        one_norm = sum(norm.rows_per_token == 1 for norm in layer.norms) == 1
        shared = inputs_saved(dense, context, normed, kept_elsewhere=shares, pinned_elsewhere=shares and one_norm)
        saved.add("mlp", shared)
        down = [one for one in by_role.get("down", ()) if not one.is_expert]
        saved.mlp += _between_dense(layer.mlp, down, context, normed)
        _add_last(saved, layer, layer.mlp, down, context, normed)
    if layer.mlp.kind == "moe":
        if context.trained and not dense:
            saved.add("mlp", inputs_saved(by_role.get("router", ()), context, normed))
        saved.mlp += _routed_saved(layer.mlp, layer, context, normed) + dispatch_saved(layer, context)
        _experts_as_modules(saved, layer, context)


def _add_last(
    saved: Saved, layer: LayerSpec, mlp: MlpSpec, down: Sequence[LinearSpec], context: LayerContext, normed: str
) -> None:
    """Adds what a dense MLP's last matrix keeps of its input."""
    dtypes = context.dtypes
    again = mlp.activation == "relu" or lora_mlp(layer, context)  # the fused function computes the product anew
    activated = activation_dtype(mlp.activation, dtypes, dtypes.linear_out(normed))
    of_down = inputs_saved(down, context, activated, kept_elsewhere=again)
    saved.add("mlp", of_down)
    saved.down = of_down.base + of_down.adapters + of_down.pinned - of_down.pinned_again
