"""Existing configs in, setups out: one module per format, the inverse of `planner.exporters`. Nothing is executed."""

from planner.readers.types import ReadConfig, canonical

__all__ = ["ReadConfig", "canonical"]
