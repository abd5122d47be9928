"""Tensor methods whose C++ looks at the true device: moves, host views, addresses, copies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.utils._device as device_context
from torch.overrides import _get_current_function_mode_stack

from probes.patching import Replacement, replaced
from probes.phantom.claims import CPU, CUDA, META, Claims, is_meta, pinned, says_pinned
from probes.phantom.copies import ready
from probes.phantom.mode import Phantom

_base = torch._C.TensorBase
_true_to = _base.to
_APART = 4096
"""Between the made-up addresses of two storages."""


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    other = args[0] if args else kwargs.pop("other", None)
    if isinstance(other, torch.Tensor):
        return other.device, other.dtype, copy or (len(args) > 2 and bool(args[2])), kwargs.get("memory_format")
    if args and isinstance(args[0], torch.dtype):
        copy, args = copy or (len(args) > 2 and bool(args[2])), args[:2]
    elif len(args) > 3:
        copy, args = copy or bool(args[3]), args[:3]
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy, memory_format


class _Methods:
    """The methods as those of CUDA tensors, each with the tensor first."""

    def __init__(self, phantom: Phantom) -> None:
        self._phantom = phantom
        self._claims = phantom.claims
        self._true_deepcopy = torch.Tensor.__deepcopy__
        self._true_repr = torch.Tensor.__repr__
        self._true_address = torch.UntypedStorage.data_ptr
        self._true_move = torch.UntypedStorage.to
        self._true_parameter = torch.nn.Parameter.__new__

    def patches(self) -> dict[str, Callable[..., Any]]:
        return {
            "to": _method(self.to),
            "cuda": lambda tensor, *args, **kwargs: self.to(tensor, CUDA),
            "cpu": lambda tensor, memory_format=None: self.to(tensor, CPU),
            "numpy": _method(self.numpy),
            "tolist": _method(self.tolist),
            "pin_memory": lambda tensor, device=None: (
                tensor if says_pinned(tensor) else pinned(tensor.detach().clone())
            ),
            "is_pinned": says_pinned,
            "record_stream": lambda tensor, stream: None,  # C++ takes none but its own streams
            "data_ptr": _method(self.address),
            "new_tensor": lambda tensor, data, dtype=None, device=None, **options: torch.tensor(
                data, dtype=dtype or tensor.dtype, device=device or tensor.device, **options
            ),
            "__deepcopy__": _method(self.deepcopy),
            "__repr__": _method(self.shown),
        }

    # Moves

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._claims.depth:
            return _true_to(tensor, *args, **kwargs)
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if args and isinstance(args[0], torch.dtype) and "device" not in kwargs:
            return _true_to(tensor, *args, **kwargs)
        device, dtype, copy, memory_format = _parse(args, kwargs)
        dtype = dtype or tensor.dtype
        options: dict[str, Any] = {"copy": copy}
        if memory_format is not None:
            options["memory_format"] = memory_format
        if device is None or device.type == tensor.device.type:
            return _true_to(tensor, dtype, **options)
        if device.type == "meta" and is_meta(tensor):  # a meta tensor of the program's own, which claims nothing
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
        if device.type == "cuda":
            device = CUDA  # without an index C++ asks the driver for it
        return _true_to(tensor, device=device, dtype=dtype, **options)

    # Views of the host

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with what is known of `tensor`, without taking memory for what is not."""
        import numpy

        values = self._phantom.values.real(tensor)
        if values is not None:
            return values
        if tensor.dtype is torch.bfloat16:
            return torch.from_numpy(numpy.zeros(tuple(tensor.shape), dtype="int16")).view(torch.bfloat16)
        dtype = torch.empty(0, dtype=tensor.dtype, device=CPU).numpy().dtype
        return torch.from_numpy(numpy.zeros(tuple(tensor.shape), dtype=dtype))

    def numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_meta(tensor):
            return _base.numpy(tensor, *args, **kwargs)
        if tensor.device.type == "cuda" and not kwargs.get("force"):
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self._real(tensor.detach()).numpy()

    def tolist(self, tensor: torch.Tensor) -> Any:
        if not is_meta(tensor):
            return _base.tolist(tensor)
        host = self.to(tensor.detach(), CPU)
        return _base.tolist(self._real(host) if is_meta(host) else host)

    # Addresses

    def address(self, tensor: torch.Tensor) -> int:
        if not is_meta(tensor) or self._claims.depth:
            return int(_base.data_ptr(tensor))
        address: int = tensor.untyped_storage()._cdata * _APART + tensor.storage_offset() * tensor.element_size()
        return address

    def storage_address(self, storage: torch.UntypedStorage) -> int:
        """Tensors that share a storage are told by its address when they are saved."""
        is_true = storage.device.type != "meta" or self._claims.depth
        return int(self._true_address(storage)) if is_true else storage._cdata * _APART

    def storage_to(self, storage: torch.UntypedStorage, *, device: Any = None, non_blocking: bool = False) -> Any:
        """`torch.load` moves storages by it to where `map_location` says."""
        if self._claims.depth or torch.device(device).type != "cuda":
            return self._true_move(storage, device=device, non_blocking=non_blocking)
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=CUDA)
        if storage.device.type == "cpu":
            made.copy_(torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage))
        return made.untyped_storage()

    # Copies

    def deepcopy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not is_meta(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return self._true_deepcopy(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            made = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            made.grad = self.deepcopy(tensor.grad, memo)
        made.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = made
        return made

    def shown(self, tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
        if not is_meta(tensor) or tensor.device.type == "meta":
            return str(self._true_repr(tensor, tensor_contents=tensor_contents))
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if is_meta(value) and not is_meta(tensor):  # real tensors of the host and the card may stand for one another
            made = torch.Tensor._make_subclass(torch.Tensor, value.detach(), tensor.requires_grad)
            torch._C._swap_tensor_impl(tensor, made)
            return
        _base.data.__set__(tensor, self._phantom.on_host(value) if is_meta(tensor) and not is_meta(value) else value)

    # What makes tensors of data

    def moved(self, true: Callable[..., Any]) -> Callable[..., Any]:
        """`true`, made on the host, then moved, as C++ would ask the driver for the device."""
        is_tensor = true is torch.tensor

        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor) and device is None and is_meta(data):
                device = data.device
            if type(device) is int:
                device = CUDA
            device = _default() if device is None else device
            data = _numbers(data)
            if device is None or torch.device(device).type != "cuda":
                options = {"requires_grad": True} if requires_grad else {}
                return true(data, *args, device=device, **options, **kwargs)
            # the host by name: `with torch.device("cuda")` would ask for the GPU where none is named
            made = data if isinstance(data, torch.Tensor) else true(data, *args, device="cpu", **kwargs)
            made = self.to(made.detach() if is_tensor else made, CUDA)
            if isinstance(data, torch.Tensor) and (args or kwargs.get("dtype")):
                made = _true_to(made, args[0] if args else kwargs["dtype"])
            return made.requires_grad_() if requires_grad else made

        return make

    def parameter(self, cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """Parameters are never real: on a GPU moving one keeps the object, which PyTorch refuses from CPU to meta."""
        is_real = type(data) is torch.Tensor and not is_meta(data) and data.is_floating_point()
        if is_real and not self._claims.depth:
            data = self._phantom.on_host(data)
        return self._true_parameter(cls, data, requires_grad)


def _method(bound: Callable[..., Any]) -> Callable[..., Any]:
    """A function that becomes a method of the tensor's class."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return bound(tensor, *args, **kwargs)

    return call


@contextmanager
def answering(phantom: Phantom) -> Iterator[None]:
    methods = _Methods(phantom)
    # PyTorch keeps those of its first call; `with torch.device` changes ours too.
    constructors = device_context._device_constructors()
    patches: list[Replacement] = [
        *((torch.Tensor, name, method) for name, method in methods.patches().items()),
        (torch.Tensor, "data", property(_base.data.__get__, methods.set_data)),
        (torch.UntypedStorage, "data_ptr", _method(methods.storage_address)),
        (torch.UntypedStorage, "to", _method(methods.storage_to)),
        (torch.UntypedStorage, "cuda", lambda storage, *_, **__: methods.storage_to(storage, device=CUDA)),
        (torch.nn.Parameter, "__new__", staticmethod(methods.parameter)),
        *((torch, name, methods.moved(getattr(torch, name))) for name in ("tensor", "as_tensor", "asarray")),
        *((torch, name, _with_numbers(getattr(torch, name))) for name in _FACTORIES),
        (torch, "save", _saving(phantom.claims)),
        (torch, "load", _loading(phantom)),
        (torch._C, "_group_tensors_by_device_and_dtype", _grouping()),
    ]
    with replaced(patches):
        constructors = constructors | {getattr(torch, name) for name in _FACTORIES}
        with mock.patch.object(device_context, "_device_constructors", return_value=constructors):
            yield


def _saving(claims: Claims) -> Callable[..., None]:
    """`torch.save` of meta tensors as such: they have no bytes to write."""
    true = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(claims, "depth", claims.depth + 1):
            true(obj, ready(f), *args, **kwargs)

    return save


def _loading(phantom: Phantom) -> Callable[..., Any]:
    """`torch.load` of what the program saved without bytes: on the device that `map_location` says, else the GPU."""
    true = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = map_location
        if callable(place):
            place = place(torch.UntypedStorage(0), "cuda:0")
        elif isinstance(place, dict):
            place = place.get("cuda:0", place.get("cuda"))
        device = torch.device(getattr(place, "device", place) if place is not None else CUDA)
        return placed(true(f, map_location, *args, **kwargs), device)

    def placed(loaded: Any, device: torch.device) -> Any:
        if isinstance(loaded, torch.Tensor):
            if not is_meta(loaded) or phantom.claims.of(loaded) != META:
                return loaded
            return (phantom.unfilled if device.type == "cpu" else phantom.made)(loaded.shape, loaded.dtype)
        if isinstance(loaded, dict):
            loaded.update({key: placed(value, device) for key, value in loaded.items()})
        elif type(loaded) in (list, tuple):
            return type(loaded)(placed(part, device) for part in loaded)
        return loaded

    return load


def _grouping() -> Callable[..., Any]:
    true = torch._C._group_tensors_by_device_and_dtype

    def device_of(tensors: Any) -> torch.device:
        return next((tensor.device for tensor in tensors if tensor is not None), CUDA)

    def group(lists: Any, with_indices: bool = False) -> Any:
        groups = true(lists, with_indices)
        return {
            (device_of(tensors[0]) if device.type == "meta" else device, dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in groups.items()
        }

    return group


def _default() -> torch.device | None:
    for mode in reversed(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else ():
        if isinstance(mode, device_context.DeviceContext):
            return mode.device
    return None


_FACTORIES = (
    "empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace",
    "eye", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip


def _with_numbers(true: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that knows that a number means a GPU, which C++ denies where there is none."""

    @wraps(true)
    def make(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CUDA
        return true(*args, **kwargs)

    return make


def _numbers(data: Any) -> Any:
    """Data for a new tensor, with the GPU's tensors among its entries as the numbers that C++ would fetch."""
    if type(data) not in (list, tuple):
        return data
    return [entry.tolist() if isinstance(entry, torch.Tensor) and is_meta(entry) else _numbers(entry) for entry in data]
