"""The `plan` command: composition root, the only package that may import probes, search and reports (late)."""

from planner.cli.app import main

__all__ = ["main"]
