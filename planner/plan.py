"""`Plan` and `NoPlan`: the answer to a workload, with the walk that led to it. Plain data, rendered in `reports`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.outcome import Candidate
from planner.units import gib, percent
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A branch the tree did not take: which setups, why, and the bytes that decided it."""

    branch: str
    reason: str
    num_setups: int
    needed_bytes: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question of the decision tree with its answer.

    Attributes:
        question: "Does full fine-tuning fit with one sequence?"
        choice: the branch taken, short ("LoRA").
        reason: one sentence with the figures.
        needed_bytes: device peak of the best setup of this branch at micro-batch 1 (None where bytes did not decide).
        budget_bytes: what it was compared with.
        cuts: branches given up here.
    """

    question: str
    choice: str
    reason: str
    needed_bytes: int | None = None
    budget_bytes: int | None = None
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A candidate worth knowing beside the chosen one, and what it costs or buys."""

    label: str
    candidate: Candidate
    trade: str


def trade(chosen: Candidate, other: Candidate) -> str:
    """What `other` costs or buys against `chosen`, in words: speed, memory, whether it fits.

    Each figure is compared on one rung, the formula where they stand on different ones: the difference of two rungs
    would be mostly the error between them.
    """
    peaks, speeds = (chosen.memory_evidence, other.memory_evidence), (chosen.speed_evidence, other.speed_evidence)
    if peaks[0].rung is not peaks[1].rung:
        peaks = (chosen.formula, other.formula)
    if speeds[0].rung is not speeds[1].rung:
        speeds = (chosen.formula, other.formula)
    mine, theirs = (one.tokens_per_s or 0.0 for one in speeds)
    ratio = theirs / mine if mine else 0.0
    delta = peaks[1].peak_device_bytes - peaks[0].peak_device_bytes
    speed = f"{percent(abs(ratio - 1))} {'faster' if ratio >= 1 else 'slower'}"
    memory = f"{'+' if delta >= 0 else '-'}{gib(abs(delta))}"
    return f"{speed}, {memory}" + ("" if other.fits else ", does not fit")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change that would make something fit, smallest first in a NoPlan."""

    action: str
    saves_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class SpaceCount:
    """How much of the space was looked at: `walked` setups, of which `infeasible` do not fit."""

    walked: int
    infeasible: int
    impossible: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest setup found that fits, why, and what stands beside it."""

    workload: Workload
    chosen: Candidate
    alternatives: tuple[Alternative, ...]
    ranked: tuple[Candidate, ...]
    walk: tuple[Answer, ...]
    space: SpaceCount
    notes: tuple[str, ...] = ()
    search: Mapping[str, object] = field(default_factory=dict)
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Nothing fits: the nearest setup, what is missing, and what would make it fit."""

    workload: Workload
    nearest: Candidate
    missing_bytes: int
    remedies: tuple[Remedy, ...]
    walk: tuple[Answer, ...]
    space: SpaceCount
    notes: tuple[str, ...] = ()
    kind: Literal["no_plan"] = "no_plan"
