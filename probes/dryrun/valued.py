"""A dry run that follows values: for model classes whose next operator depends on what is in a tensor.

Most classes ask for nothing of the kind, and following costs time, so this is the second try: experts in a loop over
`nonzero()`, positions counted on the host, masks that are looked into. Integers and masks are followed as on the
phantom GPU (`probes.phantom.values`); what comes from weights is unknown, but for the places that `topk` picks: every
place is picked equally often, as a trained router with its balancing loss comes close to. A comparison of unknown
values holds, and a mask of them selects everything: what is then computed is the most that can be.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from probes.dryrun.tracker import Tracker
from probes.patching import nothing, replaced
from probes.phantom.operators import HANDLERS
from probes.phantom.values import Values, answer

MAX_FLOATS = 1 << 22
"""Gates of a mixture: tokens x experts."""
_aten = torch.ops.aten
_ITEM = _aten._local_scalar_dense.default
_TO_COPY = _aten._to_copy.default
_COPY = _aten.copy_.default
_TOPK = _aten.topk.default
_COMPARED = frozenset(
    getattr(getattr(_aten, name), form) for name in ("gt", "ge", "lt", "le") for form in ("Scalar", "Tensor")
)
_is_meta = torch._C.TensorBase.is_meta.__get__


class _Values(Values):
    """What is known, for as long as the storage lives whose it is."""

    def __init__(self, max_floats: int) -> None:
        super().__init__(max_floats)
        self._ends: dict[int, Any] = {}

    def keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        super().keep(tensor, values)
        self._watch(tensor)

    def assume(self, tensor: torch.Tensor, value: bool) -> None:
        super().assume(tensor, value)
        self._watch(tensor)

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, ends = storage._cdata, self._ends

        def ended(_: Any) -> None:
            ends.pop(key, None)
            self.drop(key)

        if key not in ends:
            ends[key] = weakref.ref(storage, ended)


class _Card:
    """What the phantom GPU's handlers ask of their GPU."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.origins = self

    record_question = staticmethod(nothing)  # a program's user is told what was asked; a dry run has none

    def made(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def adopted(self, out: Any, source: torch.Tensor, func: Any) -> Any:
        return out


class ValuedTracker(Tracker):
    """The tracker with what is known of values."""

    def __init__(self, device_type: str, **options: Any) -> None:
        super().__init__(device_type, **options)
        self.values = _Values(MAX_FLOATS)
        self._card: Any = _Card(self.values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        metas = [tensor for tensor in _tensors(args, kwargs) if _is_meta(tensor)]
        if not metas and str(kwargs.get("device", "")) != "meta":
            return func(*args, **kwargs)
        if func is _ITEM:
            value = self.values.real(args[0])
            return answer(args[0].dtype, self.values.uniform(args[0])) if value is None else value.item()
        if func is _TO_COPY and str(kwargs.get("device")) == "cpu":
            value, dtype = self.values.real(args[0]), kwargs.get("dtype") or args[0].dtype
            if value is not None:
                return value.to(dtype, copy=True)
            return torch.full(args[0].shape, answer(args[0].dtype, self.values.uniform(args[0])), dtype=dtype)
        if func is _COPY:
            return self.values.copied(*args[:2])
        handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(self._card, func, args, kwargs)
            if out is not NotImplemented:
                self._outputs(out, str(func))
                return out
        done, out = self.values.computed(func, args, kwargs, metas)
        if done:
            self._outputs(out, str(func))
            return out
        if any(not _is_meta(tensor) and tensor.dim() for tensor in _tensors(args, kwargs)):
            args, kwargs = _on_meta(args), {name: _on_meta(argument) for name, argument in kwargs.items()}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.values.after(func, args, kwargs, out, metas)
        if func in _COMPARED and self.values.worth_keeping(torch.bool, out.numel()):
            self.values.keep(out, torch.ones(out.shape, dtype=torch.bool))
        if (
            func is _TOPK
            and (len(args) < 3 or args[2] in (-1, args[0].dim() - 1))
            and self.values.worth_keeping(torch.int64, out[1].numel())
        ):
            # in turn: no row has one twice, every place is picked equally often
            places = torch.arange(out[1].numel()) % args[0].shape[-1]
            self.values.keep(out[1], places.reshape(out[1].shape))
        return out


@contextmanager
def selecting_all() -> Iterator[None]:
    """Within it a mask of unknown values selects every element on meta, and numbers that a class writes down are known
    (on meta PyTorch forgets them)."""
    from torch.fx.experimental import _config

    plain = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        on_host = device is None or str(device) != "meta"
        made: torch.Tensor = plain(data, device=device if on_host else "cpu", **options)
        return made if on_host else made.to(device)

    with _config.patch(meta_nonzero_assume_all_nonzero=True), replaced([(torch, "tensor", tensor)]):
        yield


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    tensors = []
    for argument in (*args, *kwargs.values()):
        inner = argument if isinstance(argument, (list, tuple)) else (argument,)
        tensors += [each for each in inner if isinstance(each, torch.Tensor)]
    return tensors


def _on_meta(value: Any) -> Any:
    """`value` with real tensors (of the host) in their meta form."""
    if isinstance(value, torch.Tensor):
        return value if _is_meta(value) or not value.dim() else value.to("meta")
    if type(value) in (list, tuple):
        return type(value)(_on_meta(member) for member in value)
    return value
