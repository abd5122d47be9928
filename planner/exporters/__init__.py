"""Launch files: one module per target tool. Pure: request in, text out, the same text for the same request."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from types import ModuleType

from planner.exporters import rollouts
from planner.exporters.types import (
    PLACEHOLDER_DATASET,
    DatasetChoice,
    Difference,
    Draft,
    Exporter,
    ExportRequest,
    Launch,
    LaunchFile,
    Target,
)
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.stacks import TARGET_ROWS


def objective_refusal(setup: TrainSetup, target: str) -> str:
    """Why a target has no file for the setup's objective, "" when it has."""
    if target in setup.aim.targets:
        return ""
    others = ", ".join(setup.aim.targets)
    return f"{target} files are for other objectives than {setup.objective}: it is written for {others}"


def _refusal(room: ModuleType, setup: TrainSetup, model: ModelSpec | None = None) -> str:
    found: str = objective_refusal(setup, room.TARGET) or room.refusal(setup, model)
    return found


def _export(room: ModuleType, request: ExportRequest) -> Launch:
    setup = request.setup
    reason = objective_refusal(setup, room.TARGET)
    if not reason and setup.micro_batch_seqs < setup.aim.least_samples:
        reason = f"{setup.objective} needs a micro-batch of at least {setup.aim.least_samples} {setup.aim.sample}s"
    if reason := reason or rollouts.refusal(setup) or room.refusal(setup, request.model):
        return Launch(target=room.TARGET, refused=reason)
    found = room.differences(setup)
    draft: Draft = room.export(request, found)
    return Launch(target=room.TARGET, differences=found, validated_with=room.VALIDATED_WITH, **vars(draft))


TARGETS: Mapping[str, Target] = {
    room.TARGET: Target(
        name=room.TARGET,
        refusal=partial(_refusal, room),
        differences=room.differences,
        export=partial(_export, room),
    )
    for room in [import_module(f"planner.exporters.{name.replace('-', '_')}") for name in TARGET_ROWS]
}
"""Target name -> what it makes of a setup, and its files."""

EXPORTERS: Mapping[str, Exporter] = {name: target.export for name, target in TARGETS.items()}
"""Target name -> exporter."""

__all__ = [
    "EXPORTERS",
    "PLACEHOLDER_DATASET",
    "TARGETS",
    "DatasetChoice",
    "Difference",
    "ExportRequest",
    "Exporter",
    "Launch",
    "LaunchFile",
    "Target",
]
