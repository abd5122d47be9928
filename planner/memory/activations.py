"""Activations: what autograd keeps of one layer for its backward, term by term, as the real modules do it.

Every function returns bytes for `tokens` tokens of one layer (a micro-batch of sequences of `seq_len` tokens). They
follow the data types of `Flow`; one walk over a layer's modules, no closed-form averages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.kernels import Kernel, masked
from planner.memory.adapter_kinds import kept_by_matrix
from planner.memory.dtypes import SIZE_BYTES, Flow, promote
from planner.memory.linear_attention import linear_attention_saved
from planner.memory.scores import ScoreBytes, eager_scores, math_scores
from planner.memory.trained import of_tokens
from planner.memory.traits import Traits
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """What one layer's activation terms need to know: the setup's types, which matrices are adapted, the kernel.

    `stacks`: peft adapts whole stacks of experts (`ParamWrapper`), which materialises the merged stack.
    `fused`: what is computed by kernels of its own (`planner.choices.kernels.parts_of`).
    """

    setup: TrainSetup
    flow: Flow
    adapted: frozenset[str]
    kernel: Kernel
    tokens: int
    hidden: int
    traits: Traits
    stacks: bool = False
    fused: frozenset[str] = frozenset()

    @property
    def row_tokens(self) -> int:
        """Keys of one query: the sequence, or the whole micro-batch where packing flattens it into one row."""
        setup = self.setup
        return self.tokens if setup.packing else setup.seq_len_tokens + setup.virtual_tokens

    @property
    def trained(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.setup.method == "full"

    @property
    def tunes_norms(self) -> bool:
        """Whether the adapter is copies of the norms."""
        return self.setup.adapter == "ln-tuning"


@dataclass(slots=True)
class Saved:
    """Bytes kept for the backward by part.

    `pinned` is kept even where the layer is checkpointed: bitsandbytes' int8 multiplication stores its input on the
    autograd context itself, past the hooks of non-reentrant checkpointing.
    """

    norm: int = 0
    attention: int = 0
    scores: int = 0
    mlp: int = 0
    adapters: int = 0
    pinned: int = 0
    pinned_again: int = 0
    late: int = 0
    """Of all these, what stands behind the attention: gone when the attention's own backward begins."""
    down: int = 0
    """Of all these, what the MLP's last matrix and its adapter keep of their input: gone when the activation's own
    backward begins."""

    @property
    def total(self) -> int:
        """All parts, what two operators keep counted once."""
        return self.norm + self.attention + self.scores + self.mlp + self.adapters + self.pinned - self.pinned_again


def norm_saved(norm: NormSpec, context: LayerContext, input_dtype: str) -> int:
    """What one norm keeps: the fp32 input and the inverse deviation per row; RMSNorm with a trained weight also the
    normalised rows.

    RMSNorm computes in fp32: a 16-bit input is copied up, an fp32 input is the residual itself (kept all the same,
    because each residual sum is a new tensor). LayerNorm keeps its input in the input's type (fp32 under autocast).
    Cohere's, composed of single operations, keeps two centred fp32 tensors. Liger's and Unsloth's RMSNorm keep their
    input as it comes and the inverse deviation.

    Source: transformers 5.23 `LlamaRMSNorm`, `Gemma2RMSNorm`, `OlmoLayerNorm`, `CohereLayerNorm`; PyTorch
    `native_layer_norm`; autocast's fp32 list; liger-kernel 0.8.5 `ops/rms_norm.py` LigerRMSNormFunction.
    Shapes: [tokens * rows_per_token, size].
    """
    rows = context.tokens * norm.rows_per_token
    elements = rows * norm.size
    style = context.traits.norm
    tuned = context.tunes_norms and of_tokens(norm)
    trained = norm.weight and (context.trained or tuned)
    if norm_fused(norm, context):
        return SIZE_BYTES[input_dtype] * elements + 4 * rows
    if norm.kind == "rms":
        kept = 4 * elements + 4 * rows
        if context.traits.position_bias and input_dtype != "fp32":
            kept += SIZE_BYTES[input_dtype] * elements  # T5 scales the 16-bit rows themselves
        if trained:
            kept += (4 if style == "rms-fp32" else SIZE_BYTES[input_dtype]) * elements
        return kept
    if style == "layer-composed":
        return 8 * elements + 4 * rows + (4 * elements if trained else 0)
    dtype = "fp32" if context.flow.autocast or style == "layer-cast-back" else input_dtype
    return SIZE_BYTES[dtype] * elements + 8 * rows


def norm_fused(norm: NormSpec, context: LayerContext) -> bool:
    """Whether a kernel of its own computes the norm."""
    of_heads = norm.rows_per_token > 1 or norm.name.rpartition(".")[2] in ("q_norm", "k_norm")  # OLMo's span all heads
    return norm.kind == "rms" and ("head-norm" if of_heads else "norm") in context.fused


def norm_output_dtype(norm: NormSpec, context: LayerContext, input_dtype: str) -> str:
    """RMSNorm multiplies its weight with rows cast back to the input's type; LayerNorm is fp32 under autocast, but
    where the class casts back itself."""
    style = context.traits.norm
    if norm_fused(norm, context):
        return input_dtype
    if norm.kind == "rms":
        table = context.flow.adapter if context.tunes_norms and of_tokens(norm) else context.flow.table
        return input_dtype if style == "rms-fp32" else promote(table, input_dtype)
    return "fp32" if context.flow.autocast and style == "layer" else input_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What matrices that share one input keep of it, in bytes.

    `pinned` is kept even under checkpointing; `pinned_again` is the part of it that something else keeps as well.
    """

    base: int = 0
    adapters: int = 0
    pinned: int = 0
    pinned_again: int = 0


def inputs_saved(
    linears: Sequence[LinearSpec],
    context: LayerContext,
    input_dtype: str,
    *,
    kept_elsewhere: bool = False,
    pinned_elsewhere: bool = False,
) -> Inputs:
    """What matrices that share one input keep of it; `kept_elsewhere`: another operator keeps that input already,
    `pinned_elsewhere`: other int8 matrices do (a parallel block's attention and MLP share theirs).

    A trained weight keeps its input; several share it when no cast is needed, but autocast casts once per matrix. A
    frozen matrix keeps nothing, but for int8, which keeps its input. peft casts the input to the adapter's type for
    each adapted matrix, autocast casts it back, and every such copy is kept; with dropout a mask and a dropped copy
    too. Each adapter also keeps its rank-sized inner output. A fused LoRA function keeps its input as it comes.

    Source: peft 0.21 `tuners/lora/layer.py` and `lora/bnb.py`; bitsandbytes 0.50 `MatMul8bitLt`; PyTorch autocast;
    Axolotl `kernels/lora.py` and Unsloth `kernels/fast_lora.py` (LoRA_QKV, LoRA_W, LoRA_MLP).
    Measured: docs/accuracy/formula-vs-dry-run.md.
    """
    if not linears:
        return Inputs()
    flow, setup = context.flow, context.setup
    elements = linears[0].in_features * context.tokens
    if "lora" in context.fused and any(linear.name in context.adapted for linear in linears):
        return Inputs(adapters=0 if kept_elsewhere else SIZE_BYTES[input_dtype] * elements)
    base = pinned = 0
    if "inputs" in context.fused and linears[0].role != "o":  # the compiler makes them anew
        base = 0
    elif context.trained:
        if flow.autocast and input_dtype != flow.autocast:
            base = sum(SIZE_BYTES[flow.autocast] * elements * linear.num_active for linear in linears)
        elif not kept_elsewhere:
            base = SIZE_BYTES[input_dtype] * elements * max(linear.num_active for linear in linears)
    elif setup.quantization == "int8" and linears[0].quantizes and not pinned_elsewhere:
        pinned = SIZE_BYTES[input_dtype] * elements
    adapted = [linear for linear in linears if linear.name in context.adapted]
    if not adapted:
        return Inputs(base=base, pinned=pinned, pinned_again=pinned if kept_elsewhere else 0)
    constant = 0
    if setup.adapter != "lora" and not setup.kind.like_lora:
        kept = [kept_by_matrix(one, setup, flow, input_dtype) for one in adapted]
        constant = sum(one.constant + context.tokens * one.per_token for one in kept)
        if not kept[0].input_copy:
            return Inputs(base=base, adapters=constant, pinned=pinned, pinned_again=pinned if kept_elsewhere else 0)
    shared, copy_dtype = _adapter_input(flow, input_dtype)
    if setup.adapter == "oft":  # also on a quantized base through the type of its rotation
        shared = flow.adapter == input_dtype and flow.autocast in (None, input_dtype)
    size = SIZE_BYTES[copy_dtype]
    if setup.lora_dropout > 0:
        # CUDA's fused dropout keeps a mask of one byte; the dropped copy is kept in the type it is multiplied in
        extra = len(adapted) * (1 + size) * elements
    elif shared:
        extra = 0 if pinned or kept_elsewhere else size * elements
    else:
        extra = len(adapted) * size * elements
    inner = constant or SIZE_BYTES[flow.autocast or flow.adapter] * setup.lora_rank * context.tokens * len(adapted)
    return Inputs(base=base, adapters=extra + inner, pinned=pinned, pinned_again=pinned if kept_elsewhere else 0)


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
    size = SIZE_BYTES[context.flow.autocast or qkv_dtype]
    if context.kernel == "linear":
        return linear_attention_saved(attention, context.flow, tokens), 0
    scores = tokens * context.row_tokens
    if context.kernel in ("flash", "efficient"):
        # a single head of keys is repeated by a view
        wide = attention.num_kv_heads not in (1, attention.num_heads) and (
            context.kernel == "efficient" or context.traits.expands_kv
        )
        kept = query_width + value_width + (query_width + value_width if wide else kv_width)
        own = context.kernel == "efficient" and not context.traits.position_bias
        handed = own and masked(context.setup, attention, packs_apart=context.traits.packs_apart)
        mask = size * scores if handed else 0
        return size * tokens * kept + 4 * tokens * attention.num_heads, mask
    scores *= attention.num_heads
    held = score_bytes(attention, context, qkv_dtype)
    if context.kernel == "eager":
        wide_size = 4 if context.traits.fp32_scores and not context.flow.autocast else size
        return tokens * (2 * wide_size * query_width + size * value_width), scores * held.kept
    return 4 * tokens * (2 * query_width + value_width), scores * held.kept


def attention_held(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes that a fused attention gives: its output, and one fp32 number per head and token; 0 for other kernels,
    which selective checkpointing does not know.

    Source: TRL 1.16 `models/selective_activation_checkpointing.py`; torch 2.13 `create_selective_checkpoint_contexts`.
    """
    found = [one for one in (layer.attention, layer.cross_attention) if one is not None]
    if context.kernel not in ("flash", "efficient"):
        return 0
    size = SIZE_BYTES[context.flow.attention_input]
    return sum(context.tokens * one.num_heads * (size * one.value_head_dim + 4) for one in found)


def score_bytes(attention: AttentionSpec, context: LayerContext, qkv_dtype: str) -> ScoreBytes:
    """Bytes per score of the layer's kernel; none for a kernel that keeps no tokens x tokens matrix."""
    if context.kernel == "eager":
        return eager_scores(context.flow, context.traits, qkv_dtype, softcap=attention.softcap, sinks=attention.sinks)
    if context.kernel == "math":
        return math_scores(context.traits)
    return ScoreBytes(kept=0, forward=0, backward=0)


ACTIVATION_COPIES = {"gelu_new": 4, "gelu_fast": 7, "relu2": 2, "sparse-gelu_pytorch_tanh": 2}
"""How many tensors of the intermediate size an activation function keeps for its backward: those composed of single
operations ("gelu_fast" cubes by products, each of which keeps its factors; Gemma 3n's sparse one cuts at a deviation
first, which keeps its input); every other is one kernel that keeps its
input (relu: its output).
Source: transformers 5.23 `activations.py`."""


def activation_bytes(activation: str, flow: Flow, dtype: str) -> int:
    """Bytes per element that an activation function keeps, given its input's type.

    A power is on autocast's fp32 list: the composed GELU then keeps a 16-bit product, an fp32 copy of its input, the
    fp32 tanh and the fp32 sum.
    """
    copies = ACTIVATION_COPIES.get(activation, 1)
    if copies == 4 and flow.autocast:
        return SIZE_BYTES[dtype] + 12
    return copies * SIZE_BYTES[dtype]


def activation_dtype(activation: str, flow: Flow, dtype: str) -> str:
    """Type of the activated tensor: the composed GELU comes out of autocast in fp32."""
    return "fp32" if flow.autocast and ACTIVATION_COPIES.get(activation, 1) == 4 else dtype


def gated_fused(mlp: MlpSpec | None, context: LayerContext) -> bool:
    """Whether one kernel computes the activation of a dense gated MLP and its product."""
    return mlp is not None and mlp.kind == "gated" and "gated" in context.fused


def lora_mlp(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether a dense gated MLP runs as one fused LoRA function: all three of its matrices carry adapters."""
    roles = {one.role for one in layer.linears if one.name in context.adapted}
    return "lora" in context.fused and gated_fused(layer.mlp, context) and {"gate", "up", "down"} <= roles


def mlp_saved(mlp: MlpSpec, down: Sequence[LinearSpec], context: LayerContext, input_dtype: str) -> int:
    """What a dense MLP keeps between its projections.

    Gated: the gate (for the activation's backward), the activated gate and the up projection (for their product).
    Plain: the first projection. A kernel for both keeps gate and up, and recomputes the rest.

    Source: transformers 5.23 `LlamaMLP`, `GPT2MLP`; Shazeer 2020, https://arxiv.org/abs/2002.05202; liger-kernel 0.8.5
    `ops/swiglu.py`, `ops/geglu.py`.
    """
    flow = context.flow
    dtype = flow.linear_out(input_dtype)
    elements = context.tokens * (down[0].in_features if down else mlp.intermediate_size)
    if gated_fused(mlp, context):
        return 2 * SIZE_BYTES[dtype] * elements
    kept = activation_bytes(mlp.activation, flow, dtype)
    if mlp.kind != "plain":
        kept += SIZE_BYTES[dtype] + SIZE_BYTES[activation_dtype(mlp.activation, flow, dtype)]
    return kept * elements


def moe_saved(mlp: MlpSpec, layer: LayerSpec, context: LayerContext, input_dtype: str) -> int:
    """What routed experts keep: for each of the top-k experts of a token both projections, the activated gate and the
    down projection's output (for its weighting); where experts are trained also the gathered input and the product.

    peft's `ParamWrapper` keeps the merged stack of expert weights of the layer, and the graph an unpacked 4-bit one.
    Grouped multiplication follows the
    weights' type; Llama 4's batched one is on autocast's list, so its results are 16-bit, and the graph keeps 16-bit
    copies of a frozen fp32 stack (the k-bit cast makes bare parameters fp32) or of a merged one.

    Source: transformers 5.23 `integrations/moe.py` (grouped matrices), `MixtralSparseMoeBlock` and `Llama4TextExperts`;
    peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `autocast_mode.cpp` (`bmm`).
    """
    flow, traits = context.flow, context.traits
    hidden = next(linear.in_features for linear in layer.linears if linear.role in ("gate_up", "up", "gate"))
    size = SIZE_BYTES[flow.table]
    routed = context.tokens * (mlp.num_experts if traits.dense_experts else mlp.num_active_experts)
    copies = 1 + (2 if mlp.gated_experts else 0) + traits.extra_expert_copies
    multiplied = SIZE_BYTES[flow.autocast] if traits.dense_experts and flow.autocast else size
    kept = routed * (copies * mlp.intermediate_size * multiplied + hidden * size)
    if context.trained or context.stacks:
        kept += routed * (mlp.intermediate_size + hidden) * multiplied
    if context.setup.quantize_experts:
        kept += size * sum(linear.num_weights for linear in layer.linears if linear.is_stack)
    elif context.stacks or (multiplied != size and not context.trained):
        kept += multiplied * sum(linear.num_weights for linear in layer.linears if linear.module == "parameter")
    tokens = context.tokens
    return kept + 40 * routed + 4 * tokens * mlp.num_experts


def layer_saved(layer: LayerSpec, context: LayerContext) -> Saved:
    """Everything one layer keeps for its backward, by part."""
    flow, saved = context.flow, Saved()
    residual = flow.residual
    block_norms = [norm for norm in layer.norms if norm.rows_per_token == 1]
    head_norms = [norm for norm in layer.norms if norm.rows_per_token > 1]
    saved.norm += sum(norm_saved(norm, context, residual) for norm in block_norms)
    if layer.parallel_residual and len(block_norms) > 1 and not (flow.autocast and residual != "fp32"):
        # both norms of a parallel block keep the same residual
        saved.norm -= SIZE_BYTES[residual] * context.tokens * context.hidden
    normed = norm_output_dtype(block_norms[0], context, residual) if block_norms else residual
    if context.traits.position_bias and residual == "fp16":
        # T5 clamps each sum in fp16; the clamp keeps what it was given
        saved.norm += (2 + int(layer.cross_attention is not None)) * 2 * context.tokens * context.hidden
    if context.traits.residual_dropout:
        # masks of one byte after attention(s) and after the MLP
        saved.norm += (2 + int(layer.cross_attention is not None)) * context.tokens * context.hidden
    qkv = flow.linear_out(normed)
    saved.norm += sum(norm_saved(norm, context, qkv) for norm in head_norms)
    by_role: dict[str, list[LinearSpec]] = {}
    for linear in layer.linears:
        by_role.setdefault(linear.role, []).append(linear)
    projections = [one for role in ("q", "k", "v", "qkv", "mixer", "other") for one in by_role.get(role, ())]
    for group in _by_input(projections):
        _add(saved, "attention", inputs_saved(group, context, normed))
    for attention in (layer.attention, layer.cross_attention):
        if attention is not None:
            kept, scores = attention_saved(attention, context, qkv)
            saved.attention += kept
            saved.scores += scores
    saved.attention += _pinned_by_values(layer, context, qkv)
    attended = flow.autocast or qkv
    # rotating a part of each head concatenates q in a layout that flash's output takes over: one more copy is made
    copied = layer.attention is not None and layer.attention.rotary_fraction < 1.0 and context.kernel == "flash"
    fused = context.kernel in ("flash", "efficient") and not copied
    for output in by_role.get("o", ()):
        _add(saved, "attention", inputs_saved([output], context, attended, kept_elsewhere=fused))
    before = saved.total
    late_norms = block_norms[1:] if not layer.parallel_residual else []
    saved.late = sum(norm_saved(norm, context, residual) for norm in late_norms)
    if layer.mlp is None:
        return saved
    dense = [one for role in ("gate", "up", "gate_up") for one in by_role.get(role, ()) if not one.is_expert]
    down = [one for one in by_role.get("down", ()) if not one.is_expert]
    if dense:
        parallel = layer.parallel_residual
        shared = inputs_saved(
            dense,
            context,
            normed,
            kept_elsewhere=parallel,
            pinned_elsewhere=parallel and len(block_norms) == 1,
        )
        _add(saved, "mlp", shared)
        saved.mlp += mlp_saved(layer.mlp, down, context, normed)
        activated = activation_dtype(layer.mlp.activation, flow, flow.linear_out(normed))
        inner = context.traits.inner_dropout and down
        if inner:
            saved.mlp += context.tokens * down[0].in_features  # the mask; the down projection sees the dropped copy
        relu = layer.mlp.activation == "relu" and not inner
        again = relu or lora_mlp(layer, context)  # the fused function computes the product anew
        of_down = inputs_saved(down, context, activated, kept_elsewhere=again)
        _add(saved, "mlp", of_down)
        saved.down = of_down.base + of_down.adapters
    if layer.mlp.kind == "moe":
        saved.mlp += moe_saved(layer.mlp, layer, context, normed)
        _experts_as_modules(saved, layer, context)
    saved.late += saved.total - before
    return saved


def _experts_as_modules(saved: Saved, layer: LayerSpec, context: LayerContext) -> None:
    """What experts that are modules of their own keep beside `moe_saved`: the rows that each adds to the result, and
    with adapters the rows gathered for each expert."""
    experts = [one for one in layer.linears if one.is_expert and not one.is_stack]
    if not experts:
        return
    saved.mlp += SIZE_BYTES[context.flow.table] * context.tokens * experts[0].num_active * context.hidden
    if context.trained:
        return
    routed = replace(context, tokens=context.tokens * experts[0].num_active)
    dtype = context.flow.residual if context.flow.autocast is None else context.flow.linear_out(context.flow.residual)
    for group in _by_input(experts):
        one_of_each = [replace(one, num=1, num_active=1) for one in group]
        _add(saved, "mlp", inputs_saved(one_of_each, routed, dtype))


def _pinned_by_values(layer: LayerSpec, context: LayerContext, qkv_dtype: str) -> int:
    """Queries and keys before their rotation, where values are a view into one fused projection: it is kept whole.

    Not where the values are copied on the way to the kernel: cast by autocast, or repeated to all heads (a single head
    is repeated by a view).
    """
    spec = layer.attention
    fused = [one for one in layer.linears if one.role == "qkv"]
    if spec is None or not fused or not spec.rotary or SIZE_BYTES[context.flow.autocast or qkv_dtype] == 4:
        return 0
    repeated = spec.num_kv_heads not in (1, spec.num_heads) and (context.kernel != "flash" or context.traits.expands_kv)
    if SIZE_BYTES[qkv_dtype] == 4 or repeated or context.kernel in ("math", "linear"):
        return 0
    return SIZE_BYTES[qkv_dtype] * context.tokens * (fused[0].out_features - spec.num_kv_heads * spec.value_head_dim)


def _add(saved: Saved, part: str, inputs: Inputs) -> None:
    setattr(saved, part, getattr(saved, part) + inputs.base)
    saved.adapters += inputs.adapters
    saved.pinned += inputs.pinned
    saved.pinned_again += inputs.pinned_again


def _by_input(linears: Sequence[LinearSpec]) -> list[list[LinearSpec]]:
    """Matrices grouped by the width of their input: those of one width share it."""
    groups: dict[int, list[LinearSpec]] = {}
    for linear in linears:
        groups.setdefault(linear.in_features, []).append(linear)
    return list(groups.values())
