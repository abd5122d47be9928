"""Following every storage: when it is allocated, by which operator, in which phase, and when it dies.

One `TorchDispatchMode` sees every operator below autograd. A storage counts as allocated when it is first seen in an
output and as released when its last reference is gone, which is when PyTorch would free the block.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.speed.operators import WAIT
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.fastmeta import Remembered
from probes.dryrun.operators import OperatorLog

WORKSPACE = "cuBLAS workspace"
"""How an allocation is named that a library makes at its first call and keeps."""


class Origin(NamedTuple):
    """Where an allocation came from; a named tuple, as a step has up to 100,000 of them."""

    phase: str
    layer: int | None
    op: str
    size_bytes: int


Args = tuple[Any, ...]
Outputs = tuple[torch.Tensor, ...]
Temporaries = Callable[[Args, dict[str, Any], Outputs], Iterable[int]]
"""Sizes in bytes of what a kernel allocates for itself, from its arguments and outputs."""


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Records allocations and releases on devices of one type, in order, for `probes.allocator.replay`. `answer`: what
    data-dependent questions on meta tensors are answered (`bool(mask.all())`).

    Attributes:
        origins: where each allocation came from, by id.
        subclasses: tensor classes whose operators come again as those of the tensors inside (none on one GPU).
        log: what is issued, None: nobody asks.
    """

    subclasses: frozenset[type] = frozenset()

    def __init__(
        self, device_type: str, *, temporaries: Mapping[Any, Temporaries] | None = None, answer: bool = True
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = {}
        self.phase = "load"
        self.layer: int | None = None
        self.on_op: Callable[[Any], None] | None = None
        self.log: OperatorLog | None = None
        self._answer = answer
        self._alive: dict[int, tuple[int, Any]] = {}
        self._next = 0
        self._temporaries = temporaries or {}
        self._is_meta = device_type == "meta"
        self._remembered = Remembered()
        self._operators: dict[int, tuple[str, Temporaries | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # Recording

    def mark(self, phase: str, layer: int | None) -> None:
        """From now on events belong to `phase` (and to the decoder layer `layer`)."""
        self.phase, self.layer = phase, layer
        if self.log is not None:
            self.log.mark(phase, layer)
        self.events.append(Phase(phase if layer is None else f"{phase}/{layer}"))

    def identity(self, tensor: torch.Tensor) -> int | None:
        """The id of a live tensor's storage, None when it was never seen."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def seen(self, tensor: torch.Tensor) -> int:
        """As `track`, of a tensor that lies on the followed device."""
        number = self.track(tensor, "load")
        assert number is not None
        return number

    def track(self, tensor: torch.Tensor, op: str) -> int | None:
        """Counts `tensor`'s storage when it is on the followed device and new; returns its id."""
        if tensor.device.type != self.device_type:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._alive.get(key)
        if entry is not None:
            return entry[0]
        return self._follow(storage, key, storage.nbytes(), op)

    def _follow(self, storage: Any, key: int, size: int, op: str) -> int:
        number = Tracker.allocate(self, size, op)
        self._watch(storage, key, number)
        return number

    def _watch(self, storage: Any, key: int, number: int) -> None:
        events = self.events
        alive = self._alive

        def released(_: Any) -> None:
            events.append(Free(number))
            alive.pop(key, None)

        alive[key] = (number, weakref.ref(storage, released))

    def adopt(self, tensor: torch.Tensor, number: int) -> None:
        """From now on `tensor`'s storage is the one that was counted as `number`."""
        storage = tensor.untyped_storage()
        self._watch(storage, storage._cdata, number)

    def copy(self, events: list[Event]) -> dict[int, int]:
        """The same once more, with storages of their own, without libraries' workspaces; number -> its copy's.

        `events` release only what they made.
        """
        copies: dict[int, int] = {}
        for event in events:
            if isinstance(event, Alloc):
                origin = self.origins[event.id]
                if not origin.op.startswith(WORKSPACE):
                    copies[event.id] = self._next
                    self.origins[self._next] = origin
                    self.events.append(Alloc(self._next, event.size_bytes))
                    self._next += 1
            elif isinstance(event, Free):
                self.events.append(Free(copies[event.id]))
            else:
                self.events.append(event)
        return copies

    def allocate(self, size_bytes: int, op: str) -> int:
        """An allocation that no tensor stands for (a library's workspace)."""
        number = self._next
        self._next += 1
        self.origins[number] = Origin(self.phase, self.layer, op, size_bytes)
        self.events.append(Alloc(number, size_bytes))
        return number

    def release(self, number: int) -> None:
        self.events.append(Free(number))

    def close(self) -> None:
        """Stops following: what dies later is no event."""
        self._alive.clear()

    # Dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not self.subclasses.isdisjoint(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_meta and func is _ITEM:
            return self._item(args[0])
        if func is _ADD and adds_in_place(args, kwargs):
            # below autograd a mode makes the engine add out of place; without one it reuses the first gradient
            out = _ADD_IN_PLACE(*args)
            if self.log is not None:
                self._remembered.number = None
                self.log.add(_ADD_IN_PLACE, "aten.add_.Tensor", args, kwargs, out, self._remembered)
            return out
        name, temporaries = self._operators.get(id(func)) or self._operator(func)
        out = self._remembered.call(func, args, kwargs) if self._is_meta else func(*args, **kwargs)
        if self.on_op is not None:
            self.on_op(func)
        if self.log is not None:
            self.log.add(func, name, args, kwargs, out, self._remembered)
        if temporaries is None:
            self._outputs(out, name)
            return out
        tensors = (out,) if isinstance(out, torch.Tensor) else out or ()
        outputs = tuple(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        workspaces = [
            self.allocate(size, f"{name} workspace") for size in temporaries(args, kwargs, outputs) if size > 0
        ]
        self._outputs(out, name)
        for number in workspaces:
            self.release(number)
        return out

    def _operator(self, func: Any) -> tuple[str, Temporaries | None]:
        """An operator's name and workspaces, by its id from now on: hashing an operator is slow."""
        entry = str(func), self._temporaries.get(func)
        if isinstance(func, torch._ops.OpOverload):  # lives as long as the process, so its id stays its own
            self._operators[id(func)] = entry
        return entry

    def _outputs(self, out: Any, name: str) -> None:
        if isinstance(out, torch.Tensor):
            if out.device.type == self.device_type and out.untyped_storage()._cdata not in self._alive:
                self.track(out, name)
        elif isinstance(out, (tuple, list)):
            for member in out:
                self._outputs(member, name)

    def _item(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != "meta":
            return _ITEM(tensor)
        if self.log is not None:
            self.log.launched(WAIT, (), ())
        return self._answer if tensor.dtype is torch.bool else (tensor.dtype.is_floating_point and 1.0) or 1


_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_BUFFER_USES = 4
"""References to a gradient that only the engine's buffer holds, as this mode sees it: buffer, call and wrapper."""
STORAGE_USES = 2
"""References to a storage that only this one tensor holds: the tensor and the wrapper that is asked."""
_WRAPPERS = ("eval_frame.py", "_compile.py", "layout_tracker.py")
_ENGINE = "_engine_run_backward"


def adds_in_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this addition is the autograd engine's sum of two gradients that it would do in place on a GPU.

    The engine adds into the first gradient where nothing else holds it or its storage and no dispatch mode is active;
    a transposed weight gradient's storage is held twice, so the halves of a tied embedding make a third tensor.

    Source: PyTorch 2.13 torch/csrc/autograd/input_buffer.cpp `can_accumulate_inplace`. The numbers of references are
    those seen where PyTorch without a mode adds in place (tests/probes/test_dryrun_gradient_sums.py).
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or kwargs or len(args) != 2:
        return False
    first, second = args
    if not (isinstance(second, torch.Tensor) and first.dtype == second.dtype and first.shape == second.shape):
        return False
    if first._use_count() != _BUFFER_USES:
        return False
    if torch._C._storage_Use_Count(first.untyped_storage()._cdata) != STORAGE_USES:
        return False
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _ENGINE


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`: a DTensor's part, any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
