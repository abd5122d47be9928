"""The one composition of a training step, on any number of GPUs: from terms to moments to the peak.

    device peak = resident + the largest moment + the allocator's gap + what lies outside PyTorch's count

A moment (`planner.memory.state.MOMENTS`) adds up what the rank's engine holds then (`RankState`) and what computing
holds then (`computing`). `breakdown` lists the terms of one setup. A walk of the space takes the same moments at
micro-batches 1 and 2 and goes on in straight lines (`Lines`), since each moment by itself is affine in the micro-batch.
What is not affine, the loss chain with its tiles and what a pipeline has in flight, both add with the same functions.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.choices.losses import LossChain
from planner.hardware.gpu import GpuSpec
from planner.memory.allocator import allocator_gap_bytes, fixed_segments_gap_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.layer_costs import LayerCosts, LayerMoment
from planner.memory.loss import loss_parts
from planner.memory.micro_batch import ActivationParts, activation_parts, step_flow
from planner.memory.rank_part import RankPart
from planner.memory.rollout import VLLM, generation_terms, resident_vllm
from planner.memory.state import BACKWARD, RankState
from planner.memory.types import PHASES, Category, MemoryBreakdown, MemoryTerm, Phase
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

AFTER_LOAD: tuple[Phase, ...] = ("forward", "loss", "backward", "step")
_MOMENTS_OF: dict[Phase, tuple[str, ...]] = {
    "forward": ("forward", "gather", "start"),
    "loss": ("loss",),
    "backward": BACKWARD,
    "step": ("step",),
}
_PART_NAMES = {
    "norm": "norm inputs",
    "attention": "attention inputs and outputs",
    "scores": "attention scores (tokens x tokens)",
    "mlp": "MLP activations",
    "adapters": "adapter input copies",
    "pinned": "inputs that int8 matrices keep",
    "inputs": "checkpointed layer inputs",
    "streams": "residual streams made and joined",
    "bias": "position biases (tokens x tokens)",
    "masks": "attention masks (tokens x tokens)",
    "sound": "what the convolutions keep",
    "output": "the encoder's norm and output",
}

HOOKED = "layer inputs and gradients that FSDP 1's hooks hold"
KEPT_OUTPUTS = "logits in the outputs that the loop holds"
"""From one forward's end to the next one's: of the stacks that keep them (`planner.choices.stacks`)."""

Term = tuple[Category, str, int]
"""(category, name, bytes) of one part of memory at one moment."""


class Moment(NamedTuple):
    """What computing holds at one of `planner.memory.state.MOMENTS`, beside what the engine holds then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size_bytes(self) -> int:
        """All terms."""
        return total_bytes(self.terms)


def total_bytes(terms: Iterable[Term]) -> int:
    """The bytes of all terms."""
    return sum([term[2] for term in terms])


def step_parts(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, costs: Sequence[LayerCosts] | None = None
) -> ActivationParts:
    """`activation_parts`, with the pictures' where the setup has some."""
    parts = activation_parts(model, gpu, setup, costs)
    if setup.images is None:
        return parts
    from planner.memory.tower import with_tower  # late: text alone needs none of it

    return with_tower(parts, model, gpu, setup)


def computing(model: ModelSpec, parts: ActivationParts, *, last: bool = True) -> tuple[Moment, ...]:
    """What one micro-batch's activations are at every moment; each by itself is affine in the micro-batch.

    The backward is largest at its first layer, at its last (activations fall and gradients rise linearly in between;
    between an encoder-decoder's halves they do so apart), each at every moment of a layer, or when all activations are
    gone and the embedding's gradient comes.

    Args:
        last: whether the part has the loss.
    """
    stored = _stored(parts)
    norm: Term = ("activations", "final norm", parts.final_norm)
    seen = _seen(parts)
    of_text, stored = stored, (*stored, *seen[:3])
    kept = (*of_text, *seen, ("activations", "autocast's cache", parts.cast_cache), _prefixed(parts))
    temporaries: tuple[Term, ...] = (
        ("activations", "one layer's forward temporaries", parts.forward_temp),
        ("dequantization", "one dequantized matrix in the forward", parts.dequantized),
    )
    found = [
        Moment("start", ()),
        Moment("gather", kept),
        Moment("forward", (*kept, *temporaries)),
        Moment("loss", (*stored, norm) if last else ()),
        Moment("head", stored),
        Moment("forward", (("activations", "a copy of the embedding with its rows", parts.with_rows),)),
    ]
    if seen:
        found.append(
            Moment("forward", (*seen, ("activations", "one layer's forward temporaries", parts.tower.forward)))
        )
        name = "one recomputed layer of the tower, and gradients"
        found += [Moment("last", (*seen[:2], ("activations", name, size))) for size in parts.tower.backward]
    left = "what is left of the activations"
    others = total_bytes(of_text) * (parts.forwards - 1) // parts.forwards  # of forwards whose backward comes later
    at_last: Term = ("activations", left, max(others, total_bytes(of_text) // max(1, model.num_layers)))
    if parts.hooked > at_last[2]:
        at_last = ("activations", HOOKED, parts.hooked)
    if model.is_encoder_decoder:
        return (*found, *_halves(model, parts, stored))
    for moment in parts.layer_moments:
        of_layer = _of_layer(moment)
        found += [Moment("first", (*stored, *of_layer)), Moment("last", (at_last, *seen[:3], *of_layer))]
    return (*found, Moment("end", (("activations", left, others),) if others else ()))


def _of_layer(moment: LayerMoment) -> tuple[Term, ...]:
    """What one layer's backward makes."""
    return (
        ("activations", "one recomputed layer", moment.recomputed),
        ("workspace", "one layer's gradients of activations", moment.transient),
        ("dequantization", "one dequantized matrix in the backward", moment.dequantized),
    )


def _halves(model: ModelSpec, parts: ActivationParts, stored: tuple[Term, ...]) -> list[Moment]:
    """The forward of an encoder and the backward of both halves: at the turn the decoder's activations are gone but for
    position biases, which meet their gradients at its first layer. A decoder's own table has its gradient then too."""
    encoder = parts.encoder
    name = "what is left of the activations"
    kept: Term = ("activations", name, encoder.layers + encoder.sound)
    together = parts.stored["bias"] + parts.at_first_decoder_layer
    biases: Term = ("activations", "position biases and their gradients", together)
    gradient: Term = ("workspace", "the gradient of the encoder's output", encoder.gradient)
    running: Term = ("activations", "one layer's forward temporaries", encoder.forward)
    found = [Moment("forward", (kept, running))]
    for moment in parts.layer_moments:
        of_layer = (gradient, *_of_layer(moment))
        found += [Moment("first", (*stored, *of_layer)), Moment("turn", (kept, biases, *of_layer))]
        if not encoder.moments:
            found.append(Moment("last", _of_layer(moment)))
    share = encoder.layers // max(1, model.num_encoder_layers) + encoder.sound
    for moment in encoder.moments:
        found.append(Moment("turn", (kept, *_of_layer(moment))))
        found.append(Moment("last", (("activations", name, share), *_of_layer(moment))))
    if model.front_end is None:
        return [*found, Moment("end", ())]
    end: Term = ("workspace", "the convolutions' gradients", encoder.end)
    return [*found, Moment("last", (("activations", name, encoder.sound), end)), Moment("end", (kept, gradient))]


def _stored(parts: ActivationParts) -> tuple[Term, ...]:
    """What a micro-batch keeps from its forward to its backward."""
    kept: list[Term] = [("activations", _PART_NAMES[part], size) for part, size in parts.stored.items()]
    return (*kept, ("activations", "autocast copies of the weights", parts.weight_casts[1]))


def _prefixed(parts: ActivationParts) -> Term:
    """Of a prefix: what its cache alone holds until the forward's outputs are gone."""
    return "activations", "keys and values in the prefix's cache", parts.key_cache


def _seen(parts: ActivationParts) -> tuple[Term, ...]:
    """Of pictures: what their tower keeps for its backward, and what its forward hands to the text's."""
    if not parts.tower.inputs:
        return ()
    return (
        ("activations", "the tower's activations", parts.tower.stored),
        ("activations", "the tower's mask (patches x patches)", parts.tower.mask),
        ("activations", "between tower and text", parts.tower.behind),
        ("activations", "the tower's outputs", parts.tower.held),
    )


def loss_terms(
    state: RankState, chain: LossChain, parts: ActivationParts, outputs_bytes: int, loss: str
) -> tuple[Term, ...]:
    """The loss chain's largest moment: a reference's layers, its forward (autocast's cache still alive), its own
    backward, or the head's gradient beside 16-bit logits (with accumulation too: it is made, then added).

    Args:
        outputs_bytes: logits of other GPUs that are gathered here before the backward.
    """
    name, beside = f"loss chain ({loss})", "weights and buffers beside the loss"
    forward = chain.loss_bytes + outputs_bytes
    within = chain.within_bytes + outputs_bytes + parts.until_loss + state.loss_forward_bytes
    backward = chain.backward_bytes + state.loss_backward_bytes
    head = state.trained.head * state.trained.outer_bytes + chain.logits_bytes
    asked = _asking(state, chain, parts, loss)
    if total_bytes(asked) > max(within, forward, backward, head):
        return asked
    if within >= forward and within > max(backward, head):
        return (
            ("loss", name, chain.within_bytes + outputs_bytes),
            ("activations", "autocast's cache in the loss", parts.until_loss - parts.key_cache),
            _prefixed(parts),
            ("loss", beside, state.loss_forward_bytes),
        )
    if max(forward, head) > backward:
        return (("loss", name, max(forward, head)),)
    return ("loss", name, chain.backward_bytes), ("loss", beside, state.loss_backward_bytes)


def _asking(state: RankState, chain: LossChain, parts: ActivationParts, loss: str) -> tuple[Term, ...]:
    """What is there while a reference's layers run: one layer's temporaries, or the next one's weights arriving."""
    if not parts.asked.frames:
        return ()
    return (
        ("loss", f"what the loss keeps ({loss})", chain.asked_bytes),
        ("activations", "what the reference's forward holds", parts.asked.frames + parts.asked.cached),
        ("activations", "one layer of it, or the next one's weights", max(parts.asked.layer, state.arriving_bytes)),
        ("weights", "weights and buffers beside it", state.asked_bytes),
    )


def loss_beside(part: RankPart, setup: TrainSetup, inner: TrainSetup, flight: int) -> tuple[LossChain, int, int]:
    """(loss chain, bytes of gathered outputs, bytes of logits and losses of other micro-batches) of a last part."""
    chain = loss_parts(part.model, inner)
    outputs = setup.num_gpus * chain.logits_bytes if setup.parallel == "dp" and not part.follower else 0
    return chain, outputs, in_flight_losses_bytes(part, setup, chain.logits_bytes, inner.tokens_per_micro_batch, flight)


def in_flight_losses_bytes(part: RankPart, setup: TrainSetup, logits: int, tokens: int, flight: int) -> int:
    """What a last pipeline stage holds beside one micro-batch's loss chain: this micro-batch's logits, which the stage
    keeps to its backward's end, and under GPipe those and the fp32 log-probabilities of the micro-batches in flight.

    The largest moment is the second backward, when gradients are there and one micro-batch is done.

    Args:
        logits: bytes of one micro-batch's logits; `tokens`: its tokens.

    Source: PyTorch 2.13 `distributed/pipelining/stage.py` (backward_one_chunk's stage_output), `schedules.py`
    ScheduleGPipe. Measured: docs/accuracy/spread-stages.md.
    """
    if setup.pipeline_degree == 1:
        return 0
    wide = SIZE_BYTES["fp32"] * tokens * part.model.vocab_size
    return logits + max(0, flight - 2) * (logits + wide)


def in_flight_bytes(state: RankState, setup: TrainSetup, kept: int, flight: int, micro_batches: int) -> int:
    """Activations of further micro-batches in flight, less what they never meet.

    Where every forward comes before the first backward (GPipe; 1F1B with no more micro-batches than in flight), whole
    gradients are there when one micro-batch's activations are gone. FSDP2's weights are all gathered at a backward's
    end, when its activations are gone, and freed by the next forward.

    Args:
        kept: activation bytes of one micro-batch in flight.
    """
    if flight < 2:
        return 0
    apart = 0
    for one in state.held:
        if "gather" in one.moments and not one.resident:
            gradients = one.category == "gradients" and micro_batches <= flight
            weights = one.category == "weights" and setup.reshard_after_forward
            apart += one.size_bytes * (gradients or weights)
    return (flight - 1) * kept - min(kept, apart)


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
    one = SIZE_BYTES[step_flow(part.model, inner).residual] * part.model.hidden_size * inner.tokens_per_micro_batch
    total = micro_batches * one * (int(not part.first) + int(not part.last))
    total += 0 if part.last else flight * one
    if not part.first and setup.checkpointing:
        total -= flight * one
    return total


def dynamic_bytes(state: RankState, moments: Iterable[tuple[str, int]], *, in_flight: int, in_loss: int) -> list[int]:
    """What changes within a step at every moment: the engine's, computing's, the loss and what a pipeline has in
    flight."""
    held = state.moment_bytes
    return [held[name] + size + in_flight + (in_loss if name == "loss" else 0) for name, size in moments]


def reserved_bytes(dynamic: int) -> int:
    """What is reserved at the peak for what changes within a step: the largest moment, and the allocator's gap."""
    return dynamic + allocator_gap_bytes(dynamic)


class Lines(NamedTuple):
    """The moments of one rank as straight lines in the micro-batch: (bytes at 1, bytes of each further sequence).

    `beside` are those without the loss that no other is always above; `kept` is what each micro-batch in flight adds.
    """

    beside: tuple[tuple[int, int], ...]
    loss: tuple[int, int]
    kept: tuple[int, int]

    @classmethod
    def through(cls, state: RankState, one: Sequence[tuple[str, int]], two: Sequence[tuple[str, int]]) -> "Lines":
        """The lines through what computing holds, as (moment, bytes), at micro-batch 1 and at 2."""
        at_one, at_two = (dynamic_bytes(state, sizes, in_flight=0, in_loss=0) for sizes in (one, two))
        lines = [(first, second - first) for first, second in zip(at_one, at_two, strict=True)]
        names = [name for name, _ in one]
        kept = one[names.index("head")][1]  # nothing else is there then
        slope = two[names.index("head")][1] - kept
        loss = lines.pop(names.index("loss"))
        return cls(_highest(lines), loss, (kept, slope))

    def largest(self, micro_batch_seqs: int, *, in_flight: int, in_loss: int) -> int:
        """The largest moment before the step at one micro-batch."""
        more = micro_batch_seqs - 1
        highest = self.loss[0] + more * self.loss[1] + in_loss
        for one, slope in self.beside:
            here = one + more * slope
            if here > highest:
                highest = here
        return highest + in_flight


def _highest(lines: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The lines that are above all others at some micro-batch from 1 on, or may be."""
    found: list[tuple[int, int]] = []
    for line in sorted(lines, reverse=True):
        if not found or line[1] > found[-1][1]:
            found.append(line)
    return tuple(found)


def breakdown(part: RankPart, gpu: GpuSpec, setup: TrainSetup, state: RankState) -> MemoryBreakdown:
    """One rank's terms, each with the phases in which it is alive; of a phase's moments only the largest is shown.

    Source: the terms' own functions; docs/memory-model.md shows how the phases were found (the dry run's event order).
    Not counted: paged optimizer states (managed memory, evictable), the data loader.
    """
    inner = state.setup
    parts = step_parts(part.model, gpu, inner)
    moments = computing(part.model, parts, last=part.last)
    states, temporaries = state.optimizer_bytes(setup.optimizer)
    waiting = in_flight_bytes(state, setup, total_bytes(_stored(parts)), part.in_flight, setup.accumulation_steps)
    in_flight: Term = ("activations", f"activations of {part.in_flight - 1} more micro-batches in flight", waiting)
    in_loss, outputs = _in_loss(part, setup, state, parts)
    sizes = [(moment.name, moment.size_bytes) for moment in moments]
    totals = dynamic_bytes(state, sizes, in_flight=waiting, in_loss=total_bytes(in_loss))
    resident = _resident(part, gpu, setup, state, parts)
    shown = _Shown(resident)
    shown.add(AFTER_LOAD, [("optimizer", f"states of {setup.optimizer}", states), ("loss", KEPT_OUTPUTS, outputs)])
    generated = generation_terms(part.model, gpu, setup, state.trained.size_bytes)
    largest: dict[str, int] = {}
    for phase in AFTER_LOAD[:-1]:
        places = [place for place, moment in enumerate(moments) if moment.name in _MOMENTS_OF[phase]]
        best = max(places, key=lambda place: (totals[place], moments[place].name == "forward"))
        largest[phase] = totals[best]
        if phase == "forward" and total_bytes(generated) > totals[best]:
            shown.add((phase,), generated)
            continue
        shown.add((phase,), moments[best].terms)
        if moments[best].terms or phase != "loss":
            shown.add((phase,), [in_flight])
        shown.add((phase,), in_loss if phase == "loss" else ())
        shown.add((phase,), _held_at(state, moments[best].name))
    shown.add(("step",), [*_held_at(state, "step"), ("optimizer", f"temporaries of {setup.optimizer}", temporaries)])
    if setup.expandable_segments:
        step = state.moment_bytes["step"] + temporaries
        dynamic = max(*totals, step, total_bytes(generated))
        gap = allocator_gap_bytes(dynamic)
    else:
        gap = fixed_segments_gap_bytes(kept=total_bytes(_stored(parts)) + waiting, **largest)
    outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
    return MemoryBreakdown(terms=shown.terms(), allocator_gap_bytes=gap, context_bytes=outside)


def _in_loss(
    part: RankPart, setup: TrainSetup, state: RankState, parts: ActivationParts
) -> tuple[tuple[Term, ...], int]:
    """What is there in the loss beside the activations, and the bytes of outputs that the loop keeps from it."""
    if not part.last:
        return (), 0
    chain, outputs, others = loss_beside(part, setup, state.setup, part.in_flight)
    more: Term = ("loss", "logits and losses of more micro-batches in flight", others)
    return (*loss_terms(state, chain, parts, outputs, setup.loss), more), chain.kept_bytes


def _resident(part: RankPart, gpu: GpuSpec, setup: TrainSetup, state: RankState, parts: ActivationParts) -> list[Term]:
    """What is there in every phase."""
    steps = setup.accumulation_steps
    boundary = boundary_bytes(part, setup, state.setup, micro_batches=steps, flight=part.in_flight)
    return [
        *((one.category, one.name, one.size_bytes) for one in state.held if one.resident),
        ("other", VLLM, resident_vllm(gpu, setup)),
        ("workspace", "cuBLAS workspaces", cublas_workspace_bytes(gpu)),
        ("activations", "pixels of the step's pictures", steps * parts.tower.inputs),
        ("activations", "sound of the step's clips", steps * parts.encoder.inputs),
        ("activations", "the stage's boundary buffers", boundary),
    ]


def _held_at(state: RankState, moment: str) -> list[Term]:
    return [
        (one.category, one.name, one.size_bytes) for one in state.held if moment in one.moments and not one.resident
    ]


class _Shown:
    """Terms and the phases in which they were seen; one that is alive in several phases becomes one term."""

    def __init__(self, resident: Iterable[Term]) -> None:
        self._phases: dict[tuple[Term, int], list[Phase]] = {}
        for phase in PHASES:
            self.add((phase,), resident)

    def add(self, phases: Iterable[Phase], terms: Iterable[Term]) -> None:
        """Adds what is alive in these phases."""
        for phase in phases:
            for term in terms:
                same = 0
                while phase in self._phases.get((term, same), ()):  # another of the same name and size
                    same += 1
                if term[2] > 0:
                    self._phases.setdefault((term, same), []).append(phase)

    def terms(self) -> tuple[MemoryTerm, ...]:
        """In the order in which they were first seen."""
        return tuple(
            MemoryTerm(category=category, name=name, size_bytes=size, phases=tuple(phases))
            for ((category, name, size), _), phases in self._phases.items()
        )
