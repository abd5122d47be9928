"""The whole phantom GPU in one context: mode, lies, answers and hooks, entered once per process."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from planner.memory.workspace import workspace_bytes
from probes.dryrun.kernels import sdpa_of
from probes.dryrun.layout_tracker import resizes
from probes.dryrun.metaops import fused_dropout, quick_checks
from probes.dryrun.workspaces import cublas_workspaces, reductions, temporaries
from probes.patching import replaced
from probes.phantom import cuda, libraries, methods, operators, steps, tritons, world
from probes.phantom.card import Card, TraceOptions
from probes.phantom.claims import claims_answered
from probes.phantom.imports import Hook, Watcher
from probes.phantom.mode import Phantom
from probes.phantom.origins import from_library
from probes.stack.autocast import emulation_installed

DEFAULT = TraceOptions()
EAGER = (
    "torch.compile (or torch.jit) was asked for and the program ran eagerly: compiled code usually keeps less for the "
    "backward, so the figures are an upper bound there"
)


@contextmanager
def phantom_gpu(
    card: Card,
    options: TraceOptions = DEFAULT,
    *,
    expandable_segments: bool = False,
    finished: Callable[[Phantom], None] = lambda phantom: None,
    watcher: Watcher | None = None,
) -> Iterator[Phantom]:
    """Within it this process has `card`, on which nothing is computed.

    Args:
        finished: is called after the last optimizer step wanted, before `steps.Done` is raised.
        watcher: the one that has seen all imports of this process, None where none has.
    """
    torch._C._ensureCUDADeviceGuardSet()  # what C++ asks before it moves a tensor to CUDA; this one does nothing
    phantom = Phantom(card, options, expandable_segments=expandable_segments)
    phantom.temporaries = {**temporaries(), **reductions(card.num_sms, card.threads_per_sm)}
    phantom.handlers.update(operators.HANDLERS)
    phantom.on_op = cublas_workspaces(workspace_bytes(card.capability), phantom.memory.take)
    with ExitStack() as stack:
        for context in (
            emulation_installed(),
            fused_dropout("meta"),
            quick_checks(),
            cuda.answered(phantom),
            _attention(phantom),
            _one_hot(phantom),
            world.fake_world(phantom),
            resizes(phantom.resized),
            _eager(phantom),
            methods.answering(phantom),
            claims_answered(phantom.claims),
            phantom.origins.following(),
            phantom.issued.following(),
            steps.counted(phantom, finished),
            mock.patch.object(torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True),
        ):
            stack.enter_context(context)
        hooks: dict[str, list[Hook]] = {}
        for module_hooks in (libraries.hooks(phantom, stack), tritons.hooks(phantom, stack), world.hooks(stack)):
            for name, hook in module_hooks.items():
                hooks.setdefault(name, []).append(hook)
        if watcher is None:
            watcher = Watcher()
            watcher.watch()
            stack.callback(watcher.stop)
        watcher.absent = lambda package, library: phantom.note(
            f"{library} looked for {package}, which is not installed here, and took its path without it: where "
            f"{package} is installed the program needs another amount"
        )
        watcher.add(hooks, {**libraries.AROUND, **tritons.around(phantom)})
        stack.enter_context(phantom)
        yield phantom
        phantom.memory.keep_peaks()


def _attention(phantom: Phantom) -> AbstractContextManager[None]:
    """Within it SDPA on the phantom GPU runs the kernel that the card would choose."""
    functional = torch.nn.functional
    true = functional.scaled_dot_product_attention
    on_card = sdpa_of(phantom.log)

    @wraps(true)  # Unsloth reads in its docstring what it can do
    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type != "cuda":
            return true(query, *args, **kwargs)
        return on_card(query, *args, **kwargs)

    return replaced([(functional, "scaled_dot_product_attention", scaled_dot_product_attention)])


def _one_hot(phantom: Phantom) -> AbstractContextManager[None]:
    """Within it classes that only the GPU knows are spread evenly: a router of transformers 4, whose experts take the
    tokens that a mask of classes selects, gives each its share, not each expert all of them."""
    functional = torch.nn.functional
    true = functional.one_hot

    @wraps(true)
    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        out = true(tensor, num_classes)
        values = phantom.values
        if num_classes > 0 and tensor.device.type == "cuda" and values.worth_keeping(out.dtype, out.numel()):
            with _disable_current_modes():
                classes = values.real(tensor)
                if classes is None:
                    phantom.origins.record_question(phantom, "which classes a tensor holds (spread evenly)")
                    classes = (torch.arange(tensor.numel()) % num_classes).view(tensor.shape)
                values.keep(out, true(classes, num_classes))
        return out

    return replaced([(functional, "one_hot", one_hot)])


def _eager(phantom: Phantom) -> AbstractContextManager[None]:
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
