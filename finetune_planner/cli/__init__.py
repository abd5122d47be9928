"""The `plan` command: flags and words over the use cases of `finetune_planner.app`."""

from finetune_planner.cli.app import main

__all__ = ["main"]
