"""The full depth from a truncated run: the events of its middle layers, repeated.

Layers that are alike do the same to memory. A run with a first, some middle and a last layer therefore holds every
kind of event of the full model; a block of one period of middle layers is repeated in the forward, in the backward and
among the loaded weights, each copy with storages of its own. The optimizer is run for real on the full model's list of
trained parameters (its memory comes from the shapes alone). What comes out is the event list of the full model, which
is then analysed and replayed like a real one.

Every reference is checked: a copy may only release what its counterpart allocated, of the same size, once, and nothing
that the run released may be left. Where a model breaks that (a storage shared between far layers), `SpliceError` says
so and the caller runs the full depth.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.metaops import quick_checks
from probes.dryrun.trace import Trace, Trainable, own_optimizer_state
from probes.dryrun.tracker import Origin, Tracker
from probes.stack import make_optimizer
from probes.stack.step import make_scaler, optimizer_phase


class SpliceError(ValueError):
    """The run's layers are not copies of one another."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Which layers of the run are repeated: `start` to `start + period`, `copies` times more."""

    start: int
    period: int
    copies: int

    @property
    def end(self) -> int:
        """First layer after the block."""
        return self.start + self.period

    def shifts(self, layer: int | None) -> tuple[int, ...]:
        """By how much the layer's copies lie deeper in the full model."""
        if layer is None or layer < self.start:
            return (0,)
        if layer >= self.end:
            return (self.copies * self.period,)
        return tuple(copy * self.period for copy in range(self.copies + 1))

    def instance(self, full_layer: int) -> tuple[int, int]:
        """(layer of the run, shift) that stands for a layer of the full model."""
        if full_layer < self.start:
            return full_layer, 0
        copy, rest = divmod(full_layer - self.start, self.period)
        if copy <= self.copies:
            return self.start + rest, copy * self.period
        return full_layer - self.copies * self.period, self.copies * self.period


@dataclass(kw_only=True)
class _Segment:
    phase: str
    layer: int | None
    occurrence: int
    events: list[Event]

    @property
    def key(self) -> tuple[int, str, int | None]:
        return self.occurrence, self.phase, self.layer


class Shards(Protocol):
    """What a rank of several GPUs holds of a parameter, and how it steps."""

    tracker: type[Tracker]

    def stepping(self) -> AbstractContextManager[Any]:
        """Entered around the optimizer's run on the full model's parameters."""

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        """This rank's part of the parameter, on meta."""


class _Whole:
    """One GPU holds everything."""

    tracker = Tracker

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def parameter(self, one: Trainable) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"))


def splice(trace: Trace, block: Block, setup: TrainSetup, shards: Shards | None = None) -> Trace:
    """The trace of the full model from `trace`, whose layers `block` stand for the missing ones.

    Raises:
        SpliceError: a reference between layers does not repeat.
    """
    return _Splicer(trace, block, setup, shards or _Whole()).run()


class _Splicer:
    def __init__(self, trace: Trace, block: Block, setup: TrainSetup, shards: Shards) -> None:
        self.trace, self.block, self.setup, self.shards = trace, block, setup, shards
        self.segments = _split(trace.events)
        self.home: dict[int, tuple[_Segment, int]] = {}
        self.allocations: dict[tuple[int, str, int | None], list[int]] = {}
        for segment in self.segments:
            mine = self.allocations.setdefault(segment.key, [])
            for event in segment.events:
                if isinstance(event, Alloc):
                    self.home[event.id] = (segment, len(mine))
                    mine.append(event.id)
        self.sizes = {event.id: event.size_bytes for event in trace.events if isinstance(event, Alloc)}
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = {}
        self.owners: dict[int, tuple[str, str]] = {}
        self.alive: dict[tuple[int, int], int] = {}
        self._graph_ends: dict[int, bool] = {}
        self.gradients: list[dict[str, int]] = _gradients_by_step(trace, self.segments)

    def run(self) -> Trace:
        steps = iter(_OptimizerRun(self.trace, self.block, self.setup, self.shards).steps(len(self.gradients)))
        step = 0
        index = 0
        while index < len(self.segments):
            segment = self.segments[index]
            self.events.append(Phase(segment.phase))
            if segment.phase == "load":
                self._load(segment)
            elif segment.phase == "step":
                self._step(segment, next(steps), step)
                step += 1
            elif segment.layer is not None and self.block.start <= segment.layer < self.block.end:
                end = index
                while end < len(self.segments) and self._in_block(self.segments[end], segment):
                    end += 1
                self._repeat(self.segments[index:end])
                index = end
                continue
            else:
                shift = self.block.shifts(segment.layer)[0]
                self._emit(segment, shift, last=True)
            index += 1
        self._check_all_released()
        return replace(
            self.trace,
            events=self.events,
            origins=self.origins,
            owners=self.owners,
            num_layers=self.trace.num_layers + self.block.copies * self.block.period,
            parameter_bytes=self._parameter_bytes(),
        )

    def _in_block(self, segment: _Segment, first: _Segment) -> bool:
        return (
            segment.phase == first.phase
            and segment.occurrence == first.occurrence
            and segment.layer is not None
            and self.block.start <= segment.layer < self.block.end
        )

    def _repeat(self, run: list[_Segment]) -> None:
        shifts = self.block.shifts(self.block.start)
        order = shifts if run[0].phase == "forward" else tuple(reversed(shifts))
        for shift in order:
            for segment in run:
                self._emit(segment, shift, last=shift == order[-1])

    # Single events

    def _allocate(self, number: int, shift: int) -> None:
        new = len(self.origins)
        self.alive[number, shift] = new
        origin = self.trace.origins[number]
        layer = None if origin.layer is None else origin.layer + shift
        self.origins[new] = Origin(origin.phase, layer, origin.op, origin.size_bytes, len(self.events))
        owner = self.trace.owners.get(number)
        if owner is not None:
            self.owners[new] = owner
        self.events.append(Alloc(new, origin.size_bytes))

    def _release(self, number: int, shift: int) -> None:
        new = self.alive.pop((number, shift), None)
        if new is None:
            raise SpliceError(f"a storage of {self.trace.origins[number].op} is released twice or before it exists")
        self.events.append(Free(new))

    def _emit(self, segment: _Segment, shift: int, *, last: bool) -> None:
        for event in segment.events:
            if isinstance(event, Alloc):
                self._allocate(event.id, shift)
            elif isinstance(event, Free):
                self._free(event.id, segment, shift, last=last)

    def _free(self, number: int, segment: _Segment, shift: int, *, last: bool) -> None:
        home, place = self.home[number]
        if home.layer is None:
            if last or segment.layer is None:
                self._release(number, 0)
        elif segment.layer is None or self._ends_the_graph(segment):
            for one in self.block.shifts(home.layer):
                self._release(number, one)
        else:
            layer, own_shift = self.block.instance(home.layer + shift)
            if layer != home.layer:
                twins = self.allocations.get((home.occurrence, home.phase, layer), [])
                if place >= len(twins) or self.sizes[twins[place]] != self.sizes[number]:
                    raise SpliceError(f"layer {layer} allocates otherwise than layer {home.layer} in {home.phase}")
                number = twins[place]
            self._release(number, own_shift)

    def _ends_the_graph(self, segment: _Segment) -> bool:
        """Whether a layer before the block releases what layers behind the block made: the backward's last segment,
        when the graph dies and with it what its nodes hold themselves (int8 layers: their inputs). Such a release
        means every copy, while others mean the neighbour at the same distance."""
        if segment.layer is None or segment.layer >= self.block.start or segment.phase != "backward":
            return False
        if id(segment) not in self._graph_ends:
            homes = [self.home[event.id][0] for event in segment.events if isinstance(event, Free)]
            self._graph_ends[id(segment)] = any((home.layer or 0) >= self.block.end for home in homes)
        return self._graph_ends[id(segment)]

    def _check_all_released(self) -> None:
        released = {event.id for event in self.trace.events if isinstance(event, Free)}
        for number, _ in self.alive:
            if number in released:
                raise SpliceError(f"a copy of a storage of {self.trace.origins[number].op} is never released")

    # Segments that are no layer's

    def _load(self, segment: _Segment) -> None:
        """Weights of the block's layers once per copy; a run of allocations of the block keeps its order."""
        pending: list[tuple[int, int]] = []

        def flush() -> None:
            for shift in self.block.shifts(self.block.start) if pending else ():
                for number, _ in pending:
                    self._allocate(number, shift)
            pending.clear()

        for event in segment.events:
            if not isinstance(event, Alloc):
                flush()
                if isinstance(event, Free):
                    self._release(event.id, 0)
                continue
            owner = self.trace.owners.get(event.id)
            layer = None if owner is None else self.trace.layer_of(owner[1])
            if layer is not None and self.block.start <= layer < self.block.end:
                pending.append((event.id, layer))
                continue
            flush()
            self._allocate(event.id, self.block.shifts(layer)[0])
        flush()

    def _step(self, segment: _Segment, optimizer: "_StepEvents", step: int) -> None:
        of_parameter = self.gradients[step]
        gradients = set(of_parameter.values())
        before: list[int] = []
        after: list[int] = []
        place = before
        for event in segment.events:
            if isinstance(event, Alloc):
                place = after
            elif isinstance(event, Free) and event.id not in gradients and self.home[event.id][0].phase != "step":
                place.append(event.id)
        for number in before:
            self._free(number, segment, 0, last=True)
        for event in optimizer.events:
            if isinstance(event, Alloc):
                new = len(self.origins)
                optimizer.numbers[event.id] = new
                self.origins[new] = optimizer.origins[event.id]._replace(event_index=len(self.events))
                owner = optimizer.owners.get(event.id)
                if owner is not None:
                    self.owners[new] = owner
                self.events.append(Alloc(new, event.size_bytes))
            elif isinstance(event, Free):
                if event.id in optimizer.gradients:
                    name, shift = optimizer.gradients[event.id]
                    self._release(of_parameter[name], shift)
                else:
                    self.events.append(Free(optimizer.numbers.pop(event.id)))
        for number in after:
            self._free(number, segment, 0, last=True)

    def _parameter_bytes(self) -> int:
        return sum(
            self.origins[new].size_bytes
            for new, (category, name) in self.owners.items()
            if category in ("weights", "adapters") and name in self.trace.parameter_names
        )


def _split(events: list[Event]) -> list[_Segment]:
    segments: list[_Segment] = []
    occurrence = 0
    for event in events:
        if isinstance(event, Phase):
            phase, _, layer = event.name.partition("/")
            if not layer and phase in ("forward", "step"):
                occurrence += 1
            segments.append(
                _Segment(phase=phase, layer=int(layer) if layer else None, occurrence=occurrence, events=[])
            )
        else:
            segments[-1].events.append(event)
    return segments


def _gradients_by_step(trace: Trace, segments: list[_Segment]) -> list[dict[str, int]]:
    """For each optimizer step, parameter name -> storage of its gradient."""
    found: list[dict[str, int]] = [{}]
    for segment in segments:
        if segment.phase == "step":
            found.append({})
            continue
        for event in segment.events:
            if isinstance(event, Alloc):
                owner = trace.owners.get(event.id)
                if owner is not None and owner[0] == "gradients":
                    found[-1][owner[1]] = event.id
    return found[:-1]


@dataclass(kw_only=True)
class _StepEvents:
    events: list[Event]
    origins: dict[int, Origin]
    owners: dict[int, tuple[str, str]]
    gradients: dict[int, tuple[str, int]]
    numbers: dict[int, int]


class _OptimizerRun:
    """Clipping, optimizer and release of gradients on the full model's trained parameters."""

    def __init__(self, trace: Trace, block: Block, setup: TrainSetup, shards: Shards) -> None:
        self.setup = setup
        self.shards = shards
        self.parameters: list[tuple[str, int, Trainable, torch.nn.Parameter]] = []
        pending: list[Trainable] = []

        def add(one: Trainable, shift: int) -> None:
            self.parameters.append((one.name, shift, one, shards.parameter(one)))

        def flush() -> None:
            for shift in block.shifts(block.start) if pending else ():
                for one in pending:
                    add(one, shift)
            pending.clear()

        for one in trace.trainables:
            if one.layer is not None and block.start <= one.layer < block.end:
                pending.append(one)
                continue
            flush()
            add(one, block.shifts(one.layer)[0])
        flush()

    def _gradients(self) -> dict[tuple[str, int], torch.Tensor]:
        """Gives every parameter its gradient; one tensor for each storage, by the name that the run knows it by."""
        members: dict[tuple[str, int], list[torch.nn.Parameter]] = {}
        found = {}
        for _, shift, trainable, parameter in self.parameters:
            if trainable.has_gradient and trainable.gradient is None:
                members.setdefault((trainable.gradient_of, shift), []).append(parameter)
            elif trainable.gradient is not None:
                found[trainable.gradient_of, shift] = _laid_out_otherwise(trainable, parameter)
        for key, parameters in members.items():
            flat = torch.empty(sum(one.numel() for one in parameters), dtype=parameters[0].dtype, device="meta")
            offset = 0
            for one in parameters:
                one.grad = flat[offset : offset + one.numel()].view(one.shape)
                offset += one.numel()
            found[key] = flat
        return found

    def steps(self, count: int) -> list[_StepEvents]:
        """Events of each of `count` optimizer steps; numbers are shared between the steps."""
        holder = torch.nn.Module()
        holder.list = torch.nn.ParameterList([one[-1] for one in self.parameters])
        wide = [parameter for _, _, one, parameter in self.parameters if one.wide]
        optimizer: Any = make_optimizer(self.setup.optimizer, holder.parameters(), wide=wide)
        scaler = make_scaler(self.setup, "meta")
        tracker = self.shards.tracker("meta")
        found: list[_StepEvents] = []
        numbers: dict[int, int] = {}
        owners: dict[int, tuple[str, str]] = {}
        for parameter in holder.parameters():
            tracker.track(parameter, "load")
        for _ in range(count):
            gradients = {tracker.seen(storage): key for key, storage in self._gradients().items()}
            tracker.mark("step", None)
            first = len(tracker.events)
            with self.shards.stepping(), quick_checks(), tracker:
                optimizer_phase(holder, optimizer, scaler, "meta", clips=self.setup.by.clips_gradients)
            own_optimizer_state(tracker, optimizer, owners)
            found.append(
                _StepEvents(
                    events=tracker.events[first:],
                    origins=tracker.origins,
                    owners=owners,
                    gradients=gradients,
                    numbers=numbers,
                )
            )
        tracker.close()
        return found


def _laid_out_otherwise(one: Trainable, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Gives `parameter` (a DTensor) its gradient of another layout; returns the gradient's local tensor."""
    from torch.distributed.tensor import DTensor

    assert one.gradient is not None
    shape, placements = one.gradient
    storage = torch.empty(shape, dtype=one.dtype, device="meta")
    parameter.grad = DTensor.from_local(
        storage, one.mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return storage
