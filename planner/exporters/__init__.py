"""Launch files: one module per target tool. Pure: request in, text out, the same text for the same request."""

from collections.abc import Mapping

from planner.exporters import accelerate, axolotl, deepspeed, hf, llamafactory, torchtitan, trl, unsloth
from planner.exporters.types import (
    PLACEHOLDER_DATASET,
    DatasetChoice,
    Difference,
    Exporter,
    ExportRequest,
    Launch,
    LaunchFile,
    Target,
)

TARGETS: Mapping[str, Target] = {
    room.TARGET: Target(name=room.TARGET, refusal=room.refusal, differences=room.differences, export=room.export)
    for room in (trl, hf, axolotl, llamafactory, unsloth, accelerate, deepspeed, torchtitan)
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
