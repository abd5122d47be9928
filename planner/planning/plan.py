"""`Plan` and `NoPlan`: the answer to a workload, and how the decision tree came to it. Plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from planner.core.records import dataclass
from planner.core.units import percent, signed_gib
from planner.memory.workload import Workload
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Fit, Measurement, Prediction

CorrectionKey = tuple[object, ...]


@dataclass(frozen=True)
class PrunedBranch:
    """A branch the tree did not take: which setups, why, and the bytes that decided it."""

    branch: str
    reason: str
    num_setups: int
    needed_bytes: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    """One question of the decision tree with its answer: the branch taken ("LoRA"), one sentence with the figures, and
    the branches given up here.

    Attributes:
        needed_bytes: device peak of the best setup of this branch at micro-batch 1 (None where bytes did not decide).
        budget_bytes: what it was compared with.
    """

    question: str
    choice: str
    reason: str
    needed_bytes: int | None = None
    budget_bytes: int | None = None
    cuts: tuple[PrunedBranch, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """A candidate worth knowing beside the chosen one, and what it costs or buys."""

    label: str
    candidate: Candidate
    trade: str


def correction_key(setup: TrainSetup) -> CorrectionKey:
    """Setups that share the formula's error: what changes data types, kernels and what is kept."""
    return (
        setup.method,
        setup.precision,
        setup.quantization,
        setup.kbit_fp32_cast,
        setup.checkpointing,
        setup.kernels,
        setup.activation_offload,
        setup.selective_checkpointing,
        setup.quantize_experts,
        *(() if setup.single_gpu else (setup.num_gpus, setup.parallel, *setup.layout.items())),
    )


Evidence = tuple[Prediction | Measurement, Prediction | Measurement]
"""Of memory, and of speed."""


def on_one_level(candidates: Sequence[Candidate]) -> list[Evidence]:
    """(memory, speed) evidence of each candidate, a whole column from one level, because the difference of two levels
    would be mostly the error between them: where they stand on different ones the dry run, which the trace of one
    launch file does not replace, else the formula, corrected in the first one's family by what is known of the first.
    """
    peaks = [candidate.memory_evidence for candidate in candidates]
    speeds = [candidate.speed_evidence for candidate in candidates]
    formulas: list[Prediction | Measurement] = [candidate.formula for candidate in candidates]
    untraced = [replace(candidate, trace=None).memory_evidence for candidate in candidates]
    memory = next((column for column in (peaks, untraced) if len({evidence.level for evidence in column}) == 1), None)
    if memory is None:
        memory, family = formulas[:], correction_key(candidates[0].setup)
        ratio = peaks[0].peak_device_bytes / formulas[0].peak_device_bytes
        for place, (candidate, formula) in enumerate(zip(candidates, formulas, strict=True)):
            if correction_key(candidate.setup) == family:
                memory[place] = replace(formula, peak_device_bytes=round(formula.peak_device_bytes * ratio))
    return list(zip(memory, speeds if len({evidence.level for evidence in speeds}) == 1 else formulas, strict=True))


def trade(chosen: Candidate, other: Candidate) -> str:
    """What `other` costs or buys against `chosen`, in words: speed, memory, whether it fits."""
    return _trade(*on_one_level((chosen, other)), verdict=other.verdict)


def with_trades(chosen: Candidate, others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The alternatives with what each costs or buys against `chosen`, in the figures of one level for all of them."""
    mine, *theirs = on_one_level((chosen, *(alternative.candidate for alternative in others)))
    return tuple(
        replace(alternative, trade=_trade(mine, other, verdict=alternative.candidate.verdict))
        for alternative, other in zip(others, theirs, strict=True)
    )


def _trade(mine: Evidence, theirs: Evidence, *, verdict: Fit) -> str:
    ratio = (theirs[1].tokens_per_s or 0.0) / (mine[1].tokens_per_s or math.inf)
    delta = theirs[0].peak_device_bytes - mine[0].peak_device_bytes
    change = percent(abs(ratio - 1))
    speed = "as fast" if change == percent(0) else f"{change} {'faster' if ratio >= 1 else 'slower'}"
    memory = signed_gib(delta) if delta else "as much memory"
    return f"{speed}, {memory}" + {"fits": "", "tight": ", may not fit", "over": ", does not fit"}[verdict]


@dataclass(frozen=True)
class Suggestion:
    """One change that would make something fit, smallest first in a NoPlan."""

    action: str
    saves_bytes: int
    fits: bool = True


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
    alternatives: Sequence[Alternative]
    ranked: Sequence[Candidate]
    tree: tuple[Answer, ...]
    space: SpaceCount
    notes: tuple[str, ...] = ()
    search: Mapping[str, object] = field(default_factory=dict)
    kind: Literal["plan"] = "plan"

    @property
    def subject(self) -> Candidate:
        return self.chosen


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Nothing fits: the nearest setup, what is missing, and what would make it fit."""

    workload: Workload
    nearest: Candidate
    missing_bytes: int
    suggestions: tuple[Suggestion, ...]
    tree: tuple[Answer, ...]
    space: SpaceCount
    notes: tuple[str, ...] = ()
    kind: Literal["no_plan"] = "no_plan"

    @property
    def subject(self) -> Candidate:
        return self.nearest
