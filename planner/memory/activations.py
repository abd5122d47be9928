"""Activations: what autograd keeps of one layer for its backward, term by term, as the real modules do it.

Every function returns bytes for `tokens` tokens of one layer (a micro-batch of sequences of `seq_len` tokens). They
follow the data types of `Flow`; one walk over a layer's modules, no closed-form averages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.kernels import Kernel
from planner.memory.dtypes import SIZE_BYTES, Flow, promote
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """What one layer's activation terms need to know: the setup's types, which matrices are adapted, the kernel."""

    setup: TrainSetup
    flow: Flow
    adapted: frozenset[str]
    kernel: Kernel
    tokens: int

    @property
    def trained(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.setup.method == "full"


@dataclass(slots=True)
class Saved:
    """Bytes kept for the backward by part, and the type of what flows on."""

    norm: int = 0
    attention: int = 0
    scores: int = 0
    mlp: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        """All parts."""
        return self.norm + self.attention + self.scores + self.mlp + self.adapters


def norm_saved(norm: NormSpec, context: LayerContext, input_dtype: str) -> int:
    """What one norm keeps: the fp32 input and the inverse deviation per row; RMSNorm with a trained weight also the
    normalised rows.

    RMSNorm computes in fp32: a 16-bit input is copied up, an fp32 input is the residual itself (kept all the same,
    because each residual sum is a new tensor). LayerNorm keeps its input in the input's type (fp32 under autocast).

    Source: transformers 5.23 `LlamaRMSNorm`; PyTorch `native_layer_norm`; autocast's fp32 list.
    Shapes: [tokens * rows_per_token, size].
    """
    rows = context.tokens * norm.rows_per_token
    elements = rows * norm.size
    if norm.kind == "rms":
        kept = 4 * elements + 4 * rows
        if norm.weight and context.trained:
            kept += SIZE_BYTES[input_dtype] * elements
        return kept
    dtype = "fp32" if context.flow.autocast else input_dtype
    return SIZE_BYTES[dtype] * elements + 8 * rows


def norm_output_dtype(norm: NormSpec, context: LayerContext, input_dtype: str) -> str:
    """RMSNorm multiplies its weight with rows cast back to the input's type; LayerNorm is fp32 under autocast."""
    if norm.kind == "rms":
        return promote(context.flow.table, input_dtype)
    return "fp32" if context.flow.autocast else input_dtype


def inputs_saved(linears: Sequence[LinearSpec], context: LayerContext, input_dtype: str) -> tuple[int, int]:
    """What matrices that share one input keep of it: (by the base weights, by the adapters), in bytes.

    A trained weight keeps its input; several share it when no cast is needed, but autocast casts once per matrix. A
    frozen matrix keeps nothing (int8 keeps its input all the same). peft casts the input to the adapter's type for
    each adapted matrix, autocast casts it back, and every such copy is kept; with dropout a mask and a dropped copy too.
    Each adapter also keeps its rank-sized inner output.

    Source: peft 0.21 `tuners/lora/layer.py` and `lora/bnb.py`; bitsandbytes 0.50 `MatMul8bitLt`; PyTorch autocast.
    Measured: equals autograd's saved tensors for Llama-3.1-8B, full and LoRA (docs/memory-model.md).
    """
    if not linears:
        return 0, 0
    flow, setup = context.flow, context.setup
    width = linears[0].in_features
    active = [linear.num_active for linear in linears]
    base = 0
    if context.trained:
        if flow.autocast and input_dtype != flow.autocast:
            base = sum(SIZE_BYTES[flow.autocast] * width * context.tokens * num for num in active)
        else:
            base = SIZE_BYTES[input_dtype] * width * context.tokens * max(active)
    elif setup.quantization == "int8" and linears[0].module != "parameter":
        base = SIZE_BYTES[flow.compute] * width * context.tokens
    adapted = [linear for linear in linears if linear.name in context.adapted]
    if not adapted:
        return base, 0
    shared, copy_dtype = _adapter_input(flow, input_dtype)
    size = SIZE_BYTES[copy_dtype]
    copies = 1 if shared else len(adapted)
    extra = 0 if shared and base and copy_dtype == input_dtype else copies * size * width * context.tokens
    if setup.lora_dropout > 0:
        dropped = SIZE_BYTES[flow.adapter if not flow.autocast or not flow.quantized else input_dtype]
        extra = len(adapted) * (1 + dropped + (size if dropped != size else 0)) * width * context.tokens
    inner = SIZE_BYTES[flow.autocast or flow.adapter] * setup.lora_rank * context.tokens * len(adapted)
    return base, extra + inner


def _adapter_input(flow: Flow, input_dtype: str) -> tuple[bool, str]:
    """Whether adapted matrices share the kept input, and the type it is kept in."""
    if flow.autocast:
        direct = input_dtype == flow.autocast and (flow.quantized or flow.adapter == input_dtype)
        return direct, flow.autocast
    return flow.adapter == input_dtype, flow.adapter


def attention_saved(attention: AttentionSpec, context: LayerContext, qkv_dtype: str) -> tuple[int, int]:
    """What the attention itself keeps: (queries, keys, values, output, log-sum-exp), (tokens x tokens matrices).

    Fused kernels keep q, k, v, the output and one fp32 number per head and token. "eager" keeps the fp32 softmax and
    its 16-bit copy, and keys and values repeated to all heads; "math" computes in fp32 and keeps the softmax in fp32
    beside fp32 copies of q, k, v.

    Source: Dao 2023, FlashAttention-2, section 3.1, https://arxiv.org/abs/2307.08691; transformers 5.23
    `eager_attention_forward`; PyTorch `_scaled_dot_product_attention_math`.
    Shapes: scores [seqs, heads, tokens, keys].
    """
    tokens = context.tokens
    query_width = attention.num_heads * attention.head_dim
    value_width = attention.num_heads * attention.value_head_dim
    kv_width = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    dtype = context.flow.autocast or qkv_dtype
    size = SIZE_BYTES[dtype]
    if context.kernel == "linear":
        return size * tokens * (3 * query_width + 2 * value_width), 0
    output = size * tokens * value_width
    if context.kernel in ("flash", "efficient"):
        repeated = kv_width
        if context.kernel == "efficient" and attention.num_kv_heads != attention.num_heads:
            repeated = query_width + value_width
        return size * tokens * (query_width + repeated) + output + 4 * tokens * attention.num_heads, 0
    scores = tokens * attention.num_heads * context.setup.seq_len_tokens
    if context.kernel == "eager":
        return size * tokens * (2 * query_width + value_width) + output, scores * (4 + (size if size < 4 else 0))
    return 4 * tokens * (2 * query_width + value_width) + output, 4 * scores


ACTIVATION_COPIES = {"silu": 1, "gelu": 1, "gelu_pytorch_tanh": 1, "gelu_new": 4, "gelu_fast": 4, "relu": 1, "relu2": 2}
"""How many tensors of the intermediate size an activation function keeps for its backward (fused kernels: its input).
"gelu_new" is composed of single operations. Source: transformers 5.23 `activations.py`."""


def mlp_saved(
    mlp: MlpSpec,
    up: Sequence[LinearSpec],
    down: Sequence[LinearSpec],
    context: LayerContext,
    input_dtype: str,
) -> tuple[int, int]:
    """What a dense MLP keeps beside its input: (base, adapters).

    Gated: the gate (for the activation's backward), the activated gate and the up projection (for their product), and
    the product where `down` keeps its input. Plain: the first projection, and the activated value likewise.

    Source: transformers 5.23 `LlamaMLP`, `GPT2MLP`; Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    dtype = context.flow.linear_out(input_dtype)
    elements = context.tokens * (down[0].in_features if down else mlp.intermediate_size)
    copies = ACTIVATION_COPIES.get(mlp.activation, 1)
    kept = (copies + (2 if mlp.kind == "gated" else 0)) * SIZE_BYTES[dtype] * elements
    base, extra = inputs_saved(down, context, dtype)
    return kept + base, extra


def moe_saved(mlp: MlpSpec, layer: LayerSpec, context: LayerContext, input_dtype: str) -> int:
    """What routed experts keep: for each of the top-k experts of a token its gathered input, both projections, the
    product and the weighted output; plus the router's fp32 softmax.

    Source: transformers 5.23 `integrations/moe.py` (grouped matrices) and `MixtralSparseMoeBlock`.
    """
    tokens = context.tokens
    hidden = next(linear.in_features for linear in layer.linears if linear.role in ("gate_up", "up", "gate"))
    size = SIZE_BYTES[context.flow.linear_out(input_dtype) if not context.flow.quantized else context.flow.compute]
    routed = tokens * mlp.num_active_experts
    copies = ACTIVATION_COPIES.get(mlp.activation, 1) + (3 if mlp.gated_experts else 0)
    kept = routed * (copies * mlp.intermediate_size + 2 * hidden) * size
    if context.trained:
        kept += routed * (mlp.intermediate_size + hidden) * size
    return kept + 8 * tokens * mlp.num_experts


def layer_saved(layer: LayerSpec, context: LayerContext) -> Saved:
    """Everything one layer keeps for its backward, by part."""
    flow, saved = context.flow, Saved()
    residual = flow.residual
    block_norms = [norm for norm in layer.norms if norm.rows_per_token == 1]
    head_norms = [norm for norm in layer.norms if norm.rows_per_token > 1]
    saved.norm += sum(norm_saved(norm, context, residual) for norm in block_norms)
    normed = norm_output_dtype(block_norms[0], context, residual) if block_norms else residual
    qkv = flow.linear_out(normed)
    saved.norm += sum(norm_saved(norm, context, qkv) for norm in head_norms)
    by_role: dict[str, list[LinearSpec]] = {}
    for linear in layer.linears:
        by_role.setdefault(linear.role, []).append(linear)
    projections = [one for role in ("q", "k", "v", "qkv", "mixer", "other") for one in by_role.get(role, ())]
    for group in _by_input(projections):
        base, extra = inputs_saved(group, context, normed)
        saved.attention += base
        saved.adapters += extra
    for attention in (layer.attention, layer.cross_attention):
        if attention is None:
            continue
        kept, scores = attention_saved(attention, context, qkv)
        saved.attention += kept
        saved.scores += scores
    attended = flow.autocast or qkv
    for output in by_role.get("o", ()):
        base, extra = inputs_saved([output], context, attended)
        saved.attention += 0 if attended == (flow.autocast or attended) and base else base
        saved.adapters += extra
    if layer.mlp is None:
        return saved
    dense = [one for role in ("gate", "up", "gate_up") for one in by_role.get(role, ()) if one.module != "parameter"]
    down = [one for one in by_role.get("down", ()) if one.module != "parameter"]
    if dense:
        shared_input = dense if not layer.parallel_residual else dense
        base, extra = inputs_saved(shared_input, context, normed)
        saved.mlp += 0 if layer.parallel_residual and not flow.autocast else base
        saved.adapters += extra
        base, extra = mlp_saved(layer.mlp, dense, down, context, normed)
        saved.mlp += base
        saved.adapters += extra
    if layer.mlp.kind == "moe":
        saved.mlp += moe_saved(layer.mlp, layer, context, normed)
    return saved


def _by_input(linears: Sequence[LinearSpec]) -> list[list[LinearSpec]]:
    """Matrices grouped by the width of their input: those of one width share it."""
    groups: dict[int, list[LinearSpec]] = {}
    for linear in linears:
        groups.setdefault(linear.in_features, []).append(linear)
    return list(groups.values())
