"""`torch.compile` and `torch.jit.script` on the phantom GPU: the program runs eagerly, and it is said."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from probes.patching import replaced
from probes.phantom.mode import Phantom
from probes.phantom.origins import from_library

EAGER = (
    "torch.compile (or torch.jit) was asked for and the program ran eagerly: compiled code usually keeps less for the "
    "backward, so the figures are an upper bound there"
)


def eager(phantom: Phantom) -> AbstractContextManager[None]:
    """Within it nothing is compiled."""

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_nothing(function, **options)
        if not _of_a_library(model):
            phantom.note(EAGER)
        return model

    def compile_module(self: Any, *args: Any, **kwargs: Any) -> None:
        phantom.note(EAGER)

    return replaced(
        [
            (torch.jit, "script", lambda function, *args, **kwargs: compile_nothing(function)),
            (torch, "compile", compile_nothing),
            (torch.nn.Module, "compile", compile_module),
        ]
    )


def _of_a_library(model: Any) -> bool:
    """Whether a decorator of an installed library asks; those are small functions and classes."""
    function = vars(model).get("__init__") if isinstance(model, type) else model
    code = getattr(function, "__code__", None)
    return code is not None and from_library(code.co_filename)
