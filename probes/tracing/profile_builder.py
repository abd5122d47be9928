"""The step profiles of a model: which structures a plan asks for, and each from as few runs as it takes.

Which layers are checkpointed and which loss in tiles follows are mostly apart: the loss's own part is the same behind
them all. Where two runs show that, the rest is put together; so is what a base in 4 bits with quantized scales holds,
and what another precision leaves as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.profiles import (
    LOSS_BEGINS,
    Group,
    Piece,
    ProfileMoment,
    StepProfile,
    at_rest,
    library_versions,
    profiled_kind,
    resized_bytes,
    structure_key,
)
from planner.memory.ranks import as_profiled
from planner.models.spec import ModelSpec
from planner.models.structures import Resizer, changes, sizes_of
from planner.options.kernels import kernels_refusal
from planner.planning.groups import WalkCache
from planner.planning.plan_request import PlanRequest
from planner.planning.space import dimension_values, planned_values
from planner.setup import TrainSetup
from probes.allocator.events import rounded
from probes.dryrun.api import VERSION
from probes.dryrun.repeat_layers import RepetitionError
from probes.dryrun.startup import collection_paused, load_libraries
from probes.tracing.moments import MemoryMoment
from probes.tracing.sizes import NoPolynomial, Scale, Sizes, Terms, add
from probes.tracing.structures import Member, Pieces, Structure, has_room, spans

CARDS = ("a100-80gb", "rtx-4090", "h100-sxm")
"""One of each generation whose kernels are profiled."""
SAME = 1e-4
"""Highest moments within so much of each other are taken for the same."""
NEARLY = 1e-3
"""The same of a phase that is not the highest."""
CUBLAS: Group = ("workspace", "cuBLAS workspaces")
"""Of the card, not of the structure."""
NOT_PROFILED = (NoPolynomial, RepetitionError, ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError)
"""What a structure's runs end with where it has no profile: a step that is no polynomial, or that cannot be traced."""


def planned_structures(
    model: ModelSpec,
    cards: Sequence[str] = CARDS,
    request: PlanRequest | None = None,
    covers: Callable[[TrainSetup], bool] = profiled_kind,
) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What plans of this model on such cards walk, by key: all that can be run (`covers`) but what another dominates;
    of encoders, which predict no next token, what they classify with."""
    structures: dict[str, tuple[TrainSetup, GpuSpec]] = {}
    usual = PlanRequest(fixed={"objective": ("classification",)} if model.reads_both_ways else {})
    for name in cards:
        gpu = find_gpu(name)
        workload = (request or usual).workload(model, gpu)
        for run in WalkCache().runs(workload, planned_values(workload, dimension_values(workload)), ()):
            if run.dominating is not None:
                continue
            for loss in run.choices:
                setup = run.shared.replace_trusted(loss=loss)
                plain = [setup.replace_trusted(quantization="nf4")] * (setup.quantization == "nf4-double")
                for variant in (setup, *plain):  # plain scales are walked where speed alone counts
                    if covers(variant):
                        structures.setdefault(structure_key(model, gpu, variant), (variant, gpu))
    return structures


def with_fused_adapters(
    model: ModelSpec, structures: Iterable[tuple[TrainSetup, GpuSpec]]
) -> Iterator[tuple[TrainSetup, GpuSpec]]:
    """The same with adapters as fused functions, as Axolotl runs them: fp32 adapters, whatever the base."""
    if kernels_refusal("fused", model.model_type):
        return
    for setup, gpu in structures:
        if setup.method != "full" and setup.kernels == "liger" and setup.quantization != "int8":
            yield setup.replace_trusted(kernels="fused", adapter_dtype="fp32"), gpu


def of_ranks(
    model: ModelSpec, structures: Iterable[tuple[TrainSetup, GpuSpec]]
) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What ranks that keep a part of the states compute of the same, by key: in 16 bit throughout. Without int8, which
    two engines of four refuse."""
    rank_structures = {}
    for setup, gpu in structures:
        rank = setup.replace_trusted(num_gpus=2, parallel="fsdp2")
        inner = as_profiled(engine_of(rank).computes(rank))
        if inner.quantization != "int8" and (inner.method == "full" or inner.resolved_adapter_dtype != "fp32"):
            rank_structures[structure_key(model, gpu, inner)] = inner, gpu
    return rank_structures


class ProfileBuilder:
    """Builds the profiles of one model, or of all models of one structure of layers; what its runs have shown is kept
    between them.

    Args:
        model: what is run.
        members: of the structure, where `model` stands for it; the first is looked at most closely.
        at_depth: `model` with another number of layers.
        of_rank: whether for ranks, beside what their engines hold.

    Attributes:
        any_size: whether the profiles are for several models.
        failures: key of a structure -> why it has no profile.
    """

    def __init__(
        self,
        model: ModelSpec,
        members: Sequence[ModelSpec] = (),
        at_depth: Callable[[int], Mapping[str, Any]] | None = None,
        *,
        of_rank: bool = False,
    ) -> None:
        load_libraries()
        self._of_rank = of_rank
        self._model, self._sizes, self._at_depth = model, Sizes(), at_depth or (lambda _: model.config)
        self._members = [
            replace(_itself(member), size=partial(resized_bytes, Resizer(sizes_of(model), sizes_of(member))))
            for member in members
        ] or [_itself(model)]
        self.any_size = bool(members)
        self._runs: dict[Any, Any] = {}
        self._spans = [
            span
            for span in spans(changes(model), model.learned_positions)
            if (span.longest_tokens or SHORTEST) >= SHORTEST and has_room(span)
        ]
        self.failures: dict[str, str] = {}

    def profile(self, setup: TrainSetup, gpu: GpuSpec) -> StepProfile:
        """The profile of one structure from its own runs.

        Raises:
            one of NOT_PROFILED.
        """
        with collection_paused():
            return self._profile(self._pieces(setup, gpu))

    def _profile(self, pieces: Pieces) -> StepProfile:
        """What is kept of the pieces: of a model's own their bytes, else the terms that they are made of."""
        member = None if self.any_size else self._members[0]
        return StepProfile(
            pieces=tuple(
                Piece(
                    one_sequence=alone,
                    shortest_tokens=span.shortest_tokens,
                    longest_tokens=span.longest_tokens,
                    moments=tuple(dict.fromkeys(_moment(moment, member) for moment in piece.moments)),
                )
                for (span, alone), piece in pieces.items()
            )
        )

    def _pieces(self, setup: TrainSetup, gpu: GpuSpec, first: int = 0) -> Pieces:
        members = [*self._members[first:], *self._members[:first]]
        vocabulary = self._model.vocab_size, self._model.hidden_size
        return Structure(
            self._at_depth, vocabulary, setup, gpu.compute_capability or (8, 0), members, self._runs,
            any_size=self.any_size, of_rank=self._of_rank,
        ).pieces(self._spans, self._sizes)  # fmt: skip

    def all(self, structures: Mapping[str, tuple[TrainSetup, GpuSpec]]) -> dict[str, StepProfile]:
        """The profiles of many structures; those that have none are in `failures`."""
        profiles: dict[str, StepProfile] = {}
        ran: dict[Any, _Family] = {}
        for family in _families(structures.values()):
            setup, gpu = family[0]
            other = setup.replace_trusted(precision="bf16-pure", **_APART), setup.attention, gpu.key
            base = None
            with collection_paused():
                for first in range(len(self._members)):
                    depth_family = _Family(self, family, ran.get((other, first)), first, base)
                    base = base or depth_family
                    ran.setdefault((other, first), depth_family)
                    for key, place in depth_family.named():
                        if key in profiles or key in self.failures:
                            continue
                        if isinstance(pieces := depth_family.pieces(place), str):
                            self.failures[key] = pieces
                        else:
                            profiles[key] = self._profile(pieces)
                self._runs.clear()
        return profiles

    def key(self, setup: TrainSetup, gpu: GpuSpec, first: int) -> str:
        """What names a structure, of a member's depth where the profiles are for several."""
        key = structure_key(self._model, gpu, setup)
        return at_rest(key, self._members[first].num_layers, setup.checkpointing) if self.any_size else key

    def tried(self, setup: TrainSetup, gpu: GpuSpec, first: int) -> Pieces | str:
        """The pieces of a structure, of a member's depth, or why there are none."""
        try:
            return self._pieces(setup, gpu, first)
        except NOT_PROFILED as error:
            return f"{type(error).__name__}: {error}"


def _itself(model: ModelSpec) -> Member:
    def size(index: int, factor: float) -> float:
        return rounded(round(factor)) if index == 0 else factor

    return Member(size=size, num_layers=model.num_layers, vocabulary=(model.vocab_size, model.hidden_size))


STEP_PROFILE = "3"
"""Of how profiles are made of runs."""
SHORTEST = 512
"""A span that ends before so many tokens is not run: nobody trains there."""


def build_profiles(model: ModelSpec, *, ranks: bool = False) -> tuple[Mapping[str, StepProfile], Mapping[str, str]]:
    """All profiles that plans of a model ask for, and why others are missing, by key; for ranks what these compute of
    them."""
    builder, structures = ProfileBuilder(model, of_rank=ranks), planned_structures(model)
    return builder.all(of_ranks(model, structures.values()) if ranks else structures), builder.failures


def versions() -> dict[str, str]:
    """Of what is run here."""
    return {**library_versions(), "dry run": str(VERSION), "step profile": STEP_PROFILE}


StructureCase = tuple[TrainSetup, GpuSpec]


def _families(structures: Iterable[StructureCase]) -> list[list[StructureCase]]:
    """Structures that differ in loss and in what is checkpointed alone, 4-bit bases with and without quantized scales
    together."""
    families: dict[Any, list[StructureCase]] = {}
    for setup, gpu in structures:
        quantization = "nf4" if setup.quantization == "nf4-double" else setup.quantization
        alike = setup.replace_trusted(quantization=quantization, **_APART)
        families.setdefault((alike, setup.attention, gpu.name), []).append((setup, gpu))
    return list(families.values())


_APART: dict[str, Any] = {"loss": "full", "checkpointing": 1, "selective_checkpointing": False, "attention": "sdpa"}
SELECTIVE = 1 << 10
"""In place of how many layers lie between checkpoints: of every one all but attention is recomputed."""


_Key = tuple[str, str, int]
"""Quantization, loss, checkpointing."""


class _Family:
    """Structures that share runs.

    Args:
        like: a family that differs in precision alone.
        first: of which member's depth they are.
        base: of the first member's, which tells what no distance between checkpoints decides.
    """

    def __init__(
        self,
        builder: ProfileBuilder,
        members: Sequence[StructureCase],
        like: "_Family | None",
        first: int,
        base: "_Family | None",
    ) -> None:
        self._builder, self._gpu, self._like = builder, members[0][1], like
        self._first, self._base = first, base
        self._setups = {
            (setup.quantization, setup.loss, SELECTIVE if setup.selective_checkpointing else setup.checkpointing): setup
            for setup, _ in members
        }
        self._results: dict[_Key, Pieces | str] = {}

    def named(self) -> Iterator[tuple[str, _Key]]:
        for place, setup in self._setups.items():
            yield self._builder.key(setup, self._gpu, self._first), place

    def _run(self, key: _Key) -> Pieces | str:
        if self._base is not None and self._setups[key].checkpointing < 2:
            return self._base._run(key)
        if key not in self._results:
            self._results[key] = self._builder.tried(self._setups[key], self._gpu, self._first)
        return self._results[key]

    def pieces(self, key: _Key) -> Pieces | str:
        """A member's pieces: put together where that was seen to give the same, else run."""
        if self._as_like and self._like is not None and key in self._like._setups:
            return self._like.pieces(key)
        quantization, loss, every = key
        first = next((other_loss for _, other_loss, _ in self._setups if other_loss != "full"), "full")
        if quantization == "nf4-double" and ("nf4", loss, every) in self._setups:
            return self._requantized(key, first)
        if loss != first and (quantization, first, every) in self._setups:
            return self._with_loss(key, (quantization, first, every))
        return self._run(key)

    @cached_property
    def _as_like(self) -> bool:
        """Whether two members that differ in all that a family differs in do exactly what the other family's do."""
        first = next(iter(self._setups))
        second = next((key for key in self._setups if key[1] == "full" and key[2] != first[2]), None)
        if self._like is None or second is None or not {first, second} <= {*self._like._setups}:
            return False
        pairs = ((self._run(key), self._like.pieces(key)) for key in (first, second))
        return all(not isinstance(a, str) and not isinstance(b, str) and _same(a, b) for a, b in pairs)

    def _requantized(self, key: _Key, loss: str) -> Pieces | str:
        """What a base without quantized scales does with what is stored otherwise, where two structures of both show
        that."""
        others = sorted(every for *kind, every in self._setups if kind == [key[0], loss])
        periodic = self._builder.any_size and key[2] > 1  # so many layers a period are other terms
        if periodic or len(others) < 3 or key in [(key[0], loss, every) for every in others[:2]]:
            return self._run(key)
        pairs = [(self._run((key[0], loss, every)), self.pieces(("nf4", loss, every))) for every in others[:2]]
        return self._put_together(key, self.pieces(("nf4", *key[1:])), pairs, _stored_otherwise)

    def _with_loss(self, key: _Key, like: _Key) -> Pieces | str:
        others = sorted(every for *kind, every in self._setups if tuple(kind) == key[:2])
        if len(others) < 3 or key[2] in others[:2]:
            return self._run(key)
        pairs = [(self._run((*key[:2], every)), self.pieces((*like[:2], every))) for every in others[:2]]
        return self._put_together(key, self.pieces(like), pairs, _with_loss)

    def _put_together(
        self, key: _Key, target: Pieces | str, pairs: Sequence[tuple[Pieces | str, Pieces | str]], swap: Any
    ) -> Pieces | str:
        """`target` with what the member has instead, by two pairs of (the member's, the other's) at other
        checkpointings: one says what that is, the other whether it is the same there. Else the member is run."""
        (source, base), (checked, checked_base) = pairs
        if any(isinstance(pieces, str) for pieces in (target, source, base, checked, checked_base)):
            return self._run(key)
        return swap(target, source, base) if _same(swap(checked_base, source, base), checked) else self._run(key)


def _with_loss(like: Pieces, source: Pieces, base: Pieces) -> Pieces:
    """`like`, with the loss of `source` in place of that of `base`, each counted from where it begins."""
    pieces = {}
    for key, piece in like.items():
        starts = {moment.micro_batch: moment for moment in piece.moments if moment.phase == LOSS_BEGINS}
        own_starts = {moment.micro_batch: moment for moment in source[key].moments if moment.phase == LOSS_BEGINS}
        moments = [moment for moment in piece.moments if moment.phase != "loss"]
        for moment in source[key].moments:
            if moment.phase == "loss":
                rest = _plus(moment.alive, own_starts[moment.micro_batch].alive, -1)
                moments.append(replace(moment, alive=_plus(rest, starts[moment.micro_batch].alive, 1)))
        pieces[key] = replace(piece, moments=moments)
    return pieces


def _stored_otherwise(like: Pieces, source: Pieces, base: Pieces) -> Pieces:
    """`like` with the groups that `source` has in place of the same of `base`."""
    pieces = {}
    for key, piece in like.items():
        pairs = zip(base[key].moments, source[key].moments, strict=False)
        instead = {
            (group, frozenset(terms.items())): other.alive[group]
            for base_moment, other in pairs
            for group, terms in base_moment.alive.items()
            if group in other.alive
        }
        moments = []
        for moment in piece.moments:
            pairs_of = ((group, terms, frozenset(terms.items())) for group, terms in moment.alive.items())
            alive = {group: instead.get((group, same), terms) for group, terms, same in pairs_of}
            moments.append(replace(moment, alive=alive))
        pieces[key] = replace(piece, moments=moments)
    return pieces


def _plus(groups: dict[Group, Terms], other: dict[Group, Terms], sign: int) -> dict[Group, Terms]:
    total = {group: dict(terms) for group, terms in groups.items()}
    for group, terms in other.items():
        add(total.setdefault(group, {}), terms, sign)
    return {group: terms for group, terms in total.items() if terms}


def _same(pieces: Any, other: Any) -> bool:
    """Whether the highest moments of every micro-batch are the same, and those of its phases nearly."""
    for key, piece in pieces.items():
        mine, others = (_highest(each[key].moments, piece.scale) for each in (pieces, other))
        if mine.keys() != others.keys():
            return False
        for micro_batch in {number for _, number in mine}:
            phases = [phase for phase in mine if phase[1] == micro_batch]
            tops = [np.max([each[phase] for phase in phases], axis=0) for each in (mine, others)]
            apart = max(np.abs(mine[phase] / others[phase] - 1).max() for phase in phases)
            if apart > NEARLY or np.abs(tops[0] / tops[1] - 1).max() > SAME:
                return False
    return True


def _highest(moments: Sequence[MemoryMoment], scale: Scale) -> dict[tuple[str, int], Any]:
    peaks: dict[tuple[str, int], Any] = {}
    for moment in moments:
        key, total = (moment.phase, moment.micro_batch), scale.total(moment.total())
        peaks[key] = np.maximum(peaks[key], total) if key in peaks else total
    return peaks


def _moment(moment: MemoryMoment, member: Member | None) -> ProfileMoment:
    groups = sorted((group, _form(terms, member)) for group, terms in moment.alive.items() if group != CUBLAS)
    return ProfileMoment(moment.phase, moment.micro_batch > 1, tuple(pair for pair in groups if pair[1]))


def _form(terms: Terms, member: Member | None) -> Any:
    if member is None:
        parts: dict[tuple[int, float], list[int]] = {}
        for (index, factor, by_depth), times in terms.items():
            parts.setdefault((index, factor), [0, 0])[by_depth] += times
        return tuple((*key, *times) for key, times in sorted(parts.items()))
    sums: dict[int, float] = {}
    for (index, factor, _), times in terms.items():
        sums[index] = sums.get(index, 0.0) + times * member.size(index, factor)
    return tuple((index, float(f"{value:.10g}")) for index, value in sorted(sums.items()) if abs(value) > 1e-6)
