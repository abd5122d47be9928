"""One rank's step of a multi-GPU job, traced: PyTorch's own DDP and FSDP2 around the same model and step as on one GPU.

Rank 0 is traced: it holds the largest shards (FSDP2 pads the last ranks). What collectives write to are tensors
and counted; NCCL's own buffers are outside PyTorch's allocator.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.fakeworld import fake_world
from probes.dryrun.followed import why_not_traced
from probes.dryrun.splice import Block, Shards, splice
from probes.dryrun.trace import Trace, Trainable, World, load
from probes.dryrun.tracker import Origin, Tracker, local
from probes.stack.spread import Spread, data_mesh, spread_model

BUCKETS = "DDP buckets"
GATHERED = "gathered weights"
GATHERING = "all-gather buffer"
SCATTERING = "reduce-scatter buffer"


class SpreadTracker(Tracker):
    """A tracker that sees through DTensors and follows storages that are resized (FSDP2 frees and fills the same
    unsharded parameter again and again)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        super().__init__(*args, **kwargs)
        self.label = ""
        self.host_phases: frozenset[str] = frozenset()
        self._host: dict[int, Any] = {}
        self._wrap = torch.ops._c10d_functional._wrap_tensor_autograd.default
        self._wrappers = (DTensor, AsyncCollectiveTensor)
        self.subclasses = frozenset({DTensor})  # their operators come again as those of the local tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY and args[0].device.type == "cpu" and args[1].device.type == "meta":
            return args[0]  # DDP reads back the order of its buckets, which the fake group left as it was
        if func is self._wrap and args[0].device.type == "meta":
            return args[0]  # a collective's result that is waited for at its first use: on meta a second tensor
        if func is _TO_COPY and kwargs and kwargs.get("device") == _CPU and args[0].device.type == "meta":
            return self._copied_to_host(args[0])
        if types and self.takes_local(func) and not self.subclasses.isdisjoint(types):
            # the optimizer's own lists: straight to the local tensors, as DTensor's rules would after much looking
            with self:
                args = _laid_out_alike(args)
            args, kwargs = tree_map_only(torch.Tensor, local, (args, kwargs or {}))
            types = ()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def takes_local(self, func: Any) -> bool:
        """Whether an operator on lists of DTensors is run on the local tensors at once."""
        return _changes_list(func)

    def track(self, tensor: torch.Tensor, op: str) -> int | None:
        """As `Tracker.track`, under the present label; a wrapper has no memory of its own, and what lies in the host's
        memory is not counted."""
        if isinstance(tensor, self._wrappers) or self.phase in self.host_phases:
            return None
        if self._host and tensor.untyped_storage()._cdata in self._host:
            return None
        return super().track(tensor, self.label or op)

    def allocate(self, size_bytes: int, op: str) -> int:
        """As `Tracker.allocate`, unless the work is the host's."""
        return _ELSEWHERE if self.phase in self.host_phases else super().allocate(size_bytes, op)

    def release(self, number: int) -> None:
        """As `Tracker.release`."""
        if number != _ELSEWHERE:
            super().release(number)

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Takes `tensor`'s storage to lie in the host's memory as long as it lives: meta tensors do not say where they
        would be."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.pop(key, None)
        if known is not None:
            self.events.append(Free(known[0]))
        self._host[key] = weakref.ref(storage, lambda _: self._host.pop(key, None))

    def _copied_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            copy = torch.empty_like(tensor)
        self.keep_on_host(copy)
        return copy

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Within it, allocations carry this name instead of the operator's."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Within it, `UntypedStorage.resize_` is followed: for the allocator one block dies and another is made."""
        plain = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            done = plain(storage, size)
            if storage.device.type == self.device_type and size != before:
                known = self._alive.pop(storage._cdata, None)
                if known is not None:
                    self.events.append(Free(known[0]))
                if size:
                    self._follow(storage, storage._cdata, size, GATHERED)
            return done

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    @contextmanager
    def following_fsdp(self) -> Iterator[None]:
        """Within it, FSDP2's communication buffers carry their names, its hooks run without the compiler's wrapper
        (which only costs time), and shards in the host's memory are copied to the device before they are gathered."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        gather, reduce = groups.foreach_all_gather, groups.foreach_reduce

        def named_gather(*args: Any, **kwargs: Any) -> Any:
            with self.labelled(GATHERING):
                return gather(*args, **kwargs)

        def named_reduce(*args: Any, **kwargs: Any) -> Any:
            with self.labelled(SCATTERING):
                return reduce(*args, **kwargs)

        replacements: list[tuple[Any, str, Any]] = [
            (groups, "foreach_all_gather", named_gather),
            (groups, "foreach_reduce", named_reduce),
            (groups.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None),  # meta is not the host
            (FSDPParam, "all_gather_inputs", property(_copied_to_device(FSDPParam.all_gather_inputs.fget))),
        ]
        for owner in (FSDPState, groups.FSDPParamGroup):
            for name, function in list(vars(owner).items()):
                if hasattr(function, "__wrapped__") and name.strip("_") in _HOOKS:
                    replacements.append((owner, name, function.__wrapped__))
        with ExitStack() as stack:
            for owner, name, value in replacements:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def _copied_to_device(inputs: Any) -> Any:
    """FSDP2's `all_gather_inputs` with the copy to the device that `.to(device)` makes of an offloaded shard, where
    on meta it makes none."""

    def copied(param: Any) -> Any:
        if not param.offload_to_cpu or param._sharded_param_data.device.type != "meta":
            return inputs(param)
        shard = param._sharded_param_data
        param._sharded_param_data = shard.clone()
        try:
            return inputs(param)
        finally:
            param._sharded_param_data = shard

    return copied


@contextmanager
def untracked_trials() -> Iterator[None]:
    """Within it, what DTensor tries out on fake tensors before an operator's first run is no allocation."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    tried = ShardingPropagator._propagate_tensor_meta_non_cached

    def untracked(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return tried(*args, **kwargs)

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", untracked):
        yield


@cache
def _changes_list(func: Any) -> bool:
    name = func._schema.name
    return bool(name.startswith(("aten::_foreach_", "aten::_fused_")) and name.endswith("_"))


def _laid_out_alike(args: Any) -> Any:
    """Lists of DTensors whose members are laid out as those of the first list, which the operator changes: what lies
    otherwise (a vocabulary-split table's gradient, whole on every rank) is redistributed for the operator."""

    def alike(value: Any, reference: Any) -> Any:
        placements = getattr(reference, "placements", None)
        if placements is None or getattr(value, "placements", placements) == placements:
            return value
        return value.redistribute(placements=placements)

    changed = args[0]
    return tuple(
        [alike(*pair) for pair in zip(one, changed, strict=True)]
        if isinstance(one, (list, tuple)) and len(one) == len(changed) and isinstance(one[0], torch.Tensor)
        else one
        for one in args
    )


_HOOKS = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "root_post_backward_final_callback",
)
_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default
_CPU = torch.device("cpu")
_ELSEWHERE = -1
"""Stands for an allocation that is not the device's."""


@contextmanager
def fake_job(setup: TrainSetup) -> Iterator[World]:
    """One rank of the job of `setup`, on meta tensors in a fake process group.

    Raises:
        ValueError: a way to spread the job that is not traced, with the reason.
    """
    refusal = why_not_traced(setup)
    if refusal:
        raise ValueError(refusal)
    with fake_world(setup.num_gpus):
        yield world_of(setup)


def world_of(setup: TrainSetup) -> World:
    """What follows a rank of the job of `setup`, whose default process group exists."""
    if setup.tensor_degree > 1:
        from probes.dryrun.tensor import TensorWorld

        return TensorWorld(setup)
    return FsdpWorld(setup) if setup.parallel == "fsdp2" else DdpWorld()


class FsdpWorld:
    """A job of FSDP2 ranks. The default process group must exist: fake for a dry run, gloo for its check."""

    tracker = SpreadTracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._mesh: Any = None

    @contextmanager
    def prepared(
        self, tracker: SpreadTracker, model: Any, setup: TrainSetup
    ) -> Iterator[tuple[Spread, dict[int, tuple[str, str]]]]:
        """See `probes.dryrun.trace.World`. Loading is the shards, and then once more the largest weight, which ranks
        receive whole before they keep their part (accelerate 1.15 `fsdp2_load_full_state_dict`)."""
        device = next(model.parameters()).device
        largest = max(one.numel() * one.element_size() for one in model.parameters())
        with tracker.resizing(), tracker.following_fsdp(), untracked_trials():
            spread = spread_model(model, setup, device=device)
            if setup.offload == "parameters" and device.type == "meta":
                tracker.host_phases = frozenset({"step"})  # CPUOffloadPolicy: the optimizer steps on the host
                for one in model.parameters():
                    tracker.keep_on_host(local(one))
            owners = load(tracker, model)
            tracker.release(tracker.allocate(largest, "load"))
            yield spread, owners

    def splice(self, trace: Trace, block: Block, setup: TrainSetup) -> Trace:
        """See `probes.dryrun.trace.World`."""
        return splice(trace, block, setup, OnHost(self) if setup.offload == "parameters" else self)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `probes.dryrun.splice.Shards`: the norm of all gradients is summed up over the ranks as DTensor does it,
        from one stack of the parts' norms."""
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor._ops._math_ops import _NormPartial
        from torch.nn.utils import clip_grad

        if self._mesh is None:
            self._mesh = data_mesh(self._setup, torch.device("meta"))
        placements = [Replicate()] * (self._mesh.ndim - 1) + [_NormPartial(2.0)]

        def total_norm(tensors: Any, norm_type: float = 2.0, *_: Any) -> Any:
            norms = torch._foreach_norm(list(tensors), norm_type)
            stacked = DTensor.from_local(torch.stack(norms), self._mesh, placements, run_check=False)
            return torch.linalg.vector_norm(stacked, norm_type)

        with mock.patch.object(clip_grad, "_get_total_norm", total_norm), untracked_trials():
            yield

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        """See `probes.dryrun.splice.Shards`: rank 0's rows of the parameter. A plain tensor, as the step's kernels see
        it: DTensor's own rules take seconds for the lists of a deep model."""
        rows = -(-one.shape[0] // self._setup.shards)
        return torch.nn.Parameter(torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta"))


class OnHost:
    """See `probes.dryrun.splice.Shards`: the step happens in the host's memory, its trained parameters have no gradient
    on the device."""

    tracker = Tracker
    stepping = staticmethod(nullcontext)

    def __init__(self, world: Shards) -> None:
        self.parameter = world.parameter


@dataclass(frozen=True, kw_only=True)
class _State:
    """A parameter or buffer of the module that DDP wraps."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trained: bool


class DdpWorld:
    """A job of DDP ranks. The default process group must exist: fake for a dry run, gloo for its check."""

    tracker = SpreadTracker

    def __init__(self) -> None:
        self._states: list[_State] = []
        self._order: list[str] = []

    @contextmanager
    def prepared(
        self, tracker: SpreadTracker, model: Any, setup: TrainSetup
    ) -> Iterator[tuple[Spread, dict[int, tuple[str, str]]]]:
        """See `probes.dryrun.trace.World`."""
        self._states = [
            _State(name=name, shape=one.shape, dtype=one.dtype, trained=one.requires_grad)
            for name, one in (*model.named_parameters(), *model.named_buffers())
        ]
        self._order = []
        hooks = [
            one.register_post_accumulate_grad_hook(partial(self._ready, name))
            for name, one in model.named_parameters()
            if one.requires_grad
        ]
        owners = load(tracker, model)
        with tracker, tracker.labelled(BUCKETS):
            spread = spread_model(model, setup, device=next(model.parameters()).device)
        plain = spread.module._pre_forward

        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            with tracker.labelled(BUCKETS):  # the buckets are made anew once, in the order of the gradients
                return plain(*args, **kwargs)

        spread.module._pre_forward = pre_forward
        try:
            yield spread, owners
        finally:
            for hook in hooks:
                hook.remove()

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        if name not in self._order:
            self._order.append(name)

    def splice(self, trace: Trace, block: Block, setup: TrainSetup) -> Trace:
        """See `probes.dryrun.trace.World`: the buckets are those of the full model's parameters."""
        full = splice(_without(trace, BUCKETS), block, setup)
        states = _repeated(self._states, trace, block)
        holder = torch.nn.Module()
        holder.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=one.trained)
            for one in states
        )
        made = SpreadTracker("meta")
        for part in holder.parts:
            made.seen(part)
        made.events.clear()
        with made, made.labelled(BUCKETS):
            wrapped = spread_model(holder, setup, device=torch.device("meta")).module
        by_name = {one.name: one for one in self._states}
        order = _repeated([by_name[name] for name in self._order], trace, block)
        first = list(made.events)
        made.events.clear()
        del wrapped
        freed = list(made.events)
        made.close()
        return _with_buckets(full, first, [*freed, *_rebuilt(order, len(made.origins))])


def _without(trace: Trace, label: str) -> Trace:
    """`trace` without the allocations of one label."""
    dropped = {number for number, origin in trace.origins.items() if origin.op == label}
    events = [one for one in trace.events if isinstance(one, Phase) or getattr(one, "id", None) not in dropped]
    return replace(trace, events=events)


def _repeated(states: list[_State], trace: Trace, block: Block) -> list[_State]:
    """The full model's states in order: those of the block's layers once per copy."""
    found: list[_State] = []
    pending: list[_State] = []
    for one in (*states, None):
        layer = None if one is None else trace.layer_of(one.name)
        if one is not None and layer is not None and block.start <= layer < block.end:
            pending.append(one)
            continue
        found += pending * (block.copies + 1)
        pending = []
        if one is not None:
            found.append(one)
    return found


def _rebuilt(order: list[_State], number: int) -> list[Event]:
    """The buckets that DDP makes after its first backward, in the order in which the gradients came; numbers from
    `number` on.

    Source: PyTorch 2.13 torch/csrc/distributed/c10d/reducer.cpp `rebuild_buckets`.
    """
    import torch.distributed as dist

    tensors = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in order]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    sizes = [sum(tensors[index].numel() * tensors[index].element_size() for index in one) for one in buckets]
    return [Alloc(number + index, size) for index, size in enumerate(sizes)]


_BUCKET_BYTES = 25 * 1024**2


def _with_buckets(trace: Trace, first: list[Event], again: list[Event]) -> Trace:
    """`trace` with the buckets' events `first` after the weights are loaded and `again` as the second step begins."""
    origins = dict(trace.origins)
    events: list[Event] = []
    numbers: dict[int, int] = {}
    phase = "load"

    def insert(bucket_events: list[Event]) -> None:
        for event in bucket_events:
            if isinstance(event, Alloc):
                numbers[event.id] = len(origins)
                origins[len(origins)] = Origin(phase, None, BUCKETS, event.size_bytes, len(events))
                events.append(Alloc(numbers[event.id], event.size_bytes))
            elif isinstance(event, Free):
                events.append(Free(numbers.pop(event.id)))

    for event in trace.events:
        if isinstance(event, Phase):
            before, phase = phase, event.name.partition("/")[0]
            events.append(event)
            if phase == "forward" and before == "step":
                insert(again)
                again = []
        else:
            if phase == "load" and isinstance(event, Alloc) and event.id not in trace.owners:
                insert(first)  # after the weights, before the batches
                first = []
            events.append(event)
    return replace(trace, events=events, origins=origins)
