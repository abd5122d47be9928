"""`DryRunReport`: a dry run's prediction with its evidence, plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.setup.outcome import Prediction
from planner.speed.operators import Program

Group = tuple[str, str]
"""(category, name) of a memory term."""


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """A dry run with its evidence.

    Attributes:
        phase_groups: what is alive at the peak of each phase, (category, name) -> bytes.
        depth: layers that were run; the middle ones stand for the rest of `num_layers`.
        kernels: attention kernels and how often each ran.
        program: the operators of a step, None of a pipeline's stage.
        timeline: (event index, allocated bytes) over loading and two steps, thinned.
        phases: (phase, index of its first event) of the same run, in order.
        parameter_bytes: of the module tree that was run.
    """

    prediction: Prediction
    phase_groups: Mapping[str, Mapping[Group, int]]
    depth: int
    num_layers: int
    kernels: Mapping[str, int]
    timeline: tuple[tuple[int, int], ...]
    phases: tuple[tuple[str, int], ...]
    parameter_bytes: int
    num_events: int
    elapsed_s: float
    program: Program | None = None
