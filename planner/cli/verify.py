"""`plan MODEL --out DIR --verify TARGET`: the launch file, run by its own tool on a GPU that computes nothing."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.errors import EnvironmentProblem, PlannerError
from planner.exporters import Launch
from planner.plan import Plan
from planner.units import gib

RUNG = "trace"


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
    from probes.phantom.card import card_of
    from probes.phantom.runner import TraceOrder, run_traced

    environment, command = _taken_apart(launch.command)
    setup, gpu = plan.chosen.setup, plan.workload.gpu
    print(f"tracing launch/{launch.target}: {shlex.join(command)}", file=sys.stderr)
    try:
        ended = run_traced(
            TraceOrder(
                command=command,
                card=card_of(gpu, plan.workload.memory_bytes),
                limited=False,
                num_tokens=setup.seq_len_tokens + 1,
                environment=environment,
                folder=folder,
            )
        )
        if not ended.results or not ended.results[0].num_steps:
            reason = ended.error.strip().splitlines()[-1:] or [one.error for one in ended.results[:1]]
            raise EnvironmentProblem(reason[0] if reason and reason[0] else "it ended without an optimizer step")
    except (PlannerError, ValueError) as error:
        return replace(launch, notes=(*launch.notes, f"{_MARK}, launch/{launch.target}: not possible: {error}"))
    found = ended.results[0]
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
