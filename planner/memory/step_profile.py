"""`StepProfile`: the memory of one structure of training step, compiled from runs of the real step (`probes.tracing`).

A structure is everything of a setup but micro-batch, length, rank, accumulation and optimizer. Of it a profile holds,
for each phase, the few moments that can be its peak; each moment is a sum of groups (weights, what is kept for the
backward, the loss chain, ...), each group a polynomial in micro-batch, length, rank and the loss's tile. What the
optimizer keeps and makes stays a closed form over the list of trained parameters (`planner.memory.state`).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from planner.choices.losses import LOSSES
from planner.models.spec import ModelSpec
from planner.records import dataclass
from planner.setup import TrainSetup

MONOMIALS: tuple[tuple[int, int, int, int], ...] = (
    *((batch, length, rank, 0) for rank in (0, 1) for length in (0, 1, 2) for batch in (0, 1)),
    (2, 2, 0, 0),
    (0, 0, 0, 1),
)
"""Powers of micro-batch, length, rank and the loss's tile; the first is 1. Packed samples are one row of micro-batch
times length, whose attention scores grow with the square of that."""
Form = tuple[tuple[int, float], ...]
"""Bytes as a sum of (place in MONOMIALS, factor)."""
Group = tuple[str, str]
"""(category, name) of a memory term."""
LOSS_BEGINS = "loss begins"
"""No phase: what is alive when a micro-batch's loss begins."""
_PHASES_BEFORE_STEP = ("forward", "loss", "backward")
_BEFORE_STEP = "before the step"
"""No phase: the moments of all those."""
BATCH: Group = ("other", "batch")
"""The samples of a micro-batch; the runs hold those of two."""


class ProfileMoment(NamedTuple):
    """One moment: its phase (or LOSS_BEGINS; "step": as it begins), whether an earlier micro-batch's gradients are
    there, and the form of each group that is alive."""

    phase: str
    later: bool
    groups: tuple[tuple[Group, Form], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The moments for some micro-batches and lengths.

    Attributes:
        one_sequence: of micro-batch 1, for which some operators copy less; else of 2 and more.
        shortest_tokens, longest_tokens: of a sequence, both included (None: no end).
        gaps: (tokens of a micro-batch, what the allocator holds beyond live tensors at the peak as a share of what
            changes within a step), by rising tokens, with expandable segments.
    """

    one_sequence: bool
    shortest_tokens: int
    longest_tokens: int | None
    moments: tuple[ProfileMoment, ...]
    gaps: tuple[tuple[int, float], ...]

    def gap_fraction(self, tokens: int) -> float:
        """Between the sizes that were replayed along straight lines in the logarithm; beyond them the nearest."""
        if tokens <= self.gaps[0][0]:
            return self.gaps[0][1]
        for (below, low), (above, high) in pairwise(self.gaps):
            if tokens <= above:
                return low + (high - low) * math.log(tokens / below) / math.log(above / below)
        return self.gaps[-1][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """The profile of one structure."""

    pieces: tuple[Piece, ...]

    def piece(self, *, one_sequence: bool, tokens: int) -> Piece | None:
        """What was run for such samples, None where nothing was."""
        for one in self.pieces:
            inside = one.shortest_tokens <= tokens and (one.longest_tokens is None or tokens <= one.longest_tokens)
            if one.one_sequence == one_sequence and inside:
                return one
        return None


class Line(NamedTuple):
    """Bytes at one length and rank: a constant, per micro-batch, per its square, per token of a tile."""

    constant: float
    slope: float
    square: float
    tile: float

    def at(self, micro_batch_seqs: int, tile_tokens: int) -> float:
        """Bytes at a micro-batch."""
        return self[0] + (self[1] + self[2] * micro_batch_seqs) * micro_batch_seqs + self[3] * tile_tokens


class Sizes:
    """Moments at one length and rank, each worked out once: structures share them."""

    def __init__(self, tokens: int, rank: int) -> None:
        self._tokens, self._rank = tokens, max(1, rank)
        self._forms: dict[int, tuple[Form, Line]] = {}
        self._moments: dict[tuple[int, bool], tuple[ProfileMoment, Line]] = {}

    def form(self, form: Form) -> Line:
        """One group's."""
        known = self._forms.get(id(form))
        if known is None:
            found = [0.0] * 4
            for index, factor in form:
                batch, length, ranks, tile = MONOMIALS[index]
                found[3 if tile else batch] += factor * self._tokens**length * self._rank**ranks
            known = self._forms[id(form)] = form, Line(*found)
        return known[1]

    def moment(self, moment: ProfileMoment, *, accumulated: bool) -> Line:
        """All groups'; without accumulation of one micro-batch's samples."""
        known = self._moments.get((id(moment), accumulated))
        if known is None:
            lines: list[Sequence[float]] = []
            for group, form in moment.groups:
                line = self.form(form)
                lines.append(line if accumulated or group != BATCH else [0.5 * value for value in line])
            known = self._moments[id(moment), accumulated] = moment, Line(*map(sum, zip(*lines, strict=True)))
        return known[1]


@lru_cache(maxsize=16)
def sizes_at(tokens: int, rank: int) -> Sizes:
    """The moments at a length and rank, of all models."""
    return Sizes(tokens, rank)


class ProfiledStep:
    """A structure at one length and rank: allocated bytes at any micro-batch, without optimizer and cuBLAS. Its phase
    "step" is the moment before the optimizer makes anything."""

    def __init__(self, profile: StepProfile, model: ModelSpec, setup: TrainSetup) -> None:
        self._tokens_each = setup.replace_trusted(micro_batch_seqs=1).tokens_per_micro_batch
        self._loss, self._vocabulary = LOSSES[setup.loss], (model.vocab_size, model.hidden_size)
        self._pieces = {one: profile.piece(one_sequence=one, tokens=setup.seq_len_tokens) for one in (False, True)}
        self._sizes = sizes_at(setup.seq_len_tokens, setup.lora_rank)
        self._lines: dict[tuple[bool, bool], dict[str, list[Line]]] = {}
        self._tiles: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """Whether such samples were run."""
        return None not in self._pieces.values()

    def _piece(self, micro_batch_seqs: int) -> Piece:
        found = self._pieces[micro_batch_seqs == 1]
        assert found is not None, "`complete` was not asked"
        return found

    def _alive(self, micro_batch_seqs: int, *, accumulated: bool) -> list[ProfileMoment]:
        return [one for one in self._piece(micro_batch_seqs).moments if accumulated or not one.later]

    def _tile_tokens(self, micro_batch_seqs: int) -> int:
        found = self._tiles.get(micro_batch_seqs)
        if found is None:
            tiling = self._loss.tiling(micro_batch_seqs * self._tokens_each, *self._vocabulary)
            found = self._tiles[micro_batch_seqs] = tiling.tokens
        return found

    def _by_phase(self, micro_batch_seqs: int, *, accumulated: bool) -> dict[str, list[Line]]:
        key = micro_batch_seqs == 1, accumulated
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = {}
            for one in self._alive(micro_batch_seqs, accumulated=accumulated):
                found.setdefault(one.phase, []).append(self._sizes.moment(one, accumulated=accumulated))
            found[_BEFORE_STEP] = [line for phase in _PHASES_BEFORE_STEP for line in found.get(phase, ())]
        return found

    def bytes_at(self, phase: str, micro_batch_seqs: int, *, accumulated: bool) -> int:
        """Allocated bytes at a phase's highest moment (or at LOSS_BEGINS)."""
        lines = self._by_phase(micro_batch_seqs, accumulated=accumulated)[phase]
        tile = self._tile_tokens(micro_batch_seqs)
        return round(max([one.at(micro_batch_seqs, tile) for one in lines]))

    def largest(self, micro_batch_seqs: int, *, accumulated: bool) -> int:
        """Allocated bytes at the highest moment before the optimizer's phase."""
        return self.bytes_at(_BEFORE_STEP, micro_batch_seqs, accumulated=accumulated)

    def groups_at(self, phase: str, micro_batch_seqs: int, *, accumulated: bool) -> dict[Group, int]:
        """What is alive at a phase's highest moment, in bytes that add up to `bytes_at`."""
        tile = self._tile_tokens(micro_batch_seqs)
        moments = (one for one in self._alive(micro_batch_seqs, accumulated=accumulated) if one.phase == phase)
        best = max(moments, key=lambda one: self._sizes.moment(one, accumulated=accumulated).at(micro_batch_seqs, tile))
        found = {}
        for group, form in best.groups:
            size = self._sizes.form(form).at(micro_batch_seqs, tile)
            found[group] = round(size if accumulated or group != BATCH else size / 2)
        found = {group: size for group, size in found.items() if size > 0}
        rest = self.bytes_at(phase, micro_batch_seqs, accumulated=accumulated) - sum(found.values())
        found[max(found, key=lambda group: found[group])] += rest  # of rounding
        return found

    def gap_bytes(self, micro_batch_seqs: int, dynamic_bytes: int) -> int:
        """What the allocator holds beyond live tensors at the peak, with expandable segments."""
        fraction = self._piece(micro_batch_seqs).gap_fraction(micro_batch_seqs * self._tokens_each)
        return round(fraction * dynamic_bytes)
