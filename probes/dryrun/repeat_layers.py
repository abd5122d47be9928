"""The full depth from a truncated run: the events of its layers, repeated.

Layers that are alike, between neighbours that are alike, do the same to memory. A run that holds one of each kind of
layer therefore holds every kind of event of the full model; for each of the full model's layers the events of the run's
layer that stands for it are emitted, in the forward, in the backward and among the loaded weights, with storages of its
own. The optimizer is run for real on the full model's list of trained parameters (its memory comes from the shapes
alone).

Every reference is checked: a layer may only release what its neighbour at the same distance allocated, alike in every
size, once, and nothing that the run released may be left. Where a model breaks that (a storage shared between far
layers that several stand for), `RepetitionError` says so and the caller runs the full depth.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Pattern, Phase, Repetition, Step, flat
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.metaops import quick_checks
from probes.dryrun.trace import Trace, Trainable, claim_optimizer_state
from probes.dryrun.tracker import WORKSPACE, Origin, Tracker
from probes.dryrun.workspaces import temporaries
from probes.stack.optimizers import make_optimizer, with_later_states
from probes.stack.step import make_scaler, optimizer_phase

_OTHERS, _ONCE = -1, -2


class RepetitionError(ValueError):
    """The run's layers are not copies of one another."""


def _whole(trainable: Trainable) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(trainable.shape, dtype=trainable.dtype, device="meta"))


class Shards(NamedTuple):
    """What is held of a trained parameter, on meta, and how it steps: by default one GPU holds everything. `stepping`
    is entered around the optimizer's run on the full model's parameters."""

    parameter: Callable[[Trainable], torch.nn.Parameter] = _whole
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext
    tracker: type[Tracker] = Tracker


ONE_GPU = Shards()


class OptimizerStep(NamedTuple):
    """What one optimizer step does; `gradients` names the parameter and layer of each gradient's storage."""

    events: list[Event]
    origins: dict[int, Origin]
    owners: dict[int, tuple[str, str]]
    gradients: dict[int, tuple[str, int | None]]


def optimizer_steps(
    trace: Trace, layers: LayerMap, setup: TrainSetup, count: int, shards: Shards = ONE_GPU
) -> list[OptimizerStep]:
    """Clipping, optimizer and release of gradients on the full model's trained parameters, `count` times; storages'
    numbers are shared between the steps."""
    parameters = [
        (layer, trainable, shards.parameter(trainable))
        for trainable, layer in layers.unrolled(trace.trainables, lambda trainable: trainable.layer)
    ]
    holder = torch.nn.Module()
    holder.list = torch.nn.ParameterList([parameter for *_, parameter in parameters])
    wide = [parameter for _, trainable, parameter in parameters if trainable.wide]
    optimizer = with_later_states(make_optimizer(setup.optimizer, holder.parameters(), wide=wide))
    scaler = make_scaler(setup, "meta")
    tracker = shards.tracker("meta", temporaries=temporaries())
    steps: list[OptimizerStep] = []
    owners: dict[int, tuple[str, str]] = {}
    for parameter in holder.parameters():
        tracker.track(parameter, "load")
    for number in range(count):
        gradients = {tracker.seen(storage): key for key, storage in _give_gradients(parameters).items()}
        tracker.mark("step", None)
        first = len(tracker.events)
        tracker.log = trace.operators if number == count - 1 else None
        if tracker.log is not None:
            tracker.log.begin_full_step(layers)
        with shards.stepping(), quick_checks(), tracker:
            optimizer_phase(holder, optimizer, scaler, "meta", clips=setup.trainer.clips_gradients)
        claim_optimizer_state(tracker, optimizer, owners)
        steps.append(OptimizerStep(tracker.events[first:], tracker.origins, owners, gradients))
    tracker.close()
    return steps


def _give_gradients(
    parameters: Iterable[tuple[int | None, Trainable, torch.nn.Parameter]],
) -> dict[tuple[str, int | None], torch.Tensor]:
    """Gives every parameter its gradient; one tensor for each storage, by the name that the run knows it by."""
    members: dict[tuple[str, int | None], list[torch.nn.Parameter]] = {}
    gradients = {}
    for layer, trainable, parameter in parameters:
        if trainable.has_gradient and trainable.gradient is None:
            members.setdefault((trainable.gradient_of, layer), []).append(parameter)
        elif trainable.gradient is not None:
            from torch.distributed.tensor import DTensor

            shape, placements = trainable.gradient
            storage = torch.empty(shape, dtype=trainable.dtype, device="meta")
            whole = {"shape": parameter.shape, "stride": parameter.stride()}
            parameter.grad = DTensor.from_local(storage, trainable.mesh, placements, run_check=False, **whole)
            gradients[trainable.gradient_of, layer] = storage
    for key, group in members.items():
        storage = torch.empty(sum(member.numel() for member in group), dtype=group[0].dtype, device="meta")
        for member, part in zip(group, storage.split([member.numel() for member in group]), strict=True):
            member.grad = part.view(member.shape)
        gradients[key] = storage
    return gradients


@dataclass(kw_only=True, eq=False)
class _Segment:
    """What happened between two marks.

    Attributes:
        pattern: what it does to its own allocations, of which `numbers` are the run's.
        external: between the pattern's runs, releases of others' storages as (number, `_OTHERS`), and libraries'
            workspaces, which are made once, as (number, `_ONCE`).
        nth: how many segments of the same phase and layer came before in the same pass.
    """

    phase: str
    layer: int | None
    occurrence: int
    nth: int
    events: list[Event]
    pattern: Pattern
    external: list[list[tuple[int, int]]]
    numbers: list[int]


def repeat_layers(trace: Trace, layers: LayerMap, setup: TrainSetup, shards: Shards = ONE_GPU) -> Trace:
    """The trace of the full model from `trace`, whose layers stand for the full model's as `layers` says.

    Raises:
        RepetitionError: a reference between layers does not repeat.
    """
    return _LayerRepetition(trace, layers, setup, shards).run()


class _LayerRepetition:
    def __init__(self, trace: Trace, layers: LayerMap, setup: TrainSetup, shards: Shards) -> None:
        self.trace, self.layers, self.setup, self.shards = trace, layers, setup, shards
        self.segments = _split(trace)
        self.made_in = {
            number: (segment, place) for segment in self.segments for place, number in enumerate(segment.numbers)
        }
        self.duplicates = {
            (segment.occurrence, segment.phase, segment.nth, segment.layer): segment for segment in self.segments
        }
        self.released = {event.id for event in flat(trace.events) if isinstance(event, Free)}
        self.events: list[Event | Repetition] = []
        self.next = 0
        self.origins: dict[int, Origin] = {}
        self.owners: dict[int, tuple[str, str]] = {}
        self.first: dict[tuple[int, int | None], int] = {}
        """Segment and layer of the full model -> the number of its first allocation."""
        self.single: dict[tuple[int, int | None], int] = {}
        """Number in the run and layer of the full model -> number, of what was loaded or made by the optimizer."""
        self.open: dict[int, int] = {}
        """Numbers of what the run releases and nobody has released yet, with the run's."""
        self.gradients: list[dict[str, int]] = []
        """For each optimizer step, parameter name -> storage of its gradient."""
        of_step: dict[str, int] = {}
        for segment in self.segments:
            if segment.phase == "step":
                self.gradients.append(of_step)
                of_step = {}
                continue
            owned = ((number, trace.owners.get(number, ("", ""))) for number in segment.numbers)
            of_step |= {name: number for number, (category, name) in owned if category == "gradients"}

    def run(self) -> Trace:
        steps = optimizer_steps(self.trace, self.layers, self.setup, len(self.gradients), self.shards)
        numbers: dict[int, int] = {}  # of the optimizer's storages, as they are here
        step_pairs = zip(steps, self.gradients, strict=True)
        for (phase, _, in_layers), group in groupby(
            self.segments, lambda member: (member.phase, member.occurrence, member.layer is not None)
        ):
            self.events.append(Phase(phase))
            if in_layers:
                self._repeat(list(group))
                continue
            for segment in group:
                if phase == "load":
                    self._load(segment)
                elif phase == "step":
                    self._step(segment, *next(step_pairs), numbers)
                else:
                    self._emit(segment, None, last=True)
        if self.open:
            raise RepetitionError(f"a copy of a storage of {self._op(self.open[min(self.open)])} is never released")
        parameter_bytes = sum(
            self.origins[new].size_bytes
            for new, (category, name) in self.owners.items()
            if category in ("weights", "adapters") and name in self.trace.parameter_names
        )
        return replace(
            self.trace,
            events=self.events,
            origins=self.origins,
            owners=self.owners,
            num_layers=len(self.layers.of),
            parameter_bytes=parameter_bytes,
        )

    def _repeat(self, group: list[_Segment]) -> None:
        missing = {member.layer for member in group} ^ set(range(len(self.layers.full)))
        if missing:
            raise RepetitionError(f"{group[0].phase} passes through some layers only: not {missing}")
        descends = (group[0].layer or 0) > (group[-1].layer or 0)
        for segment, layer in self.layers.unrolled(group, lambda member: member.layer):
            copies = self.layers.full[self.layers.of[layer or 0]]
            self._emit(segment, layer, last=layer == (copies[0] if descends else copies[-1]))

    # Single events

    def _op(self, number: int) -> str:
        return self.trace.origins[number].op

    def _allocate(self, number: int, layer: int | None) -> Event:
        new = self.single[number, layer] = self._made(self.trace.origins[number], self.trace.owners.get(number))
        if number in self.released:
            self.open[new] = number
        return Alloc(new, self.origins[new].size_bytes)

    def _made(self, origin: Origin, owner: tuple[str, str] | None) -> int:
        new = self.next
        self.next += 1
        self.origins[new] = origin
        if owner is not None:
            self.owners[new] = owner
        return new

    def _release(self, number: int, layer: int | None) -> Event:
        new = self.single.get((number, layer))
        if new is None:
            maker, place = self.made_in[number]
            if maker.layer is None:
                layer = None
            elif layer is None and len(self.layers.full[maker.layer]) == 1:
                layer = self.layers.full[maker.layer][0]
            first = self.first.get((id(maker), layer))
            if first is None:
                raise RepetitionError(f"a storage of {self._op(number)} is released before it exists")
            new = first + place
        if self.open.pop(new, None) is None:
            raise RepetitionError(f"a storage of {self._op(number)} is released twice")
        return Free(new)

    def _emit(self, segment: _Segment, layer: int | None, *, last: bool) -> None:
        pattern, numbers = segment.pattern, segment.numbers
        first = self.first[id(segment), layer] = self.next
        self.next += len(numbers)
        for place in pattern.left:
            if numbers[place] in self.released:
                self.open[first + place] = numbers[place]
        # Where the first layer's backward releases what layers beyond its neighbour made, the graph dies and with it
        # what its nodes hold themselves (int8 layers: their inputs): every copy, else the neighbour's at that distance.
        of_all = layer is None or (
            (segment.layer, segment.phase) == (0, "backward")
            and any(
                (self.made_in[number][0].layer or 0) > 1
                for group in segment.external
                for number, kind in group
                if kind == _OTHERS
            )
        )
        external = [[*self._external(group, segment, layer, of_all, last=last)] for group in segment.external]
        if numbers or external:
            self.events.append(Repetition(pattern, first, external))

    def _external(
        self, entries: list[tuple[int, int]], segment: _Segment, layer: int | None, of_all: bool, *, last: bool
    ) -> Iterator[Event]:
        """What happens to others' storages; `of_all`: of every copy; `last`: no copy of the segment follows."""
        for (number, kind), made_by in (
            self._of_every_layer(entries) if of_all else ((entry, None) for entry in entries)
        ):
            if made_by is not None:
                yield self._release(number, made_by)
            elif kind == _ONCE:
                if last:
                    yield self._allocate(number, None)
            elif (number, layer) in self.single:  # a loaded weight of this layer that another replaces
                yield self._release(number, layer)
            elif self.made_in[number][0].layer is not None:
                yield from self._of_neighbours(number, segment, layer or 0, last=last)
            elif last:
                yield self._release(number, None)

    def _of_every_layer(self, entries: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int | None]]:
        """`entries` with a release of what a layer made as those of all its copies, each with its layer."""

        def layer_of(entry: tuple[int, int]) -> int | None:
            return self.made_in[entry[0]][0].layer if entry[1] == _OTHERS else None

        return self.layers.unrolled(entries, layer_of)

    def _of_neighbours(self, number: int, segment: _Segment, layer: int, *, last: bool) -> Iterator[Event]:
        """The end, in a layer, of what another made: the one at the same distance, or far away the only one."""
        maker, place = self.made_in[number]
        assert maker.layer is not None
        assert segment.layer is not None
        distance = maker.layer - segment.layer
        if abs(distance) <= 1:
            run = self.layers.of[layer + distance] if 0 <= layer + distance < len(self.layers.of) else None
            duplicate = self.duplicates.get((maker.occurrence, maker.phase, maker.nth, run))
            if duplicate is None or (duplicate is not maker and duplicate.pattern.sizes != maker.pattern.sizes):
                raise RepetitionError(f"layer {run} allocates otherwise than layer {maker.layer} in {maker.phase}")
            yield self._release(duplicate.numbers[place], layer + distance)
            return
        copies = self.layers.full[maker.layer]
        if len(copies) != 1:
            raise RepetitionError(
                f"layer {segment.layer} releases what layer {maker.layer} made, which stands for several"
            )
        if last:
            yield self._release(number, copies[0])

    # Segments that are no layer's

    def _load(self, segment: _Segment) -> None:
        def layer_of(event: Event) -> int | None:
            owner = self.trace.owners.get(event.id) if isinstance(event, Alloc) else None
            return None if owner is None else self.trace.layer_of(owner[1])

        for event, layer in self.layers.unrolled(segment.events, layer_of):
            if isinstance(event, Alloc):
                self.events.append(self._allocate(event.id, layer))
            elif isinstance(event, Free):
                self.events.append(self._release(event.id, None))

    def _step(
        self, segment: _Segment, optimizer: OptimizerStep, of_parameter: dict[str, int], numbers: dict[int, int]
    ) -> None:
        gradients = set(of_parameter.values())
        before: list[int] = []
        after: list[int] = []
        place = before
        for event in segment.events:
            if isinstance(event, Alloc):
                place = after
            elif isinstance(event, Free) and event.id not in gradients and self.made_in[event.id][0].phase != "step":
                place.append(event.id)
        self.events.extend(self._release_all(before))
        for event in optimizer.events:
            if isinstance(event, Alloc):
                new = self._made(optimizer.origins[event.id], optimizer.owners.get(event.id))
                numbers[event.id] = new
                self.events.append(Alloc(new, event.size_bytes))
            elif isinstance(event, Free):
                if event.id in optimizer.gradients:
                    name, layer = optimizer.gradients[event.id]
                    maker_layer, run = self.made_in[of_parameter[name]][0].layer, self.trace.layer_of(name)
                    if layer is not None and maker_layer is not None and run is not None:
                        layer += maker_layer - run  # a layer's gradient may be made while its neighbour runs
                    self.events.append(self._release(of_parameter[name], layer))
                else:
                    self.events.append(Free(numbers.pop(event.id)))
        self.events.extend(self._release_all(after))

    def _release_all(self, numbers: list[int]) -> Iterator[Event]:
        for (number, _), layer in self._of_every_layer([(number, _OTHERS) for number in numbers]):
            yield self._release(number, layer)


def _split(trace: Trace) -> list[_Segment]:
    repetitions: list[tuple[str, int | None, list[Event]]] = []
    for event in flat(trace.events):
        if isinstance(event, Phase):
            phase, _, name = event.name.partition("/")
            repetitions.append((phase, int(name) if name else None, []))
        else:
            repetitions[-1][-1].append(event)
    segments: list[_Segment] = []
    occurrence = 0
    seen: Counter[tuple[int, str, int | None]] = Counter()
    for phase, layer, events in repetitions:
        occurrence += layer is None and phase in ("forward", "step")
        segments.append(_segment(trace, phase, layer, occurrence, seen[occurrence, phase, layer], events))
        seen[occurrence, phase, layer] += 1
    return segments


def _segment(trace: Trace, phase: str, layer: int | None, occurrence: int, nth: int, events: list[Event]) -> _Segment:
    runs: list[list[Step]] = [[]]
    external: list[list[tuple[int, int]]] = []
    numbers: list[int] = []
    places: dict[int, int] = {}
    for event in events:
        if not isinstance(event, (Alloc, Free)):
            continue
        allocates = isinstance(event, Alloc)
        if (allocates and trace.origins[event.id].op.startswith(WORKSPACE)) or not (allocates or event.id in places):
            if runs[-1] or not external:
                external.append([])
                runs.append([])
            external[-1].append((event.id, _ONCE if allocates else _OTHERS))
        elif isinstance(event, Alloc):
            places[event.id] = len(numbers)
            runs[-1].append((len(numbers), event.size_bytes))
            numbers.append(event.id)
        else:
            runs[-1].append((places.pop(event.id), None))
    origins = [trace.origins[number] for number in numbers]
    owners = {place: trace.owners[number] for place, number in enumerate(numbers) if number in trace.owners}
    sizes, left = [origin.size_bytes for origin in origins], [*places.values()]
    return _Segment(
        phase=phase,
        layer=layer,
        occurrence=occurrence,
        nth=nth,
        events=events,
        pattern=Pattern(runs=runs, sizes=sizes, left=left, origins=origins, owners=owners),
        external=external,
        numbers=numbers,
    )
