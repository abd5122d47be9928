"""The launch targets that the user named, as a constraint of planning: which walked setups they can express.

A target may run a setup otherwise than it says (its loss, its adapters' data type). What is planned for it is what it
really runs, so that the prediction of a plan and that of its file are one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from planner.core.errors import NotExpressed, SetupError, UsageError
from planner.core.notes import measured
from planner.frameworks.tools.field import changed_fields
from planner.memory.workload import Workload
from planner.options.stacks import TARGET_ROWS, written_by
from planner.setup import TrainSetup

CONFIGS = ("accelerate", "deepspeed")
"""Targets whose file starts the plain script: they run no model that it refuses."""
NOT_PLANNED = ("adapter_dtype", "packing", "compile")
"""Fields that are no dimension of the space: a target that sets them itself gets its own value."""


def as_run(target: str, setup: TrainSetup, workload: Workload) -> TrainSetup | str:
    """The setup of a workload that a launch target really runs, or why it runs none."""
    from planner.frameworks.exporters import TARGETS  # late: a plan for no target in particular needs none

    return TARGETS[target].as_run(setup, workload.model, workload.gpu)


def branches_as_run(branch: TrainSetup, workload: Workload) -> Iterator[TrainSetup]:
    """The branch with what the first target makes of the fields that no plan chooses, under one GPU or any layout."""
    from planner.frameworks.exporters import TARGETS

    layouts: list[dict[str, Any]] = [{}]
    if workload.num_gpus > 1:  # ZeRO-3 is the one engine under which a target gives the adapters another type
        layouts.append({"num_gpus": workload.num_gpus, "parallel": "zero3"})
    variants: dict[TrainSetup, None] = {}
    open_fields = {*NOT_PLANNED} - {*workload.fixed}
    for layout in layouts:
        differences = TARGETS[workload.targets[0]].differences(branch.replace_trusted(**layout), workload.gpu)
        changes = {each.field: each.runs_as for each in differences if each.field in open_fields}
        with suppress(SetupError):  # a branch of the default stack that this one's adapters cannot compute in
            variants[branch.replace(**changes).run_by(workload.targets[0])] = None
    yield from variants


def variants_as_run(family: TrainSetup, workload: Workload) -> list[TrainSetup] | None:
    """What the targets after the first make of a setup, where it is another; None where one of them runs none, or the
    first runs it otherwise."""
    from planner.frameworks.exporters import TARGETS

    first, *others = workload.targets
    if not TARGETS[first].expresses(family, workload.model, workload.gpu):
        return None
    outcomes = dict.fromkeys(as_run(target, family, workload) for target in others)
    if any(isinstance(outcome, str) for outcome in outcomes):
        return None
    return [outcome for outcome in outcomes if isinstance(outcome, TrainSetup) and outcome != family]


def check_something_expressed(workload: Workload, setups: Iterable[TrainSetup]) -> None:
    """Refuses targets that express none of these setups, the kinds that the options allow.

    Raises:
        UsageError: with what stands most often in the way; not where no target was named, or no setup is left anyway.
    """
    from planner.frameworks.exporters import TARGETS

    setups = list(setups) if workload.targets else []
    for place, target in enumerate(workload.targets):
        refused: Counter[str] = Counter()
        otherwise: Counter[str] = Counter()
        for setup in setups:
            runs = as_run(target, setup, workload)
            if isinstance(runs, str):
                refused[runs] += 1
            elif runs != setup and not place:
                for difference in TARGETS[target].differences(setup, workload.gpu):
                    if difference.field not in NOT_PLANNED or difference.field in workload.fixed:
                        otherwise[difference.sentence()] += 1
        reasons = otherwise or refused  # what it does run is nearer
        if reasons and (refused.total() == len(setups) or len(workload.targets) == 1):
            reason = reasons.most_common(1)[0][0]
            problem = NotExpressed(f"--target {target} cannot express any setup that the options allow: {reason}")
            problem.reason = reason
            raise problem
    if setups:
        named = " and ".join(workload.targets)
        raise UsageError(f"no setup can be expressed by all of --target {named}", hint="name one --target, or fewer")


def writers(workload: Workload) -> dict[str, str]:
    """Launch targets that have a file for the objective and start from nothing but it -> why not on such data, ""."""
    from planner.frameworks.exporters.prepare import refusal

    names, data = written_by(workload.objective_spec.name), workload.data
    return {name: refusal(name, data.kind, data.loss_on) for name in names if name not in CONFIGS}


def run_otherwise(setup: TrainSetup, runs: TrainSetup) -> list[str]:
    """What a plan chose and a target that runs this instead does otherwise."""
    return [name for name in changed_fields(setup, runs) if name not in (*NOT_PLANNED, "stack")]


def unwritten(workload: Workload, setup: TrainSetup) -> str:
    """Why no target runs such a setup as it is, what the setup's own says or most of them do; "" where one does or
    targets were named."""
    reasons: Counter[str] = Counter()
    names = writers(workload) if not workload.targets else {}
    for target in sorted(names, key=lambda name: name != setup.stack):  # its own, which is there, is the answer mostly
        runs = names[target] or as_run(target, setup, workload)
        if not isinstance(runs, str):
            if not (otherwise := run_otherwise(setup, runs)):
                return ""
            runs = f"{target} has another {', '.join(otherwise)}"
        reasons[runs] += 1 if target != setup.stack else len(TARGET_ROWS)
    return reasons.most_common(1)[0][0] if reasons else ""


def target_notes(workload: Workload, chosen: TrainSetup) -> tuple[str, ...]:
    """What planning for named targets means, one sentence; where none was named, that none has a file for what was
    chosen, if so."""
    if not workload.targets:
        reason = unwritten(workload, chosen)
        return (measured(f"no launch file can be written: {reason}"),) if reason else ()
    first, *others = workload.targets
    note = f"planned as {first} runs it (--target): setups that it would run otherwise are left out"
    return (note + (f"; {', '.join(others)} must run and fit as well" if others else ""),)
