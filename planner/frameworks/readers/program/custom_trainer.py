"""What a trainer class of the program's own does in place of its base's step, by the code of its methods."""

import ast
import re
from collections.abc import Iterator, Mapping

from planner.frameworks.readers.program.values import CallResult, Function

STEPS = ("compute_loss", "training_step", "_inner_training_loop", "get_batch_loss_metrics")
"""Methods that make the step."""
WORDS = {
    "distillation": ("teacher", "distill", "student"),
    "reinforcement learning": ("reward", "advantage", "critic", "value_head", "ppo", "grpo", "rollout"),
    "preferences": ("ref_model", "reference_model", "rejected", "chosen"),
    "embedding": ("contrastive", "info_nce", "infonce", "triplet"),
}
"""What a step trains -> parts of the names in it."""


def other_objective(trainer: CallResult, trainers: Mapping[str, str]) -> tuple[str, str]:
    """What a trainer's own step trains, and the name that says so ("" twice where nothing does).

    `trainers` holds classes of trainers of other objectives: one that the class holds or makes decides.
    """
    for method in _methods(trainer):
        for name in _names(method.node):
            if name in trainers:
                return trainers[name], name
    for method in _steps(trainer):
        for name in _names(method.node):
            for objective, parts in WORDS.items():
                if any(re.search(rf"(?:^|_){part}", name.lower()) for part in parts):
                    return objective, name
    return "", ""


def forwards(trainer: CallResult) -> int:
    """Calls of a model in the largest of its own steps; 0 where it has none."""
    return max((_calls(method.node) for method in _steps(trainer)), default=0)


def _methods(trainer: CallResult) -> Iterator[Function]:
    attributes = trainer.made_by.attributes if trainer.made_by is not None else {}
    yield from (value for value in attributes.values() if isinstance(value, Function))


def _steps(trainer: CallResult) -> Iterator[Function]:
    yield from (method for method in _methods(trainer) if getattr(method.node, "name", "") in STEPS)


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def _calls(node: ast.AST) -> int:
    """Calls of something that is named as a model: `model(...)`, `self.model(...)`, `unwrapped_model(...)`."""
    called = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    names = (function.id if isinstance(function, ast.Name) else getattr(function, "attr", "") for function in called)
    return sum(name == "model" or name.endswith("_model") for name in names)
