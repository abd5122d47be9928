"""Activations of one micro-batch over all layers: what is kept, what is recomputed, what is there for a moment.

Independent of loss, optimizer and accumulation, and affine in the micro-batch, so that a walk over the whole space
computes it once for each precision, adapter, kernel and checkpointing, and what checkpointing leaves alone
(`Groundwork`) once for all of those.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.casts import NO_ADAPTER_CASTS, AdapterCasts, WeightCasts, adapter_casts, weight_casts
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy, dtype_policy_of
from planner.memory.encoder import convolutions_bytes, encoder_output_bytes, sound_bytes
from planner.memory.layer_costs import LayerCosts, LayerMoment, layer_costs
from planner.memory.outside_layers import kept_by_outer_norms
from planner.memory.parts import PARTS, ActivationParts
from planner.memory.position_bias import position_bias_bytes
from planner.memory.reference import reference_forward_bytes
from planner.memory.trained import adapted_names, frozen_below, parted, whole_where_frozen
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

ON_DEVICE_INPUTS = 2
"""Inputs of checkpointed layers that are on the device while the others lie on the host. Seen in the dry run."""


def step_dtype_policy(model: ModelSpec, setup: TrainSetup) -> DtypePolicy:
    """The data types of a setup on one model: `dtype_policy_of`, and the residual stream that autocast's LayerNorm
    widens.

    nn.LayerNorm returns fp32 under autocast, so the stream of a model with LayerNorm is fp32 from its first layer on
    where matrices return their input's type (`DtypePolicy.returns_input`).
    """
    dtypes = dtype_policy_of(setup)
    traits = traits_of(model)
    if dtypes.autocast and (traits.streams > 1 or (dtypes.returns_input and traits.norm == "layer")):
        return replace(dtypes, residual="fp32")
    return dtypes


class SharedLayerCosts(NamedTuple):
    """What of one micro-batch's activations is the same however many layers are checkpointed, as long as some are or
    none is; all in bytes.

    Attributes:
        costs: of every kind of layer; layers: how many there are above the frozen ones.
        below: layers that keep nothing for the backward.
        outside: kept outside the layers, by part; final_norm: by the norm behind them.
    """

    dtypes: DtypePolicy
    costs: Sequence[LayerCosts]
    layers: Sequence[int]
    below: int
    outside: dict[str, int]
    final_norm: int
    adapter_casts: AdapterCasts
    weight_casts: WeightCasts


def shared_layer_costs(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    costs: Sequence[LayerCosts] | None = None,
    *,
    casts_adapters: bool = True,
) -> SharedLayerCosts:
    """The groundwork of a setup; equal for all that have the same `in_common`.

    Args:
        costs: of every kind of layer; None: `costs_of`.
        casts_adapters: whether autocast's copies of the adapters are counted here.
    """
    dtypes, below = step_dtype_policy(model, setup), frozen_below(model, setup)
    model = parted(model, setup.trained_layers) if setup.trained_layers else model
    costs = costs_of(model, gpu, setup, dtypes) if costs is None else costs
    before, final_norm = kept_by_outer_norms(model, setup, dtypes)
    return SharedLayerCosts(
        dtypes=dtypes,
        costs=costs,
        layers=_counted(model, setup, below)[0],
        below=below,
        outside={"norm": before, "masks": _masks(model, costs)},
        final_norm=final_norm,
        adapter_casts=adapter_casts(model, setup, dtypes) if casts_adapters else NO_ADAPTER_CASTS,
        weight_casts=weight_casts(model, setup, dtypes),
    )


def activation_parts(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, ground: SharedLayerCosts | None = None
) -> ActivationParts:
    """The activations of a setup; independent of its loss, optimizer and accumulation.

    Args:
        ground: what `shared_layer_costs` says of this setup, where it is known already.
    """
    ground = shared_layer_costs(model, gpu, setup) if ground is None else ground
    model = parted(model, setup.trained_layers) if setup.trained_layers else model
    costs, counts, forwards = ground.costs, ground.layers, setup.live_forwards
    kept = _counted(model, setup, ground.below)[1]
    num, num_kept = sum(counts), sum(kept)
    stored = _stored(model, setup, ground, kept)
    adapters, adapter_cache = ground.adapter_casts.at(num_kept / max(1, num))
    stored["adapters"] += adapters
    casts = ground.weight_casts.at(num_kept, num)
    behind = _gone_behind(model, setup, costs, kept)
    layer_moments = _largest_moments(setup, costs, counts, kept, behind)
    largest = max(layer_moments, key=_TOTAL)
    return ActivationParts(
        stored={part: forwards * size for part, size in stored.items()} if forwards > 1 else stored,
        recomputed=largest.recomputed,
        temporary=largest.temporary,
        layer_moments=layer_moments,
        forward_temp=_forward_temporaries(setup, costs, counts, kept, behind),
        dequantized=max([one.dequantized for one in costs]),
        final_norm=forwards * ground.final_norm,
        weight_casts=(casts[0] + (forwards - 1) * casts[1], forwards * casts[1]),
        adapter_casts=adapter_cache,
        forwards=forwards,
        sound=sound_bytes(model.front_end, setup) if model.front_end is not None else 0,
        asked=reference_forward_bytes(model, setup, ground.dtypes, costs, casts[0]),
        hooked=hooked_bytes(model, setup),
        cached=cached_bytes(model, setup, beside_graph=True),
    )


def costs_of(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, dtypes: DtypePolicy) -> tuple[LayerCosts, ...]:
    """The costs of every kind of layer with the setup's adapters; equal for all that have the same `in_common`."""
    targets = setup.lora_targets if setup.method != "full" and setup.kind.adapts_matrices else None
    return layer_costs(model, gpu, setup, dtypes, adapted_names(model, targets))


def _kept_by_layers(
    setup: TrainSetup,
    costs: Sequence[LayerCosts],
    counts: Sequence[int],
    kept: Sequence[int],
) -> dict[str, int]:
    """What all layers keep of one micro-batch, by part.

    Args:
        counts, kept: layers of each kind, and how many of them keep their activations.
    """
    stored = dict.fromkeys(PARTS, 0)
    for cost, count, num in zip(costs, counts, kept, strict=True):
        saved = cost.saved
        if num:
            stored["norm"] += num * saved.norm
            stored["attention"] += num * saved.attention
            stored["scores"] += num * saved.scores
            stored["mlp"] += num * saved.mlp
            stored["adapters"] += num * saved.adapters
            stored["pinned"] += num * (saved.pinned - saved.pinned_again)
        if again := count - num:
            if setup.activation_offload:  # one on its way, and the first, which the model's forward holds
                stored["inputs"] = ON_DEVICE_INPUTS * cost.entry
            else:
                stored["inputs"] += again * cost.entry
            # a reentrant checkpoint's first forward runs without gradients, and nothing is kept of it
            stored["pinned"] += 0 if setup.reentrant_checkpointing else again * saved.pinned
            stored["attention"] += again * cost.held if setup.selective_checkpointing else 0
    return stored


def _masks(model: ModelSpec, costs: Sequence[LayerCosts]) -> int:
    """Bytes of the attention masks: layers of one window share theirs, and those that look at pictures."""
    attended = [(one.attention, cost) for one, cost in zip(model.layer_kinds, costs, strict=True)]
    return sum({(one.window_tokens, one.cross): cost.mask for one, cost in attended if one is not None}.values())


def _gone_behind(model: ModelSpec, setup: TrainSetup, costs: Sequence[LayerCosts], kept: Sequence[int]) -> int:
    """With every n-th layer checkpointed: bytes of the kept layers behind the last checkpointed one, which are gone by
    its turn."""
    gone = (model.num_layers - 1) % setup.checkpointing if setup.checkpointing else 0
    return gone * min([one.saved.total for one, num in zip(costs, kept, strict=True) if num], default=0)


_TOTAL = attrgetter("total")


def _largest_moments(
    setup: TrainSetup, costs: Sequence[LayerCosts], counts: Sequence[int], kept: Sequence[int], behind: int
) -> tuple[LayerMoment, ...]:
    """What can be the largest moment of one layer's backward, over all kinds of layers; `behind` bytes are gone."""
    moments: list[list[LayerMoment]] = []
    for cost, count, num in zip(costs, counts, kept, strict=True):
        if count > num:
            # an offloaded input is copied to the host when its layer is done, and back when its turn comes
            again = cost.saved.total + (cost.entry if setup.activation_offload else 0)
            again = max(0, again - (cost.held if setup.selective_checkpointing else 0) - behind)
            moments.append([_moment(again, *one) for one in cost.moments])
        if num:
            moments.append([_moment(0, *one) for one in cost.moments])
    if len(moments) == 1:
        return tuple(moments[0])
    return tuple([max(of_all_kinds, key=_TOTAL) for of_all_kinds in zip(*moments, strict=True)])


def _moment(recomputed: int, temporary: int, constant: int) -> LayerMoment:
    """One moment, where less than nothing beside what is recomputed is part of that which is not there."""
    return LayerMoment(max(0, recomputed + min(0, temporary)), max(0, temporary), constant)


def _forward_temporaries(
    setup: TrainSetup, costs: Sequence[LayerCosts], counts: Sequence[int], kept: Sequence[int], behind: int
) -> int:
    """The largest of one layer's forward; what the kept layers behind the last checkpointed one hold is not there yet
    in its forward."""
    again, whole = 0, 0
    for cost, count, num in zip(costs, counts, kept, strict=True):
        if count > num:
            again = max(again, cost.forward + cost.merged + (cost.entry if setup.activation_offload else 0))
        if num:
            whole = max(whole, cost.forward - cost.saved.total, cost.beside)
    return max(again - behind, whole)


def _stored(model: ModelSpec, setup: TrainSetup, ground: SharedLayerCosts, kept: Sequence[int]) -> dict[str, int]:
    """What is kept to the backward's end by part, copies apart."""
    stored = _kept_by_layers(setup, ground.costs, ground.layers, kept)
    for part, size in ground.outside.items():
        stored[part] += size
    last = ground.costs[-1]
    stored["bias"] = position_bias_bytes(
        model, setup, ground.dtypes, last.kernel, row_tokens=last.row_tokens, num_kept=sum(kept)
    )
    if model.is_encoder_decoder:
        stored["output"] = encoder_output_bytes(model, setup, ground.dtypes)
    if model.front_end is not None and not ground.below:
        stored["sound"] = convolutions_bytes(model.front_end, model, setup, ground.dtypes)
    return stored


def checkpointed_inputs_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the inputs of all checkpointed layers of one micro-batch: what offloading puts into host memory."""
    counts, kept = _counted(model, setup, frozen_below(model, setup))
    size = SIZE_BYTES[step_dtype_policy(model, setup).residual]
    return (
        (sum(counts) - sum(kept)) * size * traits_of(model).streams * model.hidden_size * setup.tokens_per_micro_batch
    )


def cached_bytes(model: ModelSpec, setup: TrainSetup, *, beside_graph: bool = False) -> int:
    """Bytes of one micro-batch's keys and values in the model's cache, where it fills one while it trains; 0 elsewhere.

    Args:
        beside_graph: those alone that the backward does not keep anyway: of checkpointed layers, and where the kernel
            is handed repeated ones.

    Source: transformers 4.33 `LlamaAttention` (past_key_value), 4.44 `DynamicCache.update` (the tensors themselves),
    4.54 (a copy, which the kernel is handed).
    Measured: Llama-2-7B under FSDP on 8 to 64 A100 (dlrover, docs/accuracy/gathered.md): 16 of 17.8 GiB that no other
    term explains.
    """
    if not setup.use_cache:
        return 0
    dtypes = step_dtype_policy(model, setup)
    size = SIZE_BYTES[dtypes.autocast or dtypes.attention_input]
    counts, kept = _counted(model, setup, 0)
    total = 0
    for layer, count, num in zip(model.layer_kinds, counts, kept, strict=True):
        if (spec := layer.attention) is None or spec.kind == "linear":
            continue
        beside = count - num * (beside_graph and not setup.repeats_keys)
        total += beside * spec.num_kv_heads * (spec.head_dim + spec.value_head_dim)
    return total * size * setup.tokens_per_micro_batch


def hooked_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of layer inputs and their gradients that FSDP version 1 holds until the backward ends; 0 of version 2.

    Its hooks on a unit's inputs hold each checkpointed layer's input where the layer's weights are frozen, and under
    reentrant checkpointing the gradient of the recomputed input beside it.

    Measured: benchmarks/fsdp1_kept_inputs.py (PyTorch 2.13, eight blocks: 24 live hidden states reentrant, 10 not, 2
    without sharding); 91 published configurations 14.8 -> 3.1 % median (docs/accuracy/multi-gpu.md).
    """
    if setup.fsdp_version != 1 or setup.method == "full" or not setup.checkpointing:
        return 0
    return (2 if setup.reentrant_checkpointing else 1) * checkpointed_inputs_bytes(model, setup)


def _counted(model: ModelSpec, setup: TrainSetup, below: int) -> tuple[Sequence[int], Sequence[int]]:
    """`_checkpointed` of a setup."""
    return _checkpointed(model, setup.checkpointing, below, whole_where_frozen(setup))


@lru_cache(maxsize=1024)
def _checkpointed(model: ModelSpec, every: int, below: int, whole: bool) -> tuple[Sequence[int], Sequence[int]]:
    """For each kind of layer above the first `below`: how many there are, and how many keep their activations (layer i
    is checkpointed when i % every == 0; transformers 5.23 `activation_checkpointing_kwargs`; with `whole` no frozen
    one)."""
    counts = [0] * len(model.layer_kinds)
    kept = [0] * len(model.layer_kinds)
    for position, kind in enumerate(model.layer_order):
        if position < below:
            continue
        counts[kind] += 1
        if not every or position % every or (whole and model.layer_kinds[kind].frozen):
            kept[kind] += 1
    return counts, kept
