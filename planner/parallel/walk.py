"""The walk over spreads: every setup of the space under every spread, with shared parts computed once.

The same functions as `planner.parallel.memory.rank_memories` (a test compares them): activations and loss chains are
shared by all spreads that compute in the same types, shares by all losses, kernels and micro-batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from planner.cluster import make_cluster
from planner.errors import SetupError
from planner.gpu import GpuSpec
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.loss import LossChain
from planner.memory.micro_batch import ActivationParts, activation_parts
from planner.memory.moments import loss_parts, loss_parts_logits
from planner.memory.workspace import context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.parallel.memory import (
    Lines,
    activation_lines,
    boundary_bytes,
    communicator_bytes,
    in_flight_losses_bytes,
    in_loss_bytes,
    never_together_bytes,
    output_bytes,
)
from planner.parallel.rank import RankPart, in_flight, rank_parts
from planner.parallel.share import Share, engine_setup, share_of
from planner.parallel.speed import spread_profile
from planner.parallel.strategies import Spread
from planner.parallel.support import why_not
from planner.setup import TrainSetup
from planner.space import Point, branches, micro_batches, same_kernels
from planner.throughput import load_calibration
from planner.workload import Workload


class _Activations(NamedTuple):
    """One part's activations at micro-batch 1, and how they grow with each further sequence."""

    parts: ActivationParts
    one: Lines
    two: Lines

    def more(self, micro: int) -> int:
        """Bytes that each further micro-batch in flight adds."""
        return self.one.more + (micro - 1) * (self.two.more - self.one.more)

    def at(self, micro: int, flight: int) -> Iterator[tuple[str, int]]:
        """(moment, bytes) at one micro-batch with so many in flight."""
        more = (flight - 1) * self.more(micro)
        for (moment, one), (_, two) in zip(self.one.moments, self.two.moments, strict=True):
            yield moment, one + (micro - 1) * (two - one) + more


def walk_spreads(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], spreads: Sequence[Spread]
) -> Iterator[Point]:
    """Every setup of the space under every spread that the engines run, with its worst rank's peak and tokens/s."""
    model, gpu = workload.model, workload.gpu
    cluster = workload.cluster if workload.cluster is not None else make_cluster(gpu, spreads[0].fields["num_gpus"])
    calibration = load_calibration()
    batches = values.get("micro_batch_seqs")
    common = _Common(model, gpu)
    for branch in branches(workload, values):
        kernels = same_kernels(model, gpu, branch, values["attention"])
        for spread in spreads:
            try:
                setup = branch.with_(**spread.fields)
            except SetupError:
                continue
            choices = _choices(model, setup, values)
            own_batch, rest = divmod(workload.global_batch_seqs, setup.data_degree)
            if rest or not choices:
                continue
            pairs = [(m, own_batch // m) for m in batches or micro_batches(own_batch) if own_batch % m == 0]
            ranks = _Ranks(common, setup)
            for attentions in kernels:
                for checkpointing in values["checkpointing"]:
                    shared = setup.trusted_with(attention=attentions[0], checkpointing=checkpointing)
                    family = _SpreadFamily(common, ranks, shared)
                    for loss, optimizers in choices.items():
                        own = shared.trusted_with(loss=loss)
                        peaks = family.peaks(own, optimizers, pairs)
                        for optimizer in optimizers:
                            at = spread_profile(
                                model, gpu, own.trusted_with(optimizer=optimizer), cluster, calibration=calibration
                            ).at
                            for (micro, steps), peak in zip(pairs, peaks[optimizer], strict=True):
                                speed = at(micro, steps)[1]
                                for attention in attentions:
                                    yield Point(shared, attention, loss, optimizer, micro, steps, peak, speed)


def _choices(model: ModelSpec, setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[str, ...]]:
    """The optimizers that the engines run with each loss; losses without any are left out."""
    found = {}
    for loss in values["loss"]:
        fitting = tuple(
            optimizer
            for optimizer in values["optimizer"]
            if not why_not(model, setup.trusted_with(loss=loss, optimizer=optimizer))
        )
        if fitting:
            found[loss] = fitting
    return found


class _Common:
    """What all spreads of one walk share."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec) -> None:
        self.model, self.gpu = model, gpu
        self._activations: dict[tuple[ModelSpec, bool, TrainSetup], _Activations] = {}

    def activations(self, part: RankPart, inner: TrainSetup) -> _Activations:
        """The activations of a part; `inner` has micro-batch 1."""
        key = (part.model, part.last, inner)
        found = self._activations.get(key)
        if found is None:
            one = activation_parts(part.model, self.gpu, inner)
            two = activation_parts(part.model, self.gpu, inner.trusted_with(micro_batch_seqs=2))
            found = _Activations(one, activation_lines(part, one), activation_lines(part, two))
            self._activations[key] = found
        return found


class _Ranks:
    """The distinct ranks of one branch under one spread, and their shares."""

    def __init__(self, common: _Common, setup: TrainSetup) -> None:
        self.parts: list[RankPart] = []
        seen: set[tuple[ModelSpec, bool, bool]] = set()
        for part in rank_parts(common.model, setup):
            key = (part.model, part.first, part.last)
            if key not in seen:  # of alike stages the first holds the most in flight
                seen.add(key)
                self.parts.append(part)
        self._shares: dict[tuple[int, bool, str, bool], Share] = {}
        self._losses: dict[tuple[int, str, int], tuple[LossChain, int, int]] = {}
        self.inner = engine_setup(setup)

    def share(self, index: int, setup: TrainSetup, accumulated: bool) -> Share:
        """The share of one rank, which knows checkpointing from none."""
        key = (index, setup.checkpointing > 0, setup.loss, accumulated)
        found = self._shares.get(key)
        if found is None:
            found = self._shares[key] = share_of(self.parts[index], setup, accumulated=accumulated)
        return found

    def loss(self, index: int, setup: TrainSetup, micro: int) -> tuple[LossChain, int, int]:
        """(loss chain, bytes of the logits, bytes of gathered outputs) of one rank at one micro-batch."""
        key = (index, setup.loss, micro)
        found = self._losses.get(key)
        if found is None:
            part, inner = self.parts[index], self.inner.trusted_with(loss=setup.loss, micro_batch_seqs=micro)
            logits = loss_parts_logits(part.model, inner)
            found = self._losses[key] = (loss_parts(part.model, inner), logits, output_bytes(part, setup, inner))
        return found


class _SpreadFamily:
    """One branch, spread, kernel and checkpointing."""

    def __init__(self, common: _Common, ranks: _Ranks, setup: TrainSetup) -> None:
        self._common, self._ranks, self._setup = common, ranks, setup
        inner = ranks.inner.trusted_with(attention=setup.attention, checkpointing=setup.checkpointing)
        self._activations = [common.activations(part, inner) for part in ranks.parts]
        gpu = common.gpu
        self._context = context_bytes(gpu) + communicator_bytes(gpu, setup)
        self._workspace = cublas_workspace_bytes(gpu)

    def peaks(
        self, setup: TrainSetup, optimizers: tuple[str, ...], pairs: Sequence[tuple[int, int]]
    ) -> dict[str, list[int]]:
        """Per optimizer, the device peak of the worst rank at every (micro-batch, accumulation)."""
        found: dict[str, list[int]] = {optimizer: [0] * len(pairs) for optimizer in optimizers}
        for index, part in enumerate(self._ranks.parts):
            activations = self._activations[index]
            for place, (micro, steps) in enumerate(pairs):
                share = self._ranks.share(index, setup, steps > 1)
                held = share.moment_bytes
                flight = in_flight(setup, part.stage, steps) if setup.pipeline_degree > 1 else 1
                in_loss = 0
                if part.last:
                    chain, logits, outputs = self._ranks.loss(index, setup, micro)
                    in_loss = in_loss_bytes(share, chain, activations.parts, logits, outputs)
                    in_loss += in_flight_losses_bytes(part, setup, logits, micro * setup.seq_len_tokens, flight)
                largest = 0
                apart = never_together_bytes(share, setup, activations.more(micro), flight, steps)
                for moment, size in activations.at(micro, flight):
                    total = held[moment] + size - apart + (in_loss if moment == "loss" else 0)
                    if total > largest:
                        largest = total
                resident = held["resident"] + self._workspace
                if setup.pipeline_degree > 1:
                    batched = setup.trusted_with(micro_batch_seqs=micro)
                    resident += boundary_bytes(part, batched, micro_batches=steps, held=flight)
                for optimizer in optimizers:
                    states, temporary = share.optimizer_bytes(optimizer)
                    dynamic = max(largest, held["step"] + temporary)
                    whole = resident + states
                    peak = whole + dynamic + allocator_gap_bytes(whole, dynamic) + self._context
                    if peak > found[optimizer][place]:
                        found[optimizer][place] = peak
        return found
