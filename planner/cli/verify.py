"""`plan MODEL --out DIR --verify TARGET`: the launch file, run by its own tool on a GPU that computes nothing."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from planner.app.progress import say
from planner.choices.stacks import TARGET_ROWS
from planner.cli.trace import traced
from planner.errors import EnvironmentProblem, PlannerError, UsageError
from planner.exporters import Launch
from planner.notes import Note, Place, found, place_of
from planner.outcome import FailureKind, Measurement, Prediction, ProbeFailure, Rung
from planner.plan import Plan
from planner.planning.expressed import as_run
from planner.units import gib

BAND_FRACTION = 0.03
"""Half-width of the error band: the worst of 11 public runs, in reserved bytes (docs/trace.md)."""
_PROGRAMS = {name: row.program for name, row in TARGET_ROWS.items() if row.program}
"""Target -> what starts its launch file; the other targets start several processes, none of their own, or Unsloth."""


def check_tools(targets: Sequence[str]) -> None:
    """Whether the launch files of `targets` can be traced here at all.

    Raises:
        UsageError: a target whose files are not followed.
        EnvironmentProblem: one whose tool is not installed.
    """
    from probes.phantom.runner import program

    for target in targets:
        if target not in _PROGRAMS:
            raise UsageError(
                f"--verify {target}: its launch files cannot be traced", hint=f"one of {', '.join(_PROGRAMS)} can"
            )
        try:
            program([_PROGRAMS[target]])
        except UsageError as error:
            raise EnvironmentProblem(
                f"--verify {target}: its tool is not installed here: {error.message}",
                hint=f"activate the environment that has {_PROGRAMS[target]}, or leave --verify {target} out",
            ) from None


def trace_files(
    plan: Plan, launches: Sequence[Launch], folder: Path, targets: Sequence[str]
) -> dict[str, Prediction | ProbeFailure]:
    """What the launch files of `targets` in `folder` need, or why nobody can say, by target; one without files is left
    out."""
    return {one.target: _traced(plan, one, folder) for one in launches if one.target in targets and one.files}


def with_trace(plan: Plan, traces: Mapping[str, Prediction | ProbeFailure]) -> Plan:
    """The plan whose chosen setup carries the trace of the launch file that runs just that setup, its own stack's
    first."""
    setup, model = plan.chosen.setup, plan.workload.model
    same = sorted(
        (name for name in traces if as_run(name, setup, model) == setup), key=lambda name: name != setup.stack
    )
    if not same:
        return plan
    chosen = replace(plan.chosen, trace=traces[same[0]])
    ranked = tuple(chosen if one is plan.chosen else one for one in plan.ranked)
    return replace(plan, chosen=chosen, ranked=ranked)


def withdraw(before: Sequence[Launch], after: Sequence[Launch], folder: Path) -> None:
    """Removes the files that were written for a trace which then said that they run out of memory."""
    kept = {file.path for launch in after for file in launch.files}
    for launch in before:
        for file in launch.files:
            if file.path not in kept:
                (folder / "launch" / file.path).unlink(missing_ok=True)


def sentence(target: str, traced: Prediction | ProbeFailure, below: Prediction | Measurement) -> Note:
    """What the trace said of a target's file, beside the rung below it."""
    if isinstance(traced, ProbeFailure):
        return found(f"Traced, launch/{target}: not possible: {traced.message}")
    words = below.rung.value.replace("_", " ")
    return found(
        f"Traced, launch/{target} as its own tool runs it: {gib(traced.peak_device_bytes)} on the device, {words}: "
        f"{gib(below.peak_device_bytes)} ({gib(traced.peak_allocated_bytes)} allocated, "
        f"{gib(traced.peak_reserved_bytes)} reserved)"
    )


def sentences(launches: Sequence[Launch]) -> tuple[str, ...]:
    """What the traces said, one sentence each."""
    return tuple(note for launch in launches for note in launch.notes if place_of(note) is Place.FOUND)


def _traced(plan: Plan, launch: Launch, folder: Path) -> Prediction | ProbeFailure:
    from probes.phantom.card import TraceOptions, card_of
    from probes.phantom.runner import TraceOrder

    environment, command = _taken_apart(launch.command)
    setup, gpu = plan.chosen.setup, plan.workload.gpu
    say(f"tracing launch/{launch.target}: {shlex.join(command)}")
    try:
        seen = traced(
            TraceOrder(
                command=command,
                card=card_of(gpu, plan.workload.memory_bytes),
                options=TraceOptions(
                    limited=False, num_steps=2, num_tokens=setup.seq_len_tokens + 1, objective=setup.objective
                ),
                environment=environment,
                folder=folder,
            )
        )
        if not seen.num_steps:
            raise EnvironmentProblem("it ended without an optimizer step")
    except (PlannerError, ValueError) as error:
        return ProbeFailure(rung=Rung.TRACE, kind=FailureKind.UNSUPPORTED, message=str(error))
    return Prediction(
        rung=Rung.TRACE,
        peak_allocated_bytes=seen.peak_allocated_bytes,
        peak_reserved_bytes=seen.peak_reserved_bytes,
        peak_device_bytes=seen.peak_device_bytes,
        peak_phase=seen.peak_phase,
        phase_peaks_bytes=seen.phase_peaks_bytes,
        terms=(),
        memory_band_fraction=BAND_FRACTION,
        notes=seen.notes,
    )


def _taken_apart(command: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment and words of a launch command."""
    words = shlex.split(command)
    environment = {}
    while words and "=" in words[0] and not words[0].startswith(("-", "/")):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return environment, tuple(words)
