"""A setup with its prediction against a workload's budget."""

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

from planner.memory.attention_kernels import padded
from planner.memory.workload import Workload
from planner.planning.plan import Alternative, trade
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


T_co = TypeVar("T_co", covariant=True)


class WhenAsked(Sequence[T_co]):
    """Items, of which all behind the first ones are made when they are looked at: the terminal shows few of them."""

    def __init__(self, first: Sequence[T_co], makers: Sequence[Callable[[], T_co]]) -> None:
        self._made = dict(enumerate(first))
        self._makers = makers
        self._len = len(first) + len(makers)

    def __len__(self) -> int:
        return self._len

    def _at(self, index: int) -> T_co:
        if index not in self._made:
            self._made[index] = self._makers[index - self._len]()
        return self._made[index]

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WhenAsked | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def of_point(workload: Workload, point: WalkedSetup) -> Candidate:
    """`candidate` of a walked setup."""
    return candidate(workload, point.setup)


def alternative(workload: Workload, chosen: Candidate, label: str, other: TrainSetup | Candidate) -> Alternative:
    """What stands beside a chosen setup."""
    other = candidate(workload, other) if isinstance(other, TrainSetup) else other
    return Alternative(label, other, trade(chosen, other))
