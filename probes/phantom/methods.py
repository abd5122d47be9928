"""Tensor methods whose C++ looks at the true device: moves, host views, addresses, copies."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.utils._device as device_context
from torch.overrides import _get_current_function_mode_stack

from probes.phantom.claims import CPU, CUDA, META, pinned, says_pinned
from probes.phantom.mode import Phantom

_is_meta = torch._C.TensorBase.is_meta.__get__
_base = torch._C.TensorBase


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Device, dtype, copy and memory format of a call of `Tensor.to`."""
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


@contextmanager
def answering(phantom: Phantom) -> Iterator[None]:
    """Within it the methods answer as those of CUDA tensors do."""
    claims = phantom.claims
    true_to = _base.to
    constructors = device_context._device_constructors()  # PyTorch keeps those of its first call

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if claims.depth:
            return true_to(self, *args, **kwargs)
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if args and isinstance(args[0], torch.dtype) and "device" not in kwargs:
            return true_to(self, *args, **kwargs)
        device, dtype, copy, memory_format = _parse(args, kwargs)
        options: dict[str, Any] = {"copy": copy}
        if memory_format is not None:
            options["memory_format"] = memory_format
        if device is None or device.type == self.device.type:
            return true_to(self, dtype or self.dtype, **options)
        if device.type == "meta" and _is_meta(self):  # a meta tensor of the program's own, which claims nothing
            return torch.empty_strided(self.size(), self.stride(), dtype=dtype or self.dtype, device=META)
        if device.type == "cuda":
            device = CUDA  # without an index C++ asks the driver for it
        return true_to(self, device=device, dtype=dtype or self.dtype, **options)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        return to(self, CUDA, non_blocking=non_blocking)

    def cpu(self: torch.Tensor, memory_format: Any = None) -> Any:
        return to(self, CPU)

    def real(self: torch.Tensor) -> torch.Tensor:
        """A real tensor with what is known of `self`, without taking memory for what is not."""
        import numpy

        found = phantom.values.known(self)
        if found is not None:
            return found
        if self.dtype is torch.bfloat16:
            return torch.from_numpy(numpy.zeros(tuple(self.shape), dtype="int16")).view(torch.bfloat16)
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return torch.from_numpy(numpy.zeros(tuple(self.shape), dtype=dtype))

    def numpy_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_meta(self):
            return _base.numpy(self, *args, **kwargs)
        if self.device.type == "cuda" and not kwargs.get("force"):
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return real(self.detach()).numpy()

    def tolist(self: torch.Tensor) -> Any:
        if not _is_meta(self):
            return _base.tolist(self)
        host = cpu(self.detach())
        return _base.tolist(real(host) if _is_meta(host) else host)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self if says_pinned(self) else pinned(self.detach())

    def data_ptr(self: torch.Tensor) -> int:
        if not _is_meta(self) or claims.depth:
            return int(_base.data_ptr(self))
        address: int = self.untyped_storage()._cdata * 4096 + self.storage_offset() * self.element_size()
        return address

    def storage_address(self: torch.UntypedStorage) -> int:
        """Tensors that share a storage are told by its address when they are saved."""
        return int(true_address(self)) if self.device.type != "meta" or claims.depth else self._cdata * 4096

    true_address = torch.UntypedStorage.data_ptr

    def new_tensor(self: torch.Tensor, data: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    true_deepcopy = torch.Tensor.__deepcopy__

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not _is_meta(self) or type(self) not in (torch.Tensor, torch.nn.Parameter):
            return true_deepcopy(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        made.__dict__.update(self.__dict__)
        memo[id(self)] = made
        return made

    true_repr = torch.Tensor.__repr__

    def shown(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        if not _is_meta(self) or self.device.type == "meta":
            return str(true_repr(self, tensor_contents=tensor_contents))
        return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype})"

    def moved(true: Callable[..., Any]) -> Callable[..., Any]:
        """A maker of tensors from data: made on the host, then moved, as C++ would ask the driver for the device."""

        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor) and device is None and _is_meta(data):
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
            made = to(made.detach() if true is true_tensor else made, CUDA)
            if isinstance(data, torch.Tensor) and (args or kwargs.get("dtype")):
                made = true_to(made, args[0] if args else kwargs["dtype"])
            return made.requires_grad_() if requires_grad else made

        return make

    true_tensor = torch.tensor
    true_parameter = torch.nn.Parameter.__new__

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """Parameters are never real: on a GPU moving one keeps the object, which PyTorch refuses from CPU to meta."""
        if type(data) is torch.Tensor and not claims.depth and not _is_meta(data) and data.is_floating_point():
            data = phantom.on_host(data)
        return true_parameter(cls, data, requires_grad)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        _base.data.__set__(self, phantom.on_host(value) if _is_meta(self) and not _is_meta(value) else value)

    methods: dict[str, Callable[..., Any]] = {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "numpy": numpy_of,
        "tolist": tolist,
        "pin_memory": pin_memory,
        "is_pinned": says_pinned,
        "record_stream": lambda self, stream: None,  # C++ takes none but its own streams
        "data_ptr": data_ptr,
        "new_tensor": new_tensor,
        "__deepcopy__": deepcopy,
        "__repr__": shown,
    }
    with ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, method))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", storage_address))
        stack.enter_context(mock.patch.object(torch.nn.Parameter, "__new__", staticmethod(parameter)))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", property(_base.data.__get__, set_data)))
        for name in ("tensor", "as_tensor", "asarray"):
            stack.enter_context(mock.patch.object(torch, name, moved(getattr(torch, name))))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _with_numbers(getattr(torch, name))))
        constructors = constructors | {getattr(torch, name) for name in _FACTORIES}  # what `with torch.device` changes
        stack.enter_context(mock.patch.object(device_context, "_device_constructors", return_value=constructors))
        true_save = torch.save

        def save(*args: Any, **kwargs: Any) -> None:
            claims.depth += 1  # as meta tensors, which have no bytes to write
            try:
                true_save(*args, **kwargs)
            finally:
                claims.depth -= 1

        stack.enter_context(mock.patch.object(torch, "save", save))
        grouped = torch._C._group_tensors_by_device_and_dtype

        def group(lists: Any, with_indices: bool = False) -> Any:
            found = grouped(lists, with_indices)
            return {
                (_device_of(tensors[0]) if device.type == "meta" else device, dtype): (tensors, indices)
                for (device, dtype), (tensors, indices) in found.items()
            }

        def _device_of(tensors: Any) -> torch.device:
            return next((one.device for one in tensors if one is not None), CUDA)

        stack.enter_context(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group))
        yield


def _default() -> torch.device | None:
    """The device of `with torch.device` or `torch.set_default_device`."""
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
    return [one.tolist() if isinstance(one, torch.Tensor) and _is_meta(one) else _numbers(one) for one in data]
