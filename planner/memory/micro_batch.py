"""Activations of one micro-batch over all layers: what is kept, what is recomputed, what is there for a moment.

Independent of loss, optimizer and accumulation, and affine in the micro-batch, so that a walk over the whole space
computes it once for each precision, adapter, kernel and checkpointing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.activations import norm_saved
from planner.memory.dtypes import SIZE_BYTES, Flow, flow_of
from planner.memory.encoder import NO_ENCODER, EncoderBytes, around_the_encoder
from planner.memory.layer_context import LayerContext
from planner.memory.layer_costs import LayerCosts, LayerMoment, layer_costs
from planner.memory.position_bias import position_bias
from planner.memory.reference import Asked, asked_bytes
from planner.memory.streams import held_by_the_forward, kept_around_the_layers, kept_by_embedders
from planner.memory.trained import adapted_names, decoder_alone, frozen_below, trained_parameters
from planner.memory.traits import traits_of
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.records import dataclass
from planner.setup import TrainSetup

ON_DEVICE_INPUTS = 2
"""Inputs of checkpointed layers that are on the device while the others lie on the host. Seen in the dry run."""


PARTS = (
    "norm", "attention", "scores", "mlp", "adapters", "pinned", "inputs", "streams", "bias", "masks", "sound", "output",
)  # fmt: skip
"""Of what the layers keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerBytes:
    """Bytes of one micro-batch's pictures.

    Attributes:
        inputs: the pixels. The batches of all micro-batches of a step are on the device at once (transformers 5.23
            `Trainer.get_batch_samples`), so that they stay until the step's end.
        stored: from the tower's forward to its backward; 0 where nothing asks for a gradient there.
        mask: as long, of all frames with all: it grows with the square of the micro-batch.
        behind: between its layers and the text, gone when the layers' backward comes.
        held: outputs that the model's forward holds until it ends.
        forward: the tower's own forward at its largest beyond what is stored.
        backward: its backward's moments beyond what is stored.
    """

    inputs: int = 0
    stored: int = 0
    mask: int = 0
    behind: int = 0
    held: int = 0
    forward: int = 0
    backward: tuple[int, ...] = ()


NO_TOWER = TowerBytes()
"""Of text alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationParts:
    """Activations of one micro-batch, all in bytes.

    `stored` is kept over the layers (by part), `recomputed` is the largest checkpointed layer during its backward,
    `transient` one layer's gradients of activations, `forward_temp` one layer's forward temporaries, `dequantized` one
    16-bit copy of a quantized matrix, `weight_casts` autocast's copies of weights alive in (forward, loss; backward).
    """

    stored: dict[str, int]
    recomputed: int
    transient: int
    forward_temp: int
    dequantized: int
    final_norm: int
    weight_casts: tuple[int, int]
    adapter_casts: int
    layer_moments: tuple[LayerMoment, ...] = ()
    """What can be the largest moment of one layer's backward; `recomputed` and `transient` are those of the largest."""
    forwards: int = 1
    """With gradients, one after another, before one backward; all that is kept is of all of them."""
    at_first_decoder_layer: int = 0
    """Beyond what is stored: position biases at the backward of an encoder-decoder's first decoder layer."""
    encoder: EncoderBytes = NO_ENCODER
    """Of an encoder-decoder: what of this is the encoder's; `layer_moments` and `forward_temp` are the decoder's."""
    tower: TowerBytes = NO_TOWER
    """Of the pictures (`planner.memory.tower`)."""
    key_cache: int = 0
    """Keys and values behind a prefix that only their cache holds, until the forward's outputs are gone."""
    with_rows: int = 0
    """At the forward's beginning, alone: a copy of the embedding with its trained rows, its output, and that scaled."""
    asked: Asked = Asked()
    """Of a reference that is asked beside all this."""
    hooked: int = 0
    """At the backward's end, in place of what is left of what is stored: `hooked_bytes`."""

    @property
    def cast_cache(self) -> int:
        """What autocast keeps until the forward ends, beyond what lives on into the backward."""
        return self.weight_casts[0] - self.weight_casts[1] + self.adapter_casts

    @property
    def until_loss(self) -> int:
        """Bytes that are gone when the loss's own backward begins: the policy's, or the reference's."""
        return max(self.cast_cache, self.asked.cached) + self.key_cache


def step_flow(model: ModelSpec, setup: TrainSetup) -> Flow:
    """The data types of a setup on one model: `flow_of`, and the residual stream that autocast's LayerNorm widens.

    nn.LayerNorm returns fp32 under autocast, so the stream of a model with LayerNorm is fp32 from its first layer on
    where matrices return their input's type (`Flow.returns_input`); so is that of a model with a LayerNorm behind its
    embeddings (BLOOM).
    """
    flow = flow_of(setup)
    widens = flow.returns_input or traits_of(model).embedding_norm
    if flow.autocast and (traits_of(model).streams > 1 or (widens and traits_of(model).norm == "layer")):
        return replace(flow, residual="fp32")
    return flow


def activation_parts(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    costs: Sequence[LayerCosts] | None = None,
    *,
    casts_adapters: bool = True,
) -> ActivationParts:
    """The activations of a setup; independent of its loss, optimizer and accumulation.

    Args:
        costs: what `costs_of` says of this setup, where it is known already.
        casts_adapters: whether autocast's copies of the adapters are counted here.
    """
    flow, forwards = step_flow(model, setup), setup.live_forwards
    costs = costs_of(model, gpu, setup) if costs is None else costs
    counts, kept = _checkpointed(model, setup.checkpointing, frozen_below(model, setup))
    halves = Halves.of(model, counts, kept)
    stored, final_norm, at_first_decoder_layer = _stored(model, setup, flow, costs, counts, kept)
    behind = _gone_behind(model, setup, costs, kept)
    layer_moments = _largest_moments(setup, costs, *halves.decoder, behind)
    largest = max(layer_moments, key=lambda moment: moment.total)
    share = sum(kept) / max(1, sum(counts))
    adapters, adapter_casts = _adapter_casts(model, setup, flow, share) if casts_adapters else (0, 0)
    stored["adapters"] += adapters
    casts = _weight_casts(model, setup, flow)
    encoder = _encoder(stored, model, setup, flow, costs, halves, casts[1]) if model.is_encoder_decoder else NO_ENCODER
    return ActivationParts(
        stored={part: forwards * size for part, size in stored.items()},
        recomputed=largest.recomputed,
        transient=largest.transient,
        layer_moments=layer_moments,
        forward_temp=_forward_temporaries(setup, costs, *halves.decoder, behind)
        + held_by_the_forward(model, flow, setup.forward_tokens, traits_of(model).streams),
        dequantized=max(one.dequantized for one in costs),
        final_norm=forwards * final_norm,
        weight_casts=(casts[0] + (forwards - 1) * casts[1], forwards * casts[1]),
        adapter_casts=adapter_casts,
        forwards=forwards,
        at_first_decoder_layer=at_first_decoder_layer,
        encoder=encoder,
        key_cache=sum(cost.cached * count for cost, count in zip(costs, counts, strict=True)),
        with_rows=_with_rows(model, setup, flow),
        asked=asked_bytes(model, setup, flow, costs, casts[0]),
        hooked=hooked_bytes(model, setup),
    )


class Halves(NamedTuple):
    """Of each kind of layer, how many there are and how many keep their activations, in each half of an
    encoder-decoder; a decoder alone has no encoder."""

    encoder: tuple[Sequence[int], Sequence[int]]
    decoder: tuple[Sequence[int], Sequence[int]]

    @classmethod
    def of(cls, model: ModelSpec, counts: Sequence[int], kept: Sequence[int]) -> "Halves":
        """Cut where layers begin to look at what the encoder gives."""
        encodes = [model.is_encoder_decoder and one.cross_attention is None for one in model.layer_kinds]

        def of(nums: Sequence[int], half: bool) -> list[int]:
            return [num if one is half else 0 for num, one in zip(nums, encodes, strict=True)]

        return cls((of(counts, True), of(kept, True)), (of(counts, False), of(kept, False)))


def _encoder(
    stored: dict[str, int],
    model: ModelSpec,
    setup: TrainSetup,
    flow: Flow,
    costs: Sequence[LayerCosts],
    halves: Halves,
    casts: int,
) -> EncoderBytes:
    """What is the encoder's; adds its convolutions and its output to what is stored.

    Args:
        casts: bytes of autocast's copies that the graph keeps of both halves' weights.
    """
    counts, kept = halves.encoder
    first = model.layer_order[frozen_below(model, setup)]
    layers = sum(_kept_by_layers(setup, costs, counts, kept, first=first, entry_pinned=False).values())
    weights = [sum(one.num_weights for one in layer.linears) for layer in model.layer_kinds]
    own, other = (sum(num * one for num, one in zip(half[1], weights, strict=True)) for half in halves)
    layers += casts * own // max(1, own + other)
    reached = frozen_below(model, setup) == 0
    found = around_the_encoder(model, setup, flow, reached=reached)
    stored["sound"], stored["output"] = found.sound, found.output
    # with nothing to keep its layers run as checkpointed ones do
    run = halves.encoder if reached else (_checkpointed(model, 1, 0)[0], [0] * len(costs))
    forward = _forward_temporaries(setup, costs, *Halves.of(model, *run).encoder, 0)
    return replace(found, layers=layers, forward=forward, moments=_largest_moments(setup, costs, counts, kept, 0))


def costs_of(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[LayerCosts, ...]:
    """The costs of every kind of layer with the setup's adapters; equal for all that have the same `in_common`."""
    targets = setup.lora_targets if setup.method != "full" and setup.kind.adapts_matrices else None
    return layer_costs(model, gpu, setup, step_flow(model, setup), adapted_names(model, targets))


def _kept_by_layers(
    setup: TrainSetup,
    costs: Sequence[LayerCosts],
    counts: Sequence[int],
    kept: Sequence[int],
    *,
    first: int,
    entry_pinned: bool,
) -> dict[str, int]:
    """What all layers keep of one micro-batch, by part.

    Args:
        counts, kept: layers of each kind, and how many of them keep their activations.
        first: the kind of the first layer that trains.
        entry_pinned: whether int8 matrices keep the very input that a checkpoint keeps.
    """
    stored = dict.fromkeys(PARTS, 0)
    for cost, count, num in zip(costs, counts, kept, strict=True):
        saved = cost.saved
        if num:
            for part in ("norm", "attention", "scores", "mlp", "adapters"):
                stored[part] += num * getattr(saved, part)
            stored["pinned"] += num * (saved.pinned - saved.pinned_again)
        if again := count - num:
            if setup.activation_offload:  # one on its way, and the first, which the model's forward holds
                stored["inputs"] = ON_DEVICE_INPUTS * cost.entry
            elif not (entry_pinned and saved.pinned) or setup.reentrant_checkpointing:
                stored["inputs"] += again * cost.entry
            # a reentrant checkpoint's first forward runs without gradients, and nothing is kept of it
            stored["pinned"] += 0 if setup.reentrant_checkpointing else again * saved.pinned
            stored["attention"] += again * cost.held if setup.selective_checkpointing else 0
    for part, less in zip(("norm", "mlp"), costs[first].not_asked, strict=True):
        stored[part] -= less if kept[first] else 0
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


def _largest_moments(
    setup: TrainSetup, costs: Sequence[LayerCosts], counts: Sequence[int], kept: Sequence[int], behind: int
) -> tuple[LayerMoment, ...]:
    """What can be the largest moment of one layer's backward, over all kinds of layers; `behind` bytes are gone."""
    moments: list[list[LayerMoment]] = []
    for cost, count, num in zip(costs, counts, kept, strict=True):
        if count > num:
            # an offloaded input is copied to the host when its layer is done, and back when its turn comes
            again = cost.saved.total - cost.entry_again + (cost.entry if setup.activation_offload else 0)
            again = max(0, again - (cost.held if setup.selective_checkpointing else 0) - behind)
            moments.append([_moment(again, *one) for one in cost.moments])
        if num:
            moments.append([_moment(0, *one) for one in cost.moments])
    return tuple([max(of_all_kinds, key=lambda moment: moment.total) for of_all_kinds in zip(*moments, strict=True)])


def _moment(recomputed: int, transient: int, constant: int) -> LayerMoment:
    """One moment, where less than nothing beside what is recomputed is part of that which is not there."""
    return LayerMoment(max(0, recomputed + min(0, transient)), max(0, transient), constant)


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


def _adapter_casts(model: ModelSpec, setup: TrainSetup, flow: Flow, share: float) -> tuple[int, int]:
    """16-bit copies of fp32 adapters: (kept by the graph of the `share` of layers that are not recomputed, kept by
    autocast's cache until the forward ends)."""
    if setup.method == "full" or not flow.autocast or flow.adapter != "fp32":
        return 0, 0
    network = 2 * 3 * model.hidden_size**2 if setup.adapter == "p-tuning" else 0
    if setup.kind.form != "low-rank":
        return network, 0
    adapters_only = setup.trusted_with(modules_to_save=()) if setup.modules_to_save else setup
    trained = trained_parameters(model, adapters_only)
    kept = network + int(2 * trained.num * share)
    if "lora" in setup.fused_parts(model.model_type):  # fused functions cast by themselves, past autocast's cache
        return kept, 0
    return kept, int(2 * (trained.num - trained.stacked) * (1 - share))


def _stored(
    model: ModelSpec,
    setup: TrainSetup,
    flow: Flow,
    costs: Sequence[LayerCosts],
    counts: Sequence[int],
    kept: Sequence[int],
) -> tuple[dict[str, int], int, int]:
    """(What is kept to the backward's end by part; behind the layers: the norm; position biases at the backward of the
    first decoder layer)."""
    traits, tokens = traits_of(model), setup.forward_tokens
    first = model.layer_order[frozen_below(model, setup)]
    stored = _kept_by_layers(setup, costs, counts, kept, first=first, entry_pinned=traits.post_norm)
    biases = position_bias(model, setup, flow, costs[-1].kernel, row_tokens=costs[-1].row_tokens, num_kept=sum(kept))
    stored["bias"], stored["masks"] = biases.stored, _masks(model, costs)
    stored["inputs"] += _embedded(model, setup, flow)
    stored["streams"], joined = kept_around_the_layers(model, flow, tokens, traits.streams)
    if embedders := [one for one, _ in model.idle_layers if one.kind == "embedder"]:
        names = _adapted_parts(model, setup)
        found = [(one, one.path in names) for one in embedders]
        stored["streams"] += kept_by_embedders(found, flow, tokens, trained=setup.method == "full")
    before, behind = _outer_norms(model, setup, flow, tokens)
    stored["norm"] += before
    return stored, behind + joined, biases.at_first_decoder_layer


def _adapted_parts(model: ModelSpec, setup: TrainSetup) -> frozenset[str]:
    """Paths of the layers of which some matrix has an adapter."""
    if setup.method == "full" or not setup.kind.adapts_matrices:
        return frozenset()
    return frozenset(layer.path for layer, _, linears in lora_linears(model, setup.lora_targets) if linears)


def _with_rows(model: ModelSpec, setup: TrainSetup, flow: Flow) -> int:
    """`ActivationParts.with_rows`. Source: peft 0.21 `tuners/trainable_tokens/layer.py` forward (index_copy)."""
    if setup.kind.form != "rows" or setup.method == "full":
        return 0
    table = max(one.num_params for one in model.embeddings)
    return SIZE_BYTES[flow.table] * (table + 2 * model.hidden_size * setup.forward_tokens)


def _embedded(model: ModelSpec, setup: TrainSetup, flow: Flow) -> int:
    """Bytes of the text's embeddings, and of their dropout's mask, that adapters keep with checkpointing where the
    first layer takes another tensor: a hook makes the embeddings a leaf that asks for gradients. Less what that layer's
    own input is smaller than every other's: it is widened behind it.

    Source: transformers 5.23 `PreTrainedModel.enable_input_require_grads`.
    """
    traits = traits_of(model)
    if not setup.checkpointing or setup.method == "full":
        return 0
    wider = 0 if traits.embedding_norm or traits.streams > 1 else SIZE_BYTES[flow.residual] - SIZE_BYTES[flow.table]
    apart = setup.kind.form == "prompt" or (traits.behind_embeddings and setup.kind.form != "rows")  # ask by themselves
    leaf = apart * SIZE_BYTES[flow.table] + (traits.behind_embeddings and traits.residual_dropout)
    text = setup.forward_tokens * setup.seq_len_tokens // setup.layer_tokens
    return model.hidden_size * (leaf * text - wider * setup.forward_tokens)


def _outer_norms(model: ModelSpec, setup: TrainSetup, flow: Flow, tokens: int) -> tuple[int, int]:
    """Bytes that the norms around the layers keep of one forward: (before them, to the backward's end; the last one
    behind them)."""
    around = LayerContext(
        setup=setup,
        flow=flow,
        adapted=frozenset(),
        kernel="flash",
        tokens=tokens,
        hidden=model.hidden_size,
        traits=traits_of(model),
        fused=setup.fused_parts(model.model_type),
    )
    before = [one for one in model.outer_norms if "embed" in one.name]
    behind = [one for one in model.outer_norms if "embed" not in one.name][-1:]
    kept, last = ([norm_saved(norm, around, flow.residual) for norm in norms] for norms in (before, behind))
    return sum(kept), sum(last)


def checkpointed_inputs_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the inputs of all checkpointed layers of one micro-batch: what offloading puts into host memory."""
    counts, kept = _checkpointed(model, setup.checkpointing, frozen_below(model, setup))
    size = SIZE_BYTES[step_flow(model, setup).residual]
    return (
        (sum(counts) - sum(kept)) * size * traits_of(model).streams * model.hidden_size * setup.tokens_per_micro_batch
    )


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


@lru_cache(maxsize=1024)
def _checkpointed(model: ModelSpec, every: int, below: int) -> tuple[Sequence[int], Sequence[int]]:
    """For each kind of layer above the first `below`: how many there are, and how many keep their activations (layer i
    is checkpointed when i % every == 0; transformers 5.23 `activation_checkpointing_kwargs`)."""
    counts = [0] * len(model.layer_kinds)
    kept = [0] * len(model.layer_kinds)
    for position, kind in enumerate(model.layer_order):
        if position < below:
            continue
        counts[kind] += 1
        if not every or position % every:
            kept[kind] += 1
    return counts, kept


def _weight_casts(model: ModelSpec, setup: TrainSetup, flow: Flow) -> tuple[int, int]:
    """16-bit copies that autocast makes of fp32 matrices: alive in (forward and loss, backward).

    Trained ones are cached until the forward ends and kept by the graph where nothing is recomputed; frozen ones are
    not cached, but the graph keeps each of them. The head's copy belongs to the loss chain. Grouped multiplication of
    stacked experts is not on autocast's list; Llama 4's batched one is: its frozen copies are in `moe_saved`, as a
    recomputed layer holds them too.

    Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
    """
    if setup.widens_trained:
        copies = 2 * trained_parameters(model, setup).num
        return copies, 0 if setup.checkpointing else copies
    fp32_down = traits_of(model).fp32_down and flow.table == "fp16"
    batched = traits_of(model).dense_experts and setup.method == "full"
    if flow.autocast is None or setup.quantized or not (flow.table == "fp32" or fp32_down):
        return 0, 0
    copied = decoder_alone(model) if setup.frozen_encoder else model
    copies = 2 * sum(
        num * one.num_weights
        for layer, num in copied.layer_counts
        for one in layer.linears
        if (one.module != "parameter" or batched) and (flow.table == "fp32" or one.role == "down")
    )
    counts, kept = _checkpointed(model, setup.checkpointing, frozen_below(model, setup))
    kept_copies = copies * sum(kept) // max(1, sum(counts))
    return (copies if setup.method == "full" else kept_copies), kept_copies
