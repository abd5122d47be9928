"""Optimizers by the setup's names, as `transformers.Trainer` makes them."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup

_LEARNING_RATE = 1e-5


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """`parameters` in lists whose members lie on one device mesh (None: not distributed), which one multi-tensor kernel
    can take together.

    Source: transformers 5.23 `Trainer.create_optimizer`, `_mixed_mesh_grad_norm`.
    """
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def wide_parameters(model: torch.nn.Module, setup: TrainSetup) -> list[torch.nn.Parameter]:
    """The trained embedding tables, where the setup's stack keeps their 8-bit states in 32 bits."""
    if not setup.trainer.wide_embedding_states:
        return []
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return [weight for table in tables for weight in table.parameters() if weight.requires_grad]


def optimizer_of(model: torch.nn.Module, setup: TrainSetup) -> Any:
    """The setup's optimizer over what is trained of a model, as its stack sets it up."""
    return make_optimizer(setup.optimizer, model.parameters(), wide=wide_parameters(model, setup))


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], *, wide: Iterable[torch.nn.Parameter] = ()
) -> Any:
    """The optimizer called `name` in `planner.options.optimizers` over `parameters`.

    Args:
        wide: parameters whose 8-bit states are kept in 32 bits.

    Source: transformers 5.23 `Trainer.get_optimizer_cls_and_kwargs`, `create_optimizer`.
    """
    trainable: Any = [parameter for parameter in parameters if parameter.requires_grad]
    groups = by_mesh(trainable)
    if len(groups) > 1:
        trainable = [{"params": group} for group in groups]
    row = OPTIMIZERS[name]
    module, _, cls = row.class_path.rpartition(".")
    optimizer = getattr(import_module(module), cls)(trainable, lr=_LEARNING_RATE, **row.arguments)
    if row.bitsandbytes and row.states.eight_bit:
        # as bitsandbytes' `GlobalOptimManager` overrides it, for this optimizer alone: the manager is one per process
        configured, kept = optimizer.get_config, {id(parameter) for parameter in wide}

        def get_config(group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = configured(group_index, index, group)
            if id(optimizer.param_groups[group_index]["params"][index]) in kept:
                config["optim_bits"] = 32
            return config

        optimizer.get_config = get_config
    return optimizer


def with_later_states(optimizer: Any) -> Any:
    """The optimizer, whose states its first step makes, as others' do: Adagrad's are there once it is constructed,
    which nothing follows. Whoever looks at the second step sees no difference."""
    constructed = dict(optimizer.state)

    def make(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, states in constructed.items():
            if parameter.grad is not None:  # on the device: not of a step in the host's memory
                optimizer.state[parameter] = {name: value.clone() for name, value in states.items()}
        constructed.clear()

    optimizer.state.clear()
    if constructed:
        optimizer.register_step_pre_hook(make)
    return optimizer
