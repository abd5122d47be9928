"""One micro-batch over all layers, in closed form."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy, dtype_policy_of
from planner.memory.layer_terms import LayerContext
from planner.memory.layers import LayerCosts, LayerMoment, layer_costs, norm_saved
from planner.memory.trained import (
    adapted_names,
    decoder_alone,
    frozen_below,
    parted,
    trained_parameters,
    whole_where_frozen,
)
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

# What the forward of a reference holds that an objective asks beside the activations of the policy's forward.


class ReferenceForward(NamedTuple):
    """Bytes of a forward that keeps nothing; nothing where no reference is asked.

    Attributes:
        frames: what its frames hold: the embeddings, a layer's input, the sum before its second norm, that norm's
            result.
        layer: the largest of one layer's temporaries.
        cached: autocast's copies of a second model's fp32 weights, until its forward ends.

    Source: trl 1.16 `DPOTrainer._compute_loss`, `KTOTrainer._compute_loss` (no_grad, without checkpointing).
    """

    frames: int = 0
    layer: int = 0
    cached: int = 0


# What one micro-batch's activations add up to: the type that its terms are handed on in.


PARTS = (
    "norm", "attention", "scores", "mlp", "adapters", "pinned", "inputs", "bias", "masks", "sound", "output",
)  # fmt: skip
"""Of what the layers keep."""
_OF_LAYERS = ("norm", "attention", "scores", "mlp", "adapters")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBytes:
    """Bytes of one micro-batch's pictures.

    Attributes:
        inputs: the pixels. The batches of all micro-batches of a step are on the device at once (transformers 5.23
            `Trainer.get_batch_samples`), so that they stay until the step's end.
        stored: from the encoder's forward to its backward; 0 where nothing asks for a gradient there.
        mask: the attention mask, frames x frames, alive as long: it grows with the square of the micro-batch.
        between_encoder_and_text: freed when the backward reaches the encoder.
        forward: the encoder's own forward at its largest beyond what is stored.
        backward: its backward's moments beyond what is stored.
    """

    inputs: int = 0
    stored: int = 0
    mask: int = 0
    between_encoder_and_text: int = 0
    forward: int = 0
    backward: tuple[int, ...] = ()


class ActivationParts(NamedTuple):
    """Activations of one micro-batch, all in bytes.

    Attributes:
        stored: of all layers, from the forward to the backward, by part (`saved` elsewhere is of one layer).
        recomputed: the largest checkpointed layer during its backward; temporary: one layer's gradients of activations.
        forward_temp: one layer's forward temporaries.
        dequantized: one 16-bit copy of a quantized matrix.
        weight_casts: autocast's copies of weights alive in (forward and loss, backward).
        layer_moments: what can be the largest moment of one layer's backward; `recomputed` and `temporary` are those of
            the largest.
        forwards: with gradients, one after another, before one backward; all that is kept is of all of them.
        sound: of a micro-batch's clips, which stay until the step's end.
        encoder: of the pictures (`planner.memory.modality_encoder`).
        reference: of a reference that is asked beside all this.
        hooked: at the backward's end, in place of what is left of what is stored
            (`planner.memory.micro_batch.hooked_bytes`).
        cached: keys and values in the model's cache until its outputs are dropped or replaced.
    """

    stored: dict[str, int]
    recomputed: int
    temporary: int
    forward_temp: int
    dequantized: int
    final_norm: int
    weight_casts: tuple[int, int]
    adapter_casts: int
    layer_moments: tuple[LayerMoment, ...] = ()
    forwards: int = 1
    sound: int = 0
    encoder: EncoderBytes = EncoderBytes()  # of text alone
    reference: ReferenceForward = ReferenceForward()
    hooked: int = 0
    cached: int = 0

    @property
    def cast_cache(self) -> int:
        """What autocast keeps until the forward ends, beyond what lives on into the backward."""
        return self.weight_casts[0] - self.weight_casts[1] + self.adapter_casts

    @property
    def freed_before_loss_backward(self) -> int:
        """Bytes that are freed when the loss's own backward begins: of the model, or of a reference model."""
        return max(self.cast_cache, self.reference.cached)


# 16-bit copies that autocast makes of fp32 adapters and matrices.


class AdapterCasts(NamedTuple):
    """Copies of fp32 adapters.

    Attributes:
        always_bytes: kept by the graph whatever is recomputed.
        copied: elements whose copies the graph keeps in layers that are not recomputed; cached: of them, those that
            autocast's cache keeps until the forward ends in layers that are.
    """

    always_bytes: int = 0
    copied: int = 0
    cached: int = 0

    def at(self, share: float) -> tuple[int, int]:
        """Bytes (kept by the graph, kept by autocast's cache) where this share of the layers is not recomputed."""
        return self.always_bytes + int(2 * self.copied * share), int(2 * self.cached * (1 - share))


def adapter_casts(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> AdapterCasts:
    """The 16-bit copies that autocast makes of a setup's adapters."""
    if setup.method == "full" or not dtypes.autocast or dtypes.adapter != "fp32":
        return AdapterCasts()
    network = 2 * 3 * model.hidden_size**2 if setup.adapter == "p-tuning" else 0
    if setup.kind.form != "low-rank":
        return AdapterCasts(network)
    adapters_only = setup.replace_trusted(modules_to_save=()) if setup.modules_to_save else setup
    trained = trained_parameters(model, adapters_only)
    # fused functions cast by themselves, past autocast's cache
    fused = "lora" in setup.fused_parts(model.model_type)
    return AdapterCasts(network, trained.num, 0 if fused else trained.num - trained.stacked)


class WeightCasts(NamedTuple):
    """Copies of matrices of another type than autocast's.

    Attributes:
        size_bytes: of all matrices, of those that train alone where others do not.
        frozen_bytes: of those beside them, which only the graph keeps.
        trained: whether they are cached until the forward ends; else only the graph keeps them.
        freed_after_forward: whether none of them outlives the forward, whichever layers keep their activations.
    """

    size_bytes: int = 0
    frozen_bytes: int = 0
    trained: bool = False
    freed_after_forward: bool = False

    def at(self, num_kept: int, layers: int) -> tuple[int, int]:
        """Bytes alive in (forward and loss, backward) where so many of the layers keep their activations."""
        if self.freed_after_forward:
            return self.size_bytes, 0
        of_kept, frozen = (size * num_kept // max(1, layers) for size in (self.size_bytes, self.frozen_bytes))
        return frozen + (self.size_bytes if self.trained else of_kept), frozen + of_kept


def weight_casts(model: ModelSpec, setup: TrainSetup, dtypes: DtypePolicy) -> WeightCasts:
    """The 16-bit copies that autocast makes of a setup's matrices.

    Trained ones of fp32 are cached until the forward ends and kept by the graph where nothing is recomputed; others are
    not cached, but the graph keeps each of them. The head's copy belongs to the loss chain. Grouped multiplication of
    stacked experts is not on autocast's list; Llama 4's batched one is: its frozen copies are counted with the
    experts, as a recomputed layer holds them too.

    Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
    """
    if setup.widens_trained:
        return WeightCasts(
            2 * trained_parameters(model, setup).num, trained=True, freed_after_forward=setup.checkpointing > 0
        )
    trained = setup.method == "full"
    batched = model.traits.dense_experts and trained
    if dtypes.autocast in (None, dtypes.table) or setup.quantized:
        return WeightCasts()
    cached = trained and dtypes.table == "fp32"
    copied = decoder_alone(model) if setup.frozen_encoder else model
    each = [
        2 * sum(linear.num_weights for linear in layer.linears if linear.module != "parameter" or batched)
        for layer in copied.layer_kinds
    ]
    if trained and setup.trained_layers:
        reached = copied.layer_order[frozen_below(model, setup) :]
        frozen = sum(each[kind] for kind in reached if copied.layer_kinds[kind].frozen)
        return WeightCasts(sum(each[kind] for kind in reached) - frozen, frozen, trained=cached)
    return WeightCasts(sum(each[kind] for kind in copied.layer_order), trained=cached)


# Activations of one micro-batch over all layers: what is kept, what is recomputed, what is there for a moment.


ON_DEVICE_INPUTS = 2
"""Inputs of checkpointed layers on the device while the others are on the host: the one being prefetched, and the
first, which the model's forward still holds."""


def step_dtype_policy(model: ModelSpec, setup: TrainSetup) -> DtypePolicy:
    """The data types of a setup on one model: `dtype_policy_of`, and the residual stream that autocast's LayerNorm
    widens.

    nn.LayerNorm returns fp32 under autocast, so the stream of a model with LayerNorm is fp32 from its first layer on
    where one stands behind the embeddings, as encoders' does, or behind each layer and so none behind all (OPT-350m),
    or matrices return their input's type (`DtypePolicy.returns_input`).
    """
    dtypes = dtype_policy_of(setup)
    traits = model.traits
    embedded = any("embed" in norm.name for norm in model.outer_norms)  # Bloom's table has a norm behind it
    after_layers = model.head is not None and not model.outer_norms
    widened = dtypes.returns_input or model.reads_both_ways or embedded or after_layers
    if dtypes.autocast and (traits.streams > 1 or (widened and traits.norm == "layer")):
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
    """What the layers of a setup cost whatever is checkpointed; equal for all that have the same `in_common`.

    Args:
        costs: of every kind of layer with the setup's adapters, where they are known already.
        casts_adapters: whether autocast's copies of the adapters are counted here.
    """
    dtypes, below = step_dtype_policy(model, setup), frozen_below(model, setup)
    model = parted(model, setup.trained_layers) if setup.trained_layers else model
    if costs is None:
        targets = setup.lora_targets if setup.method != "full" and setup.kind.adapts_matrices else None
        costs = layer_costs(model, gpu, setup, dtypes, adapted_names(model, targets))
    around = LayerContext(
        setup=setup.replace_trusted(method="lora") if setup.trained_layers else setup,
        dtypes=dtypes,
        adapted=frozenset(),
        kernel="flash",
        tokens=setup.forward_tokens,
        hidden=model.hidden_size,
        traits=model.traits,
        fused=setup.fused_parts(model.model_type),
    )
    outer = [
        ("embed" in norm.name or norm.rows_per_token > 1, norm_saved(norm, around.stream, dtypes.residual))
        for norm in model.outer_norms
    ]
    before = sum(size for embeds, size in outer if embeds)  # to the backward's end, as are inputs of each layer
    final_norm = sum([size for embeds, size in outer if not embeds][-1:])
    # layers of one window share their mask, and those that look at pictures
    masks = {
        (layer.attention.window_tokens, layer.attention.cross): cost.mask
        for layer, cost in zip(model.layer_kinds, costs, strict=True)
        if layer.attention is not None
    }
    return SharedLayerCosts(
        dtypes=dtypes,
        costs=costs,
        layers=_layer_counts(model, setup, below)[0],
        below=below,
        outside={"norm": before, "masks": sum(masks.values())},
        final_norm=final_norm,
        adapter_casts=adapter_casts(model, setup, dtypes) if casts_adapters else AdapterCasts(),
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
    kept_counts = _layer_counts(model, setup, ground.below)[1]
    num, num_kept = sum(counts), sum(kept_counts)
    stored = _stored(model, setup, ground, kept_counts)
    adapters, adapter_cache = ground.adapter_casts.at(num_kept / max(1, num))
    stored["adapters"] += adapters
    casts = ground.weight_casts.at(num_kept, num)
    # kept layers behind the last of every n-th checkpointed one are gone by its turn
    gone = (model.num_layers - 1) % setup.checkpointing if setup.checkpointing else 0
    freed = gone * min([cost.saved.total for cost, num in zip(costs, kept_counts, strict=True) if num], default=0)
    layer_moments = _largest_moments(setup, costs, counts, kept_counts, freed)
    largest = max(layer_moments, key=attrgetter("total"))
    reference = ReferenceForward()
    if setup.asks_reference:
        frames = 4 * SIZE_BYTES[ground.dtypes.residual] * model.hidden_size * setup.forward_tokens
        layer = max(cost.reference + cost.merged for cost in costs)
        reference = ReferenceForward(frames, layer, casts[0] if setup.copies_reference else 0)
    sound = 0
    if model.front_end is not None:  # stays until the step's end as pixels do
        narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
        sound = model.front_end.input_elements * SIZE_BYTES[setup.weight_dtype if narrow else "fp32"]
    return ActivationParts(
        stored={part: forwards * size for part, size in stored.items()} if forwards > 1 else stored,
        recomputed=largest.recomputed,
        temporary=largest.temporary,
        layer_moments=layer_moments,
        forward_temp=_forward_temporaries(setup, costs, counts, kept_counts, freed),
        dequantized=max([cost.dequantized for cost in costs]),
        final_norm=forwards * ground.final_norm,
        weight_casts=(casts[0] + (forwards - 1) * casts[1], forwards * casts[1]),
        adapter_casts=adapter_cache,
        forwards=forwards,
        sound=setup.micro_batch_seqs * sound,
        reference=reference,
        hooked=hooked_bytes(model, setup),
        cached=cached_bytes(model, setup, beside_graph=True),
    )


def _largest_moments(
    setup: TrainSetup, costs: Sequence[LayerCosts], counts: Sequence[int], kept_counts: Sequence[int], freed: int
) -> tuple[LayerMoment, ...]:
    """What can be the largest moment of one layer's backward, over all kinds of layers; `freed` bytes are gone."""
    moments: list[list[LayerMoment]] = []
    for cost, count, num in zip(costs, counts, kept_counts, strict=True):
        if count > num:
            # an offloaded input is copied to the host when its layer is done, and back when its turn comes
            recomputed = cost.saved.total + (cost.entry if setup.activation_offload else 0)
            recomputed = max(0, recomputed - (cost.selective_bytes if setup.selective_checkpointing else 0) - freed)
            moments.append([_moment(recomputed, *sizes) for sizes in cost.moments])
        if num:
            moments.append([_moment(0, *sizes) for sizes in cost.moments])
    if len(moments) == 1:
        return tuple(moments[0])
    return tuple([max(of_all_kinds, key=attrgetter("total")) for of_all_kinds in zip(*moments, strict=True)])


def _moment(recomputed: int, temporary: int, constant: int) -> LayerMoment:
    """One moment; a negative temporary reduces the recomputed bytes."""
    return LayerMoment(max(0, recomputed + min(0, temporary)), max(0, temporary), constant)


def _forward_temporaries(
    setup: TrainSetup, costs: Sequence[LayerCosts], counts: Sequence[int], kept_counts: Sequence[int], freed: int
) -> int:
    """The largest of one layer's forward; what the kept layers behind the last checkpointed one hold is not there yet
    in its forward."""
    recomputed, whole = 0, 0
    for cost, count, num in zip(costs, counts, kept_counts, strict=True):
        if count > num:
            recomputed = max(recomputed, cost.forward + cost.merged + (cost.entry if setup.activation_offload else 0))
        if num:
            whole = max(whole, cost.forward - cost.saved.total, cost.extra_bytes)
    return max(recomputed - freed, whole)


def _stored(
    model: ModelSpec, setup: TrainSetup, ground: SharedLayerCosts, kept_counts: Sequence[int]
) -> dict[str, int]:
    """What is kept of one micro-batch to the backward's end by part, copies apart.

    Args:
        kept_counts: layers of each kind that keep their activations.
    """
    stored = dict.fromkeys(PARTS, 0) | ground.outside
    for cost, count, num in zip(ground.costs, ground.layers, kept_counts, strict=True):
        saved, num_recomputed = cost.saved, count - num
        for part in _OF_LAYERS:
            stored[part] += num * getattr(saved, part)
        stored["pinned"] += num * (saved.pinned - saved.pinned_again)
        if num_recomputed:
            if setup.activation_offload:  # one on its way, and the first, which the model's forward holds
                stored["inputs"] = ON_DEVICE_INPUTS * cost.entry
            else:
                stored["inputs"] += num_recomputed * cost.entry
            # a reentrant checkpoint's first forward runs without gradients, and nothing is kept of it
            stored["pinned"] += 0 if setup.reentrant_checkpointing else num_recomputed * saved.pinned
            stored["attention"] += num_recomputed * cost.selective_bytes if setup.selective_checkpointing else 0
    dtypes, last, spec = ground.dtypes, ground.costs[-1], model.layer_kinds[0].attention
    if model.traits.position_bias and spec is not None:
        # biases [1, heads, tokens, tokens] that every layer adds to its scores (T5): of the encoder, of the decoder,
        # and the cross attention's zeros, each with its gradient under checkpointing; the memory-efficient kernel keeps
        # each layer's own contiguous copy as its mask, with padding for every sequence (transformers 5.23
        # `T5Attention.forward`, `integrations/sdpa_attention.py` `create_position_bias_mask`)
        zeros = SIZE_BYTES[dtypes.linear_out(dtypes.residual)]
        mask = SIZE_BYTES[dtypes.autocast or dtypes.table] if last.kernel == "efficient" else 0
        shared = 3 * SIZE_BYTES[dtypes.table] + 2 * zeros if setup.checkpointing else zeros
        mask *= setup.micro_batch_seqs if setup.pads else 1
        stored["bias"] = spec.num_heads * last.row_tokens**2 * (sum(kept_counts) * mask + shared)
    if model.is_encoder_decoder:  # the encoder's output, with its gradient where the backward goes into the encoder
        tokens = setup.micro_batch_seqs * (model.encoder_tokens or setup.seq_len_tokens)
        wide = SIZE_BYTES["fp32" if dtypes.autocast else dtypes.residual]
        stored["output"] = 2 * wide * tokens * model.hidden_size
    if model.front_end is not None and not ground.below and (setup.method == "full" or setup.checkpointing):
        # inputs [seqs, hidden, frames] and [seqs, hidden, frames / 2] of both GELUs around the convolutions, and of the
        # second one. Beside adapters and checkpointing the first one's output is a leaf (`enable_input_require_grads`;
        # `WhisperEncoder` names `conv1`), and what follows it is kept; beside adapters alone nothing is
        width = setup.micro_batch_seqs * model.hidden_size * model.front_end.frames
        wide = width * SIZE_BYTES[dtypes.autocast or dtypes.table]
        stored["sound"] = 2 * wide + wide // 2
    return stored


def checkpointed_inputs_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the inputs of all checkpointed layers of one micro-batch: what offloading puts into host memory."""
    counts, kept_counts = _layer_counts(model, setup, frozen_below(model, setup))
    row = SIZE_BYTES[step_dtype_policy(model, setup).residual] * model.traits.streams * model.hidden_size
    return (sum(counts) - sum(kept_counts)) * row * setup.tokens_per_micro_batch


def cached_bytes(model: ModelSpec, setup: TrainSetup, *, beside_graph: bool = False) -> int:
    """Bytes of one micro-batch's keys and values in the model's cache, where it fills one while it trains; 0 elsewhere.

    Args:
        beside_graph: those alone that the backward does not keep anyway: of checkpointed layers, and where the kernel
            is handed repeated ones (before transformers 4.54, or with a mask of padding).

    Source: transformers 4.33 `LlamaAttention` (past_key_value), 4.44 `DynamicCache.update` (the tensors themselves),
    4.54 (a copy, which the kernel is handed).
    Measured: Llama-2-7B under FSDP on 8 to 64 A100 (dlrover, docs/accuracy/gathered.md): 16 of 17.8 GiB that no other
    term explains.
    """
    if not setup.use_cache:
        return 0
    dtypes = step_dtype_policy(model, setup)
    size = SIZE_BYTES[dtypes.autocast or dtypes.attention_input]
    counts, kept_counts = _layer_counts(model, setup, 0)
    total = 0
    for layer, count, num in zip(model.layer_kinds, counts, kept_counts, strict=True):
        if (spec := layer.attention) is None or spec.kind == "linear":
            continue
        num_cached = count - num * (beside_graph and not (setup.repeats_keys or setup.pads))
        total += num_cached * spec.num_kv_heads * (spec.head_dim + spec.value_head_dim)
    return total * size * setup.tokens_per_micro_batch


def hooked_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of layer inputs and their gradients that FSDP version 1 holds until the backward ends; 0 of version 2.

    Its hooks on a unit's inputs hold each checkpointed layer's input where the layer's weights are frozen, and under
    reentrant checkpointing the gradient of the recomputed input beside it.

    Measured: benchmarks/fsdp1_kept_inputs.py at e34acc15 (PyTorch 2.13, eight blocks: 24 live hidden states
    reentrant, 10 not, 2 without sharding); 91 published configurations 14.8 -> 3.1 % median
    (docs/accuracy/multi-gpu.md).
    """
    if setup.fsdp_version != 1 or setup.method == "full" or not setup.checkpointing:
        return 0
    return (2 if setup.reentrant_checkpointing else 1) * checkpointed_inputs_bytes(model, setup)


def _layer_counts(model: ModelSpec, setup: TrainSetup, below: int) -> tuple[Sequence[int], Sequence[int]]:
    return _layer_and_kept_counts(model, setup.checkpointing, below, whole_where_frozen(setup))


@lru_cache(maxsize=1024)
def _layer_and_kept_counts(
    model: ModelSpec, every: int, below: int, whole: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """For each kind of layer above the first `below`: how many there are, and how many keep their activations (layer i
    is checkpointed when i % every == 0; transformers 5.23 `activation_checkpointing_kwargs`; with `whole` no frozen
    one)."""
    counts = [0] * len(model.layer_kinds)
    kept_counts = [0] * len(model.layer_kinds)
    for position, kind in enumerate(model.layer_order):
        if position < below:
            continue
        counts[kind] += 1
        if not every or position % every or (whole and model.layer_kinds[kind].frozen):
            kept_counts[kind] += 1
    return counts, kept_counts
