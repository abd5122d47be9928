"""Triton kernels: a launch does nothing, the libraries' own Python around it allocates what it would."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from probes.patching import replaced
from probes.phantom.card import Card
from probes.phantom.cuda import properties
from probes.phantom.imports import Context, Hook
from probes.phantom.mode import Phantom


def _driver(card: Card) -> SimpleNamespace:
    described = properties(card)
    major, minor = card.capability
    device_properties = {
        "multiprocessor_count": described.multi_processor_count,
        "max_shared_mem": described.shared_memory_per_block_optin,
        "max_num_regs": described.regs_per_multiprocessor,
        "warpSize": 32,
        "sm_clock_rate": 1_500_000,
        "mem_clock_rate": 10_000_000,
        "mem_bus_width": 384,
    }
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: device_properties),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )


def hooks(phantom: Phantom, stack: ExitStack) -> dict[str, Hook]:
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        _launched(phantom, getattr(self, "__name__", None) or _name(self), *args, **kwargs)

    def launching_nothing(*classes: str) -> Hook:
        return lambda module: stack.enter_context(replaced((getattr(module, name), "run", run) for name in classes))

    def driver(module: ModuleType) -> None:
        active = _driver(phantom.card)
        stack.enter_context(replaced([(module, "driver", SimpleNamespace(active=active, default=active))]))

    return {
        "triton.runtime.jit": launching_nothing("JITFunction"),
        "triton.runtime.autotuner": launching_nothing("Autotuner", "Heuristics"),
        "triton.runtime.driver": driver,
    }


def _launched(phantom: Phantom, name: str, *args: Any, **kwargs: Any) -> None:
    phantom.kernels[name] += 1
    phantom.issued.launch(f"triton.{name}", (*args, *kwargs.values()))


def _name(kernel: Any) -> str:
    inner = getattr(kernel, "fn", None)
    return getattr(inner, "__name__", None) or (_name(inner) if inner is not None else "kernel")


# Without Triton

_TRL = (
    "trl.kernels",
    "trl.kernels.chunked_logprob",
    "trl.kernels.chunked_divergence",
    "trl.kernels.logprob_entropy",
    "trl.trainer.utils",
)


def around(phantom: Phantom) -> dict[str, Context]:
    """TRL's modules that take another, larger path without Triton, imported as if it were there where it is not.

    Only theirs: what else looks for Triton in this process is told the truth.
    """
    if PathFinder.find_spec("triton") is not None:
        return {}

    @contextmanager
    def with_triton() -> Iterator[None]:
        import_module("torch._dynamo")  # looks for Triton, and for its parts, while it is imported
        import transformers.utils

        if not hasattr(transformers.utils, "is_triton_available"):  # transformers 4, whose TRL asks nobody
            yield
            return
        language = _Language("triton.language")
        triton: Any = ModuleType("triton")
        triton.jit, triton.cdiv, triton.language = partial(_Kernel, phantom), lambda a, b: -(-a // b), language
        modules = {"triton": triton, "triton.language": language}
        sys.modules.update(modules)
        try:
            with mock.patch.object(transformers.utils, "is_triton_available", return_value=True):
                yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)

    return dict.fromkeys(_TRL, with_triton)


class _Language(ModuleType):
    """`triton.language`: names in the signatures of kernels, which never run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Kernel:
    """A kernel whose launch does nothing."""

    def __init__(self, phantom: Phantom, function: Any) -> None:
        self._launch = partial(_launched, phantom, function.__name__)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch
