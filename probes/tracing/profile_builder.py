"""The step profiles of a model: which structures a plan asks for, and each from as few runs as it takes.

Which layers are checkpointed and which loss in tiles follows are mostly apart: the loss's own part is the same behind
them all. Where two runs show that, the rest is put together; so is what a base in 4 bits with quantized scales holds,
and what another precision leaves as it is. All logits at once are always run: the holes behind them are their own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.profiles import (
    LOSS_BEGINS,
    Form,
    Group,
    Piece,
    ProfileMoment,
    StepProfile,
    profiled_kind,
    structure_key,
)
from planner.models.spec import ModelSpec
from planner.planning.plan_request import PlanRequest
from planner.planning.runs import WalkCache
from planner.planning.space import dimension_values, planned_values
from planner.setup import TrainSetup
from probes.dryrun.api import VERSION
from probes.dryrun.cache import library_versions
from probes.dryrun.repeat_layers import RepetitionError
from probes.dryrun.startup import collection_paused, load_libraries
from probes.tracing.moments import FoundMoment
from probes.tracing.sizes import NoPolynomial, Sizes
from probes.tracing.structures import FoundPiece, Pieces, Span, Structure, has_room, spans

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


def asked_structures(
    model: ModelSpec, cards: Sequence[str] = CARDS, request: PlanRequest | None = None
) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What plans of this model on such cards walk, by key: all but what others outrun at the same memory."""
    found: dict[str, tuple[TrainSetup, GpuSpec]] = {}
    for name in cards:
        gpu = find_gpu(name)
        workload = (request or PlanRequest()).workload(model, gpu)
        for run in WalkCache().runs(workload, planned_values(workload, dimension_values(workload)), ()):
            if run.rival is not None:
                continue
            for loss in run.choices:
                setup = run.shared.replace_trusted(loss=loss)
                if profiled_kind(setup):
                    found.setdefault(structure_key(model, gpu, setup), (setup, gpu))
    return found


class ProfileBuilder:
    """Builds the profiles of one model; what its runs have shown is kept between them.

    Attributes:
        failures: key of a structure -> why it has no profile.
    """

    def __init__(self, model: ModelSpec) -> None:
        load_libraries()
        self._model, self._known = model, Sizes()
        self._runs: dict[Any, Any] = {}
        self._spans = [
            one for one in spans([*_changes(model)]) if (one.longest_tokens or SHORTEST) >= SHORTEST and has_room(one)
        ]
        self.failures: dict[str, str] = {}

    def profile(self, setup: TrainSetup, gpu: GpuSpec) -> StepProfile:
        """The profile of one structure from its own runs.

        Raises:
            one of NOT_PROFILED.
        """
        with collection_paused():
            return _profile(self._pieces(setup, gpu))

    def _pieces(self, setup: TrainSetup, gpu: GpuSpec) -> Pieces:
        vocabulary = self._model.vocab_size, self._model.hidden_size
        capability = gpu.compute_capability or (8, 0)
        return Structure(self._model.config, vocabulary, setup, capability, self._runs).pieces(self._spans, self._known)

    def all(self, asked: Mapping[str, tuple[TrainSetup, GpuSpec]]) -> dict[str, StepProfile]:
        """The profiles of many structures; those that have none are in `failures`."""
        found: dict[str, StepProfile] = {}
        ran: dict[Any, _Family] = {}
        for family in _families(asked.values()):
            setup, gpu = family[0]
            other = setup.replace_trusted(precision="bf16-pure", **_APART), setup.attention, gpu.key
            with collection_paused():
                one = _Family(self, family, ran.get(other))
                ran.setdefault(other, one)
                for setup, pieces in one.pieces():
                    key = structure_key(self._model, family[0][1], setup)
                    if isinstance(pieces, str):
                        self.failures[key] = pieces
                    else:
                        found[key] = _profile(pieces)
                self._runs.clear()
        return found

    def tried(self, setup: TrainSetup, gpu: GpuSpec) -> Pieces | str:
        """The pieces of a structure, or why there are none."""
        try:
            return self._pieces(setup, gpu)
        except NOT_PROFILED as error:
            return f"{type(error).__name__}: {error}"


def _changes(model: ModelSpec) -> Iterator[int]:
    """Lengths from which on a model does otherwise: of its windows, and where its rotary angles change."""
    for layer in model.layer_kinds:
        if layer.attention is not None and layer.attention.window_tokens:
            yield layer.attention.window_tokens
    text = model.config.get("text_config", model.config)
    for one in (text, text.get("rope_scaling") or {}, text.get("rope_parameters") or {}):
        if length := one.get("original_max_position_embeddings"):
            yield int(length) + 1


STEP_PROFILE = "3"
"""Of how profiles are made of runs."""
SHORTEST = 512
"""A span that ends before so many tokens is not run: nobody trains there."""


def build_profiles(
    model: ModelSpec, asked: Mapping[str, tuple[TrainSetup, GpuSpec]] | None = None
) -> tuple[Mapping[str, StepProfile], Mapping[str, str]]:
    """All profiles that plans of a model ask for, or those of some structures, and why others are missing, by key."""
    builder = ProfileBuilder(model)
    return builder.all(asked_structures(model) if asked is None else asked), builder.failures


def versions() -> dict[str, str]:
    """Of what is run here."""
    return {**dict(library_versions()), "dry run": str(VERSION), "step profile": STEP_PROFILE}


Asked = tuple[TrainSetup, GpuSpec]


def _families(asked: Iterable[Asked]) -> list[list[Asked]]:
    """Structures that differ in loss and in what is checkpointed alone, 4-bit bases with and without quantized scales
    together."""
    found: dict[Any, list[Asked]] = {}
    for setup, gpu in asked:
        quantization = "nf4" if setup.quantization == "nf4-double" else setup.quantization
        alike = setup.replace_trusted(quantization=quantization, **_APART)
        found.setdefault((alike, setup.attention, gpu.name), []).append((setup, gpu))
    return list(found.values())


_APART: dict[str, Any] = {"loss": "full", "checkpointing": 1, "selective_checkpointing": False, "attention": "sdpa"}
SELECTIVE = 1 << 10
"""In place of how many layers lie between checkpoints: of every one all but attention is recomputed."""


_Key = tuple[str, str, int]
"""Quantization, loss, checkpointing."""


class _Family:
    """Structures that share runs.

    Args:
        like: a family that differs in precision alone.
    """

    def __init__(self, builder: ProfileBuilder, members: Sequence[Asked], like: "_Family | None") -> None:
        self._builder, self._gpu, self._like = builder, members[0][1], like
        self._setups = {
            (one.quantization, one.loss, SELECTIVE if one.selective_checkpointing else one.checkpointing): one
            for one, _ in members
        }
        self._ran: dict[_Key, Pieces | str] = {}

    def pieces(self) -> Iterator[tuple[TrainSetup, Pieces | str]]:
        """Each member with its pieces."""
        for key, setup in self._setups.items():
            yield setup, self._of(key)

    def _run(self, key: _Key) -> Pieces | str:
        if key not in self._ran:
            self._ran[key] = self._builder.tried(self._setups[key], self._gpu)
        return self._ran[key]

    def _of(self, key: _Key) -> Pieces | str:
        """A member's pieces: put together where that was seen to give the same, else run."""
        if self._as_like and self._like is not None and key in self._like._setups:
            return self._like._of(key)
        quantization, loss, every = key
        first = next((one for _, one, _ in self._setups if one != "full"), "full")
        if quantization == "nf4-double" and ("nf4", loss, every) in self._setups:
            return self._requantized(key, first)
        if loss not in (first, "full") and (quantization, first, every) in self._setups:
            return self._with_loss(key, (quantization, first, every))
        return self._run(key)

    @cached_property
    def _as_like(self) -> bool:
        """Whether two members that differ in all that a family differs in do exactly what the other family's do."""
        first = next(iter(self._setups))
        second = next((one for one in self._setups if one[1] == "full" and one[2] != first[2]), None)
        if self._like is None or second is None or not {first, second} <= {*self._like._setups}:
            return False
        pairs = ((self._run(one), self._like._of(one)) for one in (first, second))
        return all(
            not isinstance(a, str)
            and not isinstance(b, str)
            and _same(a, b)
            and all(a[place].gaps == b[place].gaps for place in a)
            for a, b in pairs
        )

    def _requantized(self, key: _Key, loss: str) -> Pieces | str:
        """What a base without quantized scales does with what is stored otherwise, where two structures of both show
        that."""
        others = sorted(every for quantization, one, every in self._setups if (quantization, one) == (key[0], loss))
        if len(others) < 3 or key in [(key[0], loss, one) for one in others[:2]]:
            return self._run(key)
        pairs = [(self._run((key[0], loss, one)), self._of(("nf4", loss, one))) for one in others[:2]]
        return self._put_together(key, self._of(("nf4", *key[1:])), pairs, _stored_otherwise)

    def _with_loss(self, key: _Key, like: _Key) -> Pieces | str:
        """`like` with the member's loss instead, by the two at the first two checkpointings."""
        others = sorted(every for *kind, every in self._setups if tuple(kind) == key[:2])
        if len(others) < 3 or key[2] in others[:2]:
            return self._run(key)
        pairs = [(self._run((*key[:2], one)), self._of((*like[:2], one))) for one in others[:2]]
        return self._put_together(key, self._of(like), pairs, _with_loss)

    def _put_together(
        self, key: _Key, target: Pieces | str, pairs: Sequence[tuple[Pieces | str, Pieces | str]], swap: Any
    ) -> Pieces | str:
        """`target` with what the member has instead, by two pairs of (the member's, the other's) at other
        checkpointings: one says what that is, the other whether it is the same there. Else the member is run."""
        (own, base), (checked, checked_base) = pairs
        if any(isinstance(one, str) for one in (target, own, base, checked, checked_base)):
            return self._run(key)
        return swap(target, own, base) if _same(swap(checked_base, own, base), checked) else self._run(key)


def _with_loss(like: Pieces, own: Pieces, base: Pieces) -> Pieces:
    """`like`, with the loss of `own` in place of that of `base`, each counted from where it begins."""
    found = {}
    for key, piece in like.items():
        starts = {one.micro_batch: one for one in piece.moments if one.phase == LOSS_BEGINS}
        own_starts = {one.micro_batch: one for one in own[key].moments if one.phase == LOSS_BEGINS}
        moments = [one for one in piece.moments if one.phase != "loss"]
        for one in own[key].moments:
            if one.phase == "loss":
                alive = _plus(_plus(one.alive, own_starts[one.micro_batch].alive, -1), starts[one.micro_batch].alive, 1)
                moments.append(replace(one, alive=alive))
        found[key] = replace(piece, moments=moments)
    return found


def _stored_otherwise(like: Pieces, own: Pieces, base: Pieces) -> Pieces:
    """`like` with the groups that `own` has in place of the same of `base`."""
    found = {}
    for key, piece in like.items():
        pairs = zip(base[key].moments, own[key].moments, strict=False)
        instead = {
            (group, _form(form)): other.alive[group]
            for one, other in pairs
            for group, form in one.alive.items()
            if group in other.alive
        }
        moments = [
            replace(one, alive={group: instead.get((group, _form(form)), form) for group, form in one.alive.items()})
            for one in piece.moments
        ]
        found[key] = replace(piece, moments=moments)
    return found


def _plus(one: dict[Group, Any], other: dict[Group, Any], sign: int) -> dict[Group, Any]:
    found = dict(one)
    for group, form in other.items():
        found[group] = found[group] + sign * form if group in found else sign * form
    return {group: form for group, form in found.items() if np.abs(form).max() > 1e-6}


def _same(one: Any, other: Any) -> bool:
    """Whether the highest moments of every micro-batch are the same, and those of its phases nearly."""
    for key, piece in one.items():
        mine, others = (_highest(each[key].moments, piece.values) for each in (one, other))
        if mine.keys() != others.keys():
            return False
        for micro_batch in {number for _, number in mine}:
            phases = [phase for phase in mine if phase[1] == micro_batch]
            tops = [np.max([each[phase] for phase in phases], axis=0) for each in (mine, others)]
            apart = max(np.abs(mine[phase] / others[phase] - 1).max() for phase in phases)
            if apart > NEARLY or np.abs(tops[0] / tops[1] - 1).max() > SAME:
                return False
    return True


def _highest(moments: Sequence[FoundMoment], values: Any) -> dict[tuple[str, int], Any]:
    found: dict[tuple[str, int], Any] = {}
    for one in moments:
        key, total = (one.phase, one.micro_batch), values @ one.total
        found[key] = np.maximum(found[key], total) if key in found else total
    return found


def _profile(pieces: Pieces) -> StepProfile:
    return StepProfile(pieces=tuple(_piece(span, piece, alone=alone) for (span, alone), piece in pieces.items()))


def _piece(span: Span, piece: FoundPiece, *, alone: bool) -> Piece:
    moments = dict.fromkeys(_moment(one) for one in piece.moments)
    return Piece(
        one_sequence=alone,
        shortest_tokens=span.shortest_tokens,
        longest_tokens=span.longest_tokens,
        moments=tuple(moments),
        gaps=piece.gaps,
    )


def _moment(one: FoundMoment) -> ProfileMoment:
    groups = sorted((group, _form(form)) for group, form in one.alive.items() if group != CUBLAS)
    return ProfileMoment(one.phase, one.micro_batch > 1, tuple(pair for pair in groups if pair[1]))


def _form(factors: Any) -> Form:
    return tuple((index, float(f"{value:.10g}")) for index, value in enumerate(factors.tolist()) if abs(value) > 1e-6)
