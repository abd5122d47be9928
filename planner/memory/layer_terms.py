"""What one layer keeps and makes, by its parts: types, scores, inputs of matrices, the MLP, experts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.core.records import dataclass
from planner.memory.attention_kernels import Kernel
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, Traits
from planner.options.adapters import block_size
from planner.setup import TrainSetup

# What the terms of one layer's activations need to know of a setup, and what they add up to.


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerContext:
    """What one layer's activation terms need to know: the setup's types, which matrices are adapted, the kernel.

    `stacks`: peft adapts whole stacks of experts (`ParamWrapper`), which materialises the merged stack.
    `fused`: what is computed by kernels of its own (`TrainSetup.fused_parts`).
    `looked_at`: rows of pictures that this layer attends to instead of its own tokens, of the micro-batch.
    `masks_packed`: whether SDPA is handed a mask of packed samples.
    """

    setup: TrainSetup
    dtypes: DtypePolicy
    adapted: frozenset[str]
    kernel: Kernel
    tokens: int
    hidden: int
    traits: Traits
    stacks: bool = False
    fused: frozenset[str] = frozenset()
    looked_at: int = 0
    masks_packed: bool = True

    @property
    def stream(self) -> "LayerContext":
        """The same of the residual stream's rows: sequence parallelism cuts them."""
        degree = self.setup.stream_degree
        return self if degree == 1 else replace(self, tokens=-(-self.tokens // degree))

    @property
    def gathered_bytes(self) -> int:
        """Of the whole stream's rows, which sequence parallelism gathers before the split matrices, or adds up."""
        return 0 if self.setup.stream_degree == 1 else SIZE_BYTES[self.dtypes.residual] * self.hidden * self.tokens

    @property
    def row_tokens(self) -> int:
        """Keys of one query: the sequence, or the whole micro-batch where packing flattens it into one row, or the
        pictures of its sample."""
        setup = self.setup
        if self.looked_at:
            return self.looked_at // setup.micro_batch_seqs
        if setup.packing and not setup.trainer.packs_rows:
            return self.tokens
        return setup.seq_len_tokens + setup.virtual_tokens

    def of_length(self, tokens: int) -> "LayerContext":
        """The same for sequences of so many tokens; 0: of their own length."""
        if not tokens:
            return self
        setup = self.setup.replace_trusted(seq_len_tokens=tokens)
        return replace(self, setup=setup, tokens=setup.forward_tokens)

    @property
    def unpacked_bytes(self) -> int:
        """Of one weight of a stack of experts as it is unpacked: NF4 into the weights' type, 8 bits into fp32.

        Source: bitsandbytes 0.50 `int8_vectorwise_dequant`; Axolotl 0.21 `monkeypatch/moe_quant.py`.
        """
        return 4 if self.setup.quantization == "int8" else SIZE_BYTES[self.dtypes.table]

    @property
    def key_tokens(self) -> int:
        """Tokens that have keys and values: those that pass through the layer, and a prefix's."""
        prefixed = self.setup.kind.form == "prefix"
        return self.tokens + prefixed * self.setup.micro_batch_seqs * self.setup.virtual_tokens

    @property
    def of_keys(self) -> "LayerContext":
        """The same of the rows that keys and values are made of."""
        return replace(self, tokens=self.looked_at) if self.looked_at else self

    @property
    def trained(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.setup.method == "full"

    @property
    def tunes_norms(self) -> bool:
        """Whether the adapter is copies of the norms."""
        return self.setup.adapter == "ln-tuning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What matrices that share one input keep of it, in bytes.

    `pinned` is kept even under checkpointing; `pinned_again` is the part of it that something else keeps as well.
    """

    base: int = 0
    adapters: int = 0
    pinned: int = 0
    pinned_again: int = 0


@dataclass(slots=True)
class Saved:
    """Bytes kept for the backward by part.

    `pinned` is kept even where the layer is checkpointed: bitsandbytes' int8 multiplication, and its old one of 4 bits,
    stores its input on the autograd context itself, past the hooks of non-reentrant checkpointing.
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
    fed: int = 0
    """Of all these, what the MLP keeps, its norm apart."""
    behind: int = 0
    """Of all these, what a norm behind the MLP keeps: gone when the MLP's own backward begins, not there yet when its
    forward ends."""
    down: int = 0
    """Of all these, what the MLP's last matrix and its adapter keep of their input: gone when the activation's own
    backward begins."""

    @property
    def total(self) -> int:
        """All parts, what two operators keep counted once."""
        return self.norm + self.attention + self.scores + self.mlp + self.adapters + self.pinned - self.pinned_again

    def add(self, part: str, inputs: Inputs) -> None:
        """Adds what matrices keep of their inputs, what their own weights keep to one part."""
        setattr(self, part, getattr(self, part) + inputs.base)
        self.adapters += inputs.adapters
        self.pinned += inputs.pinned
        self.pinned_again += inputs.pinned_again


# Tokens x tokens matrices: what eager attention and SDPA's math kernel keep and hold per score.


class ScoreBytes(NamedTuple):
    """Bytes per score (query, key and head): kept for the backward, held beyond that at the largest moment of the
    forward and of the backward."""

    kept: int = 0
    forward: int = 0
    backward: int = 0


def eager_scores(
    dtypes: DtypePolicy,
    traits: Traits,
    qkv_dtype: str,
    *,
    softcap: bool = False,
    sinks: bool = False,
    rotary: bool = True,
) -> ScoreBytes:
    """Attention in single operations: product, mask, softmax in fp32, cast, dropout, product; some classes leave the
    softmax in its input's type, as do attention sinks, which add a column (gpt-oss).

    The softmax is kept, and so is what meets the values: a cast copy of it, or with dropout the dropped copy beside a
    mask of one byte. A softmax over an fp32 sum is cast to the queries' type beside that sum, but where a rotation in
    fp32 (`rotary`) made that of the queries. A soft cap keeps its tanh. The backward's largest moment is the gradient
    of the values' product beside all that, or the softmax's with its output, gradient, the product of both, and result.

    Source: transformers 5.23 `eager_attention_forward`; PyTorch autocast's fp32 list; SoftMax.cu
    `softmax_backward_cuda_out`.
    """
    value, dropout = SIZE_BYTES[dtypes.autocast or qkv_dtype], traits.attention_dropout
    plain = max(value, SIZE_BYTES[dtypes.table]) if sinks else value
    softmax = plain if sinks or (traits.plain_softmax and not dtypes.autocast) else 4
    copy = value if softmax != value or dropout else 0
    saved = softmax + copy + int(dropout)
    cast = value if softmax != value and (dtypes.table != "fp32" or not rotary) else 0
    forward = 3 * softmax if sinks else 2 * softmax + cast
    backward = max(saved + value, 4 * softmax) - saved
    return ScoreBytes(saved + (value if softcap else 0), forward, backward)


def math_scores(traits: Traits) -> ScoreBytes:
    """SDPA's math kernel: everything in fp32, the softmax kept, with dropout also the dropped copy and a mask.

    Source: PyTorch 2.13 `_scaled_dot_product_attention_math` (`attention.cpp`).
    """
    saved = 9 if traits.attention_dropout else 4
    return ScoreBytes(saved, 8, max(saved + 4, 16 + int(traits.attention_dropout)) - saved)


# What attention over a sequence that is cut over several GPUs holds beside what it holds on one.


def rank_heads(attention: AttentionSpec, setup: TrainSetup) -> AttentionSpec:
    """The attention as a rank of the cut sequence sees it: Ulysses repeats a key-value head for the GPUs that share
    it."""
    if setup.context_degree == 1 or setup.uses_ring_attention or attention.num_kv_heads >= setup.context_degree:
        return attention
    return replace(attention, num_kv_heads=setup.context_degree)


def exchanged_bytes(attention: AttentionSpec, context: LayerContext) -> tuple[int, int]:
    """(forward, backward) bytes of one layer's exchange at its largest, queries, keys and values included; zeros where
    no sequence is cut.

    A ring's forward merges a piece's result into the one so far: four fp32 tensors of the output and the piece's own,
    beside all ranks' keys and values. Its backward adds up fp32 gradients, those of keys and values on their way round
    twice more, beside a piece's own and the copy that half an update makes. Ulysses holds a tensor three times while it
    changes hands.

    Shapes: queries and output [tokens of a rank, heads x head_dim], gathered keys and values [all tokens, ...].
    """
    setup, tokens = context.setup, context.tokens
    if setup.context_degree == 1:
        return 0, 0
    size = SIZE_BYTES[context.dtypes.attention_input]
    queries = attention.num_heads * attention.head_dim
    given = attention.num_heads * attention.value_head_dim
    rank_attention = rank_heads(attention, setup)
    pairs = rank_attention.num_kv_heads * (attention.head_dim + attention.value_head_dim)
    if not setup.uses_ring_attention:
        moved = size * (3 * max(queries, given) + pairs)
        return tokens * moved, tokens * moved
    all_pairs = size * setup.context_degree * pairs
    forward = all_pairs + size * (queries + pairs + given) + 4 * 4 * given
    backward = all_pairs + size * (queries + pairs) + 4 * (2 * queries + 3 * pairs)
    return tokens * forward, tokens * backward


# Linear attention (gated delta rule): what transformers' own torch code and flash-linear-attention keep.


CHUNK = 64
"""Tokens of one chunk. Source: transformers 5.23 `torch_chunk_gated_delta_rule`."""


_LOOPED = 4 * sum(row * row + row for row in range(CHUNK)) // CHUNK
"""Bytes per token and value head of the rows and squares that the loop over a chunk's rows kept, where now two
triangular systems are solved. Source: transformers 5.16 `torch_chunk_gated_delta_rule` (5.17 has the solver). Measured:
14,157 bytes where today's function keeps 10,009, keys and values of 128 (saved_tensors_hooks around both)."""


_DECAY = 22
"""Bytes per token and value head that the operations of the decay and beta keep, in fp32 and 16 bit."""


def linear_attention_saved(
    attention: AttentionSpec, dtypes: DtypePolicy, tokens: int, *, package: bool = False, looped: bool = False
) -> int:
    """Bytes kept by one gated-delta-rule layer between its projections.

    Per token and value head of key size k and value size v, with keys repeated to the value heads: the convolution's
    input and output; fp32 copies of q, k (normalised), padded q, k, v, the weighted k; the chunk's 64-wide decay and
    attention rows; two triangular solutions; per chunk the fp32 state k x v and what its three products keep; the gated
    norm's product and gate. Under autocast every operand of a product is kept once more in 16 bit.

    With the `package`: the convolution's as before; queries and keys normalized, values as they are, all in 16 bit, and
    each chunk's 64-wide inverse; the gated norm is transformers'. The states are made again in the backward. `looped`:
    the loop of before 5.17, which keeps neither solution.

    Source: transformers 5.23 `models/qwen3_next/modeling_qwen3_next.py`, `torch_chunk_gated_delta_rule`; fla-core 0.6.0
    `ops/gated_delta_rule/chunk.py` ChunkGatedDeltaRuleFunction.
    Shapes: [tokens, heads, head_dim]; states [chunks, heads, head_dim, value_head_dim].
    Not counted: padding of short sequences to whole chunks; the gated norm's rows (it is one of the layer's norms).
    """
    heads = attention.num_heads
    keys, values = heads * attention.head_dim, heads * attention.value_head_dim
    size = SIZE_BYTES[dtypes.compute]
    conv = (3 if size == 4 and not package else 2) * size * (2 * attention.num_kv_heads * attention.head_dim + values)
    states = heads * attention.head_dim * attention.value_head_dim // CHUNK
    # q and k copied up to fp32; in fp32 both, v, what comes out, its gate and what is convolved laid out anew
    casts = 8 if size < 4 else 20
    if package:
        normalized = 2 * attention.num_kv_heads * (size * attention.head_dim + 4)
        chunks = heads * (size * CHUNK + _DECAY)
        return tokens * (conv + normalized + size * values + chunks + (8 + size) * values)
    if looped:
        conv += heads * _LOOPED - 4 * (keys + values)
    if dtypes.autocast:
        return tokens * (conv + (34 + casts) * keys + 8 * values + 14 * heads * CHUNK + 8 * states + 10 * values)
    return tokens * (conv + (24 + casts) * keys + 12 * values + 20 * heads * CHUNK + 4 * states + (8 + size) * values)


# What a layer's matrices and their adapters keep of their inputs for the backward.


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
    setup = context.setup
    elements = linears[0].in_features * context.tokens
    if "inputs" in context.fused and setup.quantization != "int8":
        return _compiled(linears, context, input_dtype, kept_elsewhere=kept_elsewhere)
    if "lora" in context.fused and any(linear.name in context.adapted for linear in linears):
        return Inputs(adapters=0 if kept_elsewhere else SIZE_BYTES[input_dtype] * elements)
    base = pinned = 0
    cast = context.dtypes.autocast
    if context.trained and cast and input_dtype != cast:  # once for each
        base = SIZE_BYTES[cast] * elements * sum(linear.num_active for linear in linears)
    elif context.trained and not kept_elsewhere:
        base = SIZE_BYTES[input_dtype] * elements * max(linear.num_active for linear in linears)
    adapted = [linear for linear in linears if linear.name in context.adapted]
    rotated = len(adapted) if setup.kind.form == "rotations" else 0  # each of these matrices gets an input of its own
    if setup.saves_matmul_inputs and not context.trained and linears[0].quantizes:
        there = pinned_elsewhere or rotated == len(linears)
        pinned = SIZE_BYTES[input_dtype] * elements * (rotated + (not there))
    shared = kept_elsewhere or (bool(pinned) and not rotated)
    adapter_bytes = adapted and _adapters_keep(adapted, context, input_dtype, shared=shared)
    again = pinned if kept_elsewhere and not rotated else 0
    return Inputs(base=base, adapters=adapter_bytes or 0, pinned=pinned, pinned_again=again)


def _compiled(
    linears: Sequence[LinearSpec], context: LayerContext, input_dtype: str, *, kept_elsewhere: bool
) -> Inputs:
    """What matrices that share one input keep of it under torch.compile: one copy in the type that is multiplied, where
    a weight or an adapter has a gradient, and each adapter's rank-sized inner output.

    Source: PyTorch 2.13 `torch/_functorch/partitioners.py`: what a product of the backward reads is not recomputed.
    Measured: its partitioner on a Llama layer, full and LoRA: equal (benchmarks/compiled_layers.py at e34acc15).
    """
    dtypes, tokens = context.dtypes, context.tokens
    adapted = sum(linear.name in context.adapted for linear in linears)
    copy = 0
    if (context.trained or adapted) and not kept_elsewhere:
        active = max(linear.num_active for linear in linears)
        copy = SIZE_BYTES[dtypes.autocast or input_dtype] * linears[0].in_features * tokens * active
    inner = adapted * context.setup.lora_rank * tokens * SIZE_BYTES[dtypes.autocast or dtypes.adapter]
    return Inputs(base=copy, adapters=inner) if context.trained else Inputs(adapters=copy + inner)


def _adapters_keep(adapted: Sequence[LinearSpec], context: LayerContext, input_dtype: str, *, shared: bool) -> int:
    """Bytes that the adapters of matrices with one input keep; `shared`: something else keeps that input."""
    dtypes, setup = context.dtypes, context.setup
    elements = adapted[0].in_features * context.tokens
    constant = 0
    if setup.adapter != "lora" and not setup.kind.like_lora:
        constant = sum(_kept_by_kind(linear, context, input_dtype) for linear in adapted)
        if setup.adapter not in ("dora", "adalora", "oft"):  # which keep a copy of their input as LoRA does
            return constant
    # whether adapted matrices share the kept input: OFT's also on a quantized base through the type of its rotation
    shared_dtype, copy_dtype = dtypes.adapter == input_dtype, dtypes.autocast or dtypes.adapter
    shared_dtype = shared_dtype or (dtypes.quantized and bool(dtypes.autocast) and setup.adapter != "oft")
    direct = shared_dtype and dtypes.autocast in (None, input_dtype)
    size = SIZE_BYTES[copy_dtype]
    if setup.lora_dropout > 0:
        # CUDA's fused dropout keeps a mask of one byte; the dropped copy is kept in the type it is multiplied in
        extra = len(adapted) * (1 + size) * elements
    elif direct:
        extra = 0 if shared else size * elements
    else:
        extra = len(adapted) * size * elements
    inner = SIZE_BYTES[dtypes.autocast or dtypes.adapter] * setup.lora_rank * context.tokens * len(adapted)
    return extra + (constant or inner)


def handed_on(dtypes: DtypePolicy, input_dtype: str) -> str:
    """Type in which an adapter is handed its matrix's input: cast to its own, but by bitsandbytes' layers under
    autocast."""
    return input_dtype if dtypes.quantized and dtypes.autocast else dtypes.adapter


def by_input(linears: Sequence[LinearSpec], *, apart: bool = False) -> list[list[LinearSpec]]:
    """Matrices grouped by the width of their input: those of one width share it; `apart`: those of one module that do
    not take the encoder's output, and those that do."""
    groups: dict[tuple[int, str, bool], list[LinearSpec]] = {}
    for linear in linears:
        module = linear.name.rpartition(".")[0] if apart else ""
        groups.setdefault((linear.in_features, module, linear.of_encoder), []).append(linear)
    return list(groups.values())


def _kept_by_kind(linear: LinearSpec, context: LayerContext, input_dtype: str) -> int:
    """Bytes that an adapter of another kind than LoRA keeps of one matrix, a copy of its input apart.

    DoRA keeps the matrix's own result and LoRA's for the gradient of the magnitude, and under dropout, which it puts
    before the matrix too, the matrix in the type that it multiplies; VeRA its inner product, the result that its vector
    scales, and what autocast makes of its two frozen matrices, which are in fp32; IA3 what it scales; OFT the skew
    matrix of its rotation, its powers and their sum.

    Source: peft 0.21 `tuners/lora/dora.py`, `tuners/adalora/layer.py`, `tuners/vera/layer.py`, `tuners/ia3/layer.py`,
    `tuners/oft/layer.py` _cayley_batch.
    """
    setup, dtypes = context.setup, context.dtypes
    out, inside, rank = linear.out_features, linear.in_features, setup.lora_rank
    multiplied, returned = SIZE_BYTES[dtypes.autocast or dtypes.adapter], SIZE_BYTES[dtypes.linear_out(input_dtype)]
    if setup.adapter == "oft":
        return 6 * multiplied * inside * block_size(inside, rank)
    per_token = {
        "dora": multiplied * rank + (returned + multiplied) * out,
        "adalora": multiplied * rank,
        "vera": multiplied * (rank + out),
        "ia3": SIZE_BYTES[dtypes.adapter] * inside if linear.role == "down" else returned * out,
    }
    dropped = setup.adapter == "dora" and setup.lora_dropout > 0
    same = dtypes.adapter == dtypes.table and dtypes.autocast in (None, dtypes.table) and not dtypes.quantized
    copied = multiplied * linear.num_weights if dropped and not same else 0
    if setup.adapter == "vera" and dtypes.autocast:
        copied = multiplied * rank * (inside + out)
    return context.tokens * per_token.get(setup.adapter, 0) + copied


# What a layer's MLP keeps between its projections: dense, gated or routed to experts.


ACTIVATION_COPIES = {"gelu_new": 4, "gelu_fast": 7, "relu2": 2, "quick_gelu": 2, "sparse-gelu_pytorch_tanh": 2}
"""How many tensors of the intermediate size an activation function keeps for its backward: those composed of single
operations ("gelu_fast" cubes by products, each of which keeps its factors; Gemma 3n's sparse one cuts at a deviation
first, which keeps its input; a quick GELU keeps its input and the sigmoid); every other is one kernel that keeps its
input (relu: its output).
Source: transformers 5.23 `activations.py`."""


def activation_dtype(activation: str, dtypes: DtypePolicy, dtype: str) -> str:
    """Type of the activated tensor: the composed GELU comes out of autocast in fp32."""
    return "fp32" if dtypes.autocast and ACTIVATION_COPIES.get(activation, 1) == 4 else dtype


def gated_fused(mlp: MlpSpec | None, context: LayerContext) -> bool:
    """Whether one kernel computes the activation of a dense gated MLP and its product."""
    return mlp is not None and mlp.kind == "gated" and "gated" in context.fused


def adapts_mlp(layer: LayerSpec, adapted: Collection[str]) -> bool:
    """Whether all three matrices of a gated MLP carry adapters."""
    return {"gate", "up", "down"} <= {linear.role for linear in layer.linears if linear.name in adapted}


def lora_mlp(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether a dense gated MLP runs as one fused LoRA function."""
    fuses_lora = "lora" in context.fused and "inputs" not in context.fused
    return fuses_lora and gated_fused(layer.mlp, context) and adapts_mlp(layer, context.adapted)


def between_dense(mlp: MlpSpec, down: Sequence[LinearSpec], context: LayerContext, input_dtype: str) -> int:
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
    copies = ACTIVATION_COPIES.get(mlp.activation, 1)
    saved = copies * SIZE_BYTES[dtype]
    if copies == 4 and dtypes.autocast:
        # a power is on autocast's fp32 list: the composed GELU keeps a 16-bit product, an fp32 copy of its input, the
        # fp32 tanh and the fp32 sum
        saved = SIZE_BYTES[dtype] + 12
    if mlp.kind != "plain":
        saved += SIZE_BYTES[dtype] + SIZE_BYTES[activation_dtype(mlp.activation, dtypes, dtype)]
    return saved * elements


def _routed_saved(mlp: MlpSpec, layer: LayerSpec, context: LayerContext) -> int:
    """What routed experts keep: for each of the top-k experts of a token both projections, the activated gate and the
    down projection's output (for its weighting); where experts are trained also the gathered input and the product.

    peft's `ParamWrapper` keeps the merged stack of expert weights of the layer, and the graph an unpacked 4-bit one.
    Grouped multiplication follows the weights' type; Llama 4's batched one is on autocast's list, so its results are
    16-bit, and the graph keeps 16-bit copies of a frozen fp32 stack (the k-bit cast makes bare parameters fp32) or of a
    merged one.

    Source: transformers 5.23 `integrations/moe.py` (grouped matrices), `MixtralSparseMoeBlock` and `Llama4TextExperts`;
    peft 0.21 `tuners/lora/layer.py` ParamWrapper; PyTorch `autocast_mode.cpp` (`bmm`).
    """
    dtypes, traits = context.dtypes, context.traits
    hidden = next(linear.in_features for linear in layer.linears if linear.role in ("gate_up", "up", "gate"))
    size = SIZE_BYTES[dtypes.stacks]
    routed = context.tokens * (mlp.num_experts if traits.dense_experts else mlp.num_active_experts)
    copies = 1 + (2 if mlp.gated_experts else 0) + traits.extra_expert_copies
    multiplied = SIZE_BYTES[dtypes.autocast] if traits.dense_experts and dtypes.autocast else size
    saved = routed * (copies * mlp.intermediate_size * multiplied + hidden * size)
    if context.trained or context.stacks:
        saved += routed * (mlp.intermediate_size + hidden) * multiplied
    saved += 40 * routed + 4 * context.tokens * mlp.num_experts
    if context.setup.trainer.grouped_experts:  # its kernels read the stacks as they lie
        return saved
    if context.setup.quantize_experts:
        saved += context.unpacked_bytes * sum(linear.num_weights for linear in layer.linears if linear.is_stack)
    elif context.stacks or (multiplied != size and not context.trained):
        saved += multiplied * sum(linear.num_weights for linear in layer.linears if linear.module == "parameter")
    return saved


def add_mlp(
    saved: Saved, layer: LayerSpec, by_role: Mapping[str, Sequence[LinearSpec]], context: LayerContext, normed: str
) -> None:
    """Adds what the MLP keeps, whose input has the type `normed`; nothing where the layer has none."""
    if layer.mlp is None:
        return
    dense = [linear for role in ("gate", "up", "gate_up") for linear in by_role.get(role, ()) if not linear.is_expert]
    if dense:
        shares = layer.parallel_residual  # its input with the attention
        one_norm = sum(norm.rows_per_token == 1 for norm in layer.norms) == 1
        shared = inputs_saved(dense, context, normed, kept_elsewhere=shares, pinned_elsewhere=shares and one_norm)
        saved.add("mlp", shared)
        down = [linear for linear in by_role.get("down", ()) if not linear.is_expert]
        saved.mlp += between_dense(layer.mlp, down, context, normed)
        # a fused LoRA function computes the last matrix's input anew
        unsaved = layer.mlp.activation == "relu" or lora_mlp(layer, context)
        activated = activation_dtype(layer.mlp.activation, context.dtypes, context.dtypes.linear_out(normed))
        of_down = inputs_saved(down, context, activated, kept_elsewhere=unsaved)
        saved.add("mlp", of_down)
        saved.down = of_down.base + of_down.adapters + of_down.pinned - of_down.pinned_again
    if layer.mlp.kind == "moe":
        if context.trained and not dense:
            saved.add("mlp", inputs_saved(by_role.get("router", ()), context, normed))
        saved.mlp += _routed_saved(layer.mlp, layer, context)
        if expert_parallel(layer, context):
            # the outputs of a token's experts are weighed where the token is instead of where the expert is, which
            # keeps as much
            saved.mlp += PAIR_BYTES * context.tokens * layer.mlp.num_active_experts
        if experts := [linear for linear in layer.linears if linear.is_expert and not linear.is_stack]:
            # modules of their own: the rows that each adds to the result, and with adapters those gathered for it
            routed = replace(context, tokens=context.tokens * experts[0].num_active)
            saved.mlp += SIZE_BYTES[context.dtypes.table] * routed.tokens * context.hidden
            residual = context.dtypes.residual
            dtype = context.dtypes.linear_out(residual) if context.dtypes.autocast else residual
            for group in by_input(experts) if not context.trained else ():
                one_of_each = [replace(linear, num=1, num_active=1) for linear in group]
                saved.add("mlp", inputs_saved(one_of_each, routed, dtype))


# What a layer of routed experts holds where they are distributed over GPUs: token dispatch, and the experts' own group.


PAIR_BYTES = 11
"""Bytes of a (token, expert) pair beyond those without expert parallelism: its place in the sent order, and marks."""


def replicas(setup: TrainSetup) -> int:
    """Ranks that hold the same experts, over which these are sharded again."""
    return setup.shards // setup.expert_degree


def expert_parallel(layer: LayerSpec, context: LayerContext) -> bool:
    """Whether the layer's experts are distributed."""
    return context.setup.expert_degree > 1 and layer.mlp is not None and layer.mlp.kind == "moe"


def dispatched_moments(layer: LayerSpec, context: LayerContext, saved: Saved) -> tuple[tuple[int, int], ...]:
    """Moments of a distributed layer's backward beside what it keeps, as `planner.memory.layers.constant_transients`:
    (bytes beside the gathered weights of the whole layer, 0). Zeros of a layer without experts beside others with some.

    In order: a recomputed forward's end, with received rows, results and their way back; the experts' gradients beside
    those of the rows, or the largest of them once more (the product of a transposed stack is copied); their reduction.
    """
    setup, dtypes = context.setup, context.dtypes
    if not expert_parallel(layer, context):
        return ((0, 0),) * 3
    assert layer.mlp is not None
    size = SIZE_BYTES[dtypes.table]
    rows = size * context.tokens * layer.mlp.num_active_experts * context.hidden
    residual = 2 * context.tokens * SIZE_BYTES[dtypes.residual] * context.hidden
    recomputed = ((6 if dtypes.autocast else 3) * rows + residual) * (setup.checkpointing > 0)
    if setup.parallel != "fsdp2":  # nothing of them is gathered or reduced
        return (recomputed, 0), (residual - saved.fed + 3 * rows, 0), (0, 0)
    stacks = [linear.num_weights + linear.num_bias for linear in layer.linears if linear.is_stack]
    elements, ranks = sum(stacks), replicas(setup)
    experts = max(linear.num for linear in layer.linears if linear.is_stack)
    wide = elements // experts * -(-experts // ranks) * ranks * (SIZE_BYTES["fp32"] if dtypes.autocast else size)
    gradients = size * elements
    return (
        (recomputed, 0),
        (residual - saved.fed + gradients + max(3 * rows, size * max(stacks)), 0),
        (residual - saved.fed + max(gradients + wide, 3 * wide * (ranks == 1)) - size * elements, 0),
    )
