"""Launch files: one module per target tool. Pure: request in, text out, the same text for the same request."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from planner.choices.images import IMAGE_TARGETS
from planner.choices.stacks import TARGET_ROWS
from planner.exporters import rollouts
from planner.exporters.text import comments, header, launch_file
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
from planner.records import dataclass
from planner.setup import TrainSetup

T = TypeVar("T")


def objective_refusal(setup: TrainSetup, target: str) -> str:
    """Why a target has no file for the setup's objective, "" when it has."""
    if target in setup.aim.targets:
        return ""
    others = ", ".join(setup.aim.targets)
    return f"{target} files are for other objectives than {setup.objective}: it is written for {others}"


def image_refusal(setup: TrainSetup, target: str) -> str:
    """Why a target has no file for a setup with pictures, "" where it has or there are none."""
    if setup.images is None or target in IMAGE_TARGETS:
        return ""
    return f"{target} files are written for text: images are for {' and '.join(IMAGE_TARGETS)}"


def _refusal(room: ModuleType, setup: TrainSetup, model: ModelSpec | None = None) -> str:
    found: str = (
        objective_refusal(setup, room.TARGET) or image_refusal(setup, room.TARGET) or room.refusal(setup, model)
    )
    return found


def _export(room: ModuleType, request: ExportRequest) -> Launch:
    setup = request.setup
    reason = objective_refusal(setup, room.TARGET) or image_refusal(setup, room.TARGET)
    if not reason and setup.micro_batch_seqs < setup.aim.least_samples:
        reason = f"{setup.objective} needs a micro-batch of at least {setup.aim.least_samples} {setup.aim.sample}s"
    if reason := reason or rollouts.refusal(setup) or room.refusal(setup, request.model):
        return Launch(target=room.TARGET, refused=reason)
    found = room.differences(setup)
    draft: Draft = room.export(request, found)
    files, main = draft.files, draft.main
    if main is not None:
        versions = room.VALIDATED_WITH
        head = header(request, main.title, draft.command, versions, differences=found, notes=draft.notes)
        files = (launch_file(main.path, comments(head) + main.body), *files)
    parts = {**vars(draft), "files": files, "main": None}
    return Launch(target=room.TARGET, differences=found, validated_with=room.VALIDATED_WITH, **parts)


@cache
def _target(name: str) -> Target:
    room = import_module(f"planner.exporters.{name.replace('-', '_')}")
    return Target(
        name=name, refusal=partial(_refusal, room), differences=room.differences, export=partial(_export, room)
    )


def _exporter(name: str) -> Exporter:
    return _target(name).export


@dataclass(frozen=True)
class _ByName(Mapping[str, T]):
    """Something of every target; its module is imported when it is first asked for."""

    of: Callable[[str], T]

    def __getitem__(self, name: str) -> T:
        if name not in TARGET_ROWS:
            raise KeyError(name)
        return self.of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(TARGET_ROWS)

    def __len__(self) -> int:
        return len(TARGET_ROWS)


TARGETS: Mapping[str, Target] = _ByName(_target)
"""Target name -> what it makes of a setup, and its files."""

EXPORTERS: Mapping[str, Exporter] = _ByName(_exporter)
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
