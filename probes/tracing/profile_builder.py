"""The step profiles of a model: which structures a plan asks for, and each from as few runs as it takes.

Which layers are checkpointed and which loss follows are mostly apart: the loss's own part is the same behind them all.
Where two runs show that, the rest is put together; so is what a base in 4 bits with quantized scales holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.profile_store import profiled_kind, structure_key
from planner.memory.step_profile import LOSS_BEGINS, Form, Group, Piece, ProfileMoment, StepProfile
from planner.models.spec import ModelSpec
from planner.planning.runs import Known
from planner.planning.space import dimension_values, planned_values
from planner.setup import TrainSetup
from planner.wish import Wish
from probes.dryrun.api import VERSION
from probes.dryrun.cache import library_versions
from probes.dryrun.splice import SpliceError
from probes.dryrun.startup import collection_paused, load_libraries
from probes.tracing.moments import FoundMoment
from probes.tracing.sizes import NoPolynomial, Sizes
from probes.tracing.structures import FoundPiece, Pieces, Span, Structure, has_room, spans

CARDS = ("a100-80gb", "rtx-4090", "h100-sxm")
"""One of each generation whose kernels are profiled."""
SAME = 2e-5
"""Highest moments within so much of each other are taken for the same."""
NEARLY = 1e-3
"""The same of a phase that is not the highest."""
CUBLAS: Group = ("workspace", "cuBLAS workspaces")
"""Of the card, not of the structure."""
NOT_PROFILED = (NoPolynomial, SpliceError, ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError)
"""What a structure's runs end with where it has no profile: a step that is no polynomial, or that cannot be traced."""


def asked_structures(model: ModelSpec, cards: Sequence[str] = CARDS) -> dict[str, tuple[TrainSetup, GpuSpec]]:
    """What plans of this model on such cards walk, by key: all but what others outrun at the same memory."""
    found: dict[str, tuple[TrainSetup, GpuSpec]] = {}
    for name in cards:
        gpu = find_gpu(name)
        workload = Wish().workload(model, gpu)
        for run in Known().runs(workload, planned_values(workload, dimension_values(workload)), ()):
            if run.rival is not None:
                continue
            for loss in run.choices:
                setup = run.shared.trusted_with(loss=loss)
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
        return Structure(self._model.config, vocabulary, setup, capability).pieces(self._spans, self._known)

    def all(self, asked: Mapping[str, tuple[TrainSetup, GpuSpec]]) -> dict[str, StepProfile]:
        """The profiles of many structures; those that have none are in `failures`."""
        found: dict[str, StepProfile] = {}
        for family in _families(asked.values()):
            with collection_paused():
                for setup, pieces in _Family(self, family).pieces():
                    key = structure_key(self._model, family[0][1], setup)
                    if isinstance(pieces, str):
                        self.failures[key] = pieces
                    else:
                        found[key] = _profile(pieces)
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


STEP_PROFILE = "2"
"""Of how profiles are made of runs."""
SHORTEST = 512
"""A span that ends before so many tokens is not run: nobody trains there."""


def build_profiles(
    model: ModelSpec, cards: Sequence[str] = CARDS
) -> tuple[Mapping[str, StepProfile], Mapping[str, str]]:
    """All profiles that plans of a model ask for, and why others are missing, by key."""
    builder = ProfileBuilder(model)
    return builder.all(asked_structures(model, cards)), builder.failures


def versions() -> dict[str, str]:
    """Of what is run here."""
    return {**dict(library_versions()), "dry run": str(VERSION), "step profile": STEP_PROFILE}


Asked = tuple[TrainSetup, GpuSpec]


def _families(asked: Iterable[Asked]) -> list[list[Asked]]:
    """Structures that differ in loss and checkpointed layers alone, 4-bit bases with and without quantized scales
    together."""
    found: dict[Any, list[Asked]] = {}
    for setup, gpu in asked:
        quantization = "nf4" if setup.quantization == "nf4-double" else setup.quantization
        alike = setup.trusted_with(loss="full", checkpointing=1, quantization=quantization, attention="sdpa")
        found.setdefault((alike, setup.attention, gpu.name), []).append((setup, gpu))
    return list(found.values())


class _Family:
    """Structures that share runs."""

    def __init__(self, builder: ProfileBuilder, members: Sequence[Asked]) -> None:
        self._builder, self._gpu = builder, members[0][1]
        self._setups = {(one.quantization, one.loss, one.checkpointing): one for one, _ in members}
        self._ran: dict[tuple[str, str, int], Pieces | str] = {}

    def pieces(self) -> Iterator[tuple[TrainSetup, Pieces | str]]:
        """Each member with its pieces."""
        for key, setup in self._setups.items():
            yield setup, self._of(key)

    def _run(self, key: tuple[str, str, int]) -> Pieces | str:
        if key not in self._ran:
            self._ran[key] = self._builder.tried(self._setups[key], self._gpu)
        return self._ran[key]

    def _of(self, key: tuple[str, str, int]) -> Pieces | str:
        """A member's pieces: put together where that was seen to give the same, else run."""
        quantization, loss, every = key
        first = next(iter(one for _, one, _ in self._setups))
        if quantization == "nf4-double" and ("nf4", loss, every) in self._setups:
            return self._requantized(key, first)
        if loss != first and (quantization, first, every) in self._setups:
            return self._swapped(key, (quantization, first, every), _with_loss)
        return self._run(key)

    def _requantized(self, key: tuple[str, str, int], loss: str) -> Pieces | str:
        """What a base without quantized scales does with its own weights, where one structure of both shows that."""
        at = min(every for quantization, one, every in self._setups if (quantization, one) == (key[0], loss))
        own, base, target = self._run((key[0], loss, at)), self._of(("nf4", loss, at)), self._of(("nf4", *key[1:]))
        if isinstance(own, str) or isinstance(base, str) or isinstance(target, str):
            return self._run(key)
        same = _same(_with_weights(base, own, base), own)
        return _with_weights(target, own, base) if same else self._run(key)

    def _swapped(self, key: tuple[str, str, int], like: tuple[str, str, int], swap: Any) -> Pieces | str:
        """`like` with what the member holds instead, by the two at the first two checkpointings."""
        others = sorted(every for *kind, every in self._setups if tuple(kind) == key[:2])
        if len(others) < 3 or key[2] in others[:2]:
            return self._run(key)
        (own, base), (checked, checked_base) = (
            (self._run((*key[:2], one)), self._of((*like[:2], one))) for one in others[:2]
        )
        target = self._of(like)
        if isinstance(checked, str) or any(isinstance(one, str) for one in (own, base, checked_base, target)):
            return self._run(key)
        tried = swap(checked_base, own, base)
        return swap(target, own, base) if _same(tried, checked) else self._run(key)


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


def _with_weights(like: Pieces, own: Pieces, base: Pieces) -> Pieces:
    """`like` with the weights of `own`."""
    found = {}
    for key, piece in like.items():
        weights = {group: form for group, form in own[key].moments[0].alive.items() if group[0] == "weights"}
        moments = [
            replace(one, alive={group: form for group, form in one.alive.items() if group[0] != "weights"} | weights)
            for one in piece.moments
        ]
        found[key] = replace(piece, moments=moments)
    return found


def _plus(one: dict[Group, Any], other: dict[Group, Any], sign: int) -> dict[Group, Any]:
    found = dict(one)
    for group, form in other.items():
        found[group] = found[group] + sign * form if group in found else sign * form
    return {group: form for group, form in found.items() if np.abs(form).max() > 1e-6}


def _same(one: Pieces, other: Pieces) -> bool:
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
