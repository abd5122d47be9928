"""Operators that have no meta form, or answer another way without values."""

from collections.abc import Callable
from typing import Any

import torch

from probes.patching import nothing
from probes.phantom.cuda import Refused
from probes.phantom.issued import masks_of
from probes.phantom.mode import Phantom

_aten = torch.ops.aten
Handler = Callable[[Phantom, Any, Any, dict[str, Any]], Any]


def _equal(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operands = [phantom.values.real(tensor) if tensor.is_meta else tensor for tensor in args[:2]]
    if all(operand is not None for operand in operands):
        return func(*operands)
    phantom.origins.record_question(phantom, "whether two tensors are equal")
    return bool(args[0].shape == args[1].shape)


def _of_unknown(handler: Handler) -> Handler:
    """For a first argument whose values are unknown: of known ones the operator itself runs."""

    def handle(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_known = phantom.values.real(args[0]) is not None
        return NotImplemented if is_known else handler(phantom, func, args, kwargs)

    return handle


def _unknown_size(what: str) -> Handler:
    """Notes that the largest possible size was taken, where the values are unknown."""

    @_of_unknown
    def handler(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        phantom.origins.record_question(phantom, f"how many elements {what} (all were assumed)")
        return NotImplemented

    return handler


@_of_unknown
def _unique(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    phantom.origins.record_question(phantom, "how many elements differ (all were assumed)")
    return tuple(
        phantom.made(shape, dtype)
        for shape, dtype in (
            ((tensor.numel(),), tensor.dtype),
            (tensor.shape, torch.int64),
            ((tensor.numel(),), torch.int64),
        )
    )


@_of_unknown
def _repeated(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        raise Refused("repeat_interleave by a number of times that only the GPU knows cannot be followed")
    return phantom.made((size,), args[0].dtype)


@_of_unknown
def _bincount(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    length = kwargs.get("minlength") or (args[2] if len(args) > 2 else 0)
    if not length:
        raise Refused("bincount of values that only the GPU knows cannot be followed without minlength")
    weighted = len(args) > 1 and args[1] is not None
    return phantom.made((length,), torch.float64 if weighted else torch.int64)


@_of_unknown
def _histc(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    return phantom.made((bins,), args[0].dtype)


def _by_masks(phantom: Phantom, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Indexing by masks: those whose values are known select as many elements as they truly do."""
    tensor, indices = args[0], args[1]
    masks = masks_of(indices)
    if not masks or not tensor.is_meta or phantom.values.real(tensor) is not None:
        return NotImplemented
    places: dict[int, torch.Tensor] = {}
    for mask in masks:
        values = phantom.values.real(mask) if mask.is_meta else mask
        if values is None:
            phantom.origins.record_question(phantom, "how many elements a mask selects (all were assumed)")
            return NotImplemented
        places[id(mask)] = values.nonzero()
    chosen: list[Any] = []
    for index in indices:
        if index is not None and id(index) in places:
            positions = phantom.made(places[id(index)].shape, torch.int64)
            chosen += positions.unbind(1)
        else:
            chosen.append(index)
    return phantom.adopted(func(tensor, chosen, *args[2:], **kwargs), tensor, func)


HANDLERS: dict[Any, Handler] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: nothing,  # it finds no infinity
    _aten.equal.default: _equal,
    _aten.nonzero.default: _unknown_size("are not zero"),
    _aten.index.Tensor: _by_masks,
    _aten.index_put.default: _by_masks,
    _aten.index_put_.default: _by_masks,
    _aten._index_put_impl_.default: _by_masks,
    _aten.masked_select.default: _unknown_size("a mask selects"),
    _aten._unique2.default: _unique,
    _aten.repeat_interleave.Tensor: _repeated,
    _aten.bincount.default: _bincount,
    _aten.histc.default: _histc,
}
"""Operators that the phantom GPU has of its own."""
