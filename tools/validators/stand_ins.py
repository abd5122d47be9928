"""Modules that torchtitan imports on the way to its config and never calls for it, where they are not installed."""

import sys
from types import ModuleType

MODULES = (
    ("torchtitan.models.moe.kernels", "generate_permute_indices"),  # Triton's: a GPU machine has it
    ("torch.utils.tensorboard", "SummaryWriter"),  # writes logs
)


def install() -> None:
    """Puts empty modules in their places."""
    for name, attribute in MODULES:
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], attribute, None)
