"""What is known of values on a GPU that computes nothing.

Integers, booleans and small floating-point tensors that come from the host keep a real copy beside their storage, and
operators on such tensors alone run on the copies: masks, positions, image grids and packed lengths have the values
that they would have, so that what depends on them (a mask that is all ones, a boolean index) is decided truly. What
comes from weights or activations is unknown. A copy belongs to a storage, so that views and in-place changes follow.

An unknown value that the program asks for is answered harmlessly and noted: `all` holds, `any` does not, no element is
infinite or NaN, a number is one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from probes.phantom.claims import CPU, META, truly_meta

MAX_INTEGERS = 1 << 22
MAX_BYTES = 1 << 16
"""Larger tensors of 8-bit integers are quantized weights, whose operators would run for real."""
MAX_FLOATS = 1 << 10
_aten = torch.ops.aten
_EMPTY = _aten.empty.memory_format
_MAKERS = frozenset(
    {
        _EMPTY,
        _aten.rand.generator,
        _aten.randn.generator,
        *(getattr(_aten, name).default for name in ("empty_strided", "zeros", "ones", "full", "rand", "randn")),
    }
)
"""What makes a tensor of nothing but its shape, the first argument."""
_KINDS = ("empty", "zeros", "ones", "full")
_LIKE = frozenset(getattr(_aten, f"{name}_like").default for name in (*_KINDS, "rand", "randn"))
_NEW = frozenset(getattr(_aten, f"new_{name}").default for name in (*_KINDS, "empty_strided"))
_TO_COPY = _aten._to_copy.default


class Values:
    """The known values of one process, by storage; `max_floats`: the largest floating-point tensor that is followed."""

    def __init__(self, max_floats: int = MAX_FLOATS) -> None:
        self._max_floats = max_floats
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._uniform: dict[int, bool] = {}

    def worth_keeping(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether values of this type and number are followed."""
        if dtype.is_floating_point or dtype.is_complex:
            return numel <= self._max_floats
        return numel <= (MAX_BYTES if dtype in (torch.uint8, torch.int8) else MAX_INTEGERS)

    def drop(self, key: int) -> None:
        self._copies.pop(key, None)
        self._uniform.pop(key, None)

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with `tensor`'s values that shares its memory with those of its storage's other views."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device=CPU)  # by name: the program may be in `with torch.device`
        return empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def uniform(self, tensor: torch.Tensor) -> bool | None:
        """The one value that all elements of a boolean tensor are assumed to have."""
        return self._uniform.get(tensor.untyped_storage()._cdata)

    def assume(self, tensor: torch.Tensor, value: bool) -> None:
        self._uniform[tensor.untyped_storage()._cdata] = value

    def keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """`tensor` (on meta) has `values`, which have its shape and become its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if values.stride() == tensor.stride() and not tensor.storage_offset() and not values.storage_offset():
            source = values.untyped_storage()
            if source.nbytes() >= storage.nbytes():
                self._copies[key] = source
                return
        copy = torch.UntypedStorage(storage.nbytes())
        self._copies[key] = copy
        mine = self.real(tensor)
        assert mine is not None
        mine.copy_(values)

    def copied(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """`destination.copy_(source)` between any two kinds of tensors."""
        values = self.real(source) if truly_meta(source) else source
        if not truly_meta(destination):
            return destination if values is None else destination.copy_(values)
        if values is None or not self.worth_keeping(destination.dtype, destination.numel()):
            self.drop(destination.untyped_storage()._cdata)
        elif (mine := self.real(destination)) is not None:
            mine.copy_(values)
        elif destination.numel() * destination.element_size() == destination.untyped_storage().nbytes():
            # all of its storage, so that values for it are values for every view of it
            self.keep(destination, torch.empty(destination.shape, dtype=destination.dtype, device=CPU).copy_(values))
        return destination

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], metas: Sequence[torch.Tensor]) -> tuple[bool, Any]:
        """(whether the output is made already, the output): an operator whose meta tensors are `metas`, run on what
        is known."""
        if not self._decides(func, args, kwargs, metas):
            return False, None
        changes = next(iter(changed_tensors(func, args, kwargs)), None) is not None
        if not changes and aliases(func):
            return False, None
        host = {name: self._real(value) for name, value in kwargs.items()}
        if host.get("device") is not None:
            host["device"] = CPU
        try:
            output = func(*[self._real(value) for value in args], **host)
        except NotImplementedError:  # a kernel that CPUs lack for this type (histc of integers)
            return False, None
        if func is _EMPTY and isinstance(output, torch.Tensor):
            output.zero_()
        return (False, None) if changes else (True, self._followed(output))

    def _decides(self, func: Any, args: Any, kwargs: dict[str, Any], metas: Sequence[torch.Tensor]) -> bool:
        if metas:
            copies = self._copies
            for tensor in metas:
                if tensor.untyped_storage()._cdata not in copies:
                    return False
        elif func in _MAKERS:
            if not self.worth_keeping(made_dtype(func, args, kwargs), prod(args[0])):
                return False
        elif func is _TO_COPY and not self.worth_keeping(kwargs.get("dtype") or args[0].dtype, args[0].numel()):
            return False
        # Those of the program's own may be for GPUs alone.
        has_cpu_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        return func.namespace == "aten" or bool(has_cpu_kernel(func.name(), "CPU"))

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.real(value) if truly_meta(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._real(entry) for entry in value)
        return value

    def _followed(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            made = torch.empty_strided(output.size(), output.stride(), dtype=output.dtype, device=META)
            if self.worth_keeping(output.dtype, output.numel()):
                self.keep(made, output)
            return made
        if isinstance(output, (list, tuple)):
            return type(output)(self._followed(part) for part in output)
        return output

    def after(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, metas: Sequence[torch.Tensor]) -> None:
        """What an operator on unknown values leaves of what was known."""
        copies = self._copies
        if copies and not all(tensor.untyped_storage()._cdata in copies for tensor in metas):
            for tensor in changed_tensors(func, args, kwargs):
                self.drop(tensor.untyped_storage()._cdata)
        keeps = KEEPS_UNIFORM.get(func)
        uniform = keeps([self.uniform(tensor) for tensor in metas]) if keeps is not None else None
        if uniform is None:
            uniform = FINITE.get(func)
        if uniform is not None and isinstance(out, torch.Tensor):
            self.assume(out, uniform)


def made_dtype(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = kwargs.get("dtype") or (torch.get_default_dtype() if func in _MAKERS else args[0].dtype)
    return dtype


def floating_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of the floating-point tensor that this call makes, 0 where it makes none."""
    if func in _MAKERS:
        shape = args[0]
    elif func in _LIKE:
        shape = args[0].shape
    elif func in _NEW:
        shape = args[1]
    else:
        return 0
    dtype = made_dtype(func, args, kwargs)
    return prod(shape) * dtype.itemsize if dtype.is_floating_point else 0


@cache
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator changes."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def aliases(func: Any) -> bool:
    """Whether an output of an operator may share memory with an argument."""
    return any(output.alias_info is not None for output in func._schema.returns)


def changed_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors that this call changes."""
    for index, name in written(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (entry for entry in value if isinstance(entry, torch.Tensor))


def _same(values: Sequence[bool | None]) -> bool | None:
    return values[0] if values and all(value is values[0] for value in values) else None


def _inverted(values: Sequence[bool | None]) -> bool | None:
    return None if values[0] is None else not values[0]


_ANY = (_aten.any.default, _aten.any.dim, _aten.any.dims, _aten._is_any_true.default)
_ALL = (_aten.all.default, _aten.all.dim, _aten.all.dims, _aten._is_all_true.default)
_BOTH = (_aten.bitwise_or.Tensor, _aten.logical_or.default, _aten.bitwise_and.Tensor, _aten.logical_and.default)
FINITE: dict[Any, bool] = {
    **dict.fromkeys((_aten.isnan.default, _aten.isinf.default, *_ANY), False),
    **dict.fromkeys((_aten.isfinite.default, *_ALL), True),
}
"""What operators on unknown values are assumed to give."""
KEEPS_UNIFORM: dict[Any, Callable[[Sequence[bool | None]], bool | None]] = {
    **dict.fromkeys((*_ANY, *_ALL, *_BOTH), _same),
    **dict.fromkeys((_aten.logical_not.default, _aten.bitwise_not.default), _inverted),
}
"""Operators whose result is uniform where their arguments are."""


def answer(dtype: torch.dtype, uniform: bool | None) -> Any:
    """What a program gets for an element that is unknown."""
    if dtype is torch.bool:
        return bool(uniform)
    return 1.0 if dtype.is_floating_point else 1
