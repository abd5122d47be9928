"""Optimizer steps: they are counted, and the program ends after as many as were asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from probes.phantom.mode import Phantom

_WITHOUT_PARTS = (torch.Tensor, torch.nn.Parameter)


class Done(BaseException):
    """Enough steps ran. No `Exception`, so that programs do not swallow it."""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory a tensor is: of a DTensor this rank's, of another wrapper all that it holds."""
    if type(tensor) in _WITHOUT_PARTS:
        return [tensor]
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return parts_of(local)
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [part for name in names for part in parts_of(getattr(tensor, name))] or [tensor]


@contextmanager
def counted(phantom: Phantom, finished: Callable[[Phantom], None]) -> Iterator[None]:
    """Within it every optimizer's step is a phase of its own, and `Done` is raised after the last one wanted."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    origins, num_steps = phantom.origins, phantom.options.num_steps

    def set_owner_of(tensor: torch.Tensor, category: str, name: str) -> None:
        for part in parts_of(tensor):
            origins.set_owner(phantom.number_of(part), category, name)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    set_owner_of(parameter.grad, "gradients", origins.parameter_name(parameter))
                if parameter.requires_grad:  # a loop may hand over all of the model's, LoRA's frozen base among them
                    set_owner_of(parameter, "trained weights", origins.parameter_name(parameter))
        origins.stepping += 1
        phantom.issued.step_begins()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        origins.stepping = 0
        phantom.issued.step_ends(id(optimizer))
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    set_owner_of(value, "optimizer states", str(name))
        phantom.num_steps[id(optimizer)] = phantom.num_steps.get(id(optimizer), 0) + 1
        if num_steps is not None and phantom.num_steps[id(optimizer)] >= num_steps:
            finished(phantom)
            raise Done

    with register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after):
        yield
