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
)

EXPORTERS: Mapping[str, Exporter] = {
    trl.TARGET: trl.export,
    hf.TARGET: hf.export,
    axolotl.TARGET: axolotl.export,
    llamafactory.TARGET: llamafactory.export,
    unsloth.TARGET: unsloth.export,
    accelerate.TARGET: accelerate.export,
    deepspeed.TARGET: deepspeed.export,
    torchtitan.TARGET: torchtitan.export,
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
