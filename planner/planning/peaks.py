"""The device peaks of what a walk visits: what losses, optimizers, micro-batches and cards share is computed once.

Memory is shared by cards that run the same kernels, layers by all losses, optimizers and micro-batches; every
micro-batch's peak comes from the moments' straight lines. It evaluates the composition of `planner.memory.step` (a test
compares it with `predict_memory`).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from planner.choices.losses import LossChain
from planner.engines import engine_of
from planner.hardware.gpu import GpuSpec
from planner.memory.layer_costs import LayerCosts, in_common
from planner.memory.micro_batch import ActivationParts, costs_of
from planner.memory.rank_part import RankPart, rank_parts
from planner.memory.rank_part import in_flight as micro_batches_in_flight
from planner.memory.rollout import generation_terms, resident_vllm
from planner.memory.state import RankState
from planner.memory.step import (
    Lines,
    boundary_bytes,
    computing,
    in_flight_bytes,
    loss_beside,
    loss_terms,
    reserved_bytes,
    step_parts,
    total_bytes,
)
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


class Peaks(NamedTuple):
    """The device peaks of a run with one loss.

    Attributes:
        by_optimizer: at every (micro-batch, accumulation); `first`: which of them is the smallest at the first.
        lowest: the smallest of all optimizers at every pair.
        ordered: all of them, rising.
    """

    by_optimizer: list[list[int]]
    first: int
    lowest: list[int]
    ordered: list[int]

    @classmethod
    def of(cls, by_optimizer: list[list[int]]) -> "Peaks":
        """All of it from the peaks."""
        at_first = [peaks[0] for peaks in by_optimizer]
        lowest = list(map(min, zip(*by_optimizer, strict=True)))
        return cls(by_optimizer, at_first.index(min(at_first)), lowest, sorted(chain.from_iterable(by_optimizer)))


def distinct_parts(model: ModelSpec, setup: TrainSetup) -> list[RankPart]:
    """The parts of a job that differ; of alike stages the first, which holds the most in flight."""
    alike: dict[tuple[ModelSpec, bool, bool], RankPart] = {}
    for part in rank_parts(model, setup):
        alike.setdefault((part.model, part.first, part.last), part)
    return list(alike.values())


def worst_peaks(
    families: "Sequence[Family]", loss: str, optimizers: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Per optimizer, the device peak of the fullest rank at every (micro-batch, accumulation)."""
    every = [family.peaks(loss, optimizers, pairs) for family in families]
    if len(every) == 1:
        return every[0]
    return [[max(ranks) for ranks in zip(*peaks, strict=True)] for peaks in zip(*every, strict=True)]


class _Activations(NamedTuple):
    """A part's activations at micro-batch 1, and what its moments hold there and at 2."""

    parts: ActivationParts
    one: tuple[tuple[str, int], ...]
    two: tuple[tuple[str, int], ...]


class SharedLayers:
    """What the layers of one model hold, for all setups and cards for which it is the same."""

    def __init__(self) -> None:
        self._activations: dict[Any, _Activations] = {}
        self._costs: dict[Any, tuple[tuple[LayerCosts, ...], tuple[LayerCosts, ...]]] = {}

    def activations(self, part: RankPart, gpu: GpuSpec, inner: TrainSetup, kernels: tuple[str, ...]) -> _Activations:
        """A part's activations with these attention kernels; `inner` has micro-batch 1."""
        if inner.quantization == "nf4-double":  # whose scales are weights: a matrix is unpacked all the same
            inner = inner.trusted_with(quantization="nf4")
        key = (part.model, part.last, inner, kernels)
        found = self._activations.get(key)
        if found is None:
            batched = inner.trusted_with(micro_batch_seqs=2)
            alike = (part.model, in_common(inner), kernels)
            costs = self._costs.get(alike)
            if costs is None:
                costs = self._costs[alike] = costs_of(part.model, gpu, inner), costs_of(part.model, gpu, batched)
            one = step_parts(part.model, gpu, inner, costs[0])
            two = step_parts(part.model, gpu, batched, costs[1])
            at_one, at_two = (
                tuple([(moment.name, moment.size_bytes) for moment in computing(part.model, parts, last=part.last)])
                for parts in (one, two)
            )
            found = self._activations[key] = _Activations(one, at_one, at_two)
        return found


Stepping = dict[str, tuple[int, int, int]]
"""By optimizer: bytes of its states, at the step's moment, and what is reserved for that."""


class Rank:
    """One part of the job under one branch and spread: its states and its loss chains, each found once."""

    def __init__(self, part: RankPart, gpu: GpuSpec, setup: TrainSetup, known: SharedLayers) -> None:
        self.part, self.gpu, self.known = part, gpu, known
        self.engine = engine_of(setup)
        self.workspace = cublas_workspace_bytes(gpu)
        self.outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
        self.beside = resident_vllm(gpu, setup)
        self._states: dict[tuple[bool, str, bool], tuple[RankState, Stepping]] = {}
        self._losses: dict[tuple[str, int, int], tuple[LossChain, int, int]] = {}
        self._in_loss: dict[tuple[Any, ...], tuple[int, int]] = {}

    def generating(self, setup: TrainSetup, state: RankState) -> int:
        """Bytes of generation at its largest moment beyond what is resident."""
        return total_bytes(generation_terms(self.part.model, self.gpu, setup, state.trained.size_bytes))

    def state(self, setup: TrainSetup, loss: str, *, accumulated: bool) -> tuple[RankState, Stepping]:
        """What the rank holds, which knows checkpointing from none, and what its optimizers add."""
        key = (setup.checkpointing > 0, loss, accumulated)
        found = self._states.get(key)
        if found is None:
            state = self.engine.state(self.part, setup.trusted_with(loss=loss), accumulated=accumulated)
            found = self._states[key] = (state, {})
        return found

    def in_loss(
        self, setup: TrainSetup, loss: str, micro: int, flight: int, state: RankState, parts: ActivationParts
    ) -> tuple[int, int]:
        """Bytes of the loss at its largest moment, that of other micro-batches in flight included, and of the logits
        that the stack's loop holds all along."""
        key = (loss, micro, flight, parts.until_loss, parts.asked, setup.checkpointing > 0)
        found = self._in_loss.get(key)
        if found is None:
            chain = self._losses.get(key[:3])
            if chain is None:
                inner = state.setup.trusted_with(micro_batch_seqs=micro)
                chain = self._losses[key[:3]] = loss_beside(self.part, setup, inner, flight)
            found = total_bytes(loss_terms(state, chain[0], parts, chain[1], loss)) + chain[2], chain[0].kept_bytes
            self._in_loss[key] = found
        return found


class Family:
    """What all losses, optimizers and micro-batches of one rank, kernel and checkpointing share."""

    def __init__(self, rank: Rank, setup: TrainSetup, kernels: tuple[str, ...]) -> None:
        self._rank, self._setup = rank, setup
        self._inner = rank.engine.computes(setup)
        self._activations = rank.known.activations(rank.part, rank.gpu, self._inner, kernels)
        self._lines: dict[tuple[int, ...], Lines] = {}  # losses whose states weigh alike share them

    def peaks(self, loss: str, optimizers: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Per optimizer, the device peak at every (micro-batch, accumulation)."""
        rank, setup, part, parts = self._rank, self._setup, self._rank.part, self._activations.parts
        found: list[list[int]] = [[] for _ in optimizers]
        variants = [self._variant(loss, optimizers, accumulated=accumulated) for accumulated in (False, True)]
        for micro, steps in pairs:
            state, lines, stepping = variants[steps > 1 or setup.cached_seqs > 0]
            resident = state.moment_bytes["resident"] + rank.workspace + rank.beside
            resident += micro * steps * parts.tower.inputs
            flight = in_flight = in_loss = 0
            if setup.pipeline_degree > 1:
                flight = micro_batches_in_flight(setup, part.stage, steps)
                kept = lines.kept[0] + (micro - 1) * lines.kept[1]
                in_flight = in_flight_bytes(state, setup, kept, flight, steps)
                batched = self._inner.trusted_with(micro_batch_seqs=micro)
                resident += boundary_bytes(part, setup, batched, micro_batches=steps, flight=flight)
            if part.last:
                in_loss, kept_outputs = rank.in_loss(setup, loss, micro, flight, state, parts)
                resident += kept_outputs
            largest = lines.largest(micro, in_flight=in_flight, in_loss=in_loss)
            largest += (micro - 1) * (micro - 2) * parts.tower.mask  # beyond its straight line through 1 and 2
            if setup.aim.rolls_out:
                whole = setup.trusted_with(micro_batch_seqs=micro, accumulation_steps=steps)
                largest = max(largest, rank.generating(whole, state))
            resident += rank.outside
            before = reserved_bytes(largest)
            for peaks, (states, step, stepped) in zip(found, stepping, strict=True):
                peaks.append(resident + states + (before if step <= largest else stepped))
        return found

    def _variant(
        self, loss: str, optimizers: Sequence[str], *, accumulated: bool
    ) -> tuple[RankState, Lines, list[tuple[int, int, int]]]:
        """(state, lines, per optimizer its `Stepping`) with accumulation or without."""
        state, stepping = self._rank.state(self._setup, loss, accumulated=accumulated)
        for optimizer in optimizers:
            if optimizer not in stepping:
                states, temporaries = state.optimizer_bytes(optimizer)
                step = state.moment_bytes["step"] + temporaries
                stepping[optimizer] = (states, step, reserved_bytes(step))
        key = tuple(state.moment_bytes.values())
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = Lines.through(state, self._activations.one, self._activations.two)
        return state, lines, [stepping[optimizer] for optimizer in optimizers]
