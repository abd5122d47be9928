"""One layer of each kind: what it keeps for its backward, what comes and goes, and what that makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import Kernel, attention_kernel, gives_mask, masks_packed
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy, promote
from planner.memory.layer_terms import (
    ACTIVATION_COPIES,
    LayerContext,
    Saved,
    ScoreBytes,
    activation_dtype,
    adapts_mlp,
    add_mlp,
    between_dense,
    by_input,
    dispatched_moments,
    eager_scores,
    exchanged_bytes,
    gated_fused,
    handed_on,
    inputs_saved,
    linear_attention_saved,
    lora_mlp,
    math_scores,
    rank_heads,
)
from planner.memory.trained import of_tokens
from planner.memory.workspace import dequantized_bytes
from planner.models.earlier import has_expert_modules, with_one_kernel_gelu
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec
from planner.models.targets import adapts_expert_stacks
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX

# Activations: what autograd keeps of one layer for its backward, term by term, as the real modules do it.


MASK_ALIGNMENT = 16
"""Columns of a mask are padded to a multiple of this for the memory-efficient kernel.

Source: PyTorch `aten/src/ATen/native/transformers/attention.cpp` pad_bias."""


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
        saved = 4 * elements + 4 * rows
        if trained:
            saved += (4 if style == "rms-fp32" else SIZE_BYTES[input_dtype]) * elements
        return saved
    if style == "layer-composed":
        return 8 * elements + 4 * rows + (4 * elements if trained else 0)
    dtype = "fp32" if context.dtypes.autocast or style == "layer-cast-back" else input_dtype
    return SIZE_BYTES[dtype] * elements + 8 * rows


GATED_NORM = "linear_attn.norm"


def norm_fused(norm: NormSpec, context: LayerContext) -> bool:
    """Whether a kernel of its own computes the norm. Liger leaves the gated one of linear attention as it is."""
    if norm.name == GATED_NORM and "inputs" not in context.fused:
        return False
    of_heads = norm.rows_per_token > 1 or norm.name.rpartition(".")[2] in ("q_norm", "k_norm")  # OLMo's span all heads
    return norm.kind == "rms" and ("head-norm" if of_heads else "norm") in context.fused


def post_mlp_norm(layer: LayerSpec) -> NormSpec | None:
    """The norm that takes what the MLP gives, where there is one."""
    return next(
        (norm for norm in layer.norms if norm.name in ("post_feedforward_layernorm", "post_mlp_layernorm")), None
    )


def attention_saved(attention: AttentionSpec, context: LayerContext, qkv_dtype: str) -> tuple[int, int]:
    """What the attention itself keeps: (queries, keys, values, output, log-sum-exp), (tokens x tokens matrices).

    Fused kernels keep q, k, v, the output and one fp32 number per head and token. "eager" keeps the fp32 softmax and
    its 16-bit copy, and keys and values repeated to all heads; "math" computes in fp32 and keeps the softmax in fp32
    beside fp32 copies of q, k, v.

    Source: Dao 2023, FlashAttention-2, section 3.1, https://arxiv.org/abs/2307.08691; transformers 5.23
    `eager_attention_forward`, `flex_attention_forward`; PyTorch `_scaled_dot_product_attention_math`.
    Shapes: scores [seqs, heads, tokens, keys].
    """
    tokens = context.tokens
    keys = context.of_keys if context.looked_at else context.of_length(attention.key_tokens)
    attention = rank_heads(attention, context.setup)
    query_width = attention.num_heads * attention.head_dim
    value_width = attention.num_heads * attention.value_head_dim
    kv_width = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    size = SIZE_BYTES[context.dtypes.autocast or qkv_dtype]
    if context.kernel == "linear":
        package = context.setup.linear_attention == "fla"
        looped = context.setup.before_transformers(5, 17)
        return linear_attention_saved(attention, context.dtypes, tokens, package=package, looped=looped), 0
    scores = tokens * keys.row_tokens
    if context.kernel in ("flash", "efficient"):
        width = query_width + value_width
        saved_elements = tokens * width + keys.key_tokens * (width if repeats_keys(attention, context) else kv_width)
        takes_mask = context.kernel == "efficient" and not context.traits.position_bias
        handed = takes_mask and gives_mask(context.setup, attention, context.kernel, masks_packed=context.masks_packed)
        if handed and attention.adds_mask and SIZE_BYTES[context.dtypes.table] == size:
            handed = keys.row_tokens % MASK_ALIGNMENT > 0
        aligned = -(-keys.row_tokens // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = size * tokens * aligned if handed else 0
        if context.setup.attention == FLEX:
            saved_elements += tokens * value_width  # the output before the sinks' share is taken off, and after it
        return size * saved_elements + 4 * tokens * attention.num_heads, mask
    scores *= attention.num_heads
    per_score = score_bytes(attention, context, qkv_dtype)
    if context.kernel == "eager":
        return size * (tokens * query_width + keys.tokens * (query_width + value_width)), scores * per_score.kept
    return 4 * (tokens * query_width + keys.tokens * (query_width + value_width)), scores * per_score.kept


def repeats_keys(attention: AttentionSpec, context: LayerContext) -> bool:
    """Whether a fused kernel is handed keys and values repeated to all heads; a single head is repeated by a view."""
    repeated = context.kernel != "flash" or context.setup.repeats_keys
    return repeated and attention.num_kv_heads not in (1, attention.num_heads)


def unpads(context: LayerContext) -> bool:
    """Whether flash attention 2 takes the real tokens out of padding, and pads what it gives."""
    return context.kernel == "flash" and context.setup.pads


def selective_checkpoint_bytes(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes that selective checkpointing keeps: what a fused attention gives, its output and one fp32 number per head
    and token (other kernels it does not know); torchtitan's keeps every second product of matrices too.

    Source: TRL 1.16 `models/selective_activation_checkpointing.py`; torch 2.13 `create_selective_checkpoint_contexts`.
    """
    attentions = [attention for attention in (layer.attention, layer.cross_attention) if attention is not None]
    size, kept_bytes = SIZE_BYTES[context.dtypes.attention_input], 0
    if context.kernel in ("flash", "efficient"):
        kept_bytes = sum(
            context.tokens * attention.num_heads * (size * attention.value_head_dim + 4) for attention in attentions
        )
    if context.setup.trainer.selects_products:
        kept_bytes += context.tokens * size * sum(linear.out_features for linear in layer.every_second_product)
    return kept_bytes


def score_bytes(attention: AttentionSpec, context: LayerContext, qkv_dtype: str) -> ScoreBytes:
    """Bytes per score of the layer's kernel; none for a kernel that keeps no tokens x tokens matrix."""
    if context.kernel == "eager":
        special = {"softcap": attention.softcap, "sinks": attention.sinks, "rotary": attention.rotary}
        return eager_scores(context.dtypes, context.traits, qkv_dtype, **special)
    if context.kernel == "math":
        return math_scores(context.traits)
    return ScoreBytes()


def layer_saved(layer: LayerSpec, context: LayerContext) -> Saved:
    """Everything one layer keeps for its backward, by part."""
    dtypes, saved = context.dtypes, Saved()
    by_role: dict[str, list[LinearSpec]] = {}
    for linear in layer.linears:
        by_role.setdefault(linear.role, []).append(linear)
    block_norms = [norm for norm in layer.norms if norm.rows_per_token == 1]
    normed = _normed_dtype(layer, context)
    width = context.stream.tokens * context.hidden  # of the stream itself: norms of whole tokens, dropouts
    saved.norm += sum(norm_saved(norm, context.stream, dtypes.residual) for norm in block_norms)
    if layer.parallel_residual and len(block_norms) > 1 and not (dtypes.autocast and dtypes.residual != "fp32"):
        saved.norm -= SIZE_BYTES[dtypes.residual] * width  # both norms of a parallel block keep the same residual
    if context.traits.residual_dropout:  # masks of one byte after attention(s) and after the MLP
        saved.norm += (2 + int(layer.cross_attention is not None)) * width
    _add_attention(saved, layer, by_role, context, normed)
    before = saved.total
    late_norms = block_norms[1:] if not layer.parallel_residual else []
    saved.late = sum(norm_saved(norm, context.stream, dtypes.residual) for norm in late_norms)
    add_mlp(saved, layer, by_role, context, normed)
    saved.fed = saved.total - before
    saved.late += saved.fed
    if last := post_mlp_norm(layer):
        saved.behind = norm_saved(last, context.stream, context.dtypes.residual)
    return saved


def _normed_dtype(layer: LayerSpec, context: LayerContext) -> str:
    """Type of what the layer's first matrices take: RMSNorm multiplies its weight with rows cast back to the input's
    type; LayerNorm is fp32 under autocast, but where the class casts back itself."""
    norm = next((norm for norm in layer.norms if norm.rows_per_token == 1), None)
    dtypes, style = context.dtypes, context.traits.norm
    residual = dtypes.residual
    if norm is None or norm_fused(norm, context) or (norm.kind == "rms" and style == "rms-fp32"):
        return residual
    if norm.kind == "rms":
        return promote(dtypes.adapter if context.tunes_norms and of_tokens(norm) else dtypes.table, residual)
    return "fp32" if dtypes.autocast and style == "layer" else residual


def qkv_dtype(layer: LayerSpec, context: LayerContext) -> str:
    """Type of queries, keys and values as their matrices give them."""
    return context.dtypes.linear_out(_normed_dtype(layer, context))


def input_dtype(linear: LinearSpec, layer: LayerSpec, context: LayerContext) -> str:
    """Type of what one of the layer's matrices takes."""
    dtypes, made = context.dtypes, qkv_dtype(layer, context)
    if linear.role == "down" and layer.mlp is not None:
        return activation_dtype(layer.mlp.activation, dtypes, made)
    return dtypes.autocast or made if linear.role == "o" else _normed_dtype(layer, context)


def _add_attention(
    saved: Saved,
    layer: LayerSpec,
    by_role: Mapping[str, Sequence[LinearSpec]],
    context: LayerContext,
    normed: str,
) -> None:
    """Adds what the attention keeps, its matrices and the norms of its heads, given the type of its input. Features of
    pictures, which a layer that looks at them is handed, are the encoder's."""
    dtypes = context.dtypes
    qkv = dtypes.linear_out(normed)
    of_keys = context.of_keys
    for norm in layer.norms:
        if norm.rows_per_token > 1:
            saved.norm += norm_saved(norm, of_keys if norm.name.endswith("k_norm") else context, qkv)
    looks = ("k", "v") if layer.is_cross_attention else ()
    projections = [linear for role in ("q", "k", "v", "qkv", "mixer", "other") for linear in by_role.get(role, ())]
    cross = layer.cross_attention
    for group in by_input([linear for linear in projections if linear.role not in looks], apart=cross is not None):
        there = group[0].of_encoder  # which all layers share
        rows = context.of_length(cross.key_tokens) if cross is not None and there else context
        saved.add("attention", inputs_saved(group, rows, normed, kept_elsewhere=there, pinned_elsewhere=there))
    seen = [linear for linear in projections if linear.role in looks]
    saved.add("attention", inputs_saved(seen, of_keys, looked_at_dtype(dtypes), kept_elsewhere=True))
    for attention in (layer.attention, layer.cross_attention):
        if attention is not None:
            saved_bytes, scores = attention_saved(attention, context, qkv)
            saved.attention += saved_bytes
            saved.scores += scores
    saved.attention += _pinned_by_views(layer, context, qkv)
    # rotating a part of each head concatenates q in a layout that flash's output takes over: one more copy is made
    in_part = layer.attention is not None and layer.attention.rotary_fraction < 1.0
    copied = (in_part or context.traits.joins_rotated) and context.kernel == "flash" and "rotary" not in context.fused
    # what comes back from the other ranks, or padded again, is a tensor of its own
    exchanged = context.setup.context_degree > 1 or unpads(context)
    fused = context.kernel in ("flash", "efficient") and not copied and not exchanged
    for output in by_role.get("o", ()):
        saved.add("attention", inputs_saved([output], context, context.dtypes.autocast or qkv, kept_elsewhere=fused))


def looked_at_dtype(dtypes: DtypePolicy) -> str:
    """Data type of the pictures' features that layers of the text look at: of the encoder's LayerNorms under autocast,
    which a quantized projector returns as it comes."""
    return "fp32" if dtypes.quantized and dtypes.autocast else dtypes.linear_out(dtypes.residual)


def _pinned_by_views(layer: LayerSpec, context: LayerContext, made: str) -> int:
    """What else a fused projection of type `made` holds where its values are a view into it, which keeps it whole:
    queries and keys before their rotation. Behind a prefix, with which keys and values are joined anew, the queries are
    that view where nothing rotates them, and the rest is keys and values.

    Not where what is viewed is copied on the way to the kernel: cast by autocast, repeated to all heads, taken out of
    padding, or made one batch of heads for eager attention's product (but in a micro-batch of one).
    """
    spec = layer.attention
    fused = [linear for linear in layer.linears if linear.role == "qkv"]
    if spec is None or not fused or context.kernel not in ("flash", "efficient"):
        return 0
    prefixed = context.setup.kind.form == "prefix"
    cast = context.dtypes.autocast is not None and SIZE_BYTES[made] == 4
    if cast or spec.rotary == prefixed or (repeats_keys(spec, context) and not prefixed) or unpads(context):
        return 0
    viewed = spec.num_heads * spec.head_dim if prefixed else spec.num_kv_heads * spec.value_head_dim
    return SIZE_BYTES[made] * context.tokens * (fused[0].out_features - viewed)


# Temporaries inside one layer: what its forward and backward hold beyond what autograd keeps, in closed form.


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
    cast, cast_back = adapter != dtype, (context.dtypes.autocast or adapter) != adapter
    dropout, size = context.setup.lora_dropout > 0, SIZE_BYTES[adapter]
    copies = size * (cast and (dropout or cast_back)) + size * (dropout and cast_back)
    backward = 2 * size if dropout else size + SIZE_BYTES[dtype] * cast
    if context.setup.kind.form == "rotations" and cast:  # what is rotated, block by block, and the result
        copies, backward = copies + 2 * size, backward + 2 * size
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
    gradients = (3 if mlp.kind != "plain" else 2) * SIZE_BYTES[hidden_dtype]
    if _composed(mlp):  # the product of its two halves, in its output's type, and what comes in
        gradients = 3 * SIZE_BYTES[activation_dtype(mlp.activation, dtypes, hidden_dtype)]
    elif gated_fused(mlp, context):  # written over gate and up, but for the product's own
        gradients = SIZE_BYTES[hidden_dtype]
    gradients *= width
    if gated_fused(mlp, context) and lora_mlp(layer, context) and not _composed(mlp):
        # at the recomputed end: the product, its copy and the last matrix's result
        return 2 * gradients + SIZE_BYTES[hidden_dtype] * context.hidden, gradients
    down = next((linear for linear in layer.linears if linear.role == "down" and not linear.is_expert), None)
    if mlp.kind == "moe" or down is None:
        if mlp.kind == "moe" and not context.traits.dense_experts:  # the experts' weighted outputs sorted back
            rows = 3 * SIZE_BYTES[dtypes.table] * _rows_at_once(layer, context.hidden)
            rows = 12 * context.hidden if has_expert_modules(layer) else rows  # each adds its rows to those of all
            return max(gradients, rows), gradients
        return gradients, gradients
    # a multiplication that keeps its input on the node itself, which lives as long as the layer's graph
    kept_on = context.setup.saves_matmul_inputs and down.quantizes and not context.trained
    pinned = SIZE_BYTES[input_dtype(down, layer, context)] * down.in_features if kept_on else 0
    gone = max(0, saved.down // context.tokens - pinned)
    activated = activation_dtype(mlp.activation, dtypes, hidden_dtype)
    wide = SIZE_BYTES[activated]
    if down.name not in context.adapted:
        return max(wide * width, gradients - gone), wide * width
    _, backward = adapter_temporaries(width, activated, context)
    end = 0
    if context.setup.checkpointing:
        end = max(at_last_matrix(layer, context, saved), at_first_matrix(layer, context, saved))
    together = (wide + SIZE_BYTES[dtypes.autocast or activated]) * width - gone  # the base multiplies in 16 bits
    return max(end, backward - gone, together + wide * width, gradients - gone), together


def _composed(mlp: MlpSpec) -> bool:
    return ACTIVATION_COPIES.get(mlp.activation, 1) == 4 and mlp.kind != "moe"


def at_last_matrix(layer: LayerSpec, context: LayerContext, saved: Saved) -> int:
    """Bytes per token beside what the layer keeps when a recomputed forward comes to its last matrix's adapter: the
    copies of that matrix's input, its result, the gradient of its adapter's product, and the stream before the MLP with
    its norm's result; 0 where that matrix has no adapter."""
    mlp, dtypes = layer.mlp, context.dtypes
    down = next((linear for linear in layer.linears if linear.role == "down" and linear.name in context.adapted), None)
    if mlp is None or down is None:
        return 0
    activated = activation_dtype(mlp.activation, dtypes, dtypes.linear_out(dtypes.residual))
    copies, _ = adapter_temporaries(down.in_features, activated, context)
    keeps_input = context.trained or saved.pinned or mlp.activation == "relu"  # the input itself
    shared = keeps_input or (not copies and context.setup.lora_dropout == 0)
    product = 0 if shared else SIZE_BYTES[activated] * down.in_features
    results = SIZE_BYTES[dtypes.linear_out(dtypes.residual)] + SIZE_BYTES[dtypes.autocast or dtypes.adapter]
    return copies + product + (results + HELD * SIZE_BYTES[dtypes.residual]) * context.hidden


def at_first_matrix(layer: LayerSpec, context: LayerContext, saved: Saved | None = None) -> int:
    """Bytes per token when the adapter of a dense MLP's last first matrix (up, or gate and up at once) has its product,
    and that scaled, beside the matrix's own result: both are fp32 without autocast, where adapters are.

    Args:
        saved: what the layer keeps at the end of a recomputed forward, beside which this is counted, with the gradients
            that wait at its last matrix; None: of a forward that keeps nothing.

    Source: peft 0.21 `tuners/lora/layer.py` Linear.forward.
    """
    mlp, dtypes, setup = layer.mlp, context.dtypes, context.setup
    firsts = [linear for linear in layer.linears if linear.role in ("up", "gate_up") and linear.name in context.adapted]
    if mlp is None or mlp.kind == "moe" or not firsts or not setup.kind.like_lora or "lora" in context.fused:
        return 0
    width, stream = firsts[0].out_features, SIZE_BYTES[dtypes.residual] * context.hidden
    multiplied = SIZE_BYTES[dtypes.autocast or dtypes.adapter]
    result, activated = SIZE_BYTES[dtypes.linear_out(dtypes.residual)], mlp.kind != "plain" and firsts[0].role == "up"
    if saved is None:
        cast = SIZE_BYTES[dtypes.adapter] * context.hidden * (handed_on(dtypes, dtypes.residual) != dtypes.residual)
        return (2 * multiplied + (1 + activated) * result) * width + cast + 2 * stream
    downs = [linear for linear in layer.linears if linear.role == "down"]
    later = between_dense(mlp, downs, context, _normed_dtype(layer, context)) + saved.down
    made = 1 + activated * (1 if gated_fused(mlp, context) else 2)  # gate, and what activates it, are kept by then
    waiting = (multiplied + result * (multiplied != result)) * context.hidden + (HELD + 1) * stream
    return (2 * multiplied + made * result) * width - later // context.tokens + waiting


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
    fed = context.stream.tokens * residual + context.gathered_bytes
    fed += context.tokens * _mlp_moments(layer, context, saved)[0] - saved.behind
    size = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
    plain = context.traits.norm == "layer" and not dtypes.autocast  # one kernel in the stream's own type
    norms = 5 * 4 if context.traits.norm.startswith("rms") else 3 * (SIZE_BYTES[dtypes.residual] if plain else 4)
    norm = (2 * size if "norm" in context.fused else norms) * context.hidden
    gone = 0 if post_mlp_norm(layer) else saved.fed
    attention = exchange = 0
    if layer.attention is not None:
        spec = layer.attention
        exchange = exchanged_bytes(spec, context)[1]
        # where there are scores their gradient is the most, when of the others the values' stands in the values' place
        scores = score_bytes(spec, context, dtypes.linear_out(dtypes.residual)).backward
        of_keys = context.of_keys.tokens * spec.num_heads * (spec.head_dim + spec.value_head_dim) // context.tokens
        attention = scores * spec.num_heads * context.row_tokens
        attention = attention or size * (spec.num_heads * (spec.head_dim + spec.value_head_dim) + of_keys)
        if context.looked_at and looked_at_dtype(dtypes) != dtypes.attention_input:
            attention = max(attention, SIZE_BYTES["fp32"] * of_keys)  # before the kernel's copies of them
    beside_norm = context.stream.tokens * (residual + norm) - gone
    beside_attention = context.stream.tokens * residual + context.gathered_bytes + context.tokens * attention
    return seen * context.hidden + max(fed, beside_norm, beside_attention + exchange - saved.late)


def constant_transients(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[tuple[int, int], ...]:
    """Moments of one layer's backward beside something that does not grow with the tokens, as (gradients of activations
    and of merged stacks, a matrix): a stack of experts' gradient, DoRA's largest matrix, the MLP's last matrix
    dequantized.

    Apart from `backward_temporary`, so that each moment is a straight line in the micro-batch.
    """
    residual = SIZE_BYTES[context.dtypes.residual] * context.hidden
    mlp, at_matrix = _mlp_moments(layer, context, saved)
    stack, moments = stack_temporary(layer, context), []
    if context.stacks:
        moments.append((context.tokens * (residual + mlp) - saved.behind + stack, 0))
    if context.setup.adapter == "dora":
        moments.append((context.tokens * residual, magnitude_bytes(layer, context)))
    if context.setup.expert_degree > 1:
        moments += dispatched_moments(layer, context, saved)
    if context.setup.quantized:
        lasts = [linear for linear in layer.linears if linear.role == "down" and not linear.is_expert]
        copy = max(
            [dequantized_bytes(linear, context.setup, context.dtypes.residual) for linear in lasts or layer.linears]
        )
        moments.append((context.tokens * (residual + at_matrix) - saved.behind + stack, copy))
    return tuple(moments)


def forward_temporary(layer: LayerSpec, context: LayerContext) -> int:
    """Temporaries of one layer's forward at their largest: the MLP's tensors before autograd keeps or drops them.

    With checkpointing nothing of the layer is kept, so these are all that the forward adds.
    """
    dtypes = context.dtypes
    size = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
    mlp = 3 * size * mlp_width(layer)
    down = next((linear for linear in layer.linears if linear.role == "down" and linear.name in context.adapted), None)
    if down is not None:
        activated = input_dtype(down, layer, context)
        mlp = max(mlp, size * mlp_width(layer) + adapter_temporaries(mlp_width(layer), activated, context)[0])
    mlp = max(mlp, at_first_matrix(layer, context))
    if context.setup.stream_degree > 1:  # beside its input, gathered; at its end what the ranks' products add up to
        mlp = size * max(3 * mlp_width(layer) + context.hidden, mlp_width(layer) + 2 * context.hidden)
    scores = exchange = 0
    if layer.attention is not None:
        exchange = exchanged_bytes(layer.attention, context)[0]
        per_score = score_bytes(layer.attention, context, dtypes.linear_out(dtypes.residual))
        scores = per_score.forward * layer.attention.num_heads * context.row_tokens
        if scores:  # beside queries, keys and values and what they are made of
            heads, value_width = layer.attention.num_heads, layer.attention.value_head_dim
            width = size * heads * (2 * layer.attention.head_dim + value_width)
            if context.kernel == "math":  # queries also scaled, keys and values repeated, all in fp32
                width = SIZE_BYTES["fp32"] * heads * (3 * layer.attention.head_dim + value_width)
            scores += width + size * context.hidden
    return max(exchange, context.tokens * max(mlp, scores))


def magnitude_bytes(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes of DoRA's largest norm of a matrix: the product of its two thin matrices by way of an identity, that scaled
    and added to the matrix, in the type that the adapter is handed.

    Source: peft 0.21 `tuners/lora/dora.py` get_lora_weight, get_weight_norm.
    """
    sizes = []
    for linear in layer.linears:
        if linear.name in context.adapted:
            handed = SIZE_BYTES[handed_on(context.dtypes, input_dtype(linear, layer, context))]
            multiplied = SIZE_BYTES[context.dtypes.autocast or context.dtypes.adapter]
            identity = multiplied * linear.in_features**2
            sizes.append(identity + 4 * handed * linear.in_features * linear.out_features)
    return max(sizes, default=0)


def stack_temporary(layer: LayerSpec, context: LayerContext) -> int:
    """The gradient of a stack of experts that peft has merged with its adapter, alive until the adapter's own gradients
    are computed: of the down stack, or of the gate_up stack once the down stack is gone.

    Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `_grouped_mm`'s backward.
    Shapes: [experts, out_features, in_features].
    """
    if context.setup.trainer.grouped_experts:
        return grouped_temporary(layer, context)
    stacks = {linear.role: linear.num_weights for linear in layer.linears if linear.is_stack} if context.stacks else {}
    down = stacks.pop("down", 0)
    return SIZE_BYTES[context.dtypes.stacks] * max(down, max(stacks.values(), default=0) - down)


PADDED_MOST_BYTES = 2 << 30
PADDED_BUCKETS_ROWS = 16384
GROUPED_BUFFERS = 5
"""Of the kernels for groups of experts: a padded block's limit, the rows from which on buckets are padded instead (to
twice the rows at most), buffers of a first product's size that are alive at once."""


def grouped_temporary(layer: LayerSpec, context: LayerContext) -> int:
    """What the backward of a layer's experts holds at most beside what it keeps: every expert's rows padded to those of
    the busiest, and buffers of the kernels. A bound: routing decides. What one sequence needs is taken for each of a
    micro-batch, so that it is a straight line in it.

    Source: experts4bit-qlora 0.58.1 `recipe.py` grouped_nf4_padded_rows_bound, _grouped_nf4_backward; grouped-nf4-gemm
    `nf4_qlora.py` (the limit is on 16-bit elements; fp32 adapters round both edges up to a quarter of a power of two).
    Measured: tests/planner/test_streamed_experts.py.
    """
    if layer.mlp is None or layer.mlp.kind != "moe" or not context.setup.quantize_experts:
        return 0
    tokens, rows = context.setup.seq_len_tokens, context.tokens * layer.mlp.num_active_experts
    first = (1 + layer.mlp.gated_experts) * layer.mlp.intermediate_size
    buffers = GROUPED_BUFFERS * rows * first * SIZE_BYTES[context.dtypes.table]
    if not context.stacks:
        return buffers
    edges = context.hidden + layer.mlp.intermediate_size
    experts, each = layer.mlp.num_experts, tokens * layer.mlp.num_active_experts
    padded = min(experts * tokens, PADDED_MOST_BYTES // (2 * min(context.hidden + first, edges)))
    if context.dtypes.adapter == "fp32":
        padded = min(_quarter_step(experts) * _quarter_step(tokens), -(-padded * 25 // 16))
    if each >= PADDED_BUCKETS_ROWS:
        padded = 2 * each
    return buffers + padded * context.tokens // tokens * (edges + first) * SIZE_BYTES[context.dtypes.adapter]


def _quarter_step(number: int) -> int:
    """The next of four steps between two powers of two."""
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def merged_stacks(layer: LayerSpec, context: LayerContext) -> int:
    """Stacks of experts, merged or unpacked, that live through a checkpointed layer's forward, where nothing is kept.

    Source: peft 0.21 ParamWrapper: `parametrize.cached` holds the merged parameter while the module runs; bitsandbytes
    0.50 `nn/parametrize.py` does the same to unpacked ones.
    """
    if not (context.stacks or context.setup.quantize_experts) or context.setup.trainer.grouped_experts:
        return 0
    size = context.unpacked_bytes if context.setup.quantize_experts else SIZE_BYTES[context.dtypes.stacks]
    return size * sum(linear.num_weights for linear in layer.linears if linear.is_stack)


# What one layer of each kind costs at one micro-batch, before it is said which of them are checkpointed.


class LayerMoment(NamedTuple):
    """One moment of a layer's backward: bytes recomputed, gradients of activations, a dequantized matrix."""

    recomputed: int
    temporary: int
    dequantized: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.recomputed + self.temporary + self.dequantized


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """One kind of layer, in bytes.

    Attributes:
        saved: kept for the backward, by part.
        entry: a checkpointed layer's input.
        selective_bytes: what selective checkpointing keeps of it.
        forward: temporaries of its forward; `reference`: of one without adapters; `merged`: stacks of experts that
            live through a forward that keeps nothing.
        extra_bytes: in a forward that keeps everything: DoRA's largest norm, or what the last matrix's adapter has.
        moments: of its backward, as (gradients of activations, a dequantized matrix), always in the same order.
        dequantized: its largest matrix in 16 bits, where it is quantized.
        mask: the attention's mask, which layers of one window share.
    """

    saved: Saved
    entry: int
    selective_bytes: int
    forward: int
    reference: int
    merged: int
    extra_bytes: int
    moments: tuple[tuple[int, int], ...]
    dequantized: int
    mask: int
    row_tokens: int
    kernel: Kernel


def in_common(setup: TrainSetup) -> TrainSetup:
    """The same for all setups that `layer_costs` finds equal."""
    some = min(1, setup.checkpointing)
    return setup.replace_trusted(checkpointing=some, selective_checkpointing=False, activation_offload=False)


def layer_costs(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, dtypes: DtypePolicy, adapted: Sequence[frozenset[str]]
) -> tuple[LayerCosts, ...]:
    """The costs of every kind of layer.

    Args:
        adapted: names of the matrices with adapters, by kind of layer.
    """
    fused = setup.fused_parts(model.model_type)
    if "inputs" in fused:  # the compiler makes one kernel of what is composed
        model = with_one_kernel_gelu(model)
    alone = setup.trainer.gates_with_lora and not setup.compiled
    stacks = setup.method != "full" and setup.kind.adapts_matrices and adapts_expert_stacks(model, setup.lora_targets)
    costs = []
    for layer, names in zip(model.layer_kinds, adapted, strict=True):
        attention, looked_at, mask = layer.attention, 0, 0
        kernel: Kernel = "linear"
        layer_setup = setup.replace_trusted(seq_len_tokens=layer.fixed_tokens) if layer.fixed_tokens else setup
        if layer.frozen:  # as under adapters, of which it has none
            layer_setup = layer_setup.replace_trusted(method="lora")
        if attention is not None:
            kernel = attention_kernel(model, layer_setup, gpu, attention, dtypes.attention_input)
        if layer.is_cross_attention and setup.images is not None:
            from planner.models.encoders import encoder_of  # late: text alone needs none of it

            frames = setup.micro_batch_seqs * setup.images.num
            looked_at = frames * encoder_of(model, setup.images).projectors[0].tokens
        context = LayerContext(
            setup=layer_setup,
            dtypes=replace(dtypes, table="fp32") if setup.widens_trained and not layer.frozen else dtypes,
            adapted=names,
            kernel=kernel,
            tokens=layer_setup.forward_tokens,
            hidden=model.hidden_size,
            traits=model.traits,
            masks_packed=masks_packed(model),
            stacks=stacks,
            fused=fused - {"gated"} if alone and not adapts_mlp(layer, names) else fused,
            looked_at=looked_at,
        )
        of_layer, tokens = context.dtypes, context.tokens
        saved = layer_saved(layer, context)
        streams, wide = model.traits.streams, SIZE_BYTES[of_layer.residual]
        if streams > 1:
            # AltUp (Gemma 3n), [streams, tokens, hidden]: all as the prediction's factor, the innovation repeated to
            # each, and fp32 streams (under autocast) as they came and as they were predicted
            per_row = streams * (SIZE_BYTES[of_layer.autocast or of_layer.residual] + wide)
            saved.norm += tokens * context.hidden * (per_row + (2 * wide * streams if wide == 4 else 0))
        if attention is not None:
            # [seqs, 1, tokens, keys]: eager attention adds one in the model's type, SDPA gets a boolean one where it
            # gets one at all, but of a class that adds its own (transformers 5.23 `masking_utils.py`)
            handed = gives_mask(layer_setup, attention, kernel, masks_packed=context.masks_packed)
            each = int(handed and kernel in ("efficient", "math"))
            if kernel == "eager" or (attention.adds_mask and handed):
                each = SIZE_BYTES[of_layer.table]
            mask = each * tokens * context.row_tokens
        extra_bytes = tokens * at_last_matrix(layer, context, saved)
        if setup.adapter == "dora" and names:  # the last matrix's norm, the layer's activations there
            extra_bytes = max(extra_bytes, magnitude_bytes(layer, context))
        unpacked = (dequantized_bytes(linear, layer_setup, of_layer.residual) for linear in layer.linears)
        moments = constant_transients(layer, context, saved)
        costs.append(
            LayerCosts(
                saved=saved,
                entry=SIZE_BYTES[of_layer.residual] * context.hidden * context.stream.tokens * model.traits.streams,
                selective_bytes=selective_checkpoint_bytes(layer, context),
                forward=forward_temporary(layer, context),
                reference=forward_temporary(layer, replace(context, adapted=frozenset())),
                merged=merged_stacks(layer, context),
                extra_bytes=extra_bytes,
                moments=((backward_temporary(layer, context, saved), 0), *moments),
                dequantized=max(unpacked, default=0),
                mask=mask,
                row_tokens=context.row_tokens,
                kernel=kernel,
            )
        )
    return tuple(costs)
