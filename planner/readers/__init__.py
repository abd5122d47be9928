"""Existing configs in, setups out: one module per format, the inverse of `planner.exporters`. Nothing is executed."""

from planner.readers.formats import FORMATS
from planner.readers.outside import FileContext
from planner.readers.read import read_config, read_text
from planner.readers.types import ReadConfig, canonical

__all__ = ["FORMATS", "FileContext", "ReadConfig", "canonical", "read_config", "read_text"]
