"""Existing configs in, setups out: one module per format, the inverse of `planner.frameworks.exporters`. Nothing is
executed."""

from planner.frameworks.readers.formats import FORMATS
from planner.frameworks.readers.read import read_config, read_text
from planner.frameworks.readers.types import ReadConfig, canonical
from planner.frameworks.readers.values import FileContext

__all__ = ["FORMATS", "FileContext", "ReadConfig", "canonical", "read_config", "read_text"]
