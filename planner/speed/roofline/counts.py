"""What one step multiplies, moves and launches, by hand."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from planner.core.records import dataclass
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec
from planner.models.targets import lora_linears, lora_params
from planner.setup.packages import DELTA_TYPES
from planner.speed.roofline.types import Conditions

# Which matrices carry adapters, as the speed model groups them.


class Adapted(NamedTuple):
    """Adapters of one target set.

    Attributes:
        linears: the adapted matrices that text tokens pass through, with how many layers hold each.
        params_per_rank: trained elements at rank 1, idle encoders included.
        modules: adapted modules, idle encoders included; `apart`: of them, those at another length than the text.
    """

    linears: tuple[tuple[LinearSpec, int], ...]
    params_per_rank: int
    modules: int
    apart: int


def adapted_linears(model: ModelSpec, targets: str | tuple[str, ...]) -> Adapted:
    """The adapters of a target set, equal matrices merged."""
    idle = {id(layer) for layer, _ in model.idle_layers}
    merged: dict[LinearSpec, int] = {}
    params = modules = apart = 0
    for layer, repeats, linears in lora_linears(model, targets):
        for linear in linears:
            params += repeats * lora_params(linear, 1)
            modules += repeats * (1 if linear.module == "parameter" else linear.num)
            if layer.fixed_tokens or (linear.of_encoder and model.encoder_tokens):
                apart += repeats
            elif id(layer) not in idle:
                merged[linear] = merged.get(linear, 0) + repeats
    return Adapted(tuple(merged.items()), params, modules, apart)


# Linear-attention layers in the formula: passes over memory, kernels and host seconds beyond their projections.


CHUNK = 64
"""Tokens of one chunk of the gated delta rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """What one layer issues beside its projections.

    Attributes:
        passes: over its elements (value heads x key size), twice forward and four times backward, in 16 bit.
        forward, backward: kernels that PyTorch launches whatever the length.
        launches: Triton kernels of a forward; the backward and a second forward have as many each.
        chunk_s, recomputed_chunk_s: the host's seconds for every chunk of a sequence, forward and backward, and more
            where the forward is computed again.
        layer_s, recomputed_layer_s: the same whatever the length.
    """

    passes: float = 30.0
    forward: int = 0
    backward: int = 0
    launches: int = 0
    chunk_s: float = 0.0
    recomputed_chunk_s: float = 0.0
    layer_s: float = 0.0
    recomputed_layer_s: float = 0.0


MIXERS = {
    "fla": Mixer(forward=49, backward=68, launches=8),
    "torch": Mixer(passes=320.0, forward=130, backward=168, chunk_s=1.26e-3, recomputed_chunk_s=0.84e-3),
}
"""By `TrainSetup.linear_attention`. Kernels are counted of Qwen3.5's layer; the other numbers are those of dry runs:
passes 251 to 277 more in the loop than with the package (RTX 4090, A100, H100; 4B and 27B), chunks by their number.

Measured: the loop of a Qwen3.5-4B on an H100, 2.69 s for 2.26 (docs/accuracy/own-runs.md); the package's path nowhere.
"""
_LOOPED = replace(MIXERS["torch"], passes=470.0, layer_s=25.0e-3, recomputed_layer_s=6.3e-3)
"""The loop over a chunk's 63 rows that transformers had before 5.17 where two triangular systems are solved now: 378
launches and 441 views forward, 882 and 254 backward, by `planner.speed.host`'s classes of call; 29 and 221 kB per token
and value head. Counted by running it in PyTorch 2.13 (transformers 5.16 `torch_chunk_gated_delta_rule`)."""
_OTHERS = Mixer()
"""State spaces and recurrences: an elementwise stand-in."""


def mixer_of(model_type: str, linear_attention: str, *, looped: bool = False) -> Mixer:
    """That of a model's linear-attention layers; `looped`: run by a transformers before 5.17."""
    if model_type not in DELTA_TYPES:
        return _OTHERS
    return _LOOPED if looped and linear_attention == "torch" else MIXERS[linear_attention]


# What one token passes through, counted once per model: matrices, norms, attention, elementwise widths.


# Roles that read the layer's normed input, where autocast casts a fp32 stream once per matrix.
_STREAM_ROLES = frozenset({"q", "k", "v", "qkv", "gate", "up", "gate_up", "router", "mixer"})
COMPOSED = frozenset({"gelu_new", "gelu_fast"})
"""Activations that transformers computes as eight or nine kernels. Source: transformers 5.23 `activations.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulGroup:
    """Equal matrices of all layers: `count` modules of [out, in], each `num` copies with `num_active` per token;
    `second` of them are every second product of their layer."""

    linear: LinearSpec
    count: int
    second: int
    reads_stream: bool

    @property
    def weights(self) -> int:
        """Elements of all of them."""
        return self.count * self.linear.num_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All that the speed model needs of a ModelSpec. Widths are elements per token, summed over all layers.

    Attributes:
        groups: the layers' matrices; head and outer matrices apart.
        rms_width, layer_norm_width: normalized elements.
        rotary_width: elements that rotary embeddings touch.
        residual_width: elements of residual additions.
        gated_width, plain_width: elements between the MLP's matrices (active experts only).
        routed_width: elements gathered and scattered around experts.
        mixer_width: elements of linear attention, in `num_mixers` layers (`planner.speed.roofline.counts`).
        composed_width: elements of activations that are single operations in Python, `num_composed` modules.
        dropout_width: elements that the model's own dropouts mask while training, `num_dropouts` of them.
        num_apart: layers of a length of their own, which nothing here counts but `num_params` and `num_tensors`.
        num_experts_run: expert modules in all layers (loops over experts launch kernels for each).
        num_tensors: parameter tensors of the whole model.
    """

    groups: tuple[MatmulGroup, ...]
    outer: tuple[LinearSpec, ...]
    head: LinearSpec | None
    attentions: tuple[tuple[AttentionSpec, int], ...]
    num_layers: int
    num_apart: int
    hidden_size: int
    num_params: int
    num_tensors: int
    rms_width: int
    layer_norm_width: int
    num_rms: int
    num_layer_norms: int
    rotary_width: int
    num_rotary: int
    residual_width: int
    gated_width: int
    plain_width: int
    routed_width: int
    mixer_width: int
    num_mixers: int
    composed_width: int
    num_composed: int
    dropout_width: int
    num_dropouts: int
    num_experts_run: int
    num_expert_layers: int
    softcap: bool


def inventory(model: ModelSpec) -> Inventory:
    """The inventory of a model."""
    return model.once("inventory", _count)


class _Tally:
    """Widths, numbers and matrices, added up layer by layer."""

    def __init__(self) -> None:
        self.merged: dict[LinearSpec, int] = {}
        self.second: Counter[LinearSpec] = Counter()
        self.attentions: dict[AttentionSpec, int] = {}
        self.width = dict.fromkeys(("rms", "layer", "rotary", "gated", "plain", "routed", "mixer", "composed"), 0)
        names = (
            *("rms", "layer", "rotary", "experts", "expert_layers"),
            *("tensors", "composed", "crossed", "apart", "mixers"),
        )
        self.num = dict.fromkeys(names, 0)

    def add_layer(self, layer: LayerSpec, repeats: int, hidden_size: int) -> None:
        """So many equal layers."""
        self.num["tensors"] += repeats * sum(_tensors(linear) for linear in layer.linears)
        if layer.fixed_tokens:  # `planner.speed.roofline.encoder`
            self.num["apart"] += repeats
            self.num["tensors"] += 2 * repeats * len(layer.norms)
            return
        cross = layer.cross_attention
        for linear in layer.linears:
            if linear.of_encoder and cross is not None and cross.key_tokens:
                continue
            self.merged[linear] = self.merged.get(linear, 0) + repeats
        for linear in layer.every_second_product:
            self.second[linear] += repeats
        for norm in layer.norms:
            self.width[norm.kind] += repeats * norm.size * norm.rows_per_token
            self.num[norm.kind] += repeats
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                self._add_attention(attention, repeats)
        if layer.mlp is not None:
            self._add_mlp(layer.mlp, repeats, hidden_size)
        self.num["crossed"] += repeats * (layer.cross_attention is not None)

    def _add_attention(self, attention: AttentionSpec, repeats: int) -> None:
        if attention.kind == "linear":
            self.width["mixer"] += repeats * attention.num_heads * attention.head_dim
            self.num["mixers"] += repeats
            return
        self.attentions[attention] = self.attentions.get(attention, 0) + repeats
        if attention.rotary:
            heads = attention.num_heads + attention.num_kv_heads
            self.width["rotary"] += repeats * heads * attention.head_dim
            self.num["rotary"] += repeats

    def _add_mlp(self, mlp: MlpSpec, repeats: int, hidden_size: int) -> None:
        if mlp.kind == "moe":
            inner = mlp.num_active_experts * mlp.intermediate_size + mlp.shared_intermediate_size
            self.width["gated" if mlp.gated_experts else "plain"] += repeats * inner
            self.width["routed"] += repeats * mlp.num_active_experts * hidden_size
            self.num["experts"] += repeats * mlp.num_experts
            self.num["expert_layers"] += repeats
            return
        self.width[mlp.kind] += repeats * mlp.intermediate_size
        if mlp.activation in COMPOSED:
            self.width["composed"] += repeats * mlp.intermediate_size
            self.num["composed"] += repeats

    def groups(self) -> tuple[MatmulGroup, ...]:
        """The layers' matrices, equal ones together."""
        return tuple(
            MatmulGroup(
                linear=linear, count=count, second=self.second[linear], reads_stream=linear.role in _STREAM_ROLES
            )
            for linear, count in self.merged.items()
        )


def _tensors(linear: LinearSpec) -> int:
    """Parameter tensors of a matrix and its copies."""
    return (1 if linear.module == "parameter" else linear.num) * (2 if linear.bias else 1)


def _through_all(layer: LayerSpec) -> LayerSpec:
    """A layer whose every token passes through every expert."""
    mlp = layer.mlp and replace(layer.mlp, num_active_experts=layer.mlp.num_experts)
    return replace(layer, linears=tuple(replace(linear, num_active=linear.num) for linear in layer.linears), mlp=mlp)


def _count(model: ModelSpec) -> Inventory:
    tally, traits = _Tally(), model.traits
    for layer, repeats in model.layer_counts:
        tally.add_layer(_through_all(layer) if traits.dense_experts else layer, repeats, model.hidden_size)
    width, num = tally.width, tally.num
    for norm in model.outer_norms:
        width[norm.kind] += norm.size * norm.rows_per_token
        num[norm.kind] += 1
    num_layers = model.num_layers - num["apart"]
    # after attention, cross-attention and MLP, and of the embeddings
    dropouts = 2 * num_layers + num["crossed"] + 1 if traits.residual_dropout else 0
    return Inventory(
        groups=tally.groups(),
        outer=model.outer_linears,
        head=model.head,
        attentions=tuple(tally.attentions.items()),
        num_layers=num_layers,
        num_apart=num["apart"],
        hidden_size=model.hidden_size,
        num_params=model.num_params,
        num_tensors=num["tensors"] + num["rms"] + 2 * num["layer"] + len(model.embeddings) + 1,
        layer_norm_width=width.pop("layer"),
        **{f"{name}_width": total for name, total in width.items()},
        num_rms=num["rms"],
        num_mixers=num["mixers"],
        num_layer_norms=num["layer"],
        num_rotary=num["rotary"],
        residual_width=2 * model.hidden_size * num_layers,
        num_composed=num["composed"],
        dropout_width=dropouts * model.hidden_size,
        num_dropouts=dropouts,
        num_experts_run=num["experts"],
        num_expert_layers=num["expert_layers"],
        softcap=model.logit_softcap,
    )


# Bytes that elementwise kernels move, and kernels that are launched: counted from the modules' eager code.


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Bytes per token and kernels per micro-batch, forward and backward."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: float
    backward_kernels: float


REDUCTION_REFERENCE_BANDWIDTH = 2.039e12  # the A100 on which the reductions below were timed


def drag_of(bandwidth: float) -> float:
    """How much of the A100's shortfall in reductions a card shows, 0 to 1.

    Norms, rotary embedding and softmax reach about half of an A100's bandwidth: their own work, not memory, holds them
    up. A card with less bandwidth waits for memory more and loses less; the share is taken as proportional.
    """
    return min(1.0, bandwidth / REDUCTION_REFERENCE_BANDWIDTH)


def _blend(counted: float, measured: float, drag: float) -> float:
    return counted + (measured - counted) * drag


COMPOSED_FORWARD, COMPOSED_BACKWARD = (16, 7), (25, 10)
"""Passes over memory, and kernels, of the composed GELU beyond those of one kernel: forward a power, five operations
with a number, a sum and a product of two; backward each one's own, and two sums of gradients.

Source: transformers 5.23 `activations.py` NewGELUActivation; PyTorch `tools/autograd/derivatives.yaml`. Measured: the
book's GPT-2 on an A100 (rasbt/LLMs-from-scratch ch05/10) takes 15.9 ms longer with this and a LayerNorm of single
operations than with PyTorch's; these are counted as 7.
"""


def eager_score_bytes(
    dtype: str, *, upcast: bool, dropout: bool, drag: float, compiled: bool = False
) -> tuple[float, float]:
    """Bytes per score (a query, a key and a head) that attention in single operations moves, forward and backward.

    Forward: the product written, scaled, masked, softmax, dropped out, read; the backward likewise, without the mask.
    Softmax and dropout are reductions and random numbers: on an A100 twice their bytes (`drag_of`). torch.compile makes
    one kernel of all between the two products.

    Args:
        upcast: whether the softmax is computed in fp32 and cast back; its kernel reads fp16 itself, bf16 is cast first.
        dropout: whether attention weights are dropped out while training, with a mask of one byte.

    Source: transformers 5.23 `models/llama/modeling_llama.py` and `models/gpt2/modeling_gpt2.py`
    eager_attention_forward; PyTorch `aten/src/ATen/native/SoftMax.cpp` softmax, `tools/autograd/derivatives.yaml`.
    Counted, not fitted.
    """
    size = SIZE_BYTES[dtype]
    slow = 1.0 + drag
    mask = 1 if dropout else 0
    if compiled:
        return 4 * size + mask, 7 * size + mask
    wide = 4 if upcast else size
    read = size if dtype == "fp16" else wide
    cast = size + wide if wide != size else 0
    casts = cast if read == size else 2 * cast
    dropped = (2 * size + 1) * slow if dropout else 0.0
    forward = 6 * size + (read + wide) * slow + casts + dropped
    backward = 6 * size + (2 * wide + read) * slow + casts + dropped
    return forward, backward


SINGLE_SCORES = {False: (53, 133), True: (50, 114)}
"""Bytes per score of attention whose softmax is single operations too, forward and backward: in fp32, and under
autocast, where exponential, sum and quotient are fp32. Half of fp32's in 16 bit.

Counted by running such a model in PyTorch 2.13 (benchmarks/single_operations.py at e34acc15; CS336's own program gives
the same), with the products' 8 and 16; autocast's from it by the types of CUDA's lists. Likewise the three below.
"""
SINGLE_GATED = (8, 18)
"""Passes over a gated activation's width where the activation is a product with a sigmoid of its own."""
SINGLE_LOGIT = {False: 140, True: 128}
"""Bytes per logit, both ways, of a cross-entropy of single operations: in fp32, and of 16-bit logits under autocast."""
SINGLE_WEIGHT = 8
"""Bytes per trained weight and backward: an einsum's gradient lies across the weight and is copied."""
SINGLE_HOST = (1.6, 1.95)
"""How many times longer the host takes with the same layer, forward and backward, than with transformers' Llama in
eager attention: einops' Python, and two to three views around every kernel, 1.4 and 1.7, on machines whose hosts take
1.15 times as long as those of published trainers (benchmarks/gathered.py, the half that is not kept out). The course's
program timed on a CPU with tensors of no size (12 layers, 12 rounds in turn, November 2026); without einops 1.2 and 1.6
(benchmarks/single_operations.py at e34acc15)."""


def layer_traffic(
    inv: Inventory,
    dtypes: DtypePolicy,
    conditions: Conditions,
    *,
    trained: bool,
    drag: float = 1.0,
    fused: frozenset[str] = frozenset(),
    mixer: Mixer,
) -> Moved:
    """Elementwise traffic of all layers: norms, rotary, residual, activation, casts, expert routing.

    Eager RMSNorm in transformers upcasts, squares, averages, scales, casts and multiplies: counted 36 bytes per 16-bit
    element forward and 62 backward (72 with the weight's gradient), but on an A100 it takes as long as 50 and 115
    (134); rotary embedding counted ten passes each way, as long as 20 and 24; LayerNorm counted 2 and 3, as long as 3.3
    and 7. `drag` blends the two. Gated activation: five passes forward and nine backward, as counted and as measured.
    With a fp32 stream under autocast each matrix casts its input; bitsandbytes casts its output back.

    Args:
        fused: of the layers, what one kernel each computes: one pass over memory; "inputs": torch.compile's.
        mixer: what a linear-attention layer does.

    Source: linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv (A100-SXM4-80GB, version 0.2.1; LayerNorm on an
    H100, 0.6.0); transformers 5.23 `models/llama/modeling_llama.py`; bitsandbytes 0.50 `nn/modules.py`; PyTorch
    `tools/autograd/derivatives.yaml`.
    """
    stream, compute, wide = (
        SIZE_BYTES[dtype] for dtype in (dtypes.residual, dtypes.compute, dtypes.linear_out(dtypes.residual))
    )
    # cosines are the stream's type, which promotes what they multiply; FSDP2 casts the table, and with it the stream
    sizes = _Sizes(stream, compute, wide, turned=wide if conditions.fp32_reduction else max(wide, stream))
    passes = SINGLE_GATED if conditions.single_operations else (5, 9)
    forward, backward = _elementwise_bytes(inv, dtypes, sizes, fused, passes, trained=trained, drag=drag)
    mixed = inv.mixer_width * mixer.passes * SIZE_BYTES[dtypes.compute]
    cast, summed, casting = _around_matrices(inv, sizes)
    kernels = _kernels(inv, conditions, fused, trained=trained, casting=casting)
    return Moved(
        forward_bytes=forward + cast + 2 * mixed,
        backward_bytes=backward + cast + summed + 4 * mixed,
        forward_kernels=kernels[0] + inv.num_mixers * mixer.forward,
        backward_kernels=kernels[1] + inv.num_mixers * mixer.backward,
    )


class _Sizes(NamedTuple):
    """Bytes of one element of the stream between layers, of what is multiplied, of what a matrix returns, and of a
    query or key that is turned."""

    stream: int
    compute: int
    wide: int
    turned: int


def _elementwise_bytes(
    inv: Inventory,
    dtypes: DtypePolicy,
    sizes: _Sizes,
    fused: frozenset[str],
    passes: tuple[int, int],
    *,
    trained: bool,
    drag: float,
) -> tuple[float, float]:
    """Bytes of norms, rotary embeddings, residuals, activations, dropouts and routing, forward and backward."""
    stream, _, wide, turned = sizes
    norm, rotary, gated = ("norm" in fused, "rotary" in fused, "gated" in fused)
    rms_forward, rms_backward = 2.0 * stream, 3.0 * stream
    rope_forward, rope_backward = 2.0 * wide, 2.0 * wide
    if not norm:
        eager = ((36, 50), (62, 115)) if stream == 2 else ((28, 39), (50, 93))
        rms_forward, rms_backward = _blend(*eager[0], drag), _blend(*eager[1], drag)
    if not rotary:
        # what holds a fast card up is elements, which are no more where they are promoted
        counted = 10 * turned
        rope_forward = _blend(counted, max(counted, 20 * wide), drag)
        rope_backward = _blend(counted, max(counted, 24 * wide), drag)
    act_forward, act_backward = (3 * wide, 5 * wide) if gated else (passes[0] * wide, passes[1] * wide)
    composed = (
        0 if gated else inv.composed_width * (4 if dtypes.autocast else wide)
    )  # a power is on autocast's fp32 list
    # a compiler draws a dropout's numbers beside other work
    dropped = 0 if "inputs" in fused else inv.dropout_width * (2 * stream + 1)
    layer_norm = _blend(14, 23, drag) if dtypes.autocast and stream == 2 else _blend(2, 3.3, drag) * stream
    layer_norm_backward = layer_norm + _blend(1, 3.7, drag) * stream
    norm_weight = (5 if norm else _blend(5, 9.5, drag)) * stream if trained else 0.0
    forward = (
        inv.rms_width * rms_forward
        + inv.layer_norm_width * layer_norm
        + inv.rotary_width * rope_forward
        + inv.residual_width * 3 * stream
        + inv.gated_width * act_forward
        + inv.plain_width * 2 * wide
        + inv.routed_width * 7 * stream
        + COMPOSED_FORWARD[0] * composed
        + dropped
    )
    backward = (
        inv.rms_width * (rms_backward + norm_weight)
        + inv.layer_norm_width * layer_norm_backward
        + inv.rotary_width * rope_backward
        + inv.residual_width * 3 * stream
        + inv.gated_width * act_backward
        + inv.plain_width * 3 * wide
        + inv.routed_width * 8 * stream
        + COMPOSED_BACKWARD[0] * composed
        + dropped
    )
    return forward, backward


def _around_matrices(inv: Inventory, sizes: _Sizes) -> tuple[int, int, int]:
    """(bytes of casts around the matrices in each direction, bytes in which gradients of the input that several share
    are added up, matrices whose input is cast)."""
    stream, compute, wide, turned = sizes
    cast = summed = casting = 0
    for group in inv.groups:
        linear = group.linear
        active = group.count * linear.num_active
        if group.reads_stream:
            summed += active * linear.in_features * 2 * stream
        if stream != compute if group.reads_stream else (wide != compute and linear.role == "down"):
            casting += group.count
            cast += active * linear.in_features * 6
            if wide != compute:
                cast += active * linear.out_features * 6
    if turned != compute:  # attention takes 16-bit queries and keys
        cast += inv.rotary_width * 6
    return cast, summed, casting


def _kernels(
    inv: Inventory, conditions: Conditions, fused: frozenset[str], *, trained: bool, casting: int
) -> tuple[float, float]:
    """Kernels that all layers launch, forward and backward."""
    rotary, gated = "rotary" in fused, "gated" in fused
    composed, dropouts = inv.num_composed * (not gated), inv.num_dropouts * ("inputs" not in fused)
    calls = sum(group.count * (1 if group.linear.module == "parameter" else group.linear.num) for group in inv.groups)
    norm = (1.0, 2.0) if "norm" in fused else (8.0, 12.0)
    forward = (
        inv.num_rms * norm[0]
        + inv.num_layer_norms
        + inv.num_rotary * (1 if rotary else 11)
        + calls
        + casting
        + inv.num_layers * (2 + (1 if gated else 2) + 4)
        + composed * COMPOSED_FORWARD[1]
        + dropouts
    )
    backward = (
        inv.num_rms * norm[1]
        + inv.num_layer_norms * 2
        + inv.num_rotary * (1 if rotary else 13)
        + calls * (2 if trained else 1)
        + casting
        + inv.num_layers * (2 + (1 if gated else 3) + 5 + 3)
        + composed * COMPOSED_BACKWARD[1]
        + dropouts
    )
    if conditions.loop_experts:
        return forward + inv.num_experts_run * 8, backward + inv.num_experts_run * 11
    return forward + inv.num_expert_layers * 15, backward + inv.num_expert_layers * 20


def adapter_traffic(
    linears: tuple[tuple[LinearSpec, int], ...], dtypes: DtypePolicy, *, dropout: bool, fused: bool
) -> Moved:
    """Traffic of LoRA around the adapted matrices (linear, how many): PEFT's eager path, or one fused function.

    result + B(A(dropout(x))) * scaling: a plain matrix casts x to the adapter's type even under autocast (which then
    casts it back for the matmul), a quantized one only without autocast; then dropout with its mask, the thin
    matmuls' long sides, the scaling, the sum and its cast back. bitsandbytes' form clones the base result first. The
    rank adds next to nothing to the bytes.

    Source: peft 0.21 `tuners/lora/layer.py` `Linear.forward`, `tuners/lora/bnb.py` `Linear4bit.forward`.
    """
    ahead, back = _around_an_adapter(dtypes, dropout=dropout, fused=fused)
    forward = backward = modules = 0
    for linear, count in linears:
        inputs = count * linear.num_active * linear.in_features
        outputs = count * linear.num_active * linear.out_features
        forward += inputs * ahead.per_input + outputs * ahead.per_output
        backward += inputs * back.per_input + outputs * back.per_output
        modules += count * (1 if linear.module == "parameter" else linear.num)
    return Moved(
        forward_bytes=forward,
        backward_bytes=backward,
        forward_kernels=modules * ahead.kernels,
        backward_kernels=modules * back.kernels,
    )


class _Around(NamedTuple):
    """What one way through an adapter moves: bytes of every input and output of its matrix; its kernels."""

    per_input: int
    per_output: int
    kernels: int


def _around_an_adapter(dtypes: DtypePolicy, *, dropout: bool, fused: bool) -> tuple[_Around, _Around]:
    """Forward and backward of one adapted matrix."""
    narrow = SIZE_BYTES[dtypes.autocast or (dtypes.compute if fused else dtypes.adapter)]
    wide, stream = SIZE_BYTES[dtypes.linear_out(dtypes.residual)], SIZE_BYTES[dtypes.residual]
    cast_size = stream if dtypes.quantized and dtypes.autocast else SIZE_BYTES[dtypes.adapter]
    mask = (2 * cast_size + 1) if dropout else 0
    if fused:
        return _Around(mask + narrow, 3 * narrow, 3), _Around(2 * narrow + mask + 3 * stream, 3 * narrow, 5)
    total = max(narrow, wide)
    cast_in = (stream + cast_size if cast_size != stream else 0) + (cast_size + narrow if cast_size != narrow else 0)
    cast_out = (total + wide) if total != wide else 0
    clone = 2 * wide if dtypes.quantized else 0
    casts = bool(cast_in) + bool(cast_out) + dropout
    return (
        _Around(cast_in + mask + narrow, 3 * narrow + (wide + narrow + total) + cast_out + clone, 4 + casts),
        _Around(2 * narrow + mask + cast_in + 3 * stream, 4 * narrow + cast_out, 6 + casts),
    )
