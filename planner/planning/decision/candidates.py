"""A setup with its prediction against a workload's budget."""

from collections.abc import Sequence
from typing import overload

from planner.memory.attention_kernels import padded
from planner.memory.workload import Workload
from planner.planning.predict import predict, predict_with_padding
from planner.planning.walk import WalkedSetup
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate
from planner.speed import speed_profile


def candidate(workload: Workload, setup: TrainSetup, *, padding: bool = True) -> Candidate:
    """A setup with its formula prediction against the workload's budget.

    Args:
        padding: what samples that differ in length take is in its band and its notes, where they may: not needed of
            what is measured, or where only peak and speed are asked for.
    """
    level = predict_with_padding if padding and workload.uneven else predict
    prediction = level(workload.model, workload.gpu, setup, workload.cluster, planned=True)
    return Candidate(setup=setup, budget_bytes=workload.budget_bytes, formula=prediction)


def uneven_tokens_per_s(workload: Workload, candidate: Candidate) -> float:
    """Its level's tokens/s of full rows, by what the formula says is left of them where the samples of a micro-batch
    differ in length: what setups are compared at (docs/choices.md)."""
    full, model, gpu = candidate.setup, workload.model, workload.gpu
    uneven = padded(model, full) if workload.uneven else None
    if uneven is None:
        return candidate.tokens_per_s
    before, after = (speed_profile(model, gpu, each, workload.cluster).step_time(each) for each in (full, uneven))
    return candidate.tokens_per_s * min(1.0, before.step_time_s / after.step_time_s)


def communication_share(candidate: Candidate) -> float:
    return candidate.formula.time_parts_s.get("communication", 0.0) / (candidate.formula.step_time_s or 1.0)


class Ranked(Sequence[Candidate]):
    """A chosen candidate and the points behind it, of which each is predicted when it is first looked at: the terminal
    shows none of them."""

    def __init__(self, chosen: Candidate, workload: Workload, points: Sequence[WalkedSetup]) -> None:
        self._workload, self._points = workload, points
        self._cache = {0: chosen}

    def __len__(self) -> int:
        return 1 + len(self._points)

    def _at(self, index: int) -> Candidate:
        if index not in self._cache:
            self._cache[index] = candidate(self._workload, self._points[index - 1].setup)
        return self._cache[index]

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranked | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
