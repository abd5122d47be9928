"""Launch files: one module per target tool. Pure: request in, text out, the same text for the same request."""

from collections.abc import Mapping

from planner.exporters import accelerate, trl
from planner.exporters.types import (
    PLACEHOLDER_DATASET,
    DatasetChoice,
    Difference,
    Exporter,
    ExportRequest,
    Launch,
    LaunchFile,
)

EXPORTERS: Mapping[str, Exporter] = {
    trl.TARGET: trl.export,
    accelerate.TARGET: accelerate.export,
}
"""Target name -> exporter."""

__all__ = [
    "EXPORTERS",
    "PLACEHOLDER_DATASET",
    "DatasetChoice",
    "Difference",
    "ExportRequest",
    "Exporter",
    "Launch",
    "LaunchFile",
]
