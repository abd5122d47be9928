"""What one layer of each kind costs at one micro-batch, before it is said which of them are checkpointed.

How many layers are checkpointed, what of them is kept and what lies on the host changes none of it, only whether there
is any checkpointing: a walk over the space works it out once for all of those (`in_common`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.hardware.kernels import Kernel, attention_kernel, masked
from planner.memory.activations import attention_held, layer_saved
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.layer_context import LayerContext, Saved
from planner.memory.scores import mask_bytes
from planner.memory.streams import kept_by_streams
from planner.memory.temporary import (
    at_last_matrix,
    backward_temporary,
    constant_transients,
    forward_temporary,
    magnitude_bytes,
    merged_stacks,
)
from planner.memory.traits import traits_of
from planner.memory.workspace import dequantized_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.targets import adapts_expert_stacks
from planner.records import dataclass
from planner.setup import TrainSetup


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
        held: what selective checkpointing keeps of it.
        forward: temporaries of its forward; `merged`: stacks of experts that live through a forward that keeps nothing.
        beside: in a forward that keeps everything: DoRA's largest norm, or what stands at the last matrix's adapter.
        moments: of its backward, as (gradients of activations, a dequantized matrix), always in the same order.
        dequantized: its largest matrix in 16 bits, where it is quantized.
        mask: the attention's mask, which layers of one window share.
    """

    saved: Saved
    entry: int
    held: int
    forward: int
    merged: int
    beside: int
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
    traits, fused = traits_of(model), setup.fused_parts(model.model_type)
    stacks = setup.method != "full" and setup.kind.adapts_matrices and adapts_expert_stacks(model, setup.lora_targets)
    found = []
    for layer, names in zip(model.layer_kinds, adapted, strict=True):
        own = setup.replace_trusted(seq_len_tokens=layer.fixed_tokens) if layer.fixed_tokens else setup
        if layer.frozen:  # as under adapters, of which it has none
            own = own.replace_trusted(method="lora")
        context = LayerContext(
            setup=own,
            dtypes=replace(dtypes, table="fp32") if setup.widens_trained and not layer.frozen else dtypes,
            adapted=names,
            kernel=_kernel(model, layer, gpu, own, dtypes),
            tokens=own.forward_tokens,
            hidden=model.hidden_size,
            traits=traits,
            stacks=stacks,
            fused=fused,
            looked_at=_looked_at(model, layer, setup),
        )
        found.append(_costs(layer, context))
    return tuple(found)


def _looked_at(model: ModelSpec, layer: LayerSpec, setup: TrainSetup) -> int:
    """Rows of the micro-batch's pictures that a layer attends to instead of its own tokens."""
    if not layer.looks or setup.images is None:
        return 0
    from planner.models.encoders import encoder_of  # late: text alone needs none of it

    return setup.micro_batch_seqs * setup.images.num * encoder_of(model, setup.images).projectors[0].tokens


def _costs(layer: LayerSpec, context: LayerContext) -> LayerCosts:
    setup, dtypes, tokens, traits = context.setup, context.dtypes, context.tokens, context.traits
    saved = layer_saved(layer, context)
    saved.norm += kept_by_streams(context)
    mask = beside = dequantized = 0
    if layer.attention is not None:
        handed = masked(setup, layer.attention, masks_packed=traits.masks_packed)
        each = mask_bytes(context.kernel, dtypes, masked=handed, adds=layer.attention.adds_mask)
        mask = each * tokens * context.row_tokens
    if setup.adapter == "dora" and context.adapted:  # the last matrix's norm, the layer's activations there
        beside = magnitude_bytes(layer, context)
    beside = max(beside, tokens * at_last_matrix(layer, context, saved))
    if setup.quantized:
        dequantized = max([dequantized_bytes(one, setup, dtypes.residual) for one in layer.linears], default=0)
    return LayerCosts(
        saved=saved,
        entry=SIZE_BYTES[dtypes.residual] * context.hidden * tokens * traits.streams,
        held=attention_held(layer, context),
        forward=forward_temporary(layer, context),
        merged=merged_stacks(layer, context),
        beside=beside,
        moments=((backward_temporary(layer, context, saved), 0), *constant_transients(layer, context, saved)),
        dequantized=dequantized,
        mask=mask,
        row_tokens=context.row_tokens,
        kernel=context.kernel,
    )


def _kernel(model: ModelSpec, layer: LayerSpec, gpu: GpuSpec, setup: TrainSetup, dtypes: DtypePolicy) -> Kernel:
    if layer.attention is None:
        return "linear"
    return attention_kernel(model, setup, gpu, layer.attention, dtypes.attention_input)
