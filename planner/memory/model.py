"""The formula rung's memory model: terms composed into phases. Peak = resident + the largest phase.

Three parts do not depend on each other, so a walk over the whole space computes each once: activations (precision,
adapters, kernel, checkpointing), the loss chain (loss, precision) and what is trained (parameters, optimizer). Every
part is affine in the micro-batch.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.gpu import GpuSpec
from planner.kernels import Kernel, attention_kernel, masked
from planner.memory.activations import LayerContext, layer_saved, norm_saved
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.dtypes import SIZE_BYTES, Flow, flow_of
from planner.memory.loss import LossChain, loss_chain
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.position_bias import position_bias
from planner.memory.scores import mask_bytes
from planner.memory.traits import traits_of
from planner.memory.transient import (
    backward_transient,
    constant_transients,
    forward_transient,
    merged_stacks,
)
from planner.memory.types import MemoryBreakdown, MemoryTerm, Phase
from planner.memory.weights import weight_bytes
from planner.memory.workspace import context_bytes, cublas_workspace_bytes, dequantized_bytes
from planner.models.spec import LayerSpec, ModelSpec
from planner.models.targets import adapts_expert_stacks, lora_linears, lora_params, lora_rank
from planner.setup import TrainSetup

AFTER_LOAD: tuple[Phase, ...] = ("forward", "loss", "backward", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the optimizer updates: how many parameters, of what type, and the shapes that matter."""

    num: int
    dtype: str
    edge_sum: int
    largest: int
    head: int
    embeddings: int
    stacked: int = 0
    """Of `num`: adapters of stacked experts, which peft itself casts to the base's type."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients."""
        return self.num * SIZE_BYTES[self.dtype]


def trained_parameters(model: ModelSpec, setup: TrainSetup) -> Trained:
    """The trained parameters of full fine-tuning (all of them) or of LoRA (A [rank, in] and B [out, rank] per matrix).

    Source: Hu et al. 2021, LoRA, section 4.1, https://arxiv.org/abs/2106.09685.
    """
    if setup.method == "full":
        return _trained_full(model, setup.weight_dtype)
    return _trained_lora(model, setup.lora_targets, setup.lora_rank, setup.resolved_adapter_dtype)


@lru_cache(maxsize=256)
def _trained_full(model: ModelSpec, dtype: str) -> Trained:
    matrices = [(one, num) for layer, num in model.layer_counts for one in layer.linears]
    edges = sum(num * one.num * (one.in_features + one.out_features) for one, num in matrices)
    idle = sum(layer.num_params * num for layer, num in model.idle_layers) + model.num_idle_other_params
    tensors = [
        one.in_features * one.out_features * (one.num if one.module == "parameter" else 1) for one, _ in matrices
    ]
    return Trained(
        num=model.num_params - idle,  # a tower that sees no text token gets no gradient
        dtype=dtype,
        edge_sum=edges + sum(table.num_rows + table.dim for table in model.embeddings),
        largest=max([*tensors, *(table.num_params for table in model.embeddings), model.num_head_params]),
        head=model.head.num_weights if model.head is not None else 0,
        embeddings=max((table.num_params for table in model.embeddings), default=0),
    )


@lru_cache(maxsize=256)
def _trained_lora(model: ModelSpec, targets: str | tuple[str, ...], rank: int, dtype: str) -> Trained:
    num = edges = largest = stacked = 0
    for _, repeats, linears in lora_linears(model, targets):
        for one in linears:
            real = lora_rank(one, rank)
            num += repeats * lora_params(one, rank)
            edges += repeats * one.num * (one.in_features + one.out_features + 2 * real)
            experts = one.num if one.module == "parameter" else 1
            stacked += repeats * lora_params(one, rank) if one.module == "parameter" else 0
            largest = max(largest, experts * real * max(one.in_features, one.out_features))
    return Trained(num=num, dtype=dtype, edge_sum=edges, largest=largest, head=0, embeddings=0, stacked=stacked)


@lru_cache(maxsize=256)
def _adapted_names(model: ModelSpec, targets: str | tuple[str, ...] | None) -> tuple[frozenset[str], ...]:
    """Names of the adapted matrices for each kind of layer, in the order of `layer_kinds`."""
    if targets is None:
        return tuple(frozenset() for _ in model.layer_kinds)
    names: dict[int, frozenset[str]] = {}
    for layer, _, linears in lora_linears(model, targets):
        names[id(layer)] = frozenset(one.name for one in linears)
    return tuple(names.get(id(layer), frozenset()) for layer in model.layer_kinds)


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
    at_first_decoder_layer: int = 0
    """Beyond what is stored: position biases at the backward of an encoder-decoder's first decoder layer."""

    @property
    def stored_total(self) -> int:
        """All stored parts."""
        return sum(self.stored.values())


def step_flow(model: ModelSpec, setup: TrainSetup) -> Flow:
    """The data types of a setup on one model: `flow_of`, and the residual stream that autocast's LayerNorm widens.

    nn.LayerNorm returns fp32 under autocast and bitsandbytes' layers return their input's type, so the stream of a
    quantized model with LayerNorm is fp32 from its first layer on; so is that of a model with a LayerNorm behind its
    embeddings (BLOOM).
    """
    flow = flow_of(setup)
    widens = flow.quantized or traits_of(model).embedding_norm
    if widens and flow.autocast and traits_of(model).norm == "layer":
        return replace(flow, residual="fp32")
    return flow


def activation_parts(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> ActivationParts:
    """The activations of a setup; independent of its loss, optimizer and accumulation."""
    flow, tokens, traits = step_flow(model, setup), setup.tokens_per_micro_batch, traits_of(model)
    targets = None if setup.method == "full" else setup.lora_targets
    adapted = _adapted_names(model, targets)
    stacks = targets is not None and adapts_expert_stacks(model, targets)
    counts, kept = _checkpointed(model, setup.checkpointing)
    stored = {
        "norm": 0,
        "attention": 0,
        "scores": 0,
        "mlp": 0,
        "adapters": 0,
        "pinned": 0,
        "inputs": 0,
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
        )
        saved = layer_saved(layer, context)
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
            if not (traits.post_norm and saved.pinned):  # int8 keeps that very input
                stored["inputs"] += again * SIZE_BYTES[flow.residual] * model.hidden_size * tokens
            stored["pinned"] += again * saved.pinned
        here = ((backward_transient(layer, context, saved), 0), *constant_transients(layer, context, saved))
        if counts[index] > kept[index]:
            in_again.append(forward_transient(layer, context) + merged_stacks(layer, context))
            moments.append([LayerMoment(recomputed=saved.total, transient=a, dequantized=b) for a, b in here])
        if kept[index]:
            in_kept.append(forward_transient(layer, context) - saved.total)
            moments.append([LayerMoment(recomputed=0, transient=a, dequantized=b) for a, b in here])
        if setup.quantized:
            dequantized = max(dequantized, *(dequantized_bytes(one, setup, flow.residual) for one in layer.linears))
    biases = position_bias(model, setup, flow, kernel, row_tokens=context.row_tokens, num_kept=sum(kept))
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
    )
    adapter_casts = 0
    if setup.method != "full" and flow.autocast and flow.adapter == "fp32":
        # the graph keeps those of layers that are not recomputed, autocast's cache the others until the forward ends
        trained, share = trained_parameters(model, setup), sum(kept) / max(1, sum(counts))
        stored["adapters"] += int(2 * trained.num * share)
        adapter_casts = int(2 * (trained.num - trained.stacked) * (1 - share))
    return ActivationParts(
        stored=stored,
        recomputed=largest.recomputed,
        transient=largest.transient,
        layer_moments=layer_moments,
        # what the kept layers behind the last checkpointed one hold is not there yet in its forward
        forward_temp=max(0, max(in_again) - behind, *in_kept),
        dequantized=dequantized,
        final_norm=sum(norm_saved(norm, tail, flow.residual) for norm in model.outer_norms[-1:]),
        weight_casts=_weight_casts(model, setup, flow),
        adapter_casts=adapter_casts,
        at_first_decoder_layer=biases.at_first_decoder_layer,
    )


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
    stacked experts is not on autocast's list; Llama 4's batched one is.

    Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
    """
    fp32_down, batched = traits_of(model).fp32_down and flow.table == "fp16", traits_of(model).dense_experts
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


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch."""
    flow = step_flow(model, setup)
    return loss_chain(
        loss=setup.loss,
        tokens=setup.tokens_per_micro_batch,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        logits_dtype=flow.autocast or flow.table,
        hidden_dtype=flow.residual,
        head_trained=setup.method == "full",
        softcap=model.logit_softcap,
        head_cast=flow.autocast is not None and flow.table == "fp32",
        upcast=not model.is_encoder_decoder or flow.autocast is not None,
    )


def loss_parts_logits(model: ModelSpec, setup: TrainSetup) -> int:
    """Bytes of the logits' gradient in the head's type, alive beside the head's own gradient (full loss only)."""
    if setup.loss != "full":
        return 0
    flow = step_flow(model, setup)
    return SIZE_BYTES[flow.autocast or flow.table] * setup.tokens_per_micro_batch * model.vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardPeak:
    """The largest moment of the layers' backward, beyond what is resident, in bytes by part."""

    where: str
    stored: int
    recomputed: int
    transient: int
    dequantized: int
    gradients: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.stored + self.recomputed + self.transient + self.dequantized + self.gradients


def halves_stay_apart(model: ModelSpec, setup: TrainSetup) -> bool:
    """Whether the two halves of a tied embedding's gradient make a third tensor instead of being added in place.

    The engine adds into the first one where nothing else holds its storage; the head's own matrix multiplication gives
    it transposed, which does. A cast (autocast) or a fused loss gives a fresh tensor.

    Source: PyTorch `input_buffer.cpp` `can_accumulate_inplace`; tests/probes/test_dryrun_gradient_sums.py.
    """
    return model.tied and setup.method == "full" and setup.loss == "full" and setup.autocast_dtype is None


def backward_moments(
    model: ModelSpec, parts: ActivationParts, trained: Trained, *, accumulated: bool, apart: bool = False
) -> tuple[BackwardPeak, ...]:
    """The moments that can be the backward's largest: the first layer's backward, the last one's (all gradients there
    but the embedding's and this layer's), each at every moment of a layer, and the embedding's own gradient, when all
    activations are gone.

    In between, activations fall and gradients rise linearly with the layers, so the maximum is at an end. With
    accumulation the gradients of earlier micro-batches are alive all along, and a new one only until it is added. Each
    moment by itself is affine in the micro-batch. `apart`: see `halves_stay_apart`.
    """
    size = SIZE_BYTES[trained.dtype]
    head = 0 if accumulated else trained.head * size
    largest = trained.embeddings * size
    half = trained.head * size if model.tied else 0  # the head's, which waits for the embedding's
    stored = parts.stored_total + parts.weight_casts[1]
    if accumulated:
        gradients = half
    else:
        others = trained.size_bytes - (0 if half >= largest else largest)
        gradients = max(0, others - (others - head) // max(1, model.num_layers))
    found = []
    for moment in parts.layer_moments:
        of_layer = {
            "recomputed": moment.recomputed,
            "transient": moment.transient,
            "dequantized": moment.dequantized,
        }
        first = BackwardPeak(where="first layer", stored=stored + parts.final_norm, gradients=head, **of_layer)
        if parts.at_first_decoder_layer:
            first = _first_decoder_layer(model, parts, trained, first, accumulated=accumulated)
        left = stored // max(1, model.num_layers)
        found += [first, BackwardPeak(where="last layer", stored=left, gradients=gradients, **of_layer)]
    # beside the gradients kept: the other half of a tied one, their sum, and a new one about to be accumulated, of the
    # tied table or, while the head's half still waits, of a larger one (Gemma 4's inputs of each layer)
    more = half * (1 + int(apart))
    if accumulated:
        more = max(more + half, half + largest)
    end = BackwardPeak(
        where="embedding",
        stored=0,
        recomputed=0,
        transient=0,
        dequantized=0,
        gradients=(0 if accumulated else trained.size_bytes) + more,
    )
    return *found, end


def _first_decoder_layer(
    model: ModelSpec, parts: ActivationParts, trained: Trained, first: BackwardPeak, *, accumulated: bool
) -> BackwardPeak:
    """The moment of an encoder-decoder with checkpointing where its position biases meet their gradients: the decoder's
    activations are gone, its gradients are there."""
    biases = parts.stored["bias"] + parts.at_first_decoder_layer
    layers = [
        (model.layer_kinds[kind].cross_attention is not None, model.layer_kinds[kind]) for kind in model.layer_order
    ]
    decoder = sum(layer.num_params for crossed, layer in layers if crossed)
    share = decoder / max(1, sum(layer.num_params for _, layer in layers))
    others = (first.stored - parts.stored["bias"]) // 2
    layer_gradients = int(share * max(0, trained.size_bytes - first.gradients))
    return replace(
        first,
        where="first decoder layer",
        stored=others + biases,
        gradients=first.gradients + (0 if accumulated else layer_gradients),
    )


def backward_peak(
    model: ModelSpec, parts: ActivationParts, trained: Trained, *, accumulated: bool, apart: bool = False
) -> BackwardPeak:
    """The largest of the backward's moments."""
    moments = backward_moments(model, parts, trained, accumulated=accumulated, apart=apart)
    return max(moments, key=lambda peak: peak.total)


def loss_peak(chain: LossChain, parts: ActivationParts, trained: Trained, logits_bytes: int) -> tuple[int, int]:
    """The loss chain's largest moment as (bytes of the chain, bytes of autocast's cache alive with it).

    Its forward (autocast's cache still alive), its own backward, or the head's gradient beside 16-bit logits.
    """
    cache = parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts
    head = trained.head * SIZE_BYTES[trained.dtype]  # with accumulation too: it is made, then added
    after = max(chain.backward_bytes, head + logits_bytes)
    return (chain.loss_bytes, cache) if chain.loss_bytes + cache > after else (after, 0)


_PART_NAMES = {
    "norm": "norm inputs",
    "attention": "attention inputs and outputs",
    "scores": "attention scores (tokens x tokens)",
    "mlp": "MLP activations",
    "adapters": "adapter input copies",
    "pinned": "inputs that int8 matrices keep",
    "inputs": "checkpointed layer inputs",
    "bias": "position biases (tokens x tokens)",
    "masks": "attention masks (tokens x tokens)",
}


def predict_memory(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> MemoryBreakdown:
    """All memory terms of one setup on one GPU, with the phases in which each is alive.

    Source: the terms' own functions; docs/memory-model.md shows how the phases were found (the dry run's event order).
    Not counted: paged optimizer states (managed memory, evictable), the data loader, NCCL.
    """
    parts, chain, trained = (
        activation_parts(model, gpu, setup),
        loss_parts(model, setup),
        trained_parameters(model, setup),
    )
    accumulated = setup.accumulation_steps > 1
    terms: list[MemoryTerm] = []

    def add(category: str, name: str, size_bytes: int, *phases: Phase) -> None:
        if size_bytes > 0:
            alive = {"phases": phases} if phases else {}
            terms.append(MemoryTerm(category=category, name=name, size_bytes=size_bytes, **alive))  # type: ignore[arg-type]

    for part, size in weight_bytes(model, setup).items():
        add("weights", f"weights: {part}", size)
    if setup.method != "full":
        add("adapters", "LoRA matrices", trained.size_bytes)
    states = state_bytes(trained.num, trained.dtype, setup.optimizer, matrix_edge_sum=trained.edge_sum)
    add("optimizer", f"states of {setup.optimizer}", states, *AFTER_LOAD)
    add("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu))
    apart = halves_stay_apart(model, setup)
    peak = backward_peak(model, parts, trained, accumulated=accumulated, apart=apart)
    shrunk = peak.where != "first layer"
    compute: tuple[Phase, ...] = ("forward", "loss") if shrunk else ("forward", "loss", "backward")
    for part, size in parts.stored.items():
        add("activations", _PART_NAMES[part], size, *compute)
    add("activations", "autocast copies of the weights", parts.weight_casts[1], *compute)
    add("activations", "final norm", parts.final_norm, *compute[1:])
    if shrunk:
        add("activations", "what is left of the activations", peak.stored, "backward")
    add(
        "activations",
        "autocast's cache",
        parts.weight_casts[0] - parts.weight_casts[1] + parts.adapter_casts,
        "forward",
    )
    if accumulated:
        add("gradients", "accumulated gradients", trained.size_bytes, "forward", "loss", "backward")
    add("activations", "one layer's forward temporaries", parts.forward_temp, "forward")
    add("dequantization", "one dequantized matrix in the forward", parts.dequantized, "forward")
    in_loss, cache = loss_peak(chain, parts, trained, loss_parts_logits(model, setup))
    add("loss", f"loss chain ({setup.loss})", in_loss, "loss")
    add("activations", "autocast's cache in the loss", cache, "loss")
    add("activations", "one recomputed layer", peak.recomputed, "backward")
    add("workspace", "one layer's gradients of activations", peak.transient, "backward")
    add("dequantization", "one dequantized matrix in the backward", peak.dequantized, "backward")
    add("gradients", "gradients in the backward", peak.gradients, "backward")
    add("gradients", "gradients", trained.size_bytes, "step")
    temporary = step_bytes(trained.num, trained.dtype, setup.optimizer, largest_tensor=trained.largest)
    add("optimizer", f"temporaries of {setup.optimizer}", temporary, "step")
    resident = sum(term.size_bytes for term in terms if len(term.phases) >= len(AFTER_LOAD))
    totals = {
        phase: sum(t.size_bytes for t in terms if phase in t.phases)
        for phase in ("forward", "loss", "backward", "step")
    }
    return MemoryBreakdown(
        terms=tuple(terms),
        allocator_gap_bytes=allocator_gap_bytes(resident, max(totals.values()) - resident),
        context_bytes=context_bytes(gpu),
    )
