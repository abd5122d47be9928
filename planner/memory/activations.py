"""Activations: what autograd keeps of one layer for its backward, term by term, as the real modules do it.

Every function returns bytes for `tokens` tokens of one layer (a micro-batch of sequences of `seq_len` tokens). They
follow the data types of `DtypePolicy`; one walk over a layer's modules, no closed-form averages.
"""

from collections.abc import Mapping, Sequence

from planner.hardware.kernels import masked
from planner.memory.context_parallel import dealt_heads
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy, promote
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.linear_attention import linear_attention_saved
from planner.memory.matrix_inputs import by_input, inputs_saved
from planner.memory.mlp import activation_dtype, add_mlp
from planner.memory.scores import ScoreBytes, eager_scores, math_scores
from planner.memory.trained import of_tokens
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, NormSpec

MASK_ALIGNMENT = 16
"""Columns of a mask are padded to a multiple of this for the memory-efficient kernel."""


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
        if trained:
            kept += (4 if style == "rms-fp32" else SIZE_BYTES[input_dtype]) * elements
        return kept
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


def norm_behind(layer: LayerSpec) -> NormSpec | None:
    """The norm that takes what the MLP gives, where there is one."""
    return next(
        (norm for norm in layer.norms if norm.name in ("post_feedforward_layernorm", "post_mlp_layernorm")), None
    )


def norm_output_dtype(norm: NormSpec, context: LayerContext, input_dtype: str) -> str:
    """RMSNorm multiplies its weight with rows cast back to the input's type; LayerNorm is fp32 under autocast, but
    where the class casts back itself."""
    style = context.traits.norm
    if norm_fused(norm, context):
        return input_dtype
    if norm.kind == "rms":
        table = context.dtypes.adapter if context.tunes_norms and of_tokens(norm) else context.dtypes.table
        return input_dtype if style == "rms-fp32" else promote(table, input_dtype)
    return "fp32" if context.dtypes.autocast and style == "layer" else input_dtype


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
    keys = context.of_keys if context.looked_at else context.of_length(attention.key_tokens)
    attention = dealt_heads(attention, context.setup)
    query_width = attention.num_heads * attention.head_dim
    value_width = attention.num_heads * attention.value_head_dim
    kv_width = attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    size = SIZE_BYTES[context.dtypes.autocast or qkv_dtype]
    if context.kernel == "linear":
        package = context.setup.linear_attention == "fla"
        return linear_attention_saved(attention, context.dtypes, tokens, package=package), 0
    scores = tokens * keys.row_tokens
    if context.kernel in ("flash", "efficient"):
        width = query_width + value_width
        kept = tokens * width + keys.key_tokens * (width if repeats_keys(attention, context) else kv_width)
        own = context.kernel == "efficient" and not context.traits.position_bias
        handed = own and masked(context.setup, attention, masks_packed=context.traits.masks_packed)
        if handed and attention.adds_mask and SIZE_BYTES[context.dtypes.table] == size:
            handed = keys.row_tokens % MASK_ALIGNMENT > 0
        mask = size * tokens * _aligned(keys.row_tokens) if handed else 0
        return size * kept + 4 * tokens * attention.num_heads, mask
    scores *= attention.num_heads
    held = score_bytes(attention, context, qkv_dtype)
    if context.kernel == "eager":
        return size * (tokens * query_width + keys.tokens * (query_width + value_width)), scores * held.kept
    return 4 * (tokens * query_width + keys.tokens * (query_width + value_width)), scores * held.kept


def repeats_keys(attention: AttentionSpec, context: LayerContext) -> bool:
    """Whether a fused kernel is handed keys and values repeated to all heads; a single head is repeated by a view."""
    repeated = context.kernel != "flash" or context.setup.repeats_keys
    return repeated and attention.num_kv_heads not in (1, attention.num_heads)


def _aligned(keys: int) -> int:
    """Columns of a mask as that kernel takes it.

    Source: PyTorch `aten/src/ATen/native/transformers/attention.cpp` pad_bias.
    """
    return -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT


def attention_held(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes that a fused attention gives: its output, and one fp32 number per head and token; 0 for other kernels,
    which selective checkpointing does not know.

    Source: TRL 1.16 `models/selective_activation_checkpointing.py`; torch 2.13 `create_selective_checkpoint_contexts`.
    """
    found = [one for one in (layer.attention, layer.cross_attention) if one is not None]
    if context.kernel not in ("flash", "efficient"):
        return 0
    size = SIZE_BYTES[context.dtypes.attention_input]
    return sum(context.tokens * one.num_heads * (size * one.value_head_dim + 4) for one in found)


def score_bytes(attention: AttentionSpec, context: LayerContext, qkv_dtype: str) -> ScoreBytes:
    """Bytes per score of the layer's kernel; none for a kernel that keeps no tokens x tokens matrix."""
    if context.kernel == "eager":
        return eager_scores(context.dtypes, context.traits, qkv_dtype, softcap=attention.softcap, sinks=attention.sinks)
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
    _add_stream(saved, layer, block_norms, context)
    _add_attention(saved, layer, by_role, context, normed)
    before = saved.total
    late_norms = block_norms[1:] if not layer.parallel_residual else []
    saved.late = sum(norm_saved(norm, context, dtypes.residual) for norm in late_norms)
    add_mlp(saved, layer, by_role, context, normed)
    saved.fed = saved.total - before
    saved.late += saved.fed
    if last := norm_behind(layer):
        saved.behind = norm_saved(last, context, context.dtypes.residual)
    return saved


def _normed_dtype(layer: LayerSpec, context: LayerContext) -> str:
    """Type of what the layer's first matrices take."""
    first = next((norm for norm in layer.norms if norm.rows_per_token == 1), None)
    residual = context.dtypes.residual
    return residual if first is None else norm_output_dtype(first, context, residual)


def qkv_dtype(layer: LayerSpec, context: LayerContext) -> str:
    """Type of queries, keys and values as their matrices give them."""
    return context.dtypes.linear_out(_normed_dtype(layer, context))


def input_dtype(linear: LinearSpec, layer: LayerSpec, context: LayerContext) -> str:
    """Type of what one of the layer's matrices takes."""
    dtypes, made = context.dtypes, qkv_dtype(layer, context)
    if linear.role == "down" and layer.mlp is not None:
        return activation_dtype(layer.mlp.activation, dtypes, made)
    return dtypes.autocast or made if linear.role == "o" else _normed_dtype(layer, context)


def _add_stream(saved: Saved, layer: LayerSpec, block_norms: Sequence[NormSpec], context: LayerContext) -> None:
    """Adds what stands on the residual stream itself: norms of whole tokens, clamps, dropouts."""
    dtypes, traits = context.dtypes, context.traits
    width = context.tokens * context.hidden
    sums = 2 + int(layer.cross_attention is not None)
    saved.norm += sum(norm_saved(norm, context, dtypes.residual) for norm in block_norms)
    if layer.parallel_residual and len(block_norms) > 1 and not (dtypes.autocast and dtypes.residual != "fp32"):
        # both norms of a parallel block keep the same residual
        saved.norm -= SIZE_BYTES[dtypes.residual] * width
    if traits.residual_dropout:
        # masks of one byte after attention(s) and after the MLP
        saved.norm += sums * width


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
    looks = ("k", "v") if layer.looks else ()
    projections = [one for role in ("q", "k", "v", "qkv", "mixer", "other") for one in by_role.get(role, ())]
    cross = layer.cross_attention
    for group in by_input([one for one in projections if one.role not in looks], apart=cross is not None):
        there = group[0].of_encoder  # which all layers share
        rows = context.of_length(cross.key_tokens) if cross is not None and there else context
        saved.add("attention", inputs_saved(group, rows, normed, kept_elsewhere=there, pinned_elsewhere=there))
    seen = [one for one in projections if one.role in looks]
    saved.add("attention", inputs_saved(seen, of_keys, looked_at_dtype(dtypes), kept_elsewhere=True))
    for attention in (layer.attention, layer.cross_attention):
        if attention is not None:
            kept, scores = attention_saved(attention, context, qkv)
            saved.attention += kept
            saved.scores += scores
    saved.attention += _pinned_by_views(layer, context, qkv)
    # rotating a part of each head concatenates q in a layout that flash's output takes over: one more copy is made
    in_part = layer.attention is not None and layer.attention.rotary_fraction < 1.0
    copied = (in_part or context.traits.joins_rotated) and context.kernel == "flash" and "rotary" not in context.fused
    exchanged = context.setup.context_degree > 1  # what comes back from the other ranks is a tensor of its own
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

    Not where what is viewed is copied on the way to the kernel: cast by autocast, repeated to all heads, or made one
    batch of heads for eager attention's product (but in a micro-batch of one).
    """
    spec = layer.attention
    fused = [one for one in layer.linears if one.role == "qkv"]
    if spec is None or not fused or context.kernel not in ("flash", "efficient"):
        return 0
    prefixed = context.setup.kind.form == "prefix"
    cast = context.dtypes.autocast is not None and SIZE_BYTES[made] == 4
    if cast or spec.rotary == prefixed or (repeats_keys(spec, context) and not prefixed):
        return 0
    viewed = spec.num_heads * spec.head_dim if prefixed else spec.num_kv_heads * spec.value_head_dim
    return SIZE_BYTES[made] * context.tokens * (fused[0].out_features - viewed)
