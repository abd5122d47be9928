"""Activations of one micro-batch over all layers: what is kept, what is recomputed, what is there for a moment.

Independent of loss, optimizer and accumulation, and affine in the micro-batch, so that a walk over the whole space
computes it once for each precision, adapter, kernel and checkpointing.
"""

from dataclasses import dataclass, replace

from planner.choices.kernels import fused_parts
from planner.gpu import GpuSpec
from planner.kernels import Kernel, attention_kernel, masked
from planner.memory.activations import LayerContext, attention_held, layer_saved, norm_fused, norm_saved
from planner.memory.dtypes import SIZE_BYTES, Flow, flow_of
from planner.memory.position_bias import position_bias
from planner.memory.scores import mask_bytes
from planner.memory.streams import kept_around_the_layers, kept_in_a_layer
from planner.memory.trained import adapted_names, trained_parameters
from planner.memory.traits import traits_of
from planner.memory.transient import (
    backward_transient,
    constant_transients,
    forward_transient,
    magnitude_moment,
    merged_stacks,
)
from planner.memory.workspace import dequantized_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.targets import adapts_expert_stacks
from planner.setup import TrainSetup

ON_DEVICE_INPUTS = 2
"""Inputs of checkpointed layers that are on the device while the others lie on the host. Seen in the dry run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMoment:
    """One moment of a layer's backward: bytes recomputed, gradients of activations, a dequantized matrix."""

    recomputed: int
    transient: int
    dequantized: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.recomputed + self.transient + self.dequantized


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

    @property
    def cast_cache(self) -> int:
        """What autocast keeps until the forward ends, beyond what lives on into the backward."""
        return self.weight_casts[0] - self.weight_casts[1] + self.adapter_casts


def step_flow(model: ModelSpec, setup: TrainSetup) -> Flow:
    """The data types of a setup on one model: `flow_of`, and the residual stream that autocast's LayerNorm widens.

    nn.LayerNorm returns fp32 under autocast and bitsandbytes' layers return their input's type, so the stream of a
    quantized model with LayerNorm is fp32 from its first layer on; so is that of a model with a LayerNorm behind its
    embeddings (BLOOM).
    """
    flow = flow_of(setup)
    widens = flow.quantized or traits_of(model).embedding_norm
    if flow.autocast and (traits_of(model).streams > 1 or (widens and traits_of(model).norm == "layer")):
        return replace(flow, residual="fp32")
    return flow


def activation_parts(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ActivationParts:
    """The activations of a setup; independent of its loss, optimizer and accumulation."""
    flow, traits, forwards = step_flow(model, setup), traits_of(model), setup.aim.forwards
    tokens = setup.tokens_per_micro_batch // forwards
    targets = setup.lora_targets if setup.method != "full" and setup.kind.adapts_matrices else None
    adapted = adapted_names(model, targets)
    stacks = targets is not None and adapts_expert_stacks(model, targets)
    counts, kept = _checkpointed(model, setup.checkpointing)
    fused = fused_parts(setup, model.model_type)
    stored = {
        "norm": 0,
        "attention": 0,
        "scores": 0,
        "mlp": 0,
        "adapters": 0,
        "pinned": 0,
        "inputs": 0,
        "streams": 0,
        "bias": 0,
        "masks": 0,
    }
    dequantized = 0
    in_again, in_kept = [0], [0]
    moments: list[list[LayerMoment]] = []  # of each kind of layer, always in the same order
    kept_bytes = []
    masks: dict[int | None, int] = {}  # by the window, as layers of one window share theirs
    for index, layer in enumerate(model.layer_kinds):
        kernel = _kernel(model, layer, gpu, setup, flow)
        context = LayerContext(
            setup=setup,
            flow=flow,
            adapted=adapted[index],
            kernel=kernel,
            tokens=tokens,
            hidden=model.hidden_size,
            traits=traits,
            stacks=stacks,
            fused=fused,
        )
        saved = layer_saved(layer, context)
        saved.norm += kept_in_a_layer(context)
        if layer.attention is not None:
            each = mask_bytes(kernel, flow, masked=masked(setup, layer.attention))
            masks[layer.attention.window_tokens] = each * tokens * context.row_tokens
        if kept[index]:
            kept_bytes.append(saved.total)
            for part in ("norm", "attention", "scores", "mlp", "adapters"):
                stored[part] += kept[index] * getattr(saved, part)
            stored["pinned"] += kept[index] * (saved.pinned - saved.pinned_again)
        if counts[index] > kept[index]:
            again = counts[index] - kept[index]
            inputs = SIZE_BYTES[flow.residual] * model.hidden_size * tokens * traits.streams
            if setup.activation_offload:  # one on its way, and the first, which the model's forward holds
                stored["inputs"] = ON_DEVICE_INPUTS * inputs
            elif not (traits.post_norm and saved.pinned):  # int8 keeps that very input
                stored["inputs"] += again * inputs
            stored["pinned"] += again * saved.pinned
            held = attention_held(layer, context) if setup.selective_checkpointing else 0
            stored["attention"] += again * held
        here = ((backward_transient(layer, context, saved), 0), *constant_transients(layer, context, saved))
        if counts[index] > kept[index]:
            # copied to the host when its layer is done, and back when its turn comes
            here_inputs = inputs if setup.activation_offload else 0
            in_again.append(forward_transient(layer, context) + merged_stacks(layer, context) + here_inputs)
            again_bytes = saved.total - _kept_input(layer, context) + here_inputs - held
            moments.append([LayerMoment(recomputed=again_bytes, transient=a, dequantized=b) for a, b in here])
        if kept[index]:
            in_kept.append(forward_transient(layer, context) - saved.total)
            if setup.adapter == "dora" and context.adapted:  # the last matrix's norm, the layer's activations there
                in_kept.append(sum(magnitude_moment(layer, context, graph=True)))
            moments.append([LayerMoment(recomputed=0, transient=a, dequantized=b) for a, b in here])
        if setup.quantized:
            dequantized = max(dequantized, *(dequantized_bytes(one, setup, flow.residual) for one in layer.linears))
    biases = position_bias(model, setup, flow, kernel, row_tokens=context.row_tokens, num_kept=sum(kept))
    stored["streams"] = kept_around_the_layers(model, flow, tokens, traits.streams)
    stored["bias"], stored["masks"] = biases.stored, sum(masks.values())
    # with every n-th layer checkpointed, the kept layers behind the last checkpointed one are gone by its turn
    gone = (model.num_layers - 1) % setup.checkpointing if setup.checkpointing else 0
    behind = gone * min(kept_bytes, default=0)
    layer_moments = tuple(
        max(
            (replace(one, recomputed=max(0, one.recomputed - behind)) for one in of_all_kinds),
            key=lambda moment: moment.total,
        )
        for of_all_kinds in zip(*moments, strict=True)
    )
    largest = max(layer_moments, key=lambda moment: moment.total)
    tail = LayerContext(
        setup=setup,
        flow=flow,
        adapted=frozenset(),
        kernel="flash",
        tokens=tokens,
        hidden=model.hidden_size,
        traits=traits,
        fused=fused,
    )
    if setup.adapter == "p-tuning" and flow.autocast and flow.adapter == "fp32":
        stored["adapters"] += 2 * 3 * model.hidden_size**2  # 16-bit copies of its network's matrices
    adapter_casts = 0
    if setup.method != "full" and flow.autocast and flow.adapter == "fp32" and setup.kind.form == "low-rank":
        # the graph keeps those of layers that are not recomputed, autocast's cache the others until the forward ends
        adapters_only = setup.trusted_with(modules_to_save=()) if setup.modules_to_save else setup
        trained, share = trained_parameters(model, adapters_only), sum(kept) / max(1, sum(counts))
        stored["adapters"] += int(2 * trained.num * share)
        if "lora" not in fused:  # fused functions cast by themselves, past autocast's cache
            adapter_casts = int(2 * (trained.num - trained.stacked) * (1 - share))
    casts = _weight_casts(model, setup, flow)
    return ActivationParts(
        stored={part: forwards * size for part, size in stored.items()},
        recomputed=largest.recomputed,
        transient=largest.transient,
        layer_moments=layer_moments,
        # what the kept layers behind the last checkpointed one hold is not there yet in its forward
        forward_temp=max(0, max(in_again) - behind, *in_kept),
        dequantized=dequantized,
        final_norm=forwards * sum(norm_saved(norm, tail, flow.residual) for norm in model.outer_norms[-1:]),
        weight_casts=(casts[0] + (forwards - 1) * casts[1], forwards * casts[1]),
        adapter_casts=adapter_casts,
        forwards=forwards,
        at_first_decoder_layer=biases.at_first_decoder_layer,
    )


def checkpointed_inputs_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the inputs of all checkpointed layers of one micro-batch: what offloading puts into host memory."""
    counts, kept = _checkpointed(model, setup.checkpointing)
    size = SIZE_BYTES[step_flow(model, setup).residual]
    return (
        (sum(counts) - sum(kept)) * size * traits_of(model).streams * model.hidden_size * setup.tokens_per_micro_batch
    )


def _kept_input(layer: LayerSpec, context: LayerContext) -> int:
    """Bytes of a checkpointed layer's input that its first norm keeps: they are the checkpoint's own."""
    first = next((norm for norm in layer.norms if norm.rows_per_token == 1), None)
    if first is None or context.traits.post_norm or not norm_fused(first, context):
        return 0
    return SIZE_BYTES[context.flow.residual] * context.hidden * context.tokens


def _checkpointed(model: ModelSpec, every: int) -> tuple[list[int], list[int]]:
    """For each kind of layer: how many there are, and how many keep their activations (layer i is checkpointed when
    i % every == 0; transformers 5.23 `activation_checkpointing_kwargs`)."""
    counts = [0] * len(model.layer_kinds)
    kept = [0] * len(model.layer_kinds)
    for position, kind in enumerate(model.layer_order):
        counts[kind] += 1
        if not every or position % every:
            kept[kind] += 1
    return counts, kept


def _kernel(model: ModelSpec, layer: LayerSpec, gpu: GpuSpec, setup: TrainSetup, flow: Flow) -> Kernel:
    if layer.attention is None:
        return "linear"
    dtype = flow.attention_input
    return attention_kernel(model, setup, gpu, layer.attention, dtype)


def _weight_casts(model: ModelSpec, setup: TrainSetup, flow: Flow) -> tuple[int, int]:
    """16-bit copies that autocast makes of fp32 matrices: alive in (forward and loss, backward).

    Trained ones are cached until the forward ends and kept by the graph where nothing is recomputed; frozen ones are
    not cached, but the graph keeps each of them. The head's copy belongs to the loss chain. Grouped multiplication of
    stacked experts is not on autocast's list; Llama 4's batched one is: its frozen copies are in `moe_saved`, as a
    recomputed layer holds them too.

    Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
    """
    fp32_down = traits_of(model).fp32_down and flow.table == "fp16"
    batched = traits_of(model).dense_experts and setup.method == "full"
    if flow.autocast is None or setup.quantized or not (flow.table == "fp32" or fp32_down):
        return 0, 0
    copies = 2 * sum(
        num * one.num_weights
        for layer, num in model.layer_counts
        for one in layer.linears
        if (one.module != "parameter" or batched) and (flow.table == "fp32" or one.role == "down")
    )
    counts, kept = _checkpointed(model, setup.checkpointing)
    kept_copies = copies * sum(kept) // max(1, sum(counts))
    return (copies if setup.method == "full" else kept_copies), kept_copies
