"""`plan MODEL --out DIR --verify TARGET`: the launch file, run by its own tool on a GPU that computes nothing."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.errors import EnvironmentProblem, PlannerError, UsageError
from planner.exporters import Launch
from planner.plan import Plan
from planner.units import gib

RUNG = "trace"
_PROGRAMS = {"trl": "trl", "hf": "python", "axolotl": "axolotl", "llamafactory": "llamafactory-cli"}
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


def verified(plan: Plan, launches: Sequence[Launch], folder: Path, targets: Sequence[str]) -> tuple[Launch, ...]:
    """The launches; those of `targets` that wrote files with what a trace of them says, as their rung and peak.

    A launch that cannot be traced keeps its prediction and says why.
    """
    found = []
    for launch in launches:
        if launch.target in targets and launch.files:
            launch = _verified(plan, launch, folder)
        found.append(launch)
    return tuple(found)


def sentences(launches: Sequence[Launch]) -> tuple[str, ...]:
    """What the traces said, one sentence each."""
    return tuple(note for launch in launches for note in launch.notes if note.startswith(_MARK))


_MARK = "Traced"


def _verified(plan: Plan, launch: Launch, folder: Path) -> Launch:
    from planner.cli.trace import traced
    from probes.phantom.card import card_of
    from probes.phantom.runner import TraceOrder

    environment, command = _taken_apart(launch.command)
    setup, gpu = plan.chosen.setup, plan.workload.gpu
    print(f"tracing launch/{launch.target}: {shlex.join(command)}", file=sys.stderr)
    try:
        found = traced(
            TraceOrder(
                command=command,
                card=card_of(gpu, plan.workload.memory_bytes),
                limited=False,
                num_tokens=setup.seq_len_tokens + 1,
                environment=environment,
                folder=folder,
            )
        )
        if not found.num_steps:
            raise EnvironmentProblem("it ended without an optimizer step")
    except (PlannerError, ValueError) as error:
        return replace(launch, notes=(*launch.notes, f"{_MARK}, launch/{launch.target}: not possible: {error}"))
    predicted = launch.peak_device_bytes
    beside = f", {launch.rung.replace('_', ' ')}: {gib(predicted)}" if predicted else ""
    budget = plan.workload.budget_bytes
    fits = "fits" if found.peak_device_bytes <= budget else f"does NOT fit the budget of {gib(budget)}"
    note = (
        f"{_MARK}, launch/{launch.target} as its own tool runs it: {gib(found.peak_device_bytes)} on the device{beside}"
        f"; it {fits} ({found.num_steps} optimizer steps, {gib(found.peak_allocated_bytes)} allocated, "
        f"{gib(found.peak_reserved_bytes)} reserved)"
    )
    return replace(launch, peak_device_bytes=found.peak_device_bytes, rung=RUNG, notes=(*launch.notes, note))


def _taken_apart(command: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment and words of a launch command."""
    words = shlex.split(command)
    environment = {}
    while words and "=" in words[0] and not words[0].startswith(("-", "/")):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return environment, tuple(words)
