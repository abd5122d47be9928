"""CUDA's autocast for tensors that are not on a GPU: the same lists, the same weight-cast cache.

`torch.autocast` gives meta tensors no autocast at all and CPU tensors another list. Here CUDA's lists are registered as
Python kernels on a dispatch key that no build of PyTorch uses (AutocastIPU), and the key is switched on for the thread
while the context is entered. Casting therefore happens where PyTorch does it, at the dispatcher, also for operators
called inside composite ones.

Source: PyTorch 2.13, aten/src/ATen/autocast_mode.h (AT_FORALL_*) and autocast_mode.cpp (`cached_cast`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import cache, partial
from typing import Any

import torch

from probes.patching import replaced

_KEY_NAME = "AutocastIPU"

LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp",
)  # fmt: skip
FP32_SET_OPT_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
FP32_APPEND_DTYPE = ("norm.Scalar", "norm.ScalarOpt_dim")
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""Upsampling (fp32 list) is left out: no language model calls it."""


class State:
    """What one thread's emulated autocast is doing: whether it is switched on now, and its 16-bit type."""

    enabled = False
    dtype = torch.bfloat16
    depth = 0
    cache_enabled = True
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # noqa: RUF012 - one per process, cleared on exit


def _eligible(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def cached_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`; the cast of a trainable fp32 leaf is kept until the outermost context ends.

    Source: autocast_mode.cpp `cached_cast`: only fp32 leaves that require gradients and are no views are cached, so
    the copies of frozen weights live only as long as something uses them.
    """
    if tensor.dtype is dtype:
        return tensor
    cacheable = (
        State.cache_enabled
        and dtype is State.dtype
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
    )
    if not cacheable:
        return tensor.to(dtype)
    hit = State.cache.get(id(tensor))
    if hit is None:
        hit = (tensor, tensor.to(dtype))
        State.cache[id(tensor)] = hit
    return hit[1]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return cached_cast(value, dtype) if _eligible(value) else value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype) for item in value]
    return value


def _first_eligible(args: Sequence[Any]) -> bool:
    return bool(args) and _eligible(args[0])


def _kernel(op: Any, policy: str, key_set: Any) -> Callable[..., Any]:
    exclude = torch._C._ExcludeDispatchKeyGuard
    names = [argument.name for argument in op._schema.arguments]
    dtype_index = names.index("dtype") if "dtype" in names else -1

    def cast(*args: Any, **kwargs: Any) -> Any:
        with exclude(key_set):
            dtype = torch.float32 if policy == "fp32" else State.dtype
            return op(*[_cast(arg, dtype) for arg in args], **{k: _cast(v, dtype) for k, v in kwargs.items()})

    def set_dtype(*args: Any, **kwargs: Any) -> Any:
        with exclude(key_set):
            given = kwargs.get("dtype") or (args[dtype_index] if 0 <= dtype_index < len(args) else None)
            if given is None and _first_eligible(args):
                kwargs["dtype"] = torch.float32
                args = args[:dtype_index] if 0 <= dtype_index < len(args) else args
            return op(*args, **kwargs)

    def append_dtype(*args: Any, **kwargs: Any) -> Any:
        with exclude(key_set):
            if not _first_eligible(args):
                return op(*args, **kwargs)
            if op is torch.ops.aten.norm.Scalar:
                return torch.ops.aten.norm.ScalarOpt_dtype(args[0], *args[1:2], dtype=torch.float32)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(*args, **kwargs, dtype=torch.float32)

    def promote(*args: Any, **kwargs: Any) -> Any:
        with exclude(key_set):
            flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            wide = any(_eligible(item) and item.dtype is torch.float32 for item in flat)
            dtype = torch.float32 if wide else State.dtype
            return op(*[_cast(arg, dtype) for arg in args], **kwargs)

    table = {"lower": cast, "fp32": cast, "set": set_dtype, "append": append_dtype, "promote": promote}
    return table[policy]


@cache
def _register() -> tuple[Any, ...]:
    """Registers the kernels once per process; the libraries must stay referenced."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    library = torch.library.Library("aten", "IMPL", _KEY_NAME)
    key_set = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY_NAME))
    lists = (LOWER_PRECISION, FP32, FP32_SET_OPT_DTYPE, FP32_APPEND_DTYPE, PROMOTE)
    for policy, names in zip(("lower", "fp32", "set", "append", "promote"), lists, strict=True):
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, base, None)
            if packet is None or (overload or "default") not in packet.overloads():
                continue  # another PyTorch version
            library.impl(name, _kernel(getattr(packet, overload or "default"), policy, key_set))
    return (fallback, library)


def _switch(on: bool) -> None:
    key = getattr(torch._C.DispatchKey, _KEY_NAME)
    torch._C._dispatch_tls_set_dispatch_key_included(key, on)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not on)


@contextmanager
def emulated_autocast(dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool = True) -> Iterator[None]:
    """CUDA's autocast to `dtype` for CPU and meta tensors, nestable like `torch.autocast`."""
    _register()
    before = (State.enabled, State.dtype, State.cache_enabled, torch.is_autocast_enabled("cuda"))
    State.enabled, State.dtype, State.cache_enabled = enabled, dtype, cache_enabled
    State.depth += 1
    _switch(enabled)
    torch.set_autocast_enabled("cuda", enabled)  # what `torch.is_autocast_enabled()` answers, as peft asks
    try:
        yield
    finally:
        State.depth -= 1
        if State.depth == 0:
            State.cache.clear()
        State.enabled, State.dtype, State.cache_enabled = before[:3]
        _switch(State.enabled)
        torch.set_autocast_enabled("cuda", before[3])


def without_casts() -> Any:
    """A context in which operators are not cast although autocast is enabled: the inside of a listed operator.

    Source: PyTorch 2.13 autocast_mode.h `WrapFunction_`: `ExcludeDispatchKeyGuard no_autocast(...)` around the call.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY_NAME)))


class _Autocast(ContextDecorator):
    """Stands in for `torch.autocast` while the emulation is installed: libraries switch autocast off around rotary
    tables, and checkpointing switches it on again for the recomputation."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        caches = State.cache_enabled if cache_enabled is None else cache_enabled
        self._make = partial(emulated_autocast, dtype or State.dtype, enabled=enabled, cache_enabled=caches)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> "_Autocast":
        self._entered.append(self._make())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)


def emulation_installed() -> AbstractContextManager[None]:
    """Makes libraries that ask or set autocast (by any device type) see the emulation. For CPU and meta runs only."""
    _register()
    return replaced(
        [
            (torch, "is_autocast_enabled", lambda device_type="cuda": State.enabled),
            (torch, "get_autocast_dtype", lambda device_type="cuda": State.dtype),
            (torch, "autocast", _Autocast),
            (torch.amp, "autocast", _Autocast),
            (torch.amp, "is_autocast_available", lambda device_type="cuda": True),
        ]
    )
