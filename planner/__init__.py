"""The planner: memory and speed models, the space, the decision tree, files of the tools that train.

Seven floors of rooms, each knowing only those below it (docs/architecture.md); nothing here imports torch,
transformers, optuna, or the packages beside it (tests enforce both).
"""

__version__ = "0.1.0"
