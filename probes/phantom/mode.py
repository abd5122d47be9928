"""The phantom GPU itself: a dispatch mode that turns CUDA tensors into followed meta tensors.

Below autograd every operator passes here. One that makes or takes tensors of the GPU runs in its meta form; its new
storages are allocated in a model of PyTorch's caching allocator on the spot, so that memory queries and running out of
memory happen where they would.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from planner.core.units import gib
from probes.allocator.blocks import Block
from probes.allocator.caching import CachingAllocator, OutOfDeviceMemory
from probes.allocator.events import Alloc, EmptyCache, Event, Free
from probes.dryrun.fastmeta import Remembered
from probes.dryrun.kernels import KernelLog
from probes.dryrun.tracker import Temporaries, adds_in_place
from probes.patching import nothing
from probes.phantom.card import Card, TraceOptions
from probes.phantom.claims import CPU, CUDA, META, Claims, pinned, says_pinned, truly_meta
from probes.phantom.issued import Issued
from probes.phantom.origins import Origin, Origins
from probes.phantom.values import Values, aliases, answer, changed_tensors, floating_bytes

HOST_BYTES = 1 << 18
"""A floating-point tensor of at least so many bytes that the program makes on the CPU is not filled."""

_aten = torch.ops.aten


class CardMemory:
    """The memory of one card.

    Attributes:
        events: allocations and releases in order; `origins.by_allocation` says whose each was.
        allocator: the card's memory as it is now.
        peak_allocated_bytes, peak_reserved_bytes: up to the last `keep_peaks`.
        group_bytes: what the communication library takes, outside PyTorch.
    """

    def __init__(self, card: Card, origins: Origins, *, limited: bool, expandable_segments: bool) -> None:
        self.events: list[Event] = []
        self.allocator = CachingAllocator(
            expandable_segments=expandable_segments, limit_bytes=card.limit_bytes if limited else None
        )
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_allocations = 0
        self.group_bytes = 0
        self._card = card
        self._origins = origins

    @property
    def free_bytes(self) -> int:
        return self._card.limit_bytes - self.group_bytes - self.allocator.reserved_bytes

    def join(self, num_bytes: int) -> None:
        self.group_bytes = num_bytes
        if self.allocator.limit_bytes is not None:
            self.allocator.limit_bytes = self._card.limit_bytes - num_bytes

    def take(self, size_bytes: int, op: str) -> tuple[int, Callable[[], None]]:
        """Takes memory that is followed: the allocation's number, and what gives it back.

        Raises:
            torch.OutOfMemoryError: the card has no room.
        """
        number = self.num_allocations
        self.num_allocations += 1
        block = self.malloc(size_bytes, op) if size_bytes > 0 else None
        self._origins.by_allocation[number] = Origin(self._origins, op, size_bytes)
        self.events.append(Alloc(number, size_bytes))
        events, free = self.events, self.allocator.free

        def release() -> None:
            events.append(Free(number))
            if block is not None:
                free(block, size_bytes)

        return number, release

    def malloc(self, size_bytes: int, op: str) -> Block:
        """A block that nobody follows.

        Raises:
            torch.OutOfMemoryError: the card has no room.
        """
        try:
            return self.allocator.malloc(size_bytes)
        except OutOfDeviceMemory:
            allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
            self._origins.out_of_memory(size_bytes, op, allocated)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {gib(size_bytes)}. GPU 0 has a total capacity of "
                f"{gib(self._card.memory_bytes)} of which {gib(self.free_bytes)} is free. Of the allocated memory "
                f"{gib(allocated)} is allocated by PyTorch, and {gib(reserved - allocated)} is reserved by PyTorch but "
                "unallocated."
            ) from None

    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        self.events.append(EmptyCache())

    def keep_peaks(self) -> None:
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocator.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocator.peak_reserved_bytes)


class Phantom(TorchDispatchMode):  # type: ignore[misc]
    """The mode.

    Attributes:
        notes: what the program's user must know, in order, each once.
        handlers: operators that have no meta form, or another one than on a GPU.
        on_op: is told of every operator on the card before it runs.
        stand_in_rows: the data set whose rows are ours, "" where none is; has_audio: whether they are clips of sound.
        num_micro_batches, num_repeated: of transformers' Trainer; those of them that were not run again.
    """

    def __init__(self, card: Card, options: TraceOptions, *, expandable_segments: bool = False) -> None:
        super().__init__()
        self.card = card
        self.options = options
        self.claims = Claims()
        self.values = Values()
        self.origins = Origins()
        self.memory = CardMemory(card, self.origins, limited=options.limited, expandable_segments=expandable_segments)
        self.notes: dict[str, None] = {}
        self.handlers: dict[Any, Callable[..., Any]] = {}
        self.log = KernelLog(capability=card.capability)
        self.stand_in_rows = ""
        self.has_audio = False
        self.issued = Issued(self.origins)
        self.kernels: Counter[str] = Counter()
        self.num_steps: dict[int, int] = {}
        self.temporaries: Mapping[Any, Temporaries] = {}
        self.on_op: Callable[[Any], None] = nothing
        self._makes_its_own = False
        self._remembered = Remembered()
        self.num_micro_batches = 0
        self.num_repeated = 0
        self._alive: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapping of the dispatch for the compiler, which would be imported for it."""
        return False

    def making_its_own(self) -> AbstractContextManager[Any]:
        """Within it a new meta tensor is one that PyTorch makes for tensors of the GPU."""
        return mock.patch.object(self, "_makes_its_own", True)

    def note(self, text: str) -> None:
        self.notes.setdefault(text)

    # Storages

    def made(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of the GPU whose values are unknown; for handlers."""
        tensor = torch.empty(shape, dtype=dtype, device=META)
        self.adopt(tensor.untyped_storage(), CUDA, "handler")
        return tensor

    def adopted(self, out: Any, source: torch.Tensor, func: Any) -> Any:
        """What an operator made of `source`, on the same device; for handlers."""
        target = self._target("", [source], func)
        if target is not None:
            self._follow(out, target, func)
        return out

    def unfilled(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that claims the CPU and takes no memory there, whoever asks: what is made on meta in a backward is
        the card's."""
        with _disable_current_modes():
            tensor = torch.empty(shape, dtype=dtype, device=META)
        self.adopt(tensor.untyped_storage(), CPU, "host")
        return tensor

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that claims the CPU in the place of a real one, whose values it keeps where they are few."""
        self.claims.depth += 1
        try:
            made = _on_meta(tensor.detach())
            self.adopt(made.untyped_storage(), CPU, "parameter")
            if self.values.worth_keeping(tensor.dtype, tensor.numel()):
                self.values.keep(made, tensor.detach().clone())
        finally:
            self.claims.depth -= 1
        return cast(torch.Tensor, made)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The allocation that holds `tensor`, None where it is not on the phantom GPU."""
        block = self._alive.get(tensor.untyped_storage()._cdata)
        return None if block is None else block[0]

    def adopt(self, storage: Any, device: torch.device, op: str) -> None:
        key = storage._cdata
        if device.type == "cpu":
            self.claims.claim(storage, CPU, self.values.drop)
            return
        self.claims.devices[key] = CUDA
        self._alive[key] = self._allocate(storage, op)

    def _allocate(self, storage: Any, op: str) -> tuple[int, Any, Callable[[], None]]:
        """A new block for `storage`: its number, what waits for the storage's end, and what gives the block back."""
        key = storage._cdata
        number, release = self.memory.take(storage.nbytes(), op)
        devices, alive, drop = self.claims.devices, self._alive, self.values.drop

        def released(_: Any) -> None:
            devices.pop(key, None)
            alive.pop(key, None)
            drop(key)
            release()

        return number, weakref.ref(storage, released), release

    def resized(self, storage: Any) -> None:
        """A storage of the GPU has another size: for the allocator one block dies and another is made."""
        key = storage._cdata
        if key in self._alive:
            self._alive.pop(key)[2]()
            self._alive[key] = self._allocate(storage, "gathered weights")

    # Dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(tensor_type.__torch_dispatch__ is not _PLAIN for tensor_type in types):
            return NotImplemented
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # without autograd composite operators arrive whole, and would hide what they allocate
                return func.decompose(*args, **(kwargs or {}))
        if func is _ADD and len(args) == 2 and adds_in_place(args, kwargs or {}):
            self._remembered.number = None
            self.issued.ran(_ADD_IN_PLACE, args, {}, args[0], self._remembered)
            return _ADD_IN_PLACE(*args)
        claims = self.claims
        claims.depth += 1
        try:
            return self._run(func, args, kwargs or {})
        finally:
            claims.depth -= 1

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            return pinned(self._run(func, args, {**kwargs, "pin_memory": False}))
        device = kwargs.get("device")
        metas, has_real = _tensors(args, kwargs)
        kind = device.type if device is not None else ""
        if not metas and kind in ("", "cpu"):
            return self._on_host(func, args, kwargs)
        if func is _SCALAR and kind == "meta":
            return func(*args, **{**kwargs, "device": CPU})  # C++ wraps a number for a tensor it takes to be on meta
        handler = self.handlers.get(func)
        if handler is not None:
            out = handler(self, func, args, kwargs)
            if out is not NotImplemented:
                if self._target(kind, metas, func) is CUDA:
                    self._remembered.number = None
                    self.issued.ran(func, args, kwargs, out, self._remembered)
                return out
        if func is _ITEM:
            return self._item(args[0])
        if func is _COPY:
            return self._copied(args, kwargs)
        if func is _TO_COPY and kind == "cpu":
            return self._to_host(args[0], kwargs)
        target = self._target(kind, metas, func)
        if target is CUDA:
            self.on_op(func)
        done, out = (False, None) if target is None else self.values.computed(func, args, kwargs, metas)
        self._remembered.number = None
        if not done:
            if kind and kind != "meta":
                kwargs = {**kwargs, "device": META}
            if has_real:
                args, kwargs = _on_meta(args), {name: _on_meta(value) for name, value in kwargs.items()}
            out = self._remembered.call(func, args, kwargs)
            self.values.after(func, args, kwargs, out, metas)
        releases = []
        if target is CUDA and func in self.temporaries:
            sizes = self.temporaries[func](args, kwargs, tuple(_flat(out)))
            releases = [self.memory.take(size, f"{func} workspace")[1] for size in sizes if size > 0]
        if target is not None:
            self._follow(out, target, func)
        for release in releases:
            release()
        if func is _TO_COPY and kind == "cuda" and not self._on_card(args[0]):
            is_pinned = says_pinned(args[0])
            waits = not (is_pinned and kwargs.get("non_blocking"))
            self.issued.travelled(out, to_host=False, is_pinned=is_pinned, waits=waits)
        elif target is CUDA:
            self.issued.ran(func, args, kwargs, out, self._remembered)
        elif target is CPU and "empty" not in str(func):
            written = [*changed_tensors(func, args, kwargs)] or ([] if aliases(func) else _flat(out))
            if written:
                self.issued.on_host(func, sum(tensor.nbytes for tensor in (*metas, *written)))
        return out

    def _copied(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """`destination.copy_(source)`, in one memory or between two."""
        destination, source = args[:2]
        arrives, leaves = self._on_card(destination), self._on_card(source)
        if arrives and leaves:
            self._remembered.number = None
            self.issued.ran(_COPY, args[:2], {}, destination, self._remembered)
        elif arrives or leaves:
            is_pinned = says_pinned(source if arrives else destination)
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self.issued.travelled(source, to_host=leaves, is_pinned=is_pinned, waits=not (is_pinned and asynchronous))
        return self.values.copied(destination, source)

    def _target(self, kind: str, metas: list[torch.Tensor], func: Any) -> torch.device | None:
        """Where an operator's new storages lie; None: on meta, as the program asked for."""
        if kind == "cuda":
            return CUDA
        if kind == "cpu":
            return CPU
        devices = self.claims.devices
        device = None
        for tensor in metas:
            claim = devices.get(tensor.untyped_storage()._cdata)
            if claim is CUDA:
                return CUDA
            device = device or claim
        if not metas and kind == "meta" and (self._makes_its_own or torch._C._current_graph_task_id() != -1):
            return CUDA  # PyTorch's C++ asks: the engine fills in a gradient that nobody gave
        return device

    def _follow(self, out: Any, target: torch.device, func: Any) -> None:
        for tensor in _flat(out):
            if truly_meta(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.claims.devices:
                    self.adopt(storage, target, str(func))

    # The host's side

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on real tensors; large new floating-point tensors are not filled but claim the CPU."""
        if floating_bytes(func, args, kwargs) < HOST_BYTES:
            return func(*args, **kwargs)
        made = func(*_on_meta(args), **{**kwargs, "device": META})
        self.adopt(made.untyped_storage(), CPU, str(func))
        return made

    def _to_host(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """A copy on the CPU: real where the values are known or few."""
        dtype = kwargs.get("dtype") or tensor.dtype
        if self._on_card(tensor):
            asynchronous = bool(kwargs.get("non_blocking"))  # PyTorch then makes the copy in pinned memory
            self.issued.travelled(tensor, to_host=True, is_pinned=asynchronous, waits=not asynchronous)
        values = self.values.real(tensor)
        on_host = self.claims.devices.get(tensor.untyped_storage()._cdata) is CPU
        if values is not None and not on_host:
            return values.to(dtype, copy=True)
        size = tensor.numel() * dtype.itemsize
        if on_host or (size >= HOST_BYTES and dtype.is_floating_point):
            out = _TO_COPY(tensor, **{**kwargs, "device": META})
            self.adopt(out.untyped_storage(), CPU, "to cpu")
            return out
        self.origins.record_question(self, "values of a GPU tensor on the host")
        uniform = self.values.uniform(tensor)
        return torch.full(tensor.shape, answer(tensor.dtype, uniform), dtype=dtype, device=CPU)

    def _on_card(self, tensor: torch.Tensor) -> bool:
        if not truly_meta(tensor):
            return False
        return self.claims.devices.get(tensor.untyped_storage()._cdata) is CUDA

    def _item(self, tensor: torch.Tensor) -> Any:
        if self._on_card(tensor):
            self.issued.waited()
        value = self.values.real(tensor)
        if value is not None:
            return value.item()
        uniform = self.values.uniform(tensor)
        if uniform is None:
            self.origins.record_question(self, f"a {str(tensor.dtype).removeprefix('torch.')} value")
        return answer(tensor.dtype, uniform)


_PLAIN = torch._C._disabled_torch_dispatch_impl
_ITEM = _aten._local_scalar_dense.default
_ADD = _aten.add.Tensor
_ADD_IN_PLACE = _aten.add_.Tensor
_COPY = _aten.copy_.default
_TO_COPY = _aten._to_copy.default
_SCALAR = _aten.scalar_tensor.default


def _tensors(args: Any, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
    metas: list[torch.Tensor] = []
    has_real = False
    for argument in (*args, *kwargs.values()) if kwargs else args:
        for inner in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(inner, torch.Tensor):
                if truly_meta(inner):
                    metas.append(inner)
                else:
                    has_real = True
    return metas, has_real


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if truly_meta(value):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    if type(value) in (list, tuple):
        return type(value)(_on_meta(part) for part in value)
    return value


def _flat(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (tuple, list)):
        return [tensor for part in out for tensor in _flat(part)]
    return []
