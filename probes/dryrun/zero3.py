"""A rank of a DeepSpeed ZeRO-3 job: the real step on meta tensors, the engine's hooks, gathers and buffers modelled.

Two parts. While the step runs, `Zero3World` hooks every module as the engine does: a weight has a storage of its own
from the fetch to the release of the module that uses it (so that a view which autograd keeps shows), and every fetch
and release is noted in the events. Afterwards `_Engine` walks over the full model's events, decides with
`probes.dryrun.zero_gather` what is really gathered and when, and puts that memory in, with the partitions, the reduce
bucket and the step. Deciding on the full model's events makes a truncated run exact: how far the engine gathers ahead
and what it keeps depends on the depth.

Source: DeepSpeed 0.19.8 runtime/zero/stage3.py, parameter_offload.py, partition_parameters.py, linear.py, with the
settings that the launch files write (planner/exporters/deepspeed.py); compared with the engine itself on two CPU ranks
(benchmarks/zero_dry_run_check.py).

Left out: the Trainer's second parameter group (norms and biases), whose partition is a few kilobytes; the order in
which the engine's side streams give memory back to the allocator.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from planner.parallel.zero import (
    NORM_CHUNK_ELEMENTS,
    ZERO3_LIVE_ELEMENTS,
    ZERO3_PERSISTENT_ELEMENTS,
    ZERO3_PREFETCH_ELEMENTS,
    ZERO3_REUSE_ELEMENTS,
    ZERO3_SUB_GROUP_ELEMENTS,
    zero_bucket_elements,
)
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, EmptyCache, Phase
from probes.dryrun.splice import Block, splice
from probes.dryrun.trace import STEPS, Trace, load
from probes.dryrun.tracker import Tracker
from probes.dryrun.zero_events import (
    BUCKET,
    GRADIENTS,
    NORM_BYTES,
    EventWriter,
    MicroBatches,
    OptimizerStep,
    cast_to_half,
    optimizer_steps,
)
from probes.dryrun.zero_gather import Coordinator, Limits, Store, Weight
from probes.stack.spread import Spread

GATHERED, GATHERING, SCATTERING = "gathered weights", "all-gather buffer", "reduce-scatter buffer"
ON_ITS_WAY = "ZeRO gradient on its way to the host"
LIMITS = Limits(prefetch=ZERO3_PREFETCH_ELEMENTS, reuse=ZERO3_REUSE_ELEMENTS, live=ZERO3_LIVE_ELEMENTS)
_MARK = "zero3"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """A parameter before it was cut."""

    num: int
    shape: torch.Size
    dtype: torch.dtype
    trained: bool

    def weight(self) -> Weight:
        return Weight(num=self.num, persistent=self.num <= ZERO3_PERSISTENT_ELEMENTS, trained=self.trained)


LEAVES = frozenset(
    {
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    }
)
"""Modules that DeepSpeed gathers as one. Source: DeepSpeed 0.19.8 runtime/zero/leaf_module_config.py."""


@dataclass(kw_only=True)
class _Modules:
    """What a model is made of, by name.

    Attributes:
        parameters: every one, in order.
        modules: which of them every hooked module has itself; of a leaf, with all below it.
        within: which of them every hooked module has with all below it.
    """

    parameters: dict[str, _Parameter] = field(default_factory=dict)
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    within: dict[str, tuple[str, ...]] = field(default_factory=dict)
    leaves: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "_Modules":
        names = {one: name for name, one in model.named_parameters()}
        parameters = {
            name: _Parameter(num=one.numel(), shape=one.shape, dtype=one.dtype, trained=one.requires_grad)
            for one, name in names.items()
        }
        found = cls(parameters=parameters)
        for path, module in model.named_modules():
            if any(path.startswith(f"{leaf}.") for leaf in found.leaves):
                continue
            if f"{type(module).__module__}.{type(module).__qualname__}" in LEAVES:
                found.leaves[path] = None
            own = module.parameters(recurse=path in found.leaves)
            found.modules[path] = tuple(dict.fromkeys(names[one] for one in own))
            found.within[path] = tuple(dict.fromkeys(names[one] for one in module.parameters()))
        return found

    def coordinator(self, store: Store, limits: Limits | None) -> Coordinator:
        """Of these modules."""
        return Coordinator(
            weights={name: one.weight() for name, one in self.parameters.items()},
            modules=dict(self.modules),
            store=store,
            limits=limits,
            leaves=frozenset(self.leaves),
            within=self.within if self.leaves else {},
        )

    def repeated(self, trace: Trace, block: Block | None) -> "_Modules":
        """The full model's: what belongs to the block's layers once per copy."""
        if block is None:
            return self

        def deeper(own: tuple[str, ...], shift: int) -> tuple[str, ...]:
            return tuple(_deeper(trace, name, shift) for name in own)

        return _Modules(
            parameters=_repeated(self.parameters, trace, block, lambda one, shift: one),
            modules=_repeated(self.modules, trace, block, deeper),
            within=self._within(trace, block),
            leaves=_repeated(self.leaves, trace, block, lambda one, shift: one),
        )

    def _within(self, trace: Trace, block: Block) -> dict[str, tuple[str, ...]]:
        """Of the full model: what lies above the layers has all of their copies."""
        if not self.leaves:
            return {}
        full: dict[str, tuple[str, ...]] = {}
        for path, names in self.within.items():
            layer = _layer(trace, path)
            if layer is not None:
                for shift in block.shifts(layer):
                    full[_deeper(trace, path, shift)] = tuple(_deeper(trace, name, shift) for name in names)
                continue
            full[path] = tuple(
                _deeper(trace, name, shift)
                for name in names
                for shift in ((0,) if _layer(trace, name) is None else block.shifts(_layer(trace, name)))
            )
        return full


def _repeated(found: dict[str, T], trace: Trace, block: Block, moved: Callable[[T, int], T]) -> dict[str, T]:
    full: dict[str, T] = {}
    pending: list[tuple[str, T]] = []

    def flush() -> None:
        for shift in block.shifts(block.start) if pending else ():
            full.update((_deeper(trace, name, shift), moved(one, shift)) for name, one in pending)
        pending.clear()

    for name, one in found.items():
        layer = _layer(trace, name)
        if layer is not None and block.start <= layer < block.end:
            pending.append((name, one))
            continue
        flush()
        (shift,) = block.shifts(layer)
        full[_deeper(trace, name, shift)] = moved(one, shift)
    flush()
    return full


def _layer(trace: Trace, name: str) -> int | None:
    return trace.layer_of(name)


def _deeper(trace: Trace, name: str, shift: int) -> str:
    """The name of the same thing `shift` layers deeper; outside the layers the name itself."""
    layer = _layer(trace, name)
    if layer is None or not shift:
        return name
    _, dot, rest = name[len(trace.layer_prefix) :].partition(".")
    return f"{trace.layer_prefix}{layer + shift}{dot}{rest}"


class _Linear(torch.autograd.Function):  # type: ignore[misc]
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


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Linear.apply(input, weight, bias)


class _Hooked:
    """One module's hooks, and the counts that say when its backward begins and ends."""

    def __init__(self, run: "_Run", path: str) -> None:
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
    def forward(ctx: Any, tensor: torch.Tensor, hooked: _Hooked) -> torch.Tensor:
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
    def forward(ctx: Any, tensor: torch.Tensor, hooked: _Hooked) -> torch.Tensor:
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


def _through(function: Any, hooked: _Hooked, value: Any) -> Any:
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


class _Run:
    """The hooks' side: which weights have a storage while the step runs, and the notes of it in the events."""

    def __init__(self, tracker: Tracker, model: Any, found: _Modules) -> None:
        self.tracker, self.model, self.found = tracker, model, found
        self.stack: list[str] = []
        self.in_forward = self.in_backward = False
        self.tensors = dict(model.named_parameters())
        self.coordinator = found.coordinator(_Storages(self), None)

    def note(self, kind: str, name: str = "", other: str = "") -> None:
        self.tracker.release(self.tracker.allocate(0, self._label(kind, name, other)))

    def _label(self, kind: str, name: str, other: str = "") -> str:
        layer = "" if self.tracker.layer is None else str(self.tracker.layer)
        return f"{_MARK}|{kind}|{layer}|{name}|{other}"

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

    run: _Run

    def begin(self, names: list[str]) -> None:
        """Nothing: it arrives at once."""

    def finish(self, names: list[str], token: Any) -> None:
        for name in names:
            self.run.gather(name)

    def done(self, token: Any) -> None:
        """Nothing: no buffer."""

    def release(self, name: str) -> None:
        self.run.cut(name)


class Zero3World:
    """A job of ZeRO-3 ranks."""

    tracker = Tracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._found = _Modules()

    @contextmanager
    def prepared(
        self, tracker: Tracker, model: Any, setup: TrainSetup
    ) -> Iterator[tuple[Spread, dict[int, tuple[str, str]]]]:
        """See `probes.dryrun.trace.World`. Weights are cut before they are counted: those that stay frozen each into a
        part of their own, the trained ones into one flat tensor (`_Engine`)."""
        cast_to_half(model, setup)
        self._found = found = _Modules.of(model)
        run = _Run(tracker, model, found)
        parts = []
        for name, tensor in run.tensors.items():
            one = found.parameters[name]
            here = 0 if one.trained or (setup.offload == "parameters" and not one.weight().persistent) else one.num
            tensor.data = torch.empty(-(-here // setup.shards), dtype=one.dtype, device="meta")
            parts.append(tensor.data)
        owners = load(tracker, model)
        for name in run.tensors:
            run.cut(name)

        def arrived(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                number = tracker.identity(parameter.grad)
                if number is not None:
                    owners[number] = ("gradients", name)
                parameter.grad = None

        def arrived_together(names: list[str], *_: Any) -> None:
            """A leaf's gradients wait for all of them."""
            for name in names:
                arrived(name, run.tensors[name])

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.nn.functional, "linear", _linear))
            stack.enter_context(_watched(run))
            hooks = [model.register_forward_pre_hook(run.begins)]
            together: set[str] = set()
            for path in found.modules:
                module = model.get_submodule(path)
                hooks += _Hooked(run, path).attach(module)
                if path in found.leaves:
                    own = [name for name in found.modules[path] if found.parameters[name].trained]
                    together.update(own)
                    hooks.append(module.register_full_backward_hook(partial(arrived_together, own)))
            for name, tensor in run.tensors.items():
                if tensor.requires_grad and name not in together:
                    hooks.append(tensor.register_post_accumulate_grad_hook(partial(arrived, name)))
            for hook in hooks:
                stack.callback(hook.remove)
            yield Spread(module=model, autocast=False, before_step=run.before_step), owners

    def splice(self, trace: Trace, block: Block, setup: TrainSetup) -> Trace:
        """See `probes.dryrun.trace.World`."""
        return splice(trace, block, setup)

    def finish(self, trace: Trace, block: Block | None) -> Trace:
        """The full model's trace with the engine's allocations."""
        return _Engine(trace, block, self._setup, self._found).run()


@contextmanager
def _watched(run: _Run) -> Iterator[None]:
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


class _Engine(EventWriter):
    """Implements `probes.dryrun.zero_gather.Store` with the full model's bytes."""

    def __init__(self, trace: Trace, block: Block | None, setup: TrainSetup, found: _Modules) -> None:
        super().__init__(trace)
        self.block, self.setup = block, setup
        full = found.repeated(trace, block)
        self.parameters = full.parameters
        self.ranks = setup.shards
        self.trained = [one for one in full.parameters.values() if one.trained]
        if not self.trained:
            raise ValueError("nothing is trained")
        self.size = 4 if setup.compute_dtype == "fp32" else 2
        self.own = sum(self._part(one) for one in self.trained)
        self.groups = self._sub_groups()
        self.bucket_elements = zero_bucket_elements(sum(one.num for one in self.trained))
        self.offloaded = setup.offload != "none"
        self.micro = MicroBatches(trace.events)
        self.coordinator = full.coordinator(self, LIMITS)
        self.gathered: dict[str, int] = {}  # the storage that a weight is whole in
        self.leaving: set[int] = set()  # released, but a view of it is still kept
        self.views: Counter[int] = Counter()
        self.uses: dict[int, int] = {}
        self.notes: set[int] = set()
        self.bucket: list[_Parameter] = []
        self.in_bucket = 0
        self.large: list[int] = []
        self.steps: list[list[OptimizerStep]] = []
        if not self.offloaded:
            by_size = {num: optimizer_steps(setup, num, count=STEPS) for num in set(self.groups)}
            self.steps = [[by_size[num][step] for num in self.groups] for step in range(STEPS)]

    def run(self) -> Trace:
        loaded = False
        for event in self.trace.events:
            if isinstance(event, Phase):
                self._phase(event)
                continue
            if isinstance(event, EmptyCache):
                self.events.append(event)
                continue
            origin = self.trace.origins[event.id]
            if isinstance(event, Alloc):
                if not loaded and event.id not in self.trace.owners:
                    loaded = True
                    self._load()
                if origin.op.startswith(_MARK):
                    self._noted(event.id, origin.op, origin.layer)
                    continue
            elif event.id in self.notes:
                continue
            elif event.id in self.uses:
                self._view_dies(self.uses.pop(event.id))
                continue
            else:
                owner = self.trace.owners.get(event.id, ("", ""))
                if owner[0] == "gradients" and self._arrives(event.id, self._by_run_name(owner[1])):
                    continue
            self.events.append(event)
        done = self.written()
        parameter_bytes = sum(
            self.origins[number].size_bytes
            for number, (category, name) in self.owners.items()
            if category in ("weights", "adapters") and (name in self.trace.parameter_names or name == _TRAINED)
        )
        return replace(done, parameter_bytes=parameter_bytes)

    # Sizes

    def _part(self, one: _Parameter) -> int:
        return -(-one.num // self.ranks)

    def _whole_bytes(self, one: _Parameter) -> int:
        return int(self._part(one) * self.ranks * one.dtype.itemsize)

    def _on_host(self, one: _Parameter) -> bool:
        return self.setup.offload == "parameters" and (one.trained or not one.weight().persistent)

    def _sub_groups(self) -> list[int]:
        """Elements of every sub-group of the step: parameters one after another until a group is full."""
        groups, inside = [], 0
        for index, one in enumerate(self.trained):
            inside += self._part(one)
            if index == len(self.trained) - 1 or (
                self.own > ZERO3_SUB_GROUP_ELEMENTS and inside >= ZERO3_SUB_GROUP_ELEMENTS
            ):
                groups.append(inside)
                inside = 0
        return groups

    def _by_run_name(self, name: str) -> _Parameter:
        """A parameter of the run by its name there: all its copies are alike."""
        if self.block is not None:
            (shift, *_) = self.block.shifts(_layer(self.trace, name))
            name = _deeper(self.trace, name, shift)
        return self.parameters[name]

    # The engine's buffers

    def _load(self) -> None:
        category = "weights" if self.setup.method == "full" else "adapters"
        if self.setup.offload != "parameters":
            self.hold(_TRAINED, self.size * self.own, (category, _TRAINED))
        if not self.offloaded:
            if self.size != 4:
                for index, num in enumerate(self.groups):
                    self.hold(f"masters {index}", 4 * num, ("optimizer", "fp32 masters"))
            self.pass_by("load", 4 * max(self.groups))  # `initialize_optimizer_states`
        self.hold(BUCKET, self.size * self.bucket_elements)
        if not self.offloaded:
            self.hold(GRADIENTS, self.size * self.own)

    def _phase(self, event: Phase) -> None:
        name = event.name.partition("/")[0]
        self.micro.see(event)
        self.phase = name
        self.events.append(event)
        if name == "step":
            self._step()

    def _arrives(self, number: int, one: _Parameter) -> bool:
        """A gradient goes into the bucket, and its own storage dies. One that is larger than the bucket is reduced by
        itself: whether it stays until then."""
        if self.bucket and self.in_bucket + one.num > self.bucket_elements:
            self._reduce()
        self.bucket.append(one)
        self.in_bucket += one.num
        if one.num <= self.bucket_elements:
            return False
        self.large.append(number)
        return True

    def _reduce(self) -> None:
        """The ranks' parts of the gradients are laid side by side in a new tensor, which is reduced and cut; this
        rank's parts go to their places. A single gradient that needs no padding is reduced where it is."""
        copy = None
        if len(self.bucket) > 1 or (self.bucket and self.bucket[0].num % self.ranks):
            copy = self.allocate(SCATTERING, self.size * sum(self._part(one) * self.ranks for one in self.bucket))
        if self.offloaded:
            for one in self.bucket:
                here = self.allocate(ON_ITS_WAY, self.size * self._part(one))
                if self.micro.is_last:
                    self.pass_by(ON_ITS_WAY, NORM_BYTES * min(NORM_CHUNK_ELEMENTS, self._part(one)))
                    self.pass_by(ON_ITS_WAY, 4 * self._part(one))
                self.free(here)
        if copy is not None:
            self.free(copy)
        while self.large:
            self.free(self.large.pop())
        self.bucket.clear()
        self.in_bucket = 0

    def _step(self) -> None:
        """Everything in parts again; the norms one by one; the sub-groups one after another; and the weights that stay
        gathered are."""
        self.coordinator.release_all()
        if not self.offloaded:
            self.norms([self._part(one) for one in self.trained])
            for num, run in zip(self.groups, self.steps.pop(0), strict=True):
                gradient = self.flat_fp32(num, self.size)
                self.play(run)
                self.free(gradient)
        self.coordinator.hold(name for name, one in self.coordinator.weights.items() if one.persistent)

    # Notes of the hooks

    def _noted(self, number: int, op: str, layer: int | None) -> None:
        _, kind, run_layer, name, other = op.split("|")
        name, other = (self._full_name(one, run_layer, layer) for one in (name, other))
        if kind == "use":
            storage = self.gathered[name]
            self.uses[number] = storage
            self.views[storage] += 1
            return
        self.notes.add(number)
        coordinator = self.coordinator
        if kind == "start":
            coordinator.start()
        elif kind == "end":
            coordinator.end_backward()
            if self.bucket:
                self._reduce()
        elif kind == "adopt":
            coordinator.adopt(name, other)
        elif kind.startswith("release"):
            coordinator.release(name, forward=kind == "release")
        else:
            coordinator.fetch(name, forward=kind != "fetch-back", recomputed=kind == "recompute")

    def _full_name(self, name: str, run_layer: str, layer: int | None) -> str:
        """A name of the run, noted in a segment of the run's layer `run_layer` that stands for `layer`, in the full
        model."""
        own = _layer(self.trace, name)
        if own is None or self.block is None:
            return name
        if layer is None:
            (shift,) = self.block.shifts(
                own
            )  # outside the layers' segments only the first and the last layers are told
        else:
            shift = layer - int(run_layer)
        return _deeper(self.trace, name, shift)

    def _view_dies(self, storage: int) -> None:
        self.views[storage] -= 1
        if not self.views[storage] and storage in self.leaving:
            self.leaving.discard(storage)
            self.free(storage)

    # What a gather allocates

    def begin(self, names: list[str]) -> list[int]:
        parameters = [self.parameters[name] for name in names]
        if len(names) == 1:
            (one,) = parameters
            self.gathered[names[0]] = self.allocate(GATHERED, self._whole_bytes(one))
            return [self.allocate(GATHERING, self._part(one) * one.dtype.itemsize)] if self._on_host(one) else []
        buffers: dict[torch.dtype, int] = Counter()
        for one in parameters:
            buffers[one.dtype] += self._whole_bytes(one)
        token = []
        for dtype, size_bytes in buffers.items():
            token.append(self.allocate(GATHERING, size_bytes))
            copies = [
                self.allocate(GATHERING, self._part(one) * dtype.itemsize)
                for one in parameters
                if one.dtype is dtype and self._on_host(one)
            ]
            for copy in copies:
                self.free(copy)
        return token

    def finish(self, names: list[str], token: list[int]) -> None:
        if len(names) == 1:
            self.done(token)
            return
        for name in names:
            one = self.parameters[name]
            self.gathered[name] = self.allocate(GATHERED, one.num * one.dtype.itemsize)

    def done(self, token: list[int]) -> None:
        while token:
            self.free(token.pop())

    def release(self, name: str) -> None:
        storage = self.gathered.pop(name)
        if self.views[storage]:
            self.leaving.add(storage)
        else:
            self.free(storage)


_TRAINED = "trained"
