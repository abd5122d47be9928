"""A rank of a DDP job, traced: PyTorch's own `DistributedDataParallel`, its buckets those of the full model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from planner.records import dataclass
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.allocator.stretches import flat
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.layout_tracker import LayoutTracker
from probes.dryrun.splice import splice
from probes.dryrun.trace import Owners, Trace, load_all
from probes.dryrun.tracker import Origin
from probes.stack.parallelize import Layout, layout_model

BUCKETS = "DDP buckets"


@dataclass(frozen=True, kw_only=True)
class _State:
    """A parameter or buffer of the module that DDP wraps."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trained: bool


class DdpWorld:
    """A job of DDP ranks. The default process group must exist: fake for a dry run, gloo for its check."""

    tracker = LayoutTracker

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._states: list[_State] = []
        self._order: list[str] = []

    @contextmanager
    def prepared(self, tracker: LayoutTracker, model: Any, reference: Any) -> Iterator[tuple[Layout, Owners]]:
        """See `probes.dryrun.trace.World`."""
        self._states = [
            _State(name=name, shape=one.shape, dtype=one.dtype, trained=one.requires_grad)
            for name, one in (*model.named_parameters(), *model.named_buffers())
        ]
        self._order = []
        hooks = [
            one.register_post_accumulate_grad_hook(partial(self._ready, name))
            for name, one in model.named_parameters()
            if one.requires_grad
        ]
        owners = load_all(tracker, model, reference)
        with tracker, tracker.labelled(BUCKETS):
            layout = layout_model(model, self._setup, device=next(model.parameters()).device)
        plain = layout.module._pre_forward

        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            with tracker.labelled(BUCKETS):  # the buckets are made anew once, in the order of the gradients
                return plain(*args, **kwargs)

        layout.module._pre_forward = pre_forward
        try:
            yield layout, owners
        finally:
            for hook in hooks:
                hook.remove()

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        if name not in self._order:
            self._order.append(name)

    def splice(self, trace: Trace, layers: LayerMap) -> Trace:
        """See `probes.dryrun.trace.World`: the buckets are those of the full model's parameters."""
        full = splice(_without(trace, BUCKETS), layers, self._setup).flat()
        states = _repeated(self._states, trace, layers)
        holder = torch.nn.Module()
        holder.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=one.trained)
            for one in states
        )
        made = LayoutTracker("meta")
        for part in holder.parts:
            made.seen(part)
        made.events.clear()
        with made, made.labelled(BUCKETS):
            wrapped = layout_model(holder, self._setup, device=torch.device("meta")).module
        by_name = {one.name: one for one in self._states}
        order = _repeated([by_name[name] for name in self._order], trace, layers)
        first = list(made.events)
        made.events.clear()
        del wrapped
        freed = list(made.events)
        made.close()
        return _with_buckets(full, first, [*freed, *_rebuilt(order, len(made.origins))])


def _without(trace: Trace, label: str) -> Trace:
    """`trace` without the allocations of one label."""
    dropped = {number for number, origin in trace.origins.items() if origin.op == label}
    events = [one for one in flat(trace.events) if isinstance(one, Phase) or getattr(one, "id", None) not in dropped]
    return replace(trace, events=events)


def _repeated(states: list[_State], trace: Trace, layers: LayerMap) -> list[_State]:
    """The full model's states in order."""
    return [one for one, _ in layers.unrolled(states, lambda one: trace.layer_of(one.name))]


def _rebuilt(order: list[_State], number: int) -> list[Event]:
    """The buckets that DDP makes after its first backward, in the order in which the gradients came; numbers from
    `number` on.

    Source: PyTorch 2.13 torch/csrc/distributed/c10d/reducer.cpp `rebuild_buckets`.
    """
    import torch.distributed as dist

    tensors = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in order]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    sizes = [sum(tensors[index].numel() * tensors[index].element_size() for index in one) for one in buckets]
    return [Alloc(number + index, size) for index, size in enumerate(sizes)]


_BUCKET_BYTES = 25 * 1024**2


def _with_buckets(trace: Trace, first: list[Event], again: list[Event]) -> Trace:
    """`trace` with the buckets' events `first` after the weights are loaded and `again` as the second step begins."""
    origins = dict(trace.origins)
    events: list[Event] = []
    numbers: dict[int, int] = {}
    phase = "load"

    def insert(bucket_events: list[Event]) -> None:
        for event in bucket_events:
            if isinstance(event, Alloc):
                numbers[event.id] = len(origins)
                origins[len(origins)] = Origin(phase, None, BUCKETS, event.size_bytes)
                events.append(Alloc(numbers[event.id], event.size_bytes))
            elif isinstance(event, Free):
                events.append(Free(numbers.pop(event.id)))

    for event in flat(trace.events):
        if isinstance(event, Phase):
            before, phase = phase, event.name.partition("/")[0]
            events.append(event)
            if phase == "forward" and before == "step":
                insert(again)
                again = []
        else:
            if phase == "load" and isinstance(event, Alloc) and event.id not in trace.owners:
                insert(first)  # after the weights, before the batches
                first = []
            events.append(event)
    return replace(trace, events=events, origins=origins)
