"""Optimizers by the setup's names, as `transformers.Trainer` makes them."""

from collections.abc import Iterable
from typing import Any

import torch

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
    """The optimizer called `name` in `planner.setup.OPTIMIZERS` over `parameters`.

    `adamw` is PyTorch's default, which chooses its multi-tensor (foreach) form on CUDA; meta and CPU are told to do the
    same, because they would loop otherwise.

    Source: transformers 5.23 `Trainer.get_optimizer_cls_and_kwargs`.
    """
    trainable: Any = [parameter for parameter in parameters if parameter.requires_grad]
    groups = by_mesh(trainable)
    if len(groups) > 1:
        trainable = [{"params": group} for group in groups]
    if name in ("adamw", "adamw-fused"):
        fused = name == "adamw-fused"
        return torch.optim.AdamW(
            trainable, lr=_LEARNING_RATE, weight_decay=0.0, fused=fused or None, foreach=None if fused else True
        )
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=_LEARNING_RATE, foreach=True)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trainable, lr=_LEARNING_RATE, scale_parameter=False, relative_step=False)
    import bitsandbytes as bnb

    classes = {
        "adamw-8bit": bnb.optim.AdamW8bit,
        "paged-adamw-8bit": bnb.optim.PagedAdamW8bit,
        "paged-adamw-32bit": bnb.optim.PagedAdamW32bit,
        "lion-8bit": bnb.optim.Lion8bit,
    }
    if name not in classes:
        raise ValueError(f"unknown optimizer {name!r}")
    return classes[name](trainable, lr=_LEARNING_RATE)
