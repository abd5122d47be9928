"""What a layer's matrices and their adapters keep of their inputs for the backward."""

from collections.abc import Sequence

from planner.choices.adapters import block_size
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.layer_context import Inputs, LayerContext
from planner.models.spec import LinearSpec
from planner.setup import TrainSetup


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
    base = _base_keeps(linears, context, input_dtype, kept_elsewhere=kept_elsewhere)
    pinned = 0
    if setup.pins_inputs and not context.trained and linears[0].quantizes and not pinned_elsewhere:
        pinned = SIZE_BYTES[input_dtype] * elements
    adapted = [linear for linear in linears if linear.name in context.adapted]
    own = adapted and _adapters_keep(adapted, context, input_dtype, shared=bool(pinned) or kept_elsewhere)
    return Inputs(base=base, adapters=own or 0, pinned=pinned, pinned_again=pinned if kept_elsewhere else 0)


def _compiled(
    linears: Sequence[LinearSpec], context: LayerContext, input_dtype: str, *, kept_elsewhere: bool
) -> Inputs:
    """What matrices that share one input keep of it under torch.compile: one copy in the type that is multiplied, where
    a weight or an adapter has a gradient, and each adapter's rank-sized inner output.

    Source: PyTorch 2.13 `torch/_functorch/partitioners.py`: what a product of the backward reads is not recomputed.
    Measured: its partitioner on a Llama layer, full and LoRA: equal (benchmarks/compiled_layers.py).
    """
    dtypes, tokens = context.dtypes, context.tokens
    adapted = sum(linear.name in context.adapted for linear in linears)
    copy = 0
    if (context.trained or adapted) and not kept_elsewhere:
        active = max(linear.num_active for linear in linears)
        copy = SIZE_BYTES[dtypes.autocast or input_dtype] * linears[0].in_features * tokens * active
    inner = adapted * context.setup.lora_rank * tokens * SIZE_BYTES[dtypes.autocast or dtypes.adapter]
    return Inputs(base=copy, adapters=inner) if context.trained else Inputs(adapters=copy + inner)


def _base_keeps(linears: Sequence[LinearSpec], context: LayerContext, input_dtype: str, *, kept_elsewhere: bool) -> int:
    """Bytes of their input that trained matrices keep; autocast copies it once for each."""
    if not context.trained:
        return 0
    elements, cast = linears[0].in_features * context.tokens, context.dtypes.autocast
    if cast and input_dtype != cast:
        return SIZE_BYTES[cast] * elements * sum(linear.num_active for linear in linears)
    return 0 if kept_elsewhere else SIZE_BYTES[input_dtype] * elements * max(linear.num_active for linear in linears)


def _adapters_keep(adapted: Sequence[LinearSpec], context: LayerContext, input_dtype: str, *, shared: bool) -> int:
    """Bytes that the adapters of matrices with one input keep; `shared`: something else keeps that input."""
    dtypes, setup = context.dtypes, context.setup
    elements = adapted[0].in_features * context.tokens
    constant = 0
    if setup.adapter != "lora" and not setup.kind.like_lora:
        constant = sum(_kept_by_kind(one, context, input_dtype) for one in adapted)
        if setup.adapter not in KEEP_INPUTS:
            return constant
    direct, copy_dtype = adapter_input(dtypes, input_dtype)
    if setup.adapter == "oft":  # also on a quantized base through the type of its rotation
        direct = dtypes.adapter == input_dtype and dtypes.autocast in (None, input_dtype)
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


def adapter_input(dtypes: DtypePolicy, input_dtype: str) -> tuple[bool, str]:
    """Whether adapted matrices share the kept input, and the type it is kept in."""
    if dtypes.autocast:
        direct = input_dtype == dtypes.autocast and (dtypes.quantized or dtypes.adapter == input_dtype)
        return direct, dtypes.autocast
    return dtypes.adapter == input_dtype, dtypes.adapter


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


KEEP_INPUTS = ("dora", "adalora", "oft")
"""Of the kinds whose step is not LoRA's, those that keep a copy of their input as it does."""


def _kept_by_kind(linear: LinearSpec, context: LayerContext, input_dtype: str) -> int:
    """Bytes that an adapter of another kind than LoRA keeps of one matrix, a copy of its input apart.

    DoRA keeps the matrix's own result and LoRA's for the gradient of the magnitude; VeRA its inner product and the
    result that its vector scales; IA3 what it scales; OFT the skew matrix of its rotation, its powers and their sum.

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
    return context.tokens * per_token.get(setup.adapter, 0)


def shared_bytes(setup: TrainSetup, linears: Sequence[LinearSpec]) -> int:
    """VeRA's two frozen matrices, wide enough for every adapted one, in fp32 (peft casts buffers as well)."""
    widest = max(one.in_features for one in linears) + max(one.out_features for one in linears)
    return 4 * setup.lora_rank * widest
