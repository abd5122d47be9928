"""What a plan.json carries beside the plan itself, for the reports: launch files, the timeline of a step, what changes
if one thing moves, the trials of a search. Plain values come in, because reports know neither probes nor search.

All of it is optional; a report leaves out what is not there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from itertools import pairwise
from typing import Any

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict, to_jsonable
from planner.setup.outcome import Candidate, Evidence, Fit, ProbeFailure
from reports.text import failure_words

MAX_TENSORS = 12
NUM_STEPS = 3
"""Doublings shown on either side of the plan's value."""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """One file to run the plan with: its path in the plan's directory and its text."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """One tool to run the plan with.

    Attributes:
        command: what starts the run, in the plan's directory; empty where the tool cannot run this setup.
        run: what installs the tool, makes the data and starts the run there; empty where files need a hand first.
        notes: what is predicted of it, what the tool runs otherwise than planned, or why it cannot run it.
        peak_device_bytes, level: the predicted peak of what it really runs; 0 and "" where it has no files.
    """

    target: str
    command: str = ""
    run: str = ""
    files: tuple[LaunchFile, ...] = ()
    notes: tuple[str, ...] = ()
    peak_device_bytes: int = 0
    level: str = ""


@dataclass(frozen=True, kw_only=True)
class TimelinePhase:
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
        phases: in order.
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
    level: str
    chosen: bool = False
    tight: bool = False

    @property
    def verdict(self) -> Fit:
        return "over" if not self.fits else "tight" if self.tight else "fits"


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Everything beside the plan. `environment` maps a name to a version or a value; `run` a target to what installs
    and starts it from where the command was typed, in its answer alone: a plan.json may be moved."""

    planner_version: str = ""
    created: str = ""
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: tuple[LaunchTarget, ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    sensitivity: tuple[SensitivityPoint, ...] = ()


EXTRA_KEYS = tuple(extra.name for extra in fields(Extras))


def extras_to_dict(extras: Extras) -> dict[str, Any]:
    values: dict[str, Any] = to_jsonable(extras)
    return {key: value for key, value in values.items() if value}


def extras_from_dict(document: Mapping[str, Any]) -> Extras:
    from planner.setup.codec import decode  # late: a new plan has none to read

    return decode(Extras, {key: document[key] for key in EXTRA_KEYS if key in document}, "plan.json")


def timeline_of(
    points: Sequence[tuple[int, int]],
    groups: Mapping[tuple[str, str], int],
    depth: str = "",
    *,
    phases: Sequence[tuple[str, int]] = (),
) -> Timeline | None:
    """A dry run's memory over one step, None where it kept none.

    Args:
        points: (event number, allocated bytes), in order.
        groups: (category, name) -> bytes alive at the peak.
        depth: what was traced where it was not the whole model ("4 of 28 layers").
        phases: (name, its first event), in order.
    """
    if not points:
        return None
    peak_event, peak_bytes = max(points, key=lambda point: point[1])
    largest = sorted(groups.items(), key=lambda item: -item[1])[:MAX_TENSORS]
    return Timeline(
        points=tuple((int(event), int(size)) for event, size in points),
        phases=tuple(
            TimelinePhase(name=name, start=start, end=end)
            for (name, start), (_, end) in pairwise([*phases, ("", points[-1][0])])
            if start < end
        ),
        peak_event=int(peak_event),
        peak_bytes=int(peak_bytes),
        tensors=tuple(
            PeakTensor(name=name, category=category, size_bytes=int(size)) for (category, name), size in largest if size
        ),
        depth=depth,
    )


def search_values(
    trials: Iterable[tuple[TrainSetup, str, Evidence | None, str]], stop_reason: str, budget_bytes: int
) -> dict[str, Any]:
    """`Plan.search` from the trials of a search, in order.

    Args:
        trials: (setup, origin, evidence, why it was left out without a probe or "").
        stop_reason: why the search stopped.
        budget_bytes: what the device peak may reach.
    """
    rows = []
    for number, (setup, origin, evidence, excluded) in enumerate(trials):
        failure = failure_words(evidence) if isinstance(evidence, ProbeFailure) else ""
        usable = None if evidence is None or isinstance(evidence, ProbeFailure) else evidence
        unanswered = evidence is None and not excluded  # it waits, or another worker runs it
        fits = usable is not None and not excluded and usable.peak_device_bytes <= budget_bytes
        rows.append(
            {
                "number": number,
                "origin": origin,
                "setup": setup_to_dict(setup),
                "level": "formula" if evidence is None else evidence.level.value,
                "tokens_per_s": None if usable is None else usable.tokens_per_s,
                "peak_device_bytes": None if usable is None else usable.peak_device_bytes,
                "feasible": None if unanswered else fits,
                "reason": excluded or failure or ("not measured" if unanswered else "" if fits else "does not fit"),
            }
        )
    return {"trials": rows, "stop_reason": stop_reason}


def neighbours(setup: TrainSetup) -> Iterator[tuple[str, int, TrainSetup]]:
    """(field, value, setup) around the chosen setup by doubling; the effective batch stays constant.

    A micro-batch that does not divide the effective batch is left out, as the planner leaves it out.
    """
    for parameter in ("lora_rank", "seq_len_tokens", "micro_batch_seqs"):
        value = getattr(setup, parameter)
        for exponent in range(-NUM_STEPS, NUM_STEPS + 1):
            moved = value * 2**exponent if exponent >= 0 else value // 2**-exponent
            if moved < 1 or (exponent < 0 and value % 2**-exponent):
                continue
            changes = {parameter: moved}
            if parameter == "micro_batch_seqs":
                sequences = setup.micro_batch_seqs * setup.accumulation_steps
                if sequences % moved:
                    continue
                changes["accumulation_steps"] = sequences // moved
            try:
                yield parameter, moved, setup.replace(**changes)
            except SetupError:
                continue


def sensitivity(chosen: Candidate, predict: Callable[[TrainSetup], Candidate]) -> tuple[SensitivityPoint, ...]:
    """The chosen setup's neighbours as `predict` (a level given by the caller) sees them."""
    points = []
    for parameter, value, setup in neighbours(chosen.setup):
        is_chosen = setup == chosen.setup
        candidate = predict(setup)
        points.append(
            SensitivityPoint(
                parameter=parameter,
                value=value,
                fits=candidate.fits,
                tight=candidate.verdict == "tight",
                peak_device_bytes=candidate.memory_evidence.peak_device_bytes,
                tokens_per_s=candidate.tokens_per_s,
                level=candidate.memory_evidence.level.value,
                chosen=is_chosen,
            )
        )
    assert all(a.parameter != b.parameter or a.value < b.value for a, b in pairwise(points))
    return tuple(points)
