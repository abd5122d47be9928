"""Which operators a run issues, in which order and by whom: what `planner.speed` prices."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any

import torch

from planner.speed.operators import ISSUERS, Layout, Operator, Program, Segment
from probes.dryrun.fastmeta import Remembered
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.streams import Exchanges, Stream
from probes.patching import replaced
from probes.stack.images import SEPARATE
from probes.stack.kernels import listening

MODULE, FORWARD, NO_GRAD, ENGINE, RECOMPUTE = range(len(ISSUERS))
_ISSUERS = {(True, True): FORWARD, (True, False): NO_GRAD, (False, True): RECOMPUTE, (False, False): ENGINE}
"""By whether no backward runs and whether a graph is recorded."""
_FORWARD = ("forward", None)
_NUMBERS = (bool, int, float)
_in_engine = torch._C._current_graph_task_id
_records = torch.is_grad_enabled
_MANY = 8
"""Tensors of a list that is one layout of all their elements: those of multi-tensor operators."""


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), _name(tensor.dtype))


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class OperatorLog:
    """What is issued, as numbers that stand for an operator with its layouts.

    Attributes:
        calls: operator x len(ISSUERS) + issuer.
        marks: (place in `calls`, phase, layer) as phases begin.
        micro_batches: places at which a micro-batch begins; full_step: at which the optimizer of all layers does, None
            where the run has them all; layers: which of the run's layers stand for the full model's.
        modules: how many modules each layer of the run has, and what belongs to none.
        exchanges: what a rank exchanges with others, None on one GPU.
    """

    def __init__(self) -> None:
        self.operators: list[Operator] = [Operator("module call")]
        self.calls: list[int] = []
        self.marks: list[tuple[int, str, int | None]] = []
        self.micro_batches: list[int] = []
        self.full_step: int | None = None
        self.layers: LayerMap | None = None
        self.modules: dict[int | None, int] = {}
        self.exchanges: Exchanges | None = None
        self._known: dict[Any, int] = {}
        self._views: dict[int, int] = {}
        self._repeated: dict[int, int] = {}

    def mark(self, phase: str, layer: int | None) -> None:
        self.marks.append((len(self.calls), phase, layer))

    def add(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, remembered: Remembered) -> None:
        """An operator that ran: known by what `remembered` knows it by, a view by its name alone."""
        if self.exchanges is not None and self.exchanges.ran(name, func, args, kwargs, out):
            return
        key = remembered.number
        if key is not None:
            number = self._known.get(key)
            if number is None:
                number = self._number(_operator(name, args, kwargs, out), key)
        elif (number := self._views.get(id(func))) is None:
            if isinstance(func, torch._ops.OpOverload) and func.is_view:
                number = self._views[id(func)] = len(self.operators)
                self.operators.append(Operator(name))
            else:
                number = self._number(_operator(name, args, kwargs, out))
        call = number * 5 + _ISSUERS[_in_engine() == -1, _records()]
        self.calls.append(call)
        if number in self._repeated:  # with the tensors that a checkpoint hands over to it
            begin = len(self.calls) - 1
            while begin and self.operators[self.calls[begin - 1] // 5].name == "aten.detach.default":
                begin -= 1
            self.calls += self.calls[begin:] * (self._repeated[number] - 1)

    def _number(self, made: Operator, key: Any = None) -> int:
        """That of an operator, which is new where its `key` (else itself) is not known."""
        key = made if key is None else key
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.operators)
            if made.inputs and made.name.startswith("aten._scaled_dot_product") and made.inputs[0].shape in SEPARATE:
                self._repeated[number] = made.inputs[0].shape[0]
                made = made.of_one_row()
            self.operators.append(made)
        return number

    def launched(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """A kernel that no operator launches."""
        self.noted(Operator(name, tuple(map(layout_of, inputs)), tuple(map(layout_of, outputs))))

    def noted(self, made: Operator) -> None:
        """A launch, or what is no operator."""
        issuer = FORWARD if _in_engine() == -1 else RECOMPUTE if _records() else ENGINE
        self.calls.append(self._number(made) * 5 + issuer)

    def module_called(self, module: Any, args: Any) -> None:
        self.calls.append(MODULE)

    def replacing_step(
        self, tracker: Any, mark: Callable[[str, int | None], None]
    ) -> Callable[[str, int | None], None]:
        """`mark`, which has `tracker` note this step's optimizer in place of an earlier one's."""

        def noted(phase: str, layer: int | None) -> None:
            if phase == "step":
                begin = next(place for place, name, _ in self.marks if name == "step")
                del self.calls[begin:]
                self.marks = [entry for entry in self.marks if entry[0] <= begin and entry[1] != "step"]
                tracker.log = self
            mark(phase, layer)

        return noted

    def begin_full_step(self, layers: LayerMap) -> None:
        """From now on the optimizer runs on all of the model's parameters, followed by another tracker."""
        self.layers = layers
        self._known = {key: number for key, number in self._known.items() if not isinstance(key, int)}
        self.full_step = len(self.calls)
        self.mark("step", None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it module calls, launches and what streams exchange are noted."""
        heard = replaced([(Stream, "exchanges", self.exchanges)])
        called = torch.nn.modules.module.register_module_forward_pre_hook(self.module_called)
        with called, listening(self.launched), heard:
            yield

    def segments(self, first: int, last: int) -> list[tuple[int | None, Segment]]:
        """What was issued from one place to another, by layer."""
        before = [mark for mark in self.marks if mark[0] <= first][-1:]
        marks = [*before, *(mark for mark in self.marks if first < mark[0] < last)]
        ends = [*(mark[0] for mark in marks[1:]), last]
        return [
            (layer, Segment(phase=phase, calls=self.calls[max(begin, first) : end]))
            for (begin, phase, layer), end in zip(marks, ends, strict=True)
            if end > max(begin, first)
        ]


def _operator(name: str, args: Any, kwargs: Any, out: Any) -> Operator:
    inputs: list[Layout] = []
    numbers: list[float] = []
    many = _collect((*args, *(kwargs or {}).values()), inputs, numbers)
    outputs: list[Layout] = []
    _collect((out,), outputs, [])
    return Operator(name, tuple(inputs), tuple(outputs), tuple(numbers), many)


def _collect(values: Any, layouts: list[Layout], numbers: list[float]) -> int:
    """Adds what `values` hold; returns how many tensors lie in long lists, each of which is one layout."""
    many = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() or not numbers:
                layouts.append(layout_of(value))
        elif isinstance(value, _NUMBERS):
            numbers.append(float(value) if math.isfinite(value) else 0.0)  # a file holds no infinity
        elif isinstance(value, (list, tuple)):
            if len(value) >= _MANY and type(value) is list and isinstance(value[0], torch.Tensor):
                many += len(value)
                layouts.append(Layout((sum(each.numel() for each in value),), (1,), _name(value[0].dtype)))
            else:
                many += _collect(value, layouts, numbers)
    return many


def full_program(log: OperatorLog, trainables: Sequence[Any], repeats: Sequence[int] = ()) -> Program | None:
    """The step's program of the full model, None where no step was followed.

    Args:
        trainables: what trains of the run's model (`probes.dryrun.trace.Trainable`).
        repeats: of the forwards that a micro-batch begins, each with what follows it, how many each stands for.
    """
    if not log.micro_batches:
        return None
    layers = log.layers
    begin, step = log.micro_batches[-1], next(place for place, phase, _ in log.marks if phase == "step")
    forwards = [place for place, phase, layer in log.marks if begin <= place < step and (phase, layer) == _FORWARD]
    ends = [*forwards[1:], step] if repeats else [step]
    parts = [log.segments(*between) for between in zip((begin, *ends), ends, strict=False)]
    micro = [segment for part in parts for segment in part]
    optimizer = log.segments(step if log.full_step is None else log.full_step, len(log.calls))
    sums: Mapping[int, int] = {}
    if len(log.micro_batches) == 1:
        every = (
            layers.unrolled(trainables, lambda trained: trained.layer)
            if layers
            else ((trained, None) for trained in trainables)
        )
        counts = Counter(
            layout_of(torch.empty(trained.local_shape, dtype=trained.dtype, device="meta"))
            for trained, _ in every
            if trained.has_gradient
        )
        sums = {len(log.operators) + place: count for place, count in enumerate(counts.values())}
        log.operators += [Operator("aten.add_.Tensor", (layout, layout), (layout,)) for layout in counts]
    module_layers = (None, *(layers.of if layers else (layer for layer in log.modules if layer is not None)))
    return Program(
        operators=log.operators,
        segments=[segment for _, segment in (*micro, *optimizer)],
        micro_batch=[*_repeated(parts, (1, *repeats), layers)],
        step=[*range(len(micro), len(micro) + len(optimizer))],
        added=sums,
        num_modules=sum(log.modules.get(layer, 0) for layer in module_layers),
    )


def _repeated(
    parts: Sequence[Sequence[tuple[int | None, Segment]]], times: Sequence[int], layers: LayerMap | None
) -> Iterator[int]:
    """The places of the segments of all parts, each part so many times, as the full model has them."""
    first = 0
    for part, repeats in zip(parts, times, strict=True):
        places = range(len(part)) if layers is None else _unrolled(part, layers)
        yield from [first + place for place in places] * repeats
        first += len(part)


def _unrolled(segments: Sequence[tuple[int | None, Segment]], layers: LayerMap) -> Iterator[int]:
    places = range(len(segments))
    for _, group in groupby(places, lambda place: (segments[place][1].phase, segments[place][0] is not None)):
        for place, _ in layers.unrolled(group, lambda place: segments[place][0]):
            yield place
