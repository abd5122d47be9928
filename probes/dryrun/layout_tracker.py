"""A rank's storages followed: through DTensors, through storages that are resized, and not into the host's memory."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from probes.allocator.events import Free
from probes.dryrun.tracker import Tracker, local
from probes.patching import Replacement, nothing, replaced

GATHERED = "gathered weights"
GATHERING = "all-gather buffer"
SCATTERING = "reduce-scatter buffer"


class LayoutTracker(Tracker):
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
            with _disable_current_modes():
                copy = torch.empty_like(args[0])
            self.keep_on_host(copy)
            return copy
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
        return _ON_HOST if self.phase in self.host_phases else super().allocate(size_bytes, op)

    def release(self, number: int) -> None:
        if number != _ON_HOST:
            super().release(number)

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Takes `tensor`'s storage to lie in the host's memory as long as it lives: meta tensors do not say where they
        would be."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._alive.pop(key, None)
        if entry is not None:
            self.events.append(Free(entry[0]))
        self._host[key] = weakref.ref(storage, lambda _: self._host.pop(key, None))

    def labelled(self, label: str) -> AbstractContextManager[Any]:
        """Within it, allocations carry this name instead of the operator's."""
        return mock.patch.object(self, "label", label)

    def resizing(self) -> AbstractContextManager[None]:
        """Within it, `UntypedStorage.resize_` is followed: for the allocator one block dies and another is made."""

        def on_resize(storage: Any) -> None:
            if storage.device.type == self.device_type:
                entry = self._alive.pop(storage._cdata, None)
                if entry is not None:
                    self.events.append(Free(entry[0]))
                if storage.nbytes():
                    self._follow(storage, storage._cdata, storage.nbytes(), GATHERED)

        return resizes(on_resize)

    @contextmanager
    def following_shards(self) -> Iterator[None]:
        """Within it, storages that are resized are followed, FSDP2's communication buffers carry their names, its hooks
        run without the compiler's wrapper (which only costs time), shards in the host's memory are copied to the device
        before they are gathered, and what DTensor tries out counts nothing."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        def named(label: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.labelled(label):
                    return function(*args, **kwargs)

            return call

        replacements: list[Replacement] = [
            (groups, "foreach_all_gather", named(GATHERING, groups.foreach_all_gather)),
            (groups, "foreach_reduce", named(SCATTERING, groups.foreach_reduce)),
            (groups.FSDPParamGroup, "_validate_cpu_offload_params", nothing),  # meta is not the host
            (FSDPParam, "all_gather_inputs", property(_copied_to_device(FSDPParam.all_gather_inputs.fget))),
        ]
        for owner in (FSDPState, groups.FSDPParamGroup):
            for name, function in list(vars(owner).items()):
                if hasattr(function, "__wrapped__") and name.strip("_") in _HOOKS:
                    replacements.append((owner, name, function.__wrapped__))
        with self.resizing(), replaced(replacements), untracked_trials():
            yield

    def keep_all_on_host(self, parameters: Iterable[torch.Tensor]) -> None:
        """FSDP2's CPUOffloadPolicy: the parameters lie in the host's memory, where the optimizer steps."""
        self.host_phases = frozenset({"step"})
        for parameter in parameters:
            self.keep_on_host(local(parameter))


def resizes(on_resize: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Within it `on_resize` hears of every storage that has another size, as FSDP2 gives its gathered weights."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        done = plain(storage, size)
        if size != before:
            on_resize(storage)
        return done

    return replaced([(torch.UntypedStorage, "resize_", resize_)])


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
        [alike(*pair) for pair in zip(argument, changed, strict=True)]
        if isinstance(argument, (list, tuple))
        and len(argument) == len(changed)
        and isinstance(argument[0], torch.Tensor)
        else argument
        for argument in args
    )


_HOOKS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "root_post_backward_final_callback")
_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default
_CPU = torch.device("cpu")
_ON_HOST = -1
"""Stands for an allocation that is not the device's."""
