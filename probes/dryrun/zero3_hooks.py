"""ZeRO-3's hooks around every module while the step runs on meta tensors: when a weight is whole, noted in the events.

A weight has a storage of its own from the fetch to the release of the module that uses it, so that a view which
autograd keeps shows. What the notes come to is decided later (`probes.dryrun.zero3_engine`).

Source: DeepSpeed 0.19.8 runtime/zero/parameter_offload.py, linear.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from probes.dryrun.tracker import Tracker
from probes.dryrun.zero3_modules import Modules

MARK = "zero3"
"""How the operator's name of a note begins."""


class Linear(torch.autograd.Function):  # type: ignore[misc]
    """`nn.functional.linear` that saves the weight itself and no view of it, whose release therefore frees it. The
    input is saved whether or not the weight is trained.

    Source: DeepSpeed 0.19.8 runtime/zero/linear.py `LinearFunctionForZeroStage3`, in place for good once the engine or
    `zero.Init` has been used (`memory_efficient_linear`, on by default).
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, bias)
        if rows.dim() == 2 and bias is not None:
            return torch.addmm(bias, rows, weight.t())
        output = rows.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        rows, weight, bias = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.reshape(-1, gradient.shape[-1]).t().matmul(rows.reshape(-1, rows.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(tuple(range(gradient.dim() - 1)))
        return of_rows, of_weight, of_bias


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return Linear.apply(input, weight, bias)


class Hooked:
    """One module's hooks, and the counts that say when its backward begins and ends."""

    def __init__(self, run: "Run", path: str) -> None:
        self.run, self.path = run, path
        self.to_come = 0  # outputs whose gradient may come
        self.inputs_left = 0

    def before_forward(self, module: Any, args: Any) -> None:
        self.run.stack.append(self.path)
        self.run.fetch(self.path, forward=True)

    def watch_inputs(self, module: Any, args: Any) -> Any:
        self.inputs_left = 0
        return _through(_AfterBackward, self, args)

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        self.run.stack.pop()
        self.run.release(self.path, forward=True)

    def watch_outputs(self, module: Any, args: Any, output: Any) -> Any:
        return _through(_BeforeBackward, self, output)

    def attach(self, module: Any) -> list[Any]:
        return [
            module.register_forward_pre_hook(self.before_forward),
            module.register_forward_hook(self.after_forward),
            module.register_forward_hook(self.watch_outputs),
            module.register_forward_pre_hook(self.watch_inputs),
        ]


class _BeforeBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, hooked: Hooked) -> torch.Tensor:
        ctx.hooked = hooked
        hooked.to_come += 1
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hooked = ctx.hooked
        if hooked.to_come > 0:
            hooked.run.fetch(hooked.path, forward=False)
            hooked.to_come -= 1
        return *gradients, None


class _AfterBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, hooked: Hooked) -> torch.Tensor:
        ctx.hooked = hooked
        if tensor.requires_grad:
            hooked.inputs_left += 1
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hooked = ctx.hooked
        hooked.inputs_left -= 1
        if hooked.inputs_left == 0:
            hooked.run.release(hooked.path, forward=False)
        return *gradients, None


def _through(function: Any, hooked: Hooked, value: Any) -> Any:
    """`value` with every tensor in it passed through an autograd function."""
    if isinstance(value, torch.Tensor):
        return function.apply(value, hooked)
    if isinstance(value, tuple | list):
        parts = [_through(function, hooked, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _through(function, hooked, value[key])
    return value


class _Watched(dict[str, Any]):
    """A module's parameters; reading one that is not gathered, in another module's forward, tells the run."""

    def __init__(self, plain: dict[str, Any], told: Callable[[Any], None]) -> None:
        super().__init__(plain)
        self._told = told

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if found is not None:
            self._told(found)
        return found


class Run:
    """The hooks' side: which weights have a storage while the step runs, and the notes of it in the events."""

    def __init__(self, tracker: Tracker, model: Any, found: Modules) -> None:
        self.tracker, self.model, self.found = tracker, model, found
        self.stack: list[str] = []
        self.in_forward = self.in_backward = False
        self.tensors = dict(model.named_parameters())
        self.coordinator = found.coordinator(_Storages(self), None)

    def note(self, kind: str, name: str = "", other: str = "") -> None:
        self.tracker.release(self.tracker.allocate(0, self._label(kind, name, other)))

    def _label(self, kind: str, name: str, other: str = "") -> str:
        layer = "" if self.tracker.layer is None else str(self.tracker.layer)
        return f"{MARK}|{kind}|{layer}|{name}|{other}"

    # The engine's hooks

    def begins(self, module: Any, args: Any) -> None:
        self.in_forward = True
        self.note("start")
        self.coordinator.start()

    def fetch(self, path: str, *, forward: bool) -> None:
        recomputed = forward and torch._C._current_graph_task_id() != -1
        if not forward and not self.in_backward:
            self.in_backward, self.in_forward = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self.note("recompute" if recomputed else "fetch" if forward else "fetch-back", path)
        self.coordinator.fetch(path, forward=forward, recomputed=recomputed)

    def release(self, path: str, *, forward: bool) -> None:
        self.note("release" if forward else "release-back", path)
        self.coordinator.release(path, forward=forward)

    def reads(self, name: str, parameter: Any) -> None:
        """A parameter is read, wherever."""
        if self.in_forward and self.stack and name not in self.coordinator.whole:
            self.note("adopt", self.stack[-1], name)
            self.coordinator.adopt(self.stack[-1], name)

    def _backward_ends(self) -> None:
        self.in_backward = False
        self.note("end")
        self.coordinator.end_backward()

    def before_step(self) -> None:
        self.stack.clear()
        self.coordinator.release_all()

    def gather(self, name: str) -> None:
        one = self.found.parameters[name]
        with _disable_current_modes():
            whole = torch.empty(one.shape, dtype=one.dtype, device="meta")
        self.tracker.track(whole, self._label("use", name))
        self.tensors[name].data = whole

    def cut(self, name: str) -> None:
        one = self.found.parameters[name]
        with _disable_current_modes():
            self.tensors[name].data = torch.empty(0, dtype=one.dtype, device="meta")


@dataclass(frozen=True)
class _Storages:
    """See `probes.dryrun.zero_gather.Store`: a storage for every use of a weight, made as soon as it is asked for."""

    run: Run

    def begin(self, names: list[str]) -> None:
        """Nothing: it arrives at once."""

    def finish(self, names: list[str], token: Any) -> None:
        for name in names:
            self.run.gather(name)

    def done(self, token: Any) -> None:
        """Nothing: no buffer."""

    def release(self, name: str) -> None:
        self.run.cut(name)


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Within it, a weight that is read outside its own module's call (a head by a fused loss, experts by an adapter) is
    gathered for the module that reads it.

    Source: DeepSpeed 0.19.8 parameter_offload.py `ZeROOrderedDict`; TRL 1.16 `maybe_gather_lm_head_ctx`.
    """
    names = {one: name for name, one in run.tensors.items()}

    def told(one: Any) -> None:
        run.reads(names[one], one)

    plain = [(module, module._parameters) for module in run.model.modules()]
    for module, parameters in plain:
        module.__dict__["_parameters"] = _Watched(parameters, told)
    try:
        yield
    finally:
        for module, parameters in plain:
            module.__dict__["_parameters"] = parameters
