"""From terms to moments to the peak: the one composition of a training step, on any number of GPUs."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from planner.core.units import MIB
from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES, DtypePolicy
from planner.memory.micro_batch import (
    ActivationParts,
    ReferenceForward,
    SharedLayerCosts,
    activation_parts,
    cached_bytes,
    step_dtype_policy,
)
from planner.memory.rank_part import RankPart
from planner.memory.rollout import VLLM, generation_terms, resident_vllm
from planner.memory.states import BACKWARD, RankState, rotary_table_bytes
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes, dequantized_bytes
from planner.models.spec import ModelSpec
from planner.options.losses import LOSSES, LossChain, LossShape
from planner.setup import TrainSetup
from planner.setup.allowed import SAVED_HEADS
from planner.setup.memory_terms import PHASES, MemoryBreakdown, MemoryTerm, Phase, Term, total_bytes

# What PyTorch's caching allocator holds beyond live tensors, as a closed form; the dry run replays it exactly.


GAP_OF_LOSS, GAP_OF_LAYER = 0.18, 0.12
"""Shares of what is made and freed again within a phase that stay behind as holes: of the loss chain, and of one
layer's temporaries. What is kept from forward to backward lies block after block and leaves none.
Measured: reserved peak against the dry run's replay with expandable segments, 273 random points of one GPU (27 November
2026): median error 0.9 %, 95th percentile 5.8 % (8 % of all that changes gave 2.7 and 7.2 %); against 15 runs on an
H200 median 0.5 %, worst 1.2 % (0.9 and 7.1 %)."""
GAP_OF_TWO_BLOCKS, GAP_OF_SPACED_LOSS = 0.34, 0.26
"""The same of all logits at once, where two blocks of 16-bit logits lie open, each a sixth of the chain, and of spaced
checkpoints over weights that are not packed, of which it is 0.19 to 0.32 (`profile_loss_gap`)."""
UNPACKED_FILLED = 0.85
"""From this share of the last matrix's unpacked copy on the residual stream fills its hole: of 62 replays of 17 models
those at 0.84 and less leave two blocks but for three, those at 0.86 and more one but for two (of a 135M)."""
GAP_FLOOR_BYTES = 24 * MIB
"""A small pool's segment and a large pool's segment are never full."""


FIXED_GAP_OF_LOSS, FIXED_GAP_OF_FORWARD, FIXED_GAP_OF_MIXED = 0.16, 0.12, 0.54
"""Shares of what fixed segments leave as holes: of the loss chain beside the activations kept, of one layer's forward
temporaries, and of whichever is smaller, the activations kept or one layer's backward: blocks of the one lie between
blocks of the other. Fitted to 112 replays by the dry run and 39 measured peaks (T4, RTX 4080), weighed by the peak:
median error of the peak 1.4 %, 90th percentile 5.7 %; each of seven sources left out 2.6 and 8.7 % (November 2026)."""


def fixed_segments_gap_bytes(*, saved: int, forward: int, loss: int, backward: int) -> int:
    """Reserved minus allocated at the peak where segments do not expand (PyTorch's default), estimated from the phases.

    A block that is freed stays in its segment, and only a request that fits into it takes it again.

    Args:
        saved: activations from forward to backward; `forward`, `loss`, `backward`: the largest moment of each phase,
            those activations included, resident memory not.

    Source: PyTorch `c10/cuda/CUDACachingAllocator.cpp`.
    """
    mixed = min(saved, max(0, backward - saved))
    holes = (
        FIXED_GAP_OF_LOSS * max(0, loss - saved)
        + FIXED_GAP_OF_FORWARD * max(0, forward - saved)
        + FIXED_GAP_OF_MIXED * mixed
    )
    return GAP_FLOOR_BYTES + int(holes)


def formula_loss_gap_share(loss: str, checkpointing: int) -> float:
    """The share of a loss chain that stays reserved as holes, by closed forms and of ranks' profiles, where every so
    manyth layer is checkpointed. Step profiles of one GPU know more (`profile_loss_gap`)."""
    return GAP_OF_TWO_BLOCKS if loss == "full" and checkpointing > 1 else GAP_OF_LOSS


class LossGap(NamedTuple):
    """The share of a loss chain that stays behind as holes, by the bytes of the residual stream of a micro-batch."""

    below: float
    from_there: float
    stream_bytes: int = 0

    def at(self, stream_bytes: int) -> float:
        """The share for a stream of so many bytes."""
        return self.below if stream_bytes < self.stream_bytes else self.from_there


def profile_loss_gap(model: ModelSpec, setup: TrainSetup, workspace_bytes: int) -> LossGap:
    """The share of a loss chain that stays reserved as holes, by a step profile of one GPU: with all logits at once
    and adapters one block of 16-bit logits, or two.

    The gradient of the logits takes the chain's place, and cuBLAS's workspace of the backward, made once, lies right
    behind it. The next micro-batch's logits fit before the workspace if no more memory lies below them than the first
    time. They do not fit (two blocks) where

    1. the last norm is made of single operations: its output lies above its fp32 temporaries; unless autocast leaves a
       hole as large as the residual stream, which takes the workspace;
    2. the base has 4 bits and the hole of the last matrix's unpacked copy is larger than what the norm makes, or, with
       spaced checkpoints and norms of one kernel, than what these keep.

    Args:
        workspace_bytes: of cuBLAS, of one thread.

    Measured: replays on three cards, docs/step-profiles.md (29 November 2026).
    """
    usual = formula_loss_gap_share(setup.loss, setup.checkpointing)
    rest, spaced = LossGap(usual, usual), setup.checkpointing > 1
    if setup.loss != "full" or setup.objective != "sft":
        return rest
    if model.traits.scales_logits:  # what the chain makes next fits in the first ones' place
        return LossGap(0.0, 0.0)
    if not setup.checkpointing or setup.method == "full":
        return rest
    composed = model.traits.norm == "rms" and "norm" not in setup.fused_parts(model.model_type)
    if not spaced and (not composed or setup.quantization == "int8"):
        return rest
    if spaced and composed and setup.four_bit:
        return LossGap(GAP_OF_LOSS, GAP_OF_LOSS)
    if setup.four_bit:
        linears = (linear for layer in model.layer_kinds for linear in layer.linears)
        unpacked = max(dequantized_bytes(linear, setup, setup.compute_dtype) for linear in linears)
        return LossGap(GAP_OF_TWO_BLOCKS, GAP_OF_LOSS, unpacked + 1 if spaced else int(UNPACKED_FILLED * unpacked))
    if spaced:
        return LossGap(GAP_OF_SPACED_LOSS, GAP_OF_SPACED_LOSS)
    held_apart = setup.autocast_dtype is not None
    return LossGap(GAP_OF_TWO_BLOCKS, GAP_OF_LOSS if held_apart else GAP_OF_TWO_BLOCKS, workspace_bytes)


def allocator_gap_bytes(*, loss: int, layer: int, of_loss: float = GAP_OF_LOSS) -> int:
    """Reserved minus allocated at the peak with expandable segments, estimated from what comes and goes.

    Weights are allocated once, and activations that wait for the backward one after another: both are packed. A loss
    chain and a layer's temporaries are freed in another order than they were made, and leave holes. With
    `expandable_segments:True`, which every launch file sets, holes are whole pages.

    Args:
        loss, layer: the largest moment of the loss, and of a layer's forward or backward, beyond the activations kept.
        of_loss: `formula_loss_gap_share` or `profile_loss_gap`.

    Source: PyTorch `c10/cuda/CUDACachingAllocator.cpp` (segment sizes 2 and 20 MiB, rounding of larger ones to 2 MiB).
    """
    return GAP_FLOOR_BYTES + int(max(of_loss * loss, GAP_OF_LAYER * layer, 0))


# What pipeline stages hold of micro-batches beside the one that they compute.


def in_flight_bytes(state: RankState, setup: TrainSetup, saved: int, flight: int, micro_batches: int) -> int:
    """Activations of further micro-batches in flight, less what they never meet.

    Where every forward comes before the first backward (GPipe; 1F1B with no more micro-batches than in flight), whole
    gradients are there when one micro-batch's activations are gone. FSDP2's weights are all gathered at a backward's
    end, when its activations are gone, and freed by the next forward.

    Args:
        saved: activation bytes of one micro-batch in flight.
    """
    if flight < 2:
        return 0
    apart = 0
    for allocation in state.allocations:
        if "gather" in allocation.moments and not allocation.resident:
            gradients = allocation.category == "gradients" and micro_batches <= flight
            weights = allocation.category == "weights" and setup.reshard_after_forward
            apart += allocation.size_bytes * (gradients or weights)
    return (flight - 1) * saved - min(saved, apart)


def boundary_bytes(part: RankPart, setup: TrainSetup, inner: TrainSetup, *, micro_batches: int, flight: int) -> int:
    """What a pipeline stage holds at its boundaries all along: a receive buffer for every micro-batch's input
    and for every micro-batch's gradient, and the sent outputs of those in flight.

    A checkpointed first layer keeps its input, which is that very buffer: it is not counted twice.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (_setup_forward_recv_info and _setup_backward_recv_info make
    one buffer per chunk, fwd_cache keeps outputs until their backward).
    Shapes: [seqs, tokens, hidden] in the residual's type.
    Not counted: the last stage's output chunks (`save_forward_output` off).
    """
    if setup.pipeline_degree == 1:
        return 0
    buffer_bytes = (
        SIZE_BYTES[step_dtype_policy(part.model, inner).residual]
        * part.model.hidden_size
        * inner.tokens_per_micro_batch
    )
    total = micro_batches * buffer_bytes * (int(not part.first) + int(not part.last))
    total += 0 if part.last else flight * buffer_bytes
    if not part.first and setup.checkpointing:
        total -= flight * buffer_bytes
    return total


# The loss chain: logits, their fp32 copies, log-softmax and gradients. It dominates for modern vocabularies.


CUT_FROM_BYTES, CUT_TOKENS, CUT_LOGIT_BYTES = 1 << 30, 512, 12
"""fp32 logits from which on experts4bit-qlora goes over pieces of so many tokens, three fp32 tensors at once.

Source: experts4bit-qlora 0.58.1 `engines/chunked_lm_loss.py` AUTO_MIN_LOGITS_BYTES, DEFAULT_CHUNK, chunked_loss_bytes.
"""


def head_copies(dtypes: DtypePolicy, setup: TrainSetup) -> tuple[int, ...]:
    """Sizes of the copies that a piece of TRL's older chunked loss makes of the head: in fp32, then autocast's."""
    widened = (4,) if setup.widens_head and dtypes.table != "fp32" else ()
    cast = dtypes.autocast is not None and (widened or dtypes.autocast != dtypes.table)
    return (*widened, SIZE_BYTES[dtypes.autocast]) if dtypes.autocast and cast else widened


def _beside_compiled(model: ModelSpec, setup: TrainSetup) -> int:
    """Tensors of the logits' size beside them in the backward of a compiled model that hands them out (`LossShape`).

    transformers finds the loss by what follows "For" in the class's name; where there is none (GPT2LMHeadModel) it
    warns, and the graph ends before the loss: then the logits' gradient is the loss's.

    Source: transformers 5.23 `modeling_utils.py` PreTrainedModel.loss_function; PyTorch 2.13 `_functorch/_aot_autograd/
    runtime_wrappers.py` (materialized gradients), `_functorch/partitioners.py` (outputs are not donated).
    Measured: 14 runs of a compiled GPT-2 by transformers (cyber_3060), docs/accuracy/gathered.md.
    """
    return 2 if setup.trainer.own_models or "For" in model.built_class else 1


def loss_parts(model: ModelSpec, setup: TrainSetup) -> LossChain:
    """The loss chain of one micro-batch, as the setup's stack runs it."""
    dtypes, by, objective = step_dtype_policy(model, setup), setup.trainer, setup.objective_spec
    several = setup.micro_batch_seqs > 1 and (by.packs_rows or not setup.packing)  # all but one row's last: no copy
    shape = LossShape(
        tokens=setup.forward_tokens if objective.head == "none" else setup.scored_tokens,
        vocab_size=-(-model.vocab_size // setup.stream_degree) if objective.head == "vocabulary" else 1,
        hidden_size=model.hidden_size,
        logit_bytes=SIZE_BYTES[dtypes.autocast or dtypes.table],
        hidden_bytes=SIZE_BYTES[dtypes.residual],
        head_trained=setup.trains_everything or bool(set(setup.modules_to_save) & set(SAVED_HEADS)),
        softcap=model.logit_softcap,
        head_cast=dtypes.autocast not in (None, dtypes.table),
        upcast=setup.upcasts_logits and not model.is_encoder_decoder,
        narrow=model.is_encoder_decoder and dtypes.autocast is not None,
        chunks=by.num_chunks(setup.tokens_per_micro_batch),
        in_place=by.in_place_loss,
        cut=setup.stream_degree > 1,
        shifted=by.shifted_loss,
        kept=by.keeps_outputs,
        compiled=setup.compiled and bool(by.compiles_loss),
        handed_out=_beside_compiled(model, setup) if by.compiles_loss == "within" else 0,
        with_reference=setup.asks_reference,
        widened=by.widens_outputs and dtypes.autocast is not None,
        upcast_early=(by.transformers_loss or by.shifted_loss) and setup.before_transformers(4, 46),
        log_probs=setup.log_probs,
        copies_shifted=several and (by.shifted_loss or setup.copies_logits),
        head_bytes=SIZE_BYTES[dtypes.table],
        head_copies=head_copies(dtypes, setup) if setup.checkpointed_loss else None,
        piece_bytes=SIZE_BYTES[dtypes.autocast or "fp32"] if setup.widens_head else 4,
    )
    if objective.whole_logits is not None and LOSSES[setup.loss].whole_logits:
        return objective.whole_logits(shape, setup.stack)
    if by.grouped_experts and 4 * shape.tokens * shape.vocab_size >= CUT_FROM_BYTES:
        piece = CUT_LOGIT_BYTES * min(shape.tokens, CUT_TOKENS) * shape.vocab_size
        rows = shape.hidden_bytes * shape.tokens * shape.hidden_size
        return LossChain(loss_bytes=piece + rows, backward_bytes=piece + rows)
    chain = LOSSES[setup.loss].memory(shape)
    if by.loss_chunks and shape.head_trained and LOSSES[setup.loss].whole_logits:
        # each piece has a product with the head: the gradients that two of them give its weight, and their sum, are
        # beside the other pieces' logits (torchtune 0.6.1 `modules/transformer.py` chunked_output; its recipe of
        # Llama-3.1-8B, traced)
        head, logits = shape.hidden_bytes * shape.vocab_size * shape.hidden_size, shape.logit_bytes * shape.tokens
        others = logits * shape.vocab_size * (shape.chunks - 2) // shape.chunks
        chain = replace(chain, backward_bytes=max(chain.backward_bytes, 3 * head + others))
    if not (setup.use_cache and by.keeps_outputs):
        return chain
    return replace(chain, kept_bytes=chain.kept_bytes + cached_bytes(model, setup))


def last_stage_loss(part: RankPart, setup: TrainSetup, inner: TrainSetup, flight: int) -> tuple[LossChain, int, int]:
    """(loss chain, bytes of gathered outputs, bytes of logits and losses of other micro-batches) of a last part.

    A last pipeline stage holds beside one micro-batch's chain its logits, to the backward's end, and under GPipe those
    and the fp32 log-probabilities of the micro-batches in flight. The largest moment is the second backward, when
    gradients are there and one micro-batch is done.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (backward_one_chunk's stage_output), `schedules.py`
    ScheduleGPipe. Measured: docs/accuracy/spread-formula-vs-dry-run.md.
    """
    chain = loss_parts(part.model, inner)
    outputs = setup.num_gpus * chain.logits_bytes if setup.parallel == "dp" and not part.follower else 0
    others = 0
    if setup.pipeline_degree > 1:
        wide = SIZE_BYTES["fp32"] * inner.tokens_per_micro_batch * part.model.vocab_size
        others = chain.logits_bytes + max(0, flight - 2) * (chain.logits_bytes + wide)
    return chain, outputs, others


class LossMoment(NamedTuple):
    """What the loss holds at each of its moments, but for what the forward's activations hold then; in bytes.

    Attributes:
        in_model_forward: while the model's forward ends (autocast's cache is still alive).
        forward: its own forward; backward: its own backward.
        head: the gradient of the head's weight while the logits are alive (accumulation adds it only afterwards), or
            what is gathered again beside them and their gradient.
        reference: while a reference's layers run; arriving: of it, the next layer's weights.
    """

    in_model_forward: int
    forward: int
    backward: int
    head: int
    reference: int
    arriving: int

    @classmethod
    def of(cls, state: RankState, chain: LossChain, outputs_bytes: int) -> "LossMoment":
        """The loss's moments on one rank.

        Args:
            outputs_bytes: logits of other GPUs that are gathered here before the backward.
        """
        supervised = state.setup.objective_spec.supervised  # of preferences the logits themselves are gone then
        return cls(
            chain.within_bytes + outputs_bytes + state.loss_forward_bytes,
            chain.loss_bytes + outputs_bytes,
            chain.backward_bytes + state.loss_backward_bytes,
            chain.logits_bytes
            + max(
                state.trained.head * state.trained.outer_bytes,
                state.regathered_bytes and state.regathered_bytes + chain.logits_bytes * supervised,
            ),
            chain.reference_forward_bytes + state.reference_forward_bytes,
            state.arriving_bytes,
        )

    def largest(self, freed_before_loss_backward: int, reference: ReferenceForward) -> int:
        """Bytes of the largest moment beyond the activations that stay.

        Args:
            freed_before_loss_backward: activations that are freed before the loss's own forward.
            reference: what a reference model's forward holds.
        """
        peak = max(self.in_model_forward + freed_before_loss_backward, self.forward, self.backward, self.head)
        if not reference.frames:
            return peak
        return max(peak, self.reference + reference.frames + reference.cached + max(reference.layer, self.arriving))


def loss_terms(
    state: RankState, chain: LossChain, parts: ActivationParts, outputs_bytes: int, loss: str
) -> tuple[Term, ...]:
    """The loss chain's largest moment (`LossMoment`).

    Args:
        outputs_bytes: logits of other GPUs that are gathered here before the backward.
    """
    name, extra_name = f"loss chain ({loss})", "weights and buffers beside the loss"
    moment = LossMoment.of(state, chain, outputs_bytes)
    within = moment.in_model_forward + parts.freed_before_loss_backward
    reference_terms: tuple[Term, ...] = ()
    reference = parts.reference
    if reference.frames:
        layer = max(reference.layer, state.arriving_bytes)
        reference_terms = (
            ("loss", f"what the loss keeps ({loss})", chain.reference_forward_bytes),
            ("activations", "what the reference's forward holds", reference.frames + reference.cached),
            ("activations", "one layer of it, or the next one's weights", layer),
            ("weights", "weights and buffers beside it", state.reference_forward_bytes),
        )
    if total_bytes(reference_terms) > max(within, moment.forward, moment.backward, moment.head):
        return reference_terms
    if within >= moment.forward and within > max(moment.backward, moment.head):
        return (
            ("loss", name, chain.within_bytes + outputs_bytes),
            ("activations", "autocast's cache in the loss", parts.freed_before_loss_backward),
            ("loss", extra_name, state.loss_forward_bytes),
        )
    if max(moment.forward, moment.head) > moment.backward:
        return (("loss", name, max(moment.forward, moment.head)),)
    return ("loss", name, chain.backward_bytes), ("loss", extra_name, state.loss_backward_bytes)


# What computing one micro-batch holds, moment by moment of a step (`planner.memory.states.MOMENTS`).


_PART_NAMES = {
    "norm": "norm inputs",
    "attention": "attention inputs and outputs",
    "scores": "attention scores (tokens x tokens)",
    "mlp": "MLP activations",
    "adapters": "adapter input copies",
    "pinned": "inputs that quantized matrices keep",
    "inputs": "checkpointed layer inputs",
    "bias": "position biases (tokens x tokens)",
    "masks": "attention masks (tokens x tokens)",
    "sound": "what the convolutions keep",
    "output": "the encoder's norm and output",
}

HOOKED = "layer inputs and gradients that FSDP 1's hooks hold"
REMAINING_ACTIVATIONS = "what is left of the activations"


class Moment(NamedTuple):
    """What computing holds at one moment of a step (start, gather, forward, loss, head, first, turn, last, end, step:
    `planner.memory.states.MOMENTS` explains them), beside what the engine holds then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size_bytes(self) -> int:
        """All terms."""
        return total_bytes(self.terms)


def computing(model: ModelSpec, parts: ActivationParts, *, last: bool = True) -> tuple[Moment, ...]:
    """What one micro-batch's activations are at every moment; each by itself is affine in the micro-batch.

    The backward is largest at its first layer, at its last (activations fall and gradients rise linearly in between),
    each at every moment of a layer, or when all activations are gone and the embedding's gradient comes; an image
    encoder's runs after the layers'.

    Args:
        last: whether the part has the loss.
    """
    of_text, encoder = stored_terms(parts), parts.encoder
    held = parts.stored.get("pinned", 0)  # on the nodes of the graph, which goes as a whole
    seen: tuple[Term, ...] = ()
    if encoder.inputs:  # what it keeps for its backward, and what its forward hands to the text's
        seen = (
            ("activations", "the encoder's activations", encoder.stored),
            ("activations", "the encoder's mask (patches x patches)", encoder.mask),
            ("activations", "between encoder and text", encoder.between_encoder_and_text),
        )
    stored = (*of_text, *seen)
    cached: Term = ("activations", "keys and values in the model's cache", parts.cached)
    saved = (*stored, cached, ("activations", "autocast's cache", parts.cast_cache))
    temporaries: Term = ("activations", "one layer's forward temporaries", parts.forward_temp)
    unpacked: Term = ("dequantization", "one dequantized matrix in the forward", parts.dequantized)
    norm: Term = ("activations", "final norm", parts.final_norm)
    moments = [
        Moment("start", ()),
        Moment("gather", saved),
        Moment("forward", (*saved, temporaries, unpacked)),
        Moment("loss", (*stored, cached, norm) if last else ()),
        Moment("head", stored),
    ]
    if seen:
        running: Term = ("activations", "one layer's forward temporaries", encoder.forward)
        moments.append(Moment("forward", (*seen, running)))
        name = "one recomputed layer of the encoder, and gradients"
        of_graph: Term = ("activations", REMAINING_ACTIVATIONS, held)
        moments += [Moment("last", (*seen[:2], of_graph, ("activations", name, size))) for size in encoder.backward]
    size = total_bytes(of_text)
    others = size * (parts.forwards - 1) // parts.forwards  # of forwards whose backward comes later
    left, others = held + (size - held) // max(1, model.num_layers), max(others, held)
    at_last: Term = ("activations", REMAINING_ACTIVATIONS, max(others, left))
    if parts.hooked > at_last[2]:
        at_last = ("activations", HOOKED, parts.hooked)
    for moment in parts.layer_moments:
        of_layer: tuple[Term, ...] = (
            ("activations", "one recomputed layer", moment.recomputed),
            ("workspace", "one layer's gradients of activations", moment.temporary),
            ("dequantization", "one dequantized matrix in the backward", moment.dequantized),
        )
        moments += [Moment("first", (*stored, *of_layer)), Moment("last", (at_last, *seen, *of_layer))]
    return (*moments, Moment("end", (("activations", REMAINING_ACTIVATIONS, others),) if others else ()))


def stored_terms(parts: ActivationParts) -> tuple[Term, ...]:
    """What a micro-batch keeps from its forward to its backward."""
    terms: list[Term] = [("activations", _PART_NAMES[part], size) for part, size in parts.stored.items()]
    return (*terms, ("activations", "autocast copies of the weights", parts.weight_casts[1]))


# The one composition of a training step, on any number of GPUs: from terms to moments to the peak.


AFTER_LOAD: tuple[Phase, ...] = ("forward", "loss", "backward", "step")
_MOMENTS_OF: dict[Phase, tuple[str, ...]] = {
    "forward": ("forward", "gather", "start"),
    "loss": ("loss",),
    "backward": BACKWARD,
    "step": ("step",),
}
_OF_LAYERS = ("forward", "first", "turn")
KEPT_OUTPUTS = "outputs that the loop holds"
"""From one forward's end to the next one's: of the stacks that keep them (`planner.options.stacks`)."""


def step_parts(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, ground: SharedLayerCosts | None = None
) -> ActivationParts:
    """`activation_parts`, with the pictures' where the setup has some."""
    parts = activation_parts(model, gpu, setup, ground)
    if setup.images is None:
        return parts
    from planner.memory.modality_encoder import encoder_bytes  # late: text alone needs none of it

    return parts._replace(encoder=encoder_bytes(model, gpu, setup))


def largest_by_name(moments: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The bytes of the largest moment of each name."""
    sizes: dict[str, int] = {}
    for name, here in moments:
        if here > sizes.get(name, -1):
            sizes[name] = here
    return sizes


def transient_bytes(sizes: Mapping[str, int], in_loss: int) -> tuple[int, int]:
    """What the loss and what a layer make beyond the activations kept; of each moment its bytes, the chain apart."""
    saved = sizes["head"]
    return sizes["loss"] - saved + in_loss, max(sizes.get(name, saved) for name in _OF_LAYERS) - saved


def breakdown(part: RankPart, gpu: GpuSpec, setup: TrainSetup, state: RankState) -> MemoryBreakdown:
    """One rank's terms, each with the phases in which it is alive; of a phase's moments only the largest is shown.

    Source: the terms' own functions; docs/memory-model.md shows how the phases were found (the dry run's event order).
    Not counted: paged optimizer states (managed memory, evictable), the data loader.
    """
    inner, steps, engine_bytes = state.setup, setup.accumulation_steps, state.moment_bytes
    parts = step_parts(part.model, gpu, inner)
    moments = computing(part.model, parts, last=part.last)
    states, temporaries = state.optimizer_bytes(setup.optimizer)
    saved = total_bytes(stored_terms(parts))
    waiting = in_flight_bytes(state, setup, saved, part.in_flight, steps)
    in_flight: Term = ("activations", f"activations of {part.in_flight - 1} more micro-batches in flight", waiting)
    in_loss: tuple[Term, ...] = ()
    outputs_kept = 0
    if part.last:
        chain, outputs, others = last_stage_loss(part, setup, inner, part.in_flight)
        more: Term = ("loss", "logits and losses of more micro-batches in flight", others)
        in_loss, outputs_kept = (*loss_terms(state, chain, parts, outputs, setup.loss), more), chain.kept_bytes
    alone = {"loss": total_bytes(in_loss)}
    totals = [engine_bytes[name] + total_bytes(terms) + waiting + alone.get(name, 0) for name, terms in moments]
    boundary = boundary_bytes(part, setup, inner, micro_batches=steps, flight=part.in_flight)
    terms = StepTerms()
    terms.add(
        PHASES,
        [
            *state.terms_at("resident"),
            ("weights", "rotary tables of every layer", rotary_table_bytes(part.model, setup)),
            ("other", VLLM, resident_vllm(gpu, setup)),
            ("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu)),
            ("activations", "pixels of the step's pictures", steps * parts.encoder.inputs),
            ("activations", "sound of the step's clips", steps * parts.sound),
            ("activations", "the stage's boundary buffers", boundary),
        ],
    )
    terms.add(AFTER_LOAD, [("optimizer", f"states of {setup.optimizer}", states), ("loss", KEPT_OUTPUTS, outputs_kept)])
    if setup.trainer.keeps_outputs and setup.saves_matmul_inputs:  # the outputs hold the last micro-batch's graph
        pinned = parts.stored["pinned"]
        terms.add(("forward",), [("activations", "inputs that the graph of the kept outputs keeps", pinned)])
    generated = generation_terms(part.model, gpu, setup, state.trained.size_bytes)
    largest: dict[str, int] = {}
    for phase in AFTER_LOAD[:-1]:
        places = [place for place, moment in enumerate(moments) if moment.name in _MOMENTS_OF[phase]]
        best = max(places, key=lambda place: (totals[place], moments[place].name == "forward"))
        largest[phase] = totals[best]
        if phase == "forward" and total_bytes(generated) > totals[best]:
            terms.add((phase,), generated)
            continue
        terms.add((phase,), moments[best].terms)
        if moments[best].terms or phase != "loss":
            terms.add((phase,), [in_flight])
        terms.add((phase,), in_loss if phase == "loss" else ())
        terms.add((phase,), state.terms_at(moments[best].name))
    terms.add(("step",), [*state.terms_at("step"), ("optimizer", f"temporaries of {setup.optimizer}", temporaries)])
    if setup.expandable_segments:
        sizes = largest_by_name((moment.name, moment.size_bytes) for moment in moments)
        loss_bytes, layer = transient_bytes(sizes, alone["loss"])
        layer, of_loss = max(layer, total_bytes(generated)), formula_loss_gap_share(setup.loss, setup.checkpointing)
        gap = allocator_gap_bytes(loss=loss_bytes, layer=layer, of_loss=of_loss) + state.holes_bytes
    else:
        gap = fixed_segments_gap_bytes(saved=saved + waiting, **largest) + state.holes_bytes
    return terms.breakdown(gpu, setup, gap)


class StepTerms:
    """Terms and the phases in which they are alive; what is alive in several phases at one size is one term."""

    def __init__(self) -> None:
        self._phases: dict[tuple[Term, int], list[Phase]] = {}

    def add(self, phases: Iterable[Phase], terms: Iterable[Term]) -> None:
        """Adds what is alive in these phases."""
        for phase, term in product(phases, [term for term in terms if term[2] > 0]):
            same = 0
            while phase in self._phases.get((term, same), ()):  # another of the same name and size
                same += 1
            self._phases.setdefault((term, same), []).append(phase)

    def add_states(self, gpu: GpuSpec, setup: TrainSetup, states_bytes: int) -> None:
        """Adds what no profile tells of a step: cuBLAS's workspaces and the optimizer's states."""
        workspaces: Term = ("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu))
        self.add(AFTER_LOAD, [workspaces, ("optimizer", f"states of {setup.optimizer}", states_bytes)])

    def breakdown(self, gpu: GpuSpec, setup: TrainSetup, gap_bytes: int, *, profiled: bool = False) -> MemoryBreakdown:
        """All in the order in which they were first seen, with what the allocator holds beyond them at the peak."""
        terms = tuple(
            MemoryTerm(category=category, name=name, size_bytes=size, phases=tuple(phases))
            for ((category, name, size), _), phases in self._phases.items()
        )
        outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
        return MemoryBreakdown(terms=terms, allocator_gap_bytes=gap_bytes, context_bytes=outside, profiled=profiled)
