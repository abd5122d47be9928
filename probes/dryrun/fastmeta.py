"""Short cuts for the meta forms of the commonest operators, which PyTorch computes in slow Python.

Each gives a tensor of the same shape, type and layout as the operator would, and only for plain contiguous operands;
otherwise None, and the operator itself runs. The comparison with real tensors (tests) covers them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_META = torch.device("meta")
_aten = torch.ops.aten


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not tensor.is_contiguous() or len(args) > 1:
        return None
    if kwargs.get("device", _META) not in (None, _META) or kwargs.get("memory_format") not in (
        None,
        torch.preserve_format,
        torch.contiguous_format,
    ):
        return None
    return torch.empty(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype, device=_META)


def _binary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[0], args[1]
    if len(args) > 2 or not isinstance(left, torch.Tensor) or not left.is_contiguous():
        return None
    if isinstance(right, torch.Tensor):
        if right.dim() == 0:
            dtype = left.dtype if left.dtype is right.dtype else torch.result_type(left, right)
        elif right.is_contiguous() and left.dim():
            dtype = left.dtype if left.dtype is right.dtype else torch.promote_types(left.dtype, right.dtype)
            if right.shape != left.shape:
                return _expanded(left.shape, right.shape, dtype)
        else:
            return None
    elif left.dtype.is_floating_point and isinstance(right, (int, float)):
        dtype = left.dtype
    else:
        return None
    return torch.empty(left.shape, dtype=dtype, device=_META)


def _expanded(left: torch.Size, right: torch.Size, dtype: torch.dtype) -> Any:
    """Where one of two contiguous operands has the result's shape already: norms and their weights."""
    whole, other = (left, right) if left.numel() >= right.numel() else (right, left)
    pairs = zip(reversed(whole), reversed(other), strict=False)
    if len(other) > len(whole) or any(one not in (1, size) for size, one in pairs):
        return None
    return torch.empty(whole, dtype=dtype, device=_META)


def _unary_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not tensor.is_contiguous() or not tensor.dtype.is_floating_point:
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)


def _norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("dtype") is not None or len(args) > 2:
        return None
    return [torch.empty((), dtype=one.dtype, device=_META) for one in args[0]]


def _list_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(one.is_meta and one.is_contiguous() and one.dtype.is_floating_point for one in args[0]):
        return None
    return [torch.empty(one.shape, dtype=one.dtype, device=_META) for one in args[0]]


def _in_place_list(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DONE if args[0] and args[0][0].is_meta else None  # an optimizer counts its steps on the CPU


def _in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DONE


DONE = object()
"""What an operator that changes its arguments in place and returns nothing gives."""

SHORTCUTS: dict[Any, Shortcut] = {
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.empty_like.default: _like,
    _aten.mul.Tensor: _binary,
    _aten.mul.Scalar: _binary,
    _aten.add.Tensor: _binary,
    _aten.sub.Tensor: _binary,
    _aten.div.Tensor: _binary,
    _aten.pow.Tensor_Scalar: _unary_float,
    _aten.neg.default: _unary_float,
    _aten.silu.default: _unary_float,
    _aten.gelu.default: _unary_float,
    _aten.tanh.default: _unary_float,
    _aten.rsqrt.default: _unary_float,
    _aten.sigmoid.default: _unary_float,
    _aten._foreach_norm.Scalar: _norms,
    _aten._foreach_sqrt.default: _list_like,
    **dict.fromkeys(
        (
            getattr(packet, overload)
            for packet in map(
                partial(getattr, _aten),
                (
                    "_foreach_add_",
                    "_foreach_addcdiv_",
                    "_foreach_addcmul_",
                    "_foreach_div_",
                    "_foreach_lerp_",
                    "_foreach_mul_",
                    "_foreach_sub_",
                ),
            )
            for overload in packet.overloads()
        ),
        _in_place_list,
    ),
    _aten._fused_adamw_.default: _in_place_list,
}


def register_in_place(*operators: Any) -> None:
    """Further operators that change their arguments in place, make nothing and return nothing."""
    for one in operators:
        SHORTCUTS[one] = _in_place
