"""Which device a meta tensor claims to be on.

A claim belongs to a storage. Outside a dispatch `tensor.device` and its relatives answer the claim, so that programs
take their CUDA branches; inside one (meta kernels and decompositions are Python too and read `.device`) the truth. A
storage without a claim is a meta tensor that the program itself made.

Host claims stand for large CPU tensors of weights, which nobody needs to fill; small ones and integers are real.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from probes.patching import Replacement, replaced

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
META = torch.device("meta")

_true_device = torch._C.TensorBase.device.__get__
truly_meta: Callable[[torch.Tensor], bool] = torch._C.TensorBase.is_meta.__get__
_num_modes = torch._C._len_torch_function_stack


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is truly on meta, also within `with torch.device`, where C++ asks `torch.Tensor`, which lies."""
    if not _num_modes():
        return bool(truly_meta(tensor))
    with torch._C.DisableTorchFunction():
        return bool(truly_meta(tensor))


def _device(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        true: torch.device = _true_device(tensor)
        return true


class Claims:
    """The claims of one process, by storage.

    Attributes:
        devices: storage -> claimed device.
        depth: above zero while an operator is dispatched: the truth is told.
    """

    def __init__(self) -> None:
        self.devices: dict[int, torch.device] = {}
        self.depth = 0
        self._watched: dict[int, Any] = {}

    def of(self, tensor: torch.Tensor) -> torch.device:
        """The device that `tensor` claims, the true one where it claims none."""
        if not is_meta(tensor):
            return _device(tensor)
        local = getattr(tensor, "_local_tensor", None)
        if local is not None:  # a DTensor, which has no storage of its own
            return self.of(local)
        try:
            return self.devices.get(tensor.untyped_storage()._cdata, META)
        except (NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
            return META

    def claim(self, storage: Any, device: torch.device, died: Callable[[int], None]) -> None:
        """From now on `storage` claims `device`, until it dies, which `died` is told."""
        key = storage._cdata
        devices, watched = self.devices, self._watched
        devices[key] = device

        def released(_: Any) -> None:
            devices.pop(key, None)
            watched.pop(key, None)
            died(key)

        watched[key] = weakref.ref(storage, released)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose memory, and so every view of it, from now on says that it is pinned; nothing is."""
    tensor.untyped_storage()._says_pinned = True
    return tensor


def says_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """`Tensor.is_pinned`."""
    try:
        return getattr(tensor.untyped_storage(), "_says_pinned", False)
    except (NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
        return False


def claims_answered(claims: Claims) -> AbstractContextManager[None]:
    """Within it tensors answer their claims wherever Python asks for a device."""

    def answering_property(true: Any, answer: Any) -> property:
        def get(tensor: torch.Tensor) -> Any:
            if claims.depth or not is_meta(tensor):
                return true(tensor)
            return answer(claims.of(tensor))

        return property(get)

    def get_device(tensor: torch.Tensor) -> int:
        device = tensor.device
        return -1 if device.type == "cpu" else device.index or 0

    base = torch._C.TensorBase
    answers: dict[str, Callable[[torch.device], Any]] = {
        "device": lambda device: device,
        "is_cuda": lambda device: device.type == "cuda",
        "is_meta": lambda device: device.type == "meta",
        "is_cpu": lambda device: device.type == "cpu",
    }
    replacements: list[Replacement] = [
        (torch.Tensor, name, answering_property(getattr(base, name).__get__, answer))
        for name, answer in answers.items()
    ]
    return replaced([*replacements, (torch.Tensor, "get_device", get_device)])
