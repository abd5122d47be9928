"""The one composition of a training step, on any number of GPUs: from terms to moments to the peak.

    device peak = resident + the largest moment + the allocator's gap + what lies outside PyTorch's count

A moment (`planner.memory.state.MOMENTS`) adds up what the rank's engine holds then (`RankState`) and what computing
holds then (`planner.memory.moments`). `breakdown` lists the terms of one setup. A walk of the space takes the same
moments at micro-batches 1 and 2 and goes on in straight lines (`Lines`), since each moment by itself is affine in the
micro-batch. What is not affine, the loss chain with its tiles and what a pipeline has in flight, both add with the same
functions.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.allocator import allocator_gap_bytes, fixed_segments_gap_bytes
from planner.memory.in_flight import boundary_bytes, in_flight_bytes
from planner.memory.loss import loss_beside, loss_terms
from planner.memory.micro_batch import SharedLayerCosts, activation_parts
from planner.memory.moments import Moment, computing, stored_terms
from planner.memory.parts import ActivationParts
from planner.memory.rank_part import RankPart
from planner.memory.rollout import VLLM, generation_terms, resident_vllm
from planner.memory.state import BACKWARD, RankState
from planner.memory.types import PHASES, MemoryBreakdown, MemoryTerm, Phase, Term, total_bytes
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
_OF_LAYERS = ("forward", "first", "turn")
KEPT_OUTPUTS = "outputs that the loop holds"
"""From one forward's end to the next one's: of the stacks that keep them (`planner.choices.stacks`)."""


def step_parts(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, ground: SharedLayerCosts | None = None
) -> ActivationParts:
    """`activation_parts`, with the pictures' where the setup has some."""
    parts = activation_parts(model, gpu, setup, ground)
    if setup.images is None:
        return parts
    from planner.memory.modality_encoder import with_encoder  # late: text alone needs none of it

    return with_encoder(parts, model, gpu, setup)


def dynamic_bytes(state: RankState, moments: Iterable[Moment], *, in_flight: int, in_loss: int) -> list[int]:
    """What changes within a step at every moment: the engine's, computing's, the loss and what a pipeline has in
    flight."""
    held = state.moment_bytes
    return [held[one.name] + one.size_bytes + in_flight + (in_loss if one.name == "loss" else 0) for one in moments]


Line = tuple[int, int]
"""(bytes at micro-batch 1, bytes of each further sequence)."""


class MomentLines(NamedTuple):
    """The moments of computing as straight lines in the micro-batch.

    Attributes:
        beside: by moment those without the loss that no other of it is always above.
        loss: the loss's, without it; kept: what each micro-batch in flight adds.
        layer: by which a layer's forward and backward are above what is kept.
    """

    beside: tuple[tuple[str, tuple[Line, ...]], ...]
    loss: Line
    kept: Line
    layer: tuple[Line, ...]

    @classmethod
    def through(cls, one: Sequence[Moment], two: Sequence[Moment]) -> "MomentLines":
        """The lines through what computing holds at micro-batch 1 and at 2."""
        found: dict[str, list[Line]] = {}
        for first, second in zip(one, two, strict=True):
            size = first.size_bytes
            found.setdefault(first.name, []).append((size, second.size_bytes - size))
        loss, kept = found.pop("loss")[0], found["head"][0]
        layer = _highest([_less(line, kept) for name in _OF_LAYERS for line in found.get(name, ())])
        beside = tuple([(name, _highest(lines)) for name, lines in found.items()])
        return cls(beside, loss, kept, layer)


class Lines(NamedTuple):
    """The moments of one rank as straight lines in the micro-batch; `beside` are those without the loss that no other
    is always above; `loss_alone` and `layer` what the loss and a layer hold beyond the activations kept."""

    beside: tuple[Line, ...]
    loss: Line
    loss_alone: Line
    layer: tuple[Line, ...]

    @classmethod
    def through(cls, state: RankState, computed: MomentLines) -> "Lines":
        """What computing holds on top of what the rank's engine does."""
        held, loss = state.moment_bytes, computed.loss
        lines = [(held[name] + one, slope) for name, each in computed.beside for one, slope in each]
        return cls(_highest(lines), (held["loss"] + loss[0], loss[1]), _less(loss, computed.kept), computed.layer)

    def largest(self, micro_batch_seqs: int, in_loss: int) -> int:
        """The largest moment before the step at one micro-batch."""
        more = micro_batch_seqs - 1
        highest = self.loss[0] + more * self.loss[1] + in_loss
        for one, slope in self.beside:
            here = one + more * slope
            if here > highest:
                highest = here
        return highest

    def come_and_gone(self, micro_batch_seqs: int, in_loss: int) -> tuple[int, int]:
        """What the loss and what a layer make beyond the activations kept, at one micro-batch."""
        more = micro_batch_seqs - 1
        alone, slope = self.loss_alone
        return alone + more * slope + in_loss, max([one + more * slope for one, slope in self.layer], default=0)


def _less(line: Line, other: Line) -> Line:
    return line[0] - other[0], line[1] - other[1]


def _highest(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that are above all others at some micro-batch from 1 on, or may be."""
    found: list[Line] = []
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
    waiting = in_flight_bytes(state, setup, total_bytes(stored_terms(parts)), part.in_flight, setup.accumulation_steps)
    in_flight: Term = ("activations", f"activations of {part.in_flight - 1} more micro-batches in flight", waiting)
    in_loss, outputs = _in_loss(part, setup, state, parts)
    totals = dynamic_bytes(state, moments, in_flight=waiting, in_loss=total_bytes(in_loss))
    shown = _Shown(_resident(part, gpu, setup, state, parts))
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
        alone, layer = _come_and_gone(moments)
        gap = allocator_gap_bytes(loss=alone + total_bytes(in_loss), layer=max(layer, total_bytes(generated)))
    else:
        gap = fixed_segments_gap_bytes(kept=total_bytes(stored_terms(parts)) + waiting, **largest)
    outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
    return MemoryBreakdown(terms=shown.terms(), allocator_gap_bytes=gap, context_bytes=outside)


def _come_and_gone(moments: Sequence[Moment]) -> tuple[int, int]:
    """What the loss, its chain not counted, and what a layer make beyond the activations kept."""
    sizes: dict[str, int] = {}
    for one in moments:
        sizes[one.name] = max(sizes.get(one.name, 0), one.size_bytes)
    return sizes["loss"] - sizes["head"], max(sizes.get(name, 0) for name in _OF_LAYERS) - sizes["head"]


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
        ("activations", "pixels of the step's pictures", steps * parts.encoder.inputs),
        ("activations", "sound of the step's clips", steps * parts.sound),
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
