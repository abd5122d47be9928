"""What a plan.json carries beside the plan itself, for the reports: launch files, the timeline of a step, sensitivity.

All of it is optional; a report leaves out what is not there.
"""

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from planner.codec import decode
from planner.interchange import to_jsonable
from planner.outcome import Verdict
from planner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """One file to run the plan with: its path in the plan's directory and its text."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """One tool to run the plan with.

    Attributes:
        command: what starts the run; empty where the tool cannot run this setup.
        notes: what is predicted of it, what the tool runs otherwise than planned, or why it cannot run it.
        peak_device_bytes, rung: the predicted peak of what it really runs; 0 and "" where it has no files.
    """

    target: str
    command: str = ""
    files: tuple[LaunchFile, ...] = ()
    notes: tuple[str, ...] = ()
    peak_device_bytes: int = 0
    rung: str = ""


@dataclass(frozen=True, kw_only=True)
class TimelinePhase:
    """A phase of the step: from event `start` up to event `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class PeakTensor:
    """A tensor (or a group of equal ones) that is alive at the peak."""

    name: str
    category: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Allocated memory over one step, as the dry run saw it.

    Attributes:
        points: (event number, allocated bytes), in order; thinned by the maker, the peak kept.
        phases: empty where their borders are not known.
        peak_event, peak_bytes: where the peak is.
        depth: what was traced ("4 of 28 layers"), empty for full depth.
        tensors: what is alive at the peak, largest first.
    """

    points: tuple[tuple[int, int], ...]
    phases: tuple[TimelinePhase, ...] = ()
    peak_event: int
    peak_bytes: int
    tensors: tuple[PeakTensor, ...] = ()
    depth: str = ""


@dataclass(frozen=True, kw_only=True)
class SensitivityPoint:
    """The chosen setup with one value moved. `parameter` is a field of TrainSetup, `chosen` marks the plan's own."""

    parameter: str
    value: int
    fits: bool
    peak_device_bytes: int
    tokens_per_s: float
    rung: str
    chosen: bool = False
    tight: bool = False

    @property
    def verdict(self) -> Verdict:
        """As a candidate's."""
        return "over" if not self.fits else "tight" if self.tight else "fits"


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Everything beside the plan. `environment` maps a name to a version or a value."""

    planner_version: str = ""
    created: str = ""
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: tuple[LaunchTarget, ...] = ()
    timeline: Timeline | None = None
    sensitivity: tuple[SensitivityPoint, ...] = ()


EXTRA_KEYS = tuple(one.name for one in fields(Extras))


def extras_to_dict(extras: Extras) -> dict[str, Any]:
    """The extras as keys of plan.json, empty ones left out."""
    values: dict[str, Any] = to_jsonable(extras)
    return {key: value for key, value in values.items() if value}


def extras_from_dict(document: Mapping[str, Any]) -> Extras:
    """The extras of a plan.json."""
    return decode(Extras, {key: document[key] for key in EXTRA_KEYS if key in document}, "plan.json")
