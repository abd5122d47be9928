"""The full depth from a truncated run: the events of its layers, repeated.

Layers that are alike, between neighbours that are alike, do the same to memory. A run that holds one of each kind of
layer therefore holds every kind of event of the full model; for each of the full model's layers the events of the run's
layer that stands for it are emitted, in the forward, in the backward and among the loaded weights, with storages of its
own. The optimizer is run for real on the full model's list of
trained parameters (its memory comes from the shapes alone). What comes out is the event list of the full model, which
is then analysed and replayed like a real one.

Every reference is checked: a layer may only release what its neighbour at the same distance allocated, alike in every
size, once, and nothing that the run released may be left. Where a model breaks that (a storage shared between far
layers that several stand for), `SpliceError` says so and the caller runs the full depth.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.dryrun.full_step import OptimizerRun, Shards, StepEvents, Whole
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import WORKSPACE, Origin

_ELSEWHERE, _ONCE, _FOUND = -1, -2, -3


class SpliceError(ValueError):
    """The run's layers are not copies of one another."""


@dataclass(kw_only=True, eq=False)
class _Segment:
    """What happened between two marks.

    Attributes:
        steps: its allocations as (place among them, size), the releases of those as (place, None), other releases as
            (number, `_ELSEWHERE`), and libraries' workspaces, which are made once, as (number, `_ONCE`).
        numbers: of its allocations, in order; `left` the places of those that it does not release itself.
        nth: how many segments of the same phase and layer came before in the same pass.
    """

    phase: str
    layer: int | None
    occurrence: int
    nth: int
    events: list[Event]
    steps: list[tuple[int, int | None]]
    numbers: list[int]
    sizes: list[int]
    left: list[int]


def splice(trace: Trace, layers: LayerMap, setup: TrainSetup, shards: Shards | None = None) -> Trace:
    """The trace of the full model from `trace`, whose layers stand for the full model's as `layers` says.

    Raises:
        SpliceError: a reference between layers does not repeat.
    """
    return _Splicer(trace, layers, setup, shards or Whole()).run()


class _Splicer:
    def __init__(self, trace: Trace, layers: LayerMap, setup: TrainSetup, shards: Shards) -> None:
        self.trace, self.layers, self.setup, self.shards = trace, layers, setup, shards
        self.segments = _split(trace)
        self.home: dict[int, tuple[_Segment, int]] = {}
        self.twins: dict[tuple[int, str, int, int | None], _Segment] = {}
        for segment in self.segments:
            self.twins[segment.occurrence, segment.phase, segment.nth, segment.layer] = segment
            for place, number in enumerate(segment.numbers):
                self.home[number] = (segment, place)
        self.released = {event.id for event in trace.events if isinstance(event, Free)}
        self.events: list[Event] = []
        self.origins: dict[int, Origin] = {}
        self.owners: dict[int, tuple[str, str]] = {}
        self.first: dict[tuple[int, int | None], int] = {}
        """Segment and layer of the full model -> the number of its first allocation."""
        self.single: dict[tuple[int, int | None], int] = {}
        """Number in the run and layer of the full model -> number, of what was loaded or made by the optimizer."""
        self.open: set[int] = set()
        """Numbers of what the run releases and nobody has released yet."""
        self._graph_ends: dict[int, bool] = {}
        self.gradients: list[dict[str, int]] = _gradients_by_step(trace, self.segments)

    def run(self) -> Trace:
        steps = iter(OptimizerRun(self.trace, self.layers, self.setup, self.shards).steps(len(self.gradients)))
        step = 0
        for (phase, _, in_layers), group in groupby(
            self.segments, lambda one: (one.phase, one.occurrence, one.layer is not None)
        ):
            self.events.append(Phase(phase))
            if in_layers:
                self._repeat(list(group))
                continue
            for segment in group:
                if phase == "load":
                    self._load(segment)
                elif phase == "step":
                    self._step(segment, next(steps), step)
                    step += 1
                else:
                    self._emit(segment, None, last=True)
        if self.open:
            raise SpliceError(f"a copy of a storage of {self.origins[min(self.open)].op} is never released")
        return replace(
            self.trace,
            events=self.events,
            origins=self.origins,
            owners=self.owners,
            num_layers=len(self.layers.of),
            parameter_bytes=self._parameter_bytes(),
        )

    def _repeat(self, group: list[_Segment]) -> None:
        """One pass through the layers, of the full model now."""
        missing = {one.layer for one in group} ^ set(range(len(self.layers.full)))
        if missing:
            raise SpliceError(f"{group[0].phase} passes through some layers only: not {missing}")
        descends = (group[0].layer or 0) > (group[-1].layer or 0)
        for segment, layer in self.layers.unrolled(group, lambda one: one.layer):
            copies = self.layers.full[self.layers.of[layer or 0]]
            self._emit(segment, layer, last=layer == (copies[0] if descends else copies[-1]))

    # Single events

    def _new(self, number: int, layer: int | None) -> int:
        """The number of the run's storage `number` in the full model."""
        single = self.single.get((number, layer))
        if single is not None:
            return single
        home, place = self.home[number]
        if home.layer is None:
            layer = None
        elif layer is None and len(self.layers.full[home.layer]) == 1:
            layer = self.layers.full[home.layer][0]
        first = self.first.get((id(home), layer))
        if first is None:
            raise SpliceError(f"a storage of {self.trace.origins[number].op} is released before it exists")
        return first + place

    def _allocate(self, number: int, layer: int | None) -> None:
        new = self.single[number, layer] = len(self.origins)
        self.origins[new] = self.trace.origins[number]
        owner = self.trace.owners.get(number)
        if owner is not None:
            self.owners[new] = owner
        if number in self.released:
            self.open.add(new)
        self.events.append(Alloc(new, self.origins[new].size_bytes))

    def _release(self, number: int, layer: int | None) -> None:
        self._end(self._new(number, layer))

    def _end(self, new: int) -> None:
        if new not in self.open:
            raise SpliceError(f"a storage of {self.origins[new].op} is released twice")
        self.open.remove(new)
        self.events.append(Free(new))

    def _emit(self, segment: _Segment, layer: int | None, *, last: bool) -> None:
        first = self.first[id(segment), layer] = len(self.origins)
        trace, numbers = self.trace, segment.numbers
        self.origins.update(
            zip(range(first, first + len(numbers)), map(trace.origins.__getitem__, numbers), strict=True)
        )
        for place in segment.left:
            number = numbers[place]
            if number in trace.owners:
                self.owners[first + place] = trace.owners[number]
            if number in self.released:
                self.open.add(first + place)
        append = self.events.append
        for_all = layer is None or self._ends_the_graph(segment)
        for place, size in self._of_every_layer(segment.steps) if for_all else segment.steps:
            if size is None:
                append(Free(first + place))
            elif size >= 0:
                append(Alloc(first + place, size))
            elif size == _FOUND:
                self._end(place)
            elif size == _ONCE:
                if last:
                    self._allocate(place, None)
            elif (place, layer) in self.single:  # a loaded weight of this layer that another replaces
                self._release(place, layer)
            elif self.home[place][0].layer is None:
                if last:
                    self._release(place, None)
            else:
                self._release_neighbours(place, segment, layer or 0, last=last)

    def _of_every_layer(self, steps: Iterable[tuple[int, int | None]]) -> Iterator[tuple[int, int | None]]:
        """`steps` with the releases of what layers made as those of all their copies: (new number, `_FOUND`)."""

        def layer_of(step: tuple[int, int | None]) -> int | None:
            return self.home[step[0]][0].layer if step[1] == _ELSEWHERE else None

        for step, layer in self.layers.unrolled(steps, layer_of):
            yield step if layer is None else (self._new(step[0], layer), _FOUND)

    def _release_neighbours(self, number: int, segment: _Segment, layer: int, *, last: bool) -> None:
        """The end, in a layer, of what another made: the one at the same distance, or far away the only one."""
        home, place = self.home[number]
        assert home.layer is not None
        assert segment.layer is not None
        distance = home.layer - segment.layer
        if abs(distance) <= 1:
            self._release(self._twin(home, place, layer + distance), layer + distance)
            return
        copies = self.layers.full[home.layer]
        if len(copies) != 1:
            raise SpliceError(f"layer {segment.layer} releases what layer {home.layer} made, which stands for several")
        if last:
            self._release(number, copies[0])

    def _twin(self, home: _Segment, place: int, layer: int) -> int:
        """The number in the run of what a layer of the full model made where the layer of `home` made its own."""
        run = self.layers.of[layer] if 0 <= layer < len(self.layers.of) else None
        twin = self.twins.get((home.occurrence, home.phase, home.nth, run))
        if twin is None or (twin is not home and twin.sizes != home.sizes):
            raise SpliceError(f"layer {run} allocates otherwise than layer {home.layer} in {home.phase}")
        return twin.numbers[place]

    def _ends_the_graph(self, segment: _Segment) -> bool:
        """Whether the first layer releases what layers beyond its neighbour made: the backward's last segment,
        when the graph dies and with it what its nodes hold themselves (int8 layers: their inputs). Such a release
        means every copy, while others mean the neighbour at the same distance."""
        if segment.layer != 0 or segment.phase != "backward":
            return False
        if id(segment) not in self._graph_ends:
            homes = [self.home[number][0] for number, size in segment.steps if size == _ELSEWHERE]
            self._graph_ends[id(segment)] = any((home.layer or 0) > 1 for home in homes)
        return self._graph_ends[id(segment)]

    # Segments that are no layer's

    def _load(self, segment: _Segment) -> None:
        """Weights of each layer of the full model."""

        def layer_of(event: Event) -> int | None:
            owner = self.trace.owners.get(event.id) if isinstance(event, Alloc) else None
            return None if owner is None else self.trace.layer_of(owner[1])

        for event, layer in self.layers.unrolled(segment.events, layer_of):
            if isinstance(event, Alloc):
                self._allocate(event.id, layer)
            elif isinstance(event, Free):
                self._release(event.id, None)

    def _step(self, segment: _Segment, optimizer: StepEvents, step: int) -> None:
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
        self._release_all(before)
        for event in optimizer.events:
            if isinstance(event, Alloc):
                new = len(self.origins)
                optimizer.numbers[event.id] = new
                self.origins[new] = optimizer.origins[event.id]
                owner = optimizer.owners.get(event.id)
                if owner is not None:
                    self.owners[new] = owner
                self.events.append(Alloc(new, event.size_bytes))
            elif isinstance(event, Free):
                if event.id in optimizer.gradients:
                    self._release_gradient(of_parameter, *optimizer.gradients[event.id])
                else:
                    self.events.append(Free(optimizer.numbers.pop(event.id)))
        self._release_all(after)

    def _release_all(self, numbers: list[int]) -> None:
        for number, size in self._of_every_layer([(number, _ELSEWHERE) for number in numbers]):
            if size == _FOUND:
                self._end(number)
            else:
                self._release(number, None)

    def _release_gradient(self, of_parameter: dict[str, int], name: str, layer: int | None) -> None:
        """A layer's gradient may be made while its neighbour runs."""
        home, run = self.home[of_parameter[name]][0].layer, self.trace.layer_of(name)
        if layer is not None and home is not None and run is not None:
            layer += home - run
        self._release(of_parameter[name], layer)

    def _parameter_bytes(self) -> int:
        return sum(
            self.origins[new].size_bytes
            for new, (category, name) in self.owners.items()
            if category in ("weights", "adapters") and name in self.trace.parameter_names
        )


def _split(trace: Trace) -> list[_Segment]:
    segments: list[_Segment] = []
    occurrence = 0
    seen: dict[tuple[int, str, int | None], int] = defaultdict(int)
    stretch: list[Event] = []
    for event in trace.events:
        if isinstance(event, Phase):
            phase, _, name = event.name.partition("/")
            if not name and phase in ("forward", "step"):
                occurrence += 1
            layer = int(name) if name else None
            stretch = []
            segments.append(
                _Segment(
                    phase=phase,
                    layer=layer,
                    occurrence=occurrence,
                    nth=seen[occurrence, phase, layer],
                    events=stretch,
                    steps=[],
                    numbers=[],
                    sizes=[],
                    left=[],
                )
            )
            seen[occurrence, phase, layer] += 1
        else:
            stretch.append(event)
    for segment in segments:
        _compile(segment, trace.origins)
    return segments


def _compile(segment: _Segment, origins: Mapping[int, Origin]) -> None:
    """Fills in what `_Splicer._emit` goes through."""
    places: dict[int, int] = {}
    for event in segment.events:
        if isinstance(event, Alloc) and origins[event.id].op.startswith(WORKSPACE):
            segment.steps.append((event.id, _ONCE))
        elif isinstance(event, Alloc):
            places[event.id] = len(segment.numbers)
            segment.steps.append((len(segment.numbers), event.size_bytes))
            segment.numbers.append(event.id)
            segment.sizes.append(event.size_bytes)
        elif isinstance(event, Free):
            place = places.pop(event.id, None)
            segment.steps.append((event.id, _ELSEWHERE) if place is None else (place, None))
    segment.left.extend(places.values())


def _gradients_by_step(trace: Trace, segments: list[_Segment]) -> list[dict[str, int]]:
    """For each optimizer step, parameter name -> storage of its gradient."""
    found: list[dict[str, int]] = [{}]
    for segment in segments:
        if segment.phase == "step":
            found.append({})
            continue
        for number in segment.numbers:
            owner = trace.owners.get(number)
            if owner is not None and owner[0] == "gradients":
                found[-1][owner[1]] = number
    return found[:-1]
