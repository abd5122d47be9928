"""The launch targets side by side: for each, what `plan --target` would plan for one wish."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import UsageError
from planner.outcome import Candidate
from planner.plan import NoPlan
from planner.planning import plan_workload
from planner.stacks import TARGET_ROWS
from planner.workload import Workload

LAUNCHERS = ("accelerate", "deepspeed")
"""Targets that start another's program: on one GPU they add nothing."""


@dataclass(frozen=True, kw_only=True)
class TargetChoice:
    """One launch target.

    Attributes:
        target: its name; `title` for people.
        candidate: what is planned for it, None where nothing is.
        refused: why nothing is.
    """

    target: str
    title: str
    candidate: Candidate | None = None
    refused: str = ""


def compare_targets(workload: Workload) -> list[TargetChoice]:
    """The fastest plan by the formula of every target that has a file for the objective, fastest first; what plans
    nothing last."""
    names = [name for name in workload.aim.targets if workload.num_gpus > 1 or name not in LAUNCHERS]
    return sorted((_choice(workload, name) for name in names), key=lambda row: -(tokens_per_s(row) or 0.0))


def _choice(workload: Workload, name: str) -> TargetChoice:
    title = TARGET_ROWS[name].title
    try:
        plan = plan_workload(replace(workload, targets=(name,)))
    except UsageError as problem:
        said = problem.message.removeprefix(f"--target {name} cannot express any setup that the options allow: ")
        return TargetChoice(target=name, title=title, refused=said)
    if isinstance(plan, NoPlan):
        return TargetChoice(target=name, title=title, refused="nothing fits")
    return TargetChoice(target=name, title=title, candidate=plan.chosen)


def tokens_per_s(row: TargetChoice) -> float | None:
    """Predicted tokens/s of what is planned for a target."""
    return row.candidate.formula.tokens_per_s if row.candidate is not None else None


def as_fast(rows: Sequence[TargetChoice]) -> list[TargetChoice]:
    """Targets whose speed lies within the fastest one's band: not surely slower."""
    best, *others = [(row, row.candidate.formula) for row in rows if row.candidate is not None]
    speed, band = best[1].tokens_per_s or 0.0, best[1].time_band_fraction or 0.0
    return [row for row, formula in others if (formula.tokens_per_s or 0.0) * (1 + band) >= speed]
