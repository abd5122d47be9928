"""Optimizers by the setup's names, as `transformers.Trainer` makes them."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from planner.choices.optimizers import OPTIMIZERS

_LEARNING_RATE = 1e-5


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """`parameters` in lists whose members lie on one device mesh (None: not distributed), which one multi-tensor kernel
    can take together.

    Source: transformers 5.23 `Trainer.create_optimizer`, `_mixed_mesh_grad_norm`.
    """
    found: dict[Any, list[torch.nn.Parameter]] = {}
    for one in parameters:
        found.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return list(found.values())


def make_optimizer(name: str, parameters: Iterable[torch.nn.Parameter], *, device_type: str) -> Any:
    """The optimizer called `name` in `planner.choices.optimizers` over `parameters`.

    Source: transformers 5.23 `Trainer.get_optimizer_cls_and_kwargs`.
    """
    trainable: Any = [parameter for parameter in parameters if parameter.requires_grad]
    groups = by_mesh(trainable)
    if len(groups) > 1:
        trainable = [{"params": group} for group in groups]
    row = OPTIMIZERS[name]
    module, _, cls = row.class_path.rpartition(".")
    return getattr(import_module(module), cls)(trainable, lr=_LEARNING_RATE, **row.arguments)
