"""Operators that make a tensor from nothing but its form."""

from math import prod
from typing import Any

import torch

_aten = torch.ops.aten

MAKERS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.randn.default,
        _aten.rand.generator,
        _aten.randn.generator,
    }
)
"""By the shape, their first argument."""
_LIKE = frozenset(
    {
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
    }
)
_NEW = frozenset(
    {
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.new_full.default,
    }
)


def made_dtype(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    """The type of what a maker makes."""
    dtype: torch.dtype = kwargs.get("dtype") or (torch.get_default_dtype() if func in MAKERS else args[0].dtype)
    return dtype


def floating_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of the floating-point tensor that this call makes, 0 where it makes none."""
    if func in MAKERS:
        shape = args[0]
    elif func in _LIKE:
        shape = args[0].shape
    elif func in _NEW:
        shape = args[1]
    else:
        return 0
    dtype = made_dtype(func, args, kwargs)
    return prod(shape) * dtype.itemsize if dtype.is_floating_point else 0
