"""The planner: formula memory and speed models, the decision tree, the space, launch files, and the `plan` command.

Nothing in this package imports torch, transformers or optuna (a test enforces it); `planner.cli` is the composition
root and imports its siblings `probes`, `search` and `reports` late.
"""

__version__ = "0.1.0"
