"""`Problem`: the candidates, what makes one better, and why some are out before any probe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import Any, Literal

from planner.core.errors import UsageError
from planner.core.units import gib
from planner.memory.workload import Workload
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Evidence, FailureKind, Measurement, Prediction, ProbeFailure
from search.dimensions import key_of

Objective = Literal["tokens", "cost", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("tokens", "cost", "memory")

Evaluate = Callable[[TrainSetup], Evidence | str]
"""Runs one setup: a probe on a GPU (Measurement or ProbeFailure), or the dry run (Prediction). Text: why there is no
time for it, which ends the search; the setup waits for the next call."""

Unprobed = Callable[[TrainSetup], str]
"""Why no probe of this machine runs a setup, whatever its memory; empty where one does."""

EXCLUSION_BANDS = 2.0
"""The formula may exclude a setup only when even this many error bands less would not fit: a probe decides the rest."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the search is to solve.

    Attributes:
        candidates: every setup worth asking about, with its formula prediction; all with one budget.
        objective: "tokens" (most tokens/s), "cost" (most tokens/s per GPU, so least money), "memory" (least peak).
        min_rank: no adapter below it is recommended.
        fixed: setup fields the user decided, name -> allowed values.
        memory_bytes: the card's usable memory, above the budget by the headroom: what runs out needs more than this.
            0: as the budget.
        unprobed: setups that no probe here can run are out before any, with the reason and their prediction.
        subject: the model and the GPU, in words: a study of another one is refused.
        conditions: what else keeps two measurements of one setup apart (the device that probes run on, the model's
            shape, library versions), as digits: a study's trials under others are none of this search.
    """

    candidates: tuple[Candidate, ...]
    objective: Objective = "tokens"
    min_rank: int = 1
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    memory_bytes: int = 0
    unprobed: Unprobed = lambda setup: ""
    subject: str = ""
    conditions: str = ""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(
                f"the goal must be one of {', '.join(OBJECTIVES)}; got {self.objective!r}", hint="use --goal tokens"
            )
        if not self.candidates:
            raise UsageError("the search got no candidates", hint="widen the space: drop a --fix or a --rank")
        for name, value_name in (("budget_bytes", "memory budget"), ("tokens_per_step", "tokens per optimizer step")):
            values = {getattr(c if name == "budget_bytes" else c.setup, name) for c in self.candidates}
            if len(values) > 1:
                raise UsageError(f"all candidates need one {value_name}, got {sorted(values)[:3]}")

    @classmethod
    def of(cls, workload: Workload, candidates: Sequence[Candidate], **changes: Any) -> "Problem":
        """The problem of a workload: its objective, rank floor and fixed fields."""
        model = workload.model
        values: dict[str, Any] = {
            "subject": f"{model.model_type}, {model.num_params:,} parameters, on {workload.gpu.name}",
            "fixed": dict(workload.fixed),
            **{name: getattr(workload, name) for name in ("objective", "min_rank", "memory_bytes")},
        }
        return cls(candidates=tuple(candidates), **{**values, **changes})

    @property
    def budget_bytes(self) -> int:
        return self.candidates[0].budget_bytes

    @cached_property
    def index(self) -> dict[str, int]:
        return {key_of(candidate.setup): position for position, candidate in enumerate(self.candidates)}

    def exclusion(self, candidate: Candidate) -> str:
        """Why this candidate is out before any probe; empty when it is not."""
        return self.broken_request(candidate.setup) or self.unprobed(candidate.setup) or self.too_large(candidate)

    def broken_request(self, setup: TrainSetup) -> str:
        """Which of the user's constraints the setup breaks; empty when none."""
        for name, allowed in self.fixed.items():
            if getattr(setup, name) not in allowed:
                return f"{name} is {getattr(setup, name)!r}, the user asked for {' or '.join(map(repr, allowed))}"
        if setup.method != "full" and setup.kind.size and setup.lora_rank < self.min_rank:
            return f"LoRA rank {setup.lora_rank} is below the floor {self.min_rank}"
        return ""

    def too_large(self, candidate: Candidate) -> str:
        """How far even the lower end of the predicted memory is beyond the budget; empty when it may fit."""
        prediction = candidate.dry_run if isinstance(candidate.dry_run, Prediction) else candidate.formula
        lower = prediction.peak_device_bytes * max(0.0, 1.0 - EXCLUSION_BANDS * prediction.memory_band_fraction)
        if lower <= candidate.budget_bytes:
            return ""
        needed, budget = gib(prediction.peak_device_bytes), gib(candidate.budget_bytes)
        return f"{prediction.level.value}: needs {needed}, budget {budget}"

    def feasible(self, setup: TrainSetup, evidence: Evidence | None) -> bool:
        """Whether the evidence shows that the setup runs, fits the budget and meets every request."""
        if evidence is None or isinstance(evidence, ProbeFailure) or self.broken_request(setup):
            return False
        if evidence.peak_device_bytes > self.budget_bytes:
            return False
        # measured, but the speed is not the setup's: nothing to rank it by
        unranked = evidence.tokens_per_s is None and isinstance(evidence, Measurement) and self.objective != "memory"
        return not unranked

    def score(self, candidate: Candidate, evidence: Measurement | Prediction) -> float:
        """What the search maximises, as a logarithm: a difference of 0.01 is one percent."""
        if self.objective == "memory":
            return -log(evidence.peak_device_bytes)
        speed = evidence.tokens_per_s or candidate.formula.tokens_per_s
        assert speed is not None  # the formula ranks what is searched
        return log(speed) - (log(candidate.setup.num_gpus) if self.objective == "cost" else 0.0)


def with_evidence(candidate: Candidate, evidence: Evidence | None) -> Candidate:
    if evidence is None:
        return candidate
    if isinstance(evidence, Prediction):
        return replace(candidate, dry_run=evidence)
    return replace(candidate, probe=evidence)


def memory_excess(problem: Problem, candidate: Candidate | None, evidence: Evidence) -> float:
    """The memory constraint as Optuna wants it: at most 0 when it fits; share of the budget that is missing.

    Out of memory without a figure counts as what the formula expected (of a candidate of this search), at least one
    percent.
    """
    if not isinstance(evidence, ProbeFailure):
        return evidence.peak_device_bytes / problem.budget_bytes - 1.0
    if evidence.kind is not FailureKind.OUT_OF_MEMORY or candidate is None:
        return 0.0
    return max(0.01, candidate.formula.peak_device_bytes / problem.budget_bytes - 1.0)


def pareto_set(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that fit and are dominated by no other that fits, fastest first.

    One dominates another when it is at least as fast, needs at most as much memory, has at least the rank, and is
    better in one of the three. Full fine-tuning (rank 0) adapts every weight: it counts as the highest rank.
    Each candidate speaks from its own highest level.
    """
    ranked = sorted(
        (candidate for candidate in candidates if candidate.fits),
        key=lambda c: (-c.tokens_per_s, c.memory_evidence.peak_device_bytes, -_rank(c)),
    )
    kept: list[Candidate] = []
    for candidate in ranked:
        memory, rank = candidate.memory_evidence.peak_device_bytes, _rank(candidate)
        # All kept ones are at least as fast: one that is also as small and as high in rank dominates (or equals) this.
        if not any(k.memory_evidence.peak_device_bytes <= memory and _rank(k) >= rank for k in kept):
            kept.append(candidate)
    return tuple(kept)


def _rank(candidate: Candidate) -> float:
    return float("inf") if candidate.setup.method == "full" else float(candidate.setup.lora_rank)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished question: a candidate (by index) and what came back."""

    index: int
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One probe, of this model or another, against today's formula.

    Attributes:
        gpu: where it was measured: the GPU's key, or `search.corrections.place_of` several.
        program: the launch target whose own steps these were, "" of a probe's.
        group: 0 of the model and place that a search is about, another number of each other.
    """

    gpu: str
    model: str
    setup: TrainSetup
    formula: Prediction
    measured_tokens_per_s: float | None
    measured_peak_device_bytes: int
    program: str = ""
    group: int = 0

    @property
    def speed_error(self) -> float | None:
        """log(measured / predicted); None where one of them is not known."""
        if not self.measured_tokens_per_s or not self.formula.tokens_per_s:
            return None
        return log(self.measured_tokens_per_s / self.formula.tokens_per_s)

    @property
    def memory_error(self) -> float:
        return log(self.measured_peak_device_bytes / self.formula.peak_device_bytes)
