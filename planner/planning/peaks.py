"""The peaks of what a walk visits: what losses, optimizers, micro-batches and cards share is computed once.

Memory is shared by cards that run the same kernels, layers by all losses, optimizers and micro-batches; every
micro-batch's peak comes from the moments' straight lines: those of a step profile (`planner.memory.profiles`) where the
structure has one, else those of the composition of `planner.memory.step` (a test compares both with `memory_of`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.engines import engine_of
from planner.memory.layers import in_common
from planner.memory.micro_batch import ActivationParts, ReferenceForward, SharedLayerCosts, shared_layer_costs
from planner.memory.model import step_profile_of
from planner.memory.profiles import ProfiledStep, buckets, reserved_peak
from planner.memory.rank_part import RankPart, rank_parts
from planner.memory.rank_part import in_flight as micro_batches_in_flight
from planner.memory.rollout import generation_terms, resident_vllm
from planner.memory.states import RankState
from planner.memory.step import (
    LossMoment,
    Moment,
    allocator_gap_bytes,
    boundary_bytes,
    computing,
    formula_loss_gap_share,
    in_flight_bytes,
    largest_by_name,
    last_stage_loss,
    step_parts,
    transient_bytes,
)
from planner.memory.workspace import communicator_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.options.layouts import SHARDED
from planner.options.losses import LossChain
from planner.setup import TrainSetup
from planner.setup.memory_terms import total_bytes

AtPair = Callable[[int], list[int]]
"""Per optimizer, the peak at the (micro-batch, accumulation) of a place."""


class Peaks:
    """The peaks of a run with one loss, without the CUDA context, each found when first asked for: cards that run the
    same kernels share them.

    Args:
        ranks: of every rank; the fullest counts.
        least: the pairs among which the smallest is: of more sequences at once nothing is smaller, but that the last
            pair may accumulate nothing, and of a pipeline fewer are in flight.
    """

    def __init__(self, ranks: Sequence[AtPair], num_pairs: int, least: Sequence[int]) -> None:
        self._ranks, self._least = ranks, least
        self._by_pair: list[list[int] | None] = [None] * num_pairs

    def at(self, index: int) -> list[int]:
        """Per optimizer, at one pair."""
        peaks = self._by_pair[index]
        if peaks is None:
            peaks = self._ranks[0](index)
            for rank in self._ranks[1:]:
                peaks = [*map(max, peaks, rank(index))]
            self._by_pair[index] = peaks
        return peaks

    def fit(self, limit_bytes: int) -> bool:
        """Whether any of them is at most so large."""
        return any(min(self.at(index)) <= limit_bytes for index in self._least)


def distinct_parts(model: ModelSpec, setup: TrainSetup) -> list[RankPart]:
    """The parts of a job that differ; of alike stages the first, which holds the most in flight."""
    alike: dict[tuple[ModelSpec, bool, bool], RankPart] = {}
    for part in rank_parts(model, setup):
        alike.setdefault((part.model, part.first, part.last), part)
    return list(alike.values())


class _Activations:
    def __init__(self, layers: "_Layers", inner: TrainSetup) -> None:
        self._layers, self._inner = layers, inner
        self.parts, self._one = layers.computed(inner, 1)
        self._sizes: dict[int, dict[str, int]] = {}

    @cached_property
    def _two(self) -> tuple[ActivationParts, list[tuple[str, int, int]]]:
        """The activations of two sequences; (name of a moment, bytes at micro-batch 1, of each further sequence)."""
        parts, two = self._layers.computed(self._inner, 2)
        pairs = zip(self._one, two, strict=True)
        both = [(name, total_bytes(terms), total_bytes(more)) for (name, terms), (_, more) in pairs]
        return parts, [(name, size, larger - size) for name, size, larger in both]

    def sizes(self, micro_batch_seqs: int) -> dict[str, int]:
        """The largest moment of each name, the loss's chain not counted."""
        sizes, more = self._sizes.get(micro_batch_seqs), micro_batch_seqs - 1
        if sizes is None:
            lines = [(name, intercept + more * slope) for name, intercept, slope in self._two[1]]
            sizes = self._sizes[micro_batch_seqs] = largest_by_name(lines)
        return sizes

    def reference(self, micro_batch_seqs: int) -> ReferenceForward:
        """What a reference model's forward holds."""
        reference, more = self.parts.reference, micro_batch_seqs - 1
        if not (reference.frames and more):
            return reference
        further = self._two[0].reference
        return reference._replace(
            frames=reference.frames + more * (further.frames - reference.frames),
            layer=reference.layer + more * (further.layer - reference.layer),
        )


class _Layers:
    """What the layers of one part hold whichever of them are checkpointed, as long as some are or none is."""

    def __init__(self, part: RankPart, gpu: GpuSpec, inner: TrainSetup) -> None:
        self._part, self._gpu, self._inner = part, gpu, inner
        self._grounds: dict[int, SharedLayerCosts] = {}
        self._activations: dict[tuple[int, bool, bool], _Activations] = {}

    def activations(self, inner: TrainSetup) -> _Activations:
        """The activations of a setup; `inner` has micro-batch 1."""
        key = (inner.checkpointing, inner.activation_offload, inner.selective_checkpointing)
        if key not in self._activations:
            self._activations[key] = _Activations(self, inner)
        return self._activations[key]

    def computed(self, inner: TrainSetup, seqs: int) -> tuple[ActivationParts, tuple[Moment, ...]]:
        """The activations of a micro-batch of so many samples, and what computing holds."""
        part, gpu = self._part, self._gpu
        if seqs not in self._grounds:
            batched = self._inner.replace_trusted(micro_batch_seqs=seqs)
            self._grounds[seqs] = shared_layer_costs(part.model, gpu, batched)
        parts = step_parts(part.model, gpu, inner.replace_trusted(micro_batch_seqs=seqs), self._grounds[seqs])
        return parts, computing(part.model, parts, last=part.last)


class SharedLayers:
    """What the layers of one model hold, for all setups and cards for which it is the same."""

    def __init__(self) -> None:
        self._cache: dict[Any, _Layers] = {}

    def of(self, part: RankPart, gpu: GpuSpec, inner: TrainSetup, kernels: tuple[str, ...]) -> _Layers:
        """A part's layers with these attention kernels; `inner` has micro-batch 1."""
        alike = in_common(inner)
        if alike.quantization == "nf4-double":  # whose scales are weights: a matrix is unpacked all the same
            alike = alike.replace_trusted(quantization="nf4")
        key = (part.model, part.last, alike, kernels)
        layers = self._cache.get(key)
        if layers is None:
            layers = self._cache[key] = _Layers(part, gpu, alike)
        return layers


Stepping = dict[str, tuple[int, int]]
"""By optimizer: bytes of its states, and at the step's moment."""


class _RankBaseline(NamedTuple):
    """What a rank holds under one loss, which knows checkpointing from none."""

    state: RankState
    stepping: Stepping


_LossMemory = tuple[LossMoment, int, int]
"""The loss of one micro-batch: its moment, bytes of other micro-batches' in flight, and of the logits that the stack's
loop holds all along."""


class Rank:
    """One part of the job under one branch and spread: its states and its loss chains, each found once.

    Attributes:
        pairs: (micro-batch, accumulation); in_flight: micro-batches in flight at each.
        extra_bytes: that are there whatever it holds: workspaces, communicators, vLLM.
    """

    def __init__(
        self,
        part: RankPart,
        gpu: GpuSpec,
        setup: TrainSetup,
        pairs: Sequence[tuple[int, int]],
        shared_layers: SharedLayers,
    ) -> None:
        self.part, self.gpu, self.pairs, self._shared = part, gpu, pairs, shared_layers
        self.engine = engine_of(setup)
        self.extra_bytes = cublas_workspace_bytes(gpu) + resident_vllm(gpu, setup) + communicator_bytes(gpu, setup)
        self.in_flight = [0] * len(pairs)
        if setup.pipeline_degree > 1:
            self.in_flight = [micro_batches_in_flight(setup, part.stage, steps) for _, steps in pairs]
        self._layers: dict[tuple[object, ...], _Layers] = {}
        self._held: dict[tuple[bool, str, bool], _RankBaseline] = {}
        self._chains: dict[tuple[str, int], tuple[LossChain, int, int]] = {}
        self._in_loss: dict[tuple[bool, str, bool], dict[int, _LossMemory]] = {}

    def activations(self, inner: TrainSetup, kernels: tuple[str, ...]) -> _Activations:
        """The activations of a setup of this branch; `inner` has micro-batch 1."""
        key = (inner.kernels, kernels, inner.attention, inner.checkpointing > 0)
        layers = self._layers.get(key)
        if layers is None:
            layers = self._layers[key] = self._shared.of(self.part, self.gpu, inner, kernels)
        return layers.activations(inner)

    def baseline(self, setup: TrainSetup, loss: str, *, accumulated: bool) -> _RankBaseline:
        """What the rank holds with a loss, and what its optimizers add."""
        loss = self.engine.equivalent_loss(self.part.model, setup, loss)
        key = (setup.checkpointing > 0, loss, accumulated)
        baseline = self._held.get(key)
        if baseline is None:
            state = self.engine.state(self.part, setup.replace_trusted(loss=loss), accumulated=accumulated)
            baseline = self._held[key] = _RankBaseline(state, {})
        return baseline

    def stepping(self, baseline: _RankBaseline, optimizers: Sequence[str]) -> list[tuple[int, int]]:
        state, by_optimizer = baseline.state, baseline.stepping
        for optimizer in optimizers:
            if optimizer not in by_optimizer:
                states, temporaries = state.optimizer_bytes(optimizer)
                by_optimizer[optimizer] = (states, state.moment_bytes["step"] + temporaries)
        return [by_optimizer[optimizer] for optimizer in optimizers]

    def in_loss(self, setup: TrainSetup, loss: str, *, accumulated: bool) -> dict[int, _LossMemory]:
        """What is known of the loss by the pair's place."""
        return self._in_loss.setdefault((setup.checkpointing > 0, loss, accumulated), {})

    def chain(self, setup: TrainSetup, loss: str, index: int, state: RankState) -> tuple[LossChain, int, int]:
        """The loss chain at one pair, and what is beside it (`last_stage_loss`)."""
        key = (loss, index)
        chained = self._chains.get(key)
        if chained is None:
            inner = state.setup.replace_trusted(loss=loss, micro_batch_seqs=self.pairs[index][0])
            chained = self._chains[key] = last_stage_loss(self.part, setup, inner, self.in_flight[index])
        return chained


class Family:
    """What all losses, optimizers and micro-batches of one rank, kernel and checkpointing share."""

    def __init__(self, rank: Rank, setup: TrainSetup, kernels: tuple[str, ...]) -> None:
        self._rank, self._setup, self._kernels = rank, setup, kernels
        self._inner = rank.engine.computes(setup)

    @cached_property
    def _activations(self) -> _Activations:
        return self._rank.activations(self._inner, self._kernels)

    @cached_property
    def _plain(self) -> bool:
        pictures = self._activations.parts.encoder.inputs
        return not (pictures or self._rank.in_flight[0] or self._setup.objective_spec.rolls_out)

    def peaks(self, loss: str, optimizers: Sequence[str]) -> AtPair:
        """The peaks without the CUDA context, by the step profile where there is one."""
        whole = self._setup.replace_trusted(loss=loss)
        step = step_profile_of(self._rank.part.model, self._rank.gpu, whole)
        if step is None:
            return self._by_closed_forms(loss, optimizers)
        return self._by_profile(step, loss, optimizers)

    def _by_profile(self, step: ProfiledStep, loss: str, optimizers: Sequence[str]) -> AtPair:
        """As `profiled_breakdown` and `rank_breakdown` have it."""
        rank, setup, of_loss = self._rank, self._setup, formula_loss_gap_share(loss, self._setup.checkpointing)
        holding = [rank.baseline(setup, loss, accumulated=accumulated) for accumulated in (False, True)]
        stepping = [rank.stepping(baseline, optimizers) for baseline in holding]
        constant = [rank.extra_bytes + total_bytes(buckets(held.state)) for held in holding]
        if sharded := setup.parallel in SHARDED:
            from planner.memory.ranks import RankMoments, before_step

            moments = [RankMoments(step, held.state, accumulated=place > 0) for place, held in enumerate(holding)]

        def at(index: int) -> list[int]:
            micro, steps = rank.pairs[index]
            accumulated, state = steps > 1, holding[steps > 1].state
            if sharded:
                sizes = moments[accumulated].at(micro, rank.chain(setup, loss, index, state)[0])
                before = before_step(sizes, of_loss, state.holes_bytes)
                fixed, at_end = state.moment_bytes["resident"] + rank.extra_bytes, sizes["step"][0].size_bytes
            else:
                before = step.before_step(micro, accumulated=accumulated)
                fixed, at_end = constant[accumulated], step.bytes_at(micro, "step", accumulated=accumulated)[0]
            at_end -= state.moment_bytes["step"]
            return [
                fixed + states + reserved_peak(before, at_end + at_step) for states, at_step in stepping[accumulated]
            ]

        return at

    def _by_closed_forms(self, loss: str, optimizers: Sequence[str]) -> AtPair:
        rank, setup, until = self._rank, self._setup, self._activations.parts.freed_before_loss_backward
        holding = [rank.baseline(setup, loss, accumulated=accumulated) for accumulated in (False, True)]
        stepping = [rank.stepping(baseline, optimizers) for baseline in holding]
        loss_memories = [rank.in_loss(setup, loss, accumulated=accumulated) for accumulated in (False, True)]
        always, last, of_loss = setup.cached_seqs > 0, rank.part.last, formula_loss_gap_share(loss, setup.checkpointing)

        def at(index: int) -> list[int]:
            micro, steps = rank.pairs[index]
            accumulated = steps > 1 or always
            state, losses = holding[accumulated].state, loss_memories[accumulated]
            sizes = self._activations.sizes(micro)
            engine_bytes, in_loss = state.moment_bytes, 0
            resident = engine_bytes["resident"] + rank.extra_bytes
            if last:
                if index not in losses:
                    chain, outputs, others = rank.chain(setup, loss, index, state)
                    losses[index] = LossMoment.of(state, chain, outputs), others, chain.kept_bytes
                moment, others, kept = losses[index]
                in_loss = moment.largest(until, self._activations.reference(micro)) + others
                resident += kept
            largest = max([engine_bytes[name] + size for name, size in sizes.items()])
            largest = max(largest, engine_bytes["loss"] + sizes["loss"] + in_loss)
            alone, layer = transient_bytes(sizes, in_loss)
            if not self._plain:
                more, largest, generated = self._rare_parts(state, index, largest)
                resident, layer = resident + more, max(layer, generated)
            resident += allocator_gap_bytes(loss=alone, layer=layer, of_loss=of_loss) + state.holes_bytes
            return [resident + states + max(largest, step) for states, step in stepping[accumulated]]

        return at

    def _rare_parts(self, state: RankState, index: int, largest: int) -> tuple[int, int, int]:
        """(bytes that are resident, of the largest moment, of generation) with what only some setups have: pictures,
        further micro-batches in flight, generation."""
        rank, setup, encoder = self._rank, self._setup, self._activations.parts.encoder
        generated = 0
        micro, steps = rank.pairs[index]
        resident = micro * steps * encoder.inputs
        if flight := rank.in_flight[index]:
            batched = self._inner.replace_trusted(micro_batch_seqs=micro)
            resident += boundary_bytes(rank.part, setup, batched, micro_batches=steps, flight=flight)
            largest += in_flight_bytes(state, setup, self._activations.sizes(micro)["head"], flight, steps)
        largest += (micro - 1) * (micro - 2) * encoder.mask  # beyond its straight line through 1 and 2
        if setup.objective_spec.rolls_out:
            whole = setup.replace_trusted(micro_batch_seqs=micro, accumulation_steps=steps)
            generated = total_bytes(generation_terms(rank.part.model, rank.gpu, whole, state.trained.size_bytes))
        return resident, max(largest, generated), generated
