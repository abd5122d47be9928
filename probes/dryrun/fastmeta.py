"""Short cuts for the meta forms of operators, which PyTorch computes in slow Python.

What a functional operator makes follows from the layouts of its arguments: the first call with some layouts runs, later
ones are given tensors of the same shapes, types and strides. Multi-tensor operators, of which a run has one call each,
have short cuts of their own. The comparison with real tensors (tests) covers both.
"""

from collections.abc import Callable
from typing import Any

import torch

Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_META = torch.device("meta")
_aten = torch.ops.aten


def _norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("dtype") is not None or len(args) > 2:
        return None
    return [torch.empty((), dtype=tensor.dtype, device=_META) for tensor in args[0]]


def _list_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(tensor.is_meta and tensor.is_contiguous() and tensor.dtype.is_floating_point for tensor in args[0]):
        return None
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=_META) for tensor in args[0]]


def _in_place_list(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DONE if args[0] and args[0][0].is_meta else None  # an optimizer counts its steps on the CPU


DONE = object()
"""What an operator that changes its arguments in place and returns nothing gives."""

_IN_PLACE = ("add", "addcdiv", "addcmul", "div", "lerp", "mul", "sub")
_PACKETS = [getattr(_aten, f"_foreach_{name}_") for name in _IN_PLACE]
SHORTCUTS: dict[Any, Shortcut] = {
    _aten._foreach_norm.Scalar: _norms,
    _aten._foreach_sqrt.default: _list_like,
    _aten._fused_adamw_.default: _in_place_list,
    **{getattr(packet, overload): _in_place_list for packet in _PACKETS for overload in packet.overloads()},
}


def register_in_place(*operators: Any) -> None:
    """Further operators that change their arguments in place, make nothing and return nothing."""
    SHORTCUTS.update(dict.fromkeys(operators, lambda args, kwargs: DONE))


_PLAIN = frozenset({bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NOT_KEPT = object()
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Remembered:
    """What functional operators gave, by the operator and the layouts of its arguments."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Which operator with which layouts the last call was; None: one that is not known by them."""
        self._kept: dict[Any, tuple[Any, int]] = {}
        self._makes_new: dict[int, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` gives on meta tensors: by its short cut, new tensors where it was called with such arguments
        before, else by calling it."""
        self.number = None
        number = id(func)
        new = self._makes_new.get(number)
        if new is None:
            new = makes_new(func)
            if isinstance(func, torch._ops.OpOverload) and func not in SHORTCUTS:
                self._makes_new[number] = new  # it lives as long as the process; hashing it is slow
        if not new:
            shortcut = SHORTCUTS.get(func) if number not in self._makes_new else None
            out = None if shortcut is None else shortcut(args, kwargs)
            return func(*args, **kwargs) if out is None else None if out is DONE else out
        try:
            key = (number, _key(args), *((name, _key((value,))) for name, value in kwargs.items()))
        except TypeError:  # an argument of a kind that no layout says
            return func(*args, **kwargs)
        cached = self._kept.get(key)
        if cached is None:
            out = func(*args, **kwargs)
            self.number = len(self._kept)
            self._kept[key] = _layouts_of(out, args), self.number
            return out
        layouts, self.number = cached
        if layouts is _NOT_KEPT:
            return func(*args, **kwargs)
        if type(layouts) is tuple:
            size, stride, dtype = layouts
            return torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return tuple(
            layout and torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=_META) for layout in layouts
        )


def makes_new(func: Any) -> bool:
    """Whether an operator changes none of its arguments and, by its schema, gives no part of them back."""
    if not isinstance(func, torch._ops.OpOverload) or func in SHORTCUTS or func is _aten._unsafe_view.default:
        return False
    schema = func._schema
    return not any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))


def _key(values: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            if not value.shape:  # a number's type may give way to another's: which, no layout says
                raise TypeError(kind)
            key.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif kind in _PLAIN:
            key.append((kind, value))  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple or kind is torch.Size:
            key.append(_key(value))
        else:
            raise TypeError(kind)
    return tuple(key)


def _layouts_of(out: Any, args: tuple[Any, ...]) -> Any:
    """The layouts of an operator's outputs: of one tensor, or a list with None where it gave None."""
    single = isinstance(out, torch.Tensor)
    if not single and not isinstance(out, tuple):
        return _NOT_KEPT
    given = {argument.untyped_storage()._cdata for argument in args if isinstance(argument, torch.Tensor)}
    layouts: list[_Layout | None] = []
    for tensor in (out,) if single else out:
        if tensor is None:
            layouts.append(None)
            continue
        if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.storage_offset():
            return _NOT_KEPT
        storage = tensor.untyped_storage()
        if storage._cdata in given:
            return _NOT_KEPT
        given.add(storage._cdata)
        replica = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        if replica.untyped_storage().nbytes() != storage.nbytes():
            return _NOT_KEPT
        layouts.append((tensor.shape, tensor.stride(), tensor.dtype))
    return layouts[0] if single else layouts
