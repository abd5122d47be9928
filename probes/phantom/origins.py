"""Whose bytes they are: the phase, the module and the line of the user's program behind every allocation."""

import os
import sys
import sysconfig
import weakref
from bisect import bisect_right
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from planner.planning.trace_result import Refusal
from probes.patching import replaced

_HERE = str(Path(__file__).parent.parent.parent)
_LIBRARIES = tuple(
    {
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        os.path.join(_HERE, "probes"),
        os.path.join(_HERE, "planner"),
    }
)
_TORCH = f"-packages{os.sep}torch{os.sep}"
_MARKS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen", "<string>", "<attrs", "<eval")


class Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Origin:
    """Where an allocation came from.

    Attributes:
        module: path of the module that was running, "" outside all.
        code: the innermost function that is none of PyTorch's or Python's: the program's or a library's.
    """

    __slots__ = ("code", "line", "module", "op", "phase", "size_bytes")

    def __init__(self, origins: "Origins", op: str, size_bytes: int) -> None:
        self.phase = origins.phase
        self.module = origins.module
        self.line, self.code = _running()
        self.op = op
        self.size_bytes = size_bytes


class Origins:
    """What is running now, and where every allocation came from.

    Attributes:
        by_allocation: allocation -> origin.
        owners: allocation -> (category, name) of parameters, gradients and optimizer states.
        refused: the first request that the card refused.
        num_forwards: calls of outermost modules in training mode.
        stepping: above zero while an optimizer steps; loading: while a model is loaded or goes to a device.
        evaluating: whether the outermost module that ran last is the trained one out of its training.
        models: outermost modules that ran, as weak references.
        idle_checkpointing: whether it trained in evaluation mode, where transformers' checkpointing does nothing.
        questions: what the program asked that only a GPU could answer -> how often.
    """

    def __init__(self) -> None:
        self.by_allocation: dict[int, Origin] = {}
        self.owners: dict[int, tuple[str, str]] = {}
        self.refused: Refusal | None = None
        self.questions: dict[tuple[str, Line | None], int] = {}
        self._modules: list[str] = []
        self._began: list[int] = []
        self._ran: list[str] = []
        self._names: dict[int, tuple[Any, str]] = {}
        self._parameters: dict[int, str] = {}
        self.stepping = self.loading = 0
        self.num_forwards = 0
        self.evaluating = False
        self.idle_checkpointing = False
        self._trained: set[int] = set()
        self.models: dict[int, weakref.ref[Any]] = {}

    @property
    def phase(self) -> str:
        """load, forward, backward, step or evaluation."""
        if self.stepping:
            return "step"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if self.loading:
            return "load"
        if self.evaluating:
            return "evaluation"
        if self._modules or self.num_forwards:
            return "forward"
        return "load"

    @property
    def module(self) -> str:
        """Path of the module that is running, in the backward that of the module whose gradient is computed."""
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if node is None:
            return ""
        at = bisect_right(self._began, node._sequence_nr()) - 1
        return self._ran[at] if at >= 0 else ""

    def _runs(self) -> None:
        """The innermost running module is another one: autograd numbers the nodes of the graph as they are made."""
        self._began.append(torch._C._autograd._get_sequence_nr())
        self._ran.append(self._modules[-1] if self._modules else "")

    def record_question(self, phantom: Any, what: str) -> None:
        key = (what, user_line())
        self.questions[key] = self.questions.get(key, 0) + 1

    def out_of_memory(self, size_bytes: int, op: str, allocated_bytes: int) -> None:
        if self.refused is None:
            self.refused = Refusal(
                requested_bytes=size_bytes,
                allocated_bytes=allocated_bytes,
                line=str(user_line() or ""),
                module=self.module,
                phase=self.phase,
                op=op,
            )

    def set_owner(self, number: int | None, category: str, name: str) -> None:
        if number is not None:
            self.owners.setdefault(number, (category, name))

    def parameter_name(self, parameter: Any) -> str:
        return self._parameters.get(id(parameter), "")

    # Modules

    def _name(self, module: Any) -> str:
        cached = self._names.get(id(module))
        if cached is not None and cached[0]() is module:
            return cached[1]
        prefix = self.module
        for path, submodule in module.named_modules():
            entry = self._names.get(id(submodule))
            if entry is None or entry[0]() is not submodule:
                full = ".".join(filter(None, (prefix, path))) or type(submodule).__name__
                self._names[id(submodule)] = (weakref.ref(submodule), full)
        for path, parameter in module.named_parameters():
            self._parameters.setdefault(id(parameter), ".".join(filter(None, (prefix, path))))
        return self._names[id(module)][1]

    def _outermost(self, module: Any) -> None:
        """A whole model begins a forward: of the training, or of an evaluation of what trains (no other model's, such
        as a reference's)."""
        self.models[id(module)] = self._names[id(module)][0]
        if module.training or (torch.is_grad_enabled() and not self.num_forwards):
            self.num_forwards += 1
            self._trained.add(id(module))
        learns = not self._trained or id(module) in self._trained
        self.evaluating = not module.training and not torch.is_grad_enabled() and learns
        checkpoints = getattr(module, "is_gradient_checkpointing", False)
        if not module.training and torch.is_grad_enabled() and checkpoints:
            self.idle_checkpointing = True

    def following(self) -> AbstractContextManager[None]:
        """Within it the running module and the optimizer's step are known."""
        call, apply = torch.nn.Module._call_impl, torch.nn.Module._apply
        stack = self._modules

        def _call_impl(module: Any, *args: Any, **kwargs: Any) -> Any:
            depth = len(stack)
            stack.append(self._name(module))
            self._runs()
            if not depth:
                self._outermost(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                del stack[depth:]
                self._runs()

        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            with self.loads():
                return apply(module, *args, **kwargs)

        return replaced([(torch.nn.Module, "_call_impl", _call_impl), (torch.nn.Module, "_apply", _apply)])

    def loads(self) -> AbstractContextManager[Any]:
        """Within it a model is loaded, or goes to a device, whatever ran before."""
        return mock.patch.object(self, "loading", self.loading + 1)


@cache
def from_library(file: str) -> bool:
    """Whether a file belongs to Python, an installed library or this project."""
    return file.startswith(("<", *_LIBRARIES)) or any(mark in file for mark in _MARKS)


def user_line() -> Line | None:
    """The innermost running line that belongs to no library, None where only libraries run."""
    return _running()[0]


@cache
def _below(file: str) -> bool:
    """Whether a file is PyTorch's, Python's or this project's: what libraries that train stand on."""
    others = any(mark in file for mark in _MARKS[:2]) and _TORCH not in file
    return from_library(file) and not others


def _running() -> tuple[Line | None, Any]:
    """`user_line`, and the code of the innermost function that is none of PyTorch's, Python's or ours."""
    frame: Any = sys._getframe(2)
    code: Any = None
    while frame is not None:
        file = frame.f_code.co_filename
        if code is None and not _below(file):
            code = frame.f_code
        if not from_library(file):
            return Line(file, frame.f_lineno), code
        frame = frame.f_back
    return None, code


def code_name(code: Any) -> str:
    """A function by its file, from the library's folder on, and name: the same in every environment."""
    if code is None:
        return "(PyTorch)"
    file = code.co_filename
    for mark in _MARKS[:2]:
        file = file.rpartition(mark)[2]
    return f"{file}: {getattr(code, 'co_qualname', code.co_name)}"
