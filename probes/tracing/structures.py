"""Runs of one structure of step: at which sizes, what their allocations' forms are, and the full model's moments."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from planner.memory.profiles import FIRST, GRADIENTS, HEAD, LAST, LOSS_BEGINS, MONOMIALS, STATES, TURN, Form
from planner.options.losses import LOSSES
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase, Repetition
from probes.dryrun.depths import DepthPlan, layer_kinds, neighbourhoods, plan_depth
from probes.dryrun.layer_map import LayerMap
from probes.dryrun.repeat_layers import RepetitionError, repeat_layers
from probes.dryrun.trace import Trace, trace_samples
from probes.stack.configs import load_config
from probes.tracing.moments import Class, Depth, MemoryMoment, moments_of
from probes.tracing.sizes import Model, NoPolynomial, Point, Scale, Sizes, fit, value_of, values_at

UNIT = 128
"""Lengths that are run are multiples of it: attention kernels pad some rows to that."""
USUAL = ((7, 13, 24), (3, 9, 40), (5, 17, 56))
"""Micro-batch, length in UNIT and rank of the runs: without a factor in common; the second has fewer tokens than a tile
of TRL's loss, and more than the embedding's backward sorts at once."""
SEQS = (2, 4, 16, 64)
RANKS = (8, 64, 256)
LENGTHS = (128, 512, 2048, 8192, 32768, 131072)
MAX_TOKENS = 1 << 20
DEPTHS, SPACED_DEPTHS = (12, 40), (4, 9)
"""Layers, or periods of checkpoints, of the full models that are told from one run."""
_TILE = MONOMIALS.index((0, 0, 0, 1))
_LINE = {MONOMIALS.index((0, 0, 0, 0)), MONOMIALS.index((0, 1, 0, 0))}


@dataclass(frozen=True, kw_only=True)
class Span:
    """Lengths between which a model does the same: beyond one window and up to the next (None: no end)."""

    shortest_tokens: int
    longest_tokens: int | None


def spans(windows: Sequence[int], longest: int | None = None) -> tuple[Span, ...]:
    """The spans of a model whose layers attend to so many tokens at most, and whose longest sequence has so many (None:
    no end)."""
    ends = sorted({window for window in windows if 0 < window <= (longest or window)})
    starts = [1, *ends]
    bounded = [Span(shortest_tokens=start, longest_tokens=end - 1) for start, end in zip(starts, ends, strict=False)]
    return (*bounded, Span(shortest_tokens=starts[-1], longest_tokens=longest))


@dataclass(frozen=True, kw_only=True)
class SpanMoments:
    """The moments of one span, of one sequence or of more, and where they were compared."""

    moments: list[MemoryMoment]
    scale: Scale


Pieces = dict[tuple[Span, bool], SpanMoments]
"""By span and whether it is one sequence."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A model of a structure of layers.

    Attributes:
        size: what a factor of a monomial (its place, its value for the model that is run) is here, in bytes.
        vocabulary: its size and the stream's width, by which the loss's tiles are cut.
    """

    size: Callable[[int, float], float]
    num_layers: int
    vocabulary: tuple[int, int]


class Structure:
    """One structure of a model.

    Args:
        at_depth: the configuration with so many layers.
        setup: of the structure; its sizes do not matter.
        members: models it is made for, the first of which says what the allocator holds.
        shared_runs: runs that several structures share: where every fourth layer is checkpointed, or a rarer one, and
            those of several depths.
        any_size: whether it is for other models than the one that is run, of other depths.
        of_rank: whether its moments are a rank's, beside what engines hold.
    """

    def __init__(
        self,
        at_depth: Callable[[int], Mapping[str, Any]],
        vocabulary: tuple[int, int],
        setup: TrainSetup,
        capability: tuple[int, int],
        members: Sequence[Member],
        shared_runs: dict[Any, list[Trace]],
        *,
        any_size: bool,
        of_rank: bool = False,
    ) -> None:
        self._of_rank = of_rank
        self.setup, self._capability, self._vocabulary, self._shared_runs = setup, capability, vocabulary, shared_runs
        self._every, every = setup.checkpointing, max(1, setup.checkpointing)
        depths = [members[0].num_layers]
        rest = depths[0] % every
        self._members = [member for member in members if member.num_layers % every == rest]
        if any_size:
            if depths[0] < every:
                raise NoPolynomial("fewer layers than lie between two checkpoints")
            depths = [every * many + rest for many in (DEPTHS if every == 1 else SPACED_DEPTHS)]
        self._repeats = [depth // every if any_size else 0 for depth in depths]
        configs = [load_config(at_depth(depth)) for depth in depths]
        fourths = [_as_every_fourth(config, setup) for config in configs]
        if None in fourths:
            self._plans = [
                plan_depth(config, checkpointing=setup.checkpointing, full_depth=False) for config in configs
            ]
        else:
            self._plans, self._every = [plan for plan in fourths if plan is not None], _FOURTH
        self._check()

    def _check(self) -> None:
        """That all depths are told from one run."""
        if len({plan.depth for plan in self._plans}) > 1 or (
            len(self._plans) > 1 and any(plan.layers is None for plan in self._plans)
        ):
            raise RepetitionError("the layers that stand for the model depend on its depth")

    @property
    def _plan(self) -> DepthPlan:
        return self._plans[0]

    def point(self, seqs: int, tokens: int, rank: int, vocabulary: tuple[int, int] | None = None) -> Point:
        """A point with its tile, of the model that is run unless told."""
        made = self._at(seqs, tokens, rank)
        tile = LOSSES[made.loss].tiling(made.tokens_per_micro_batch, *(vocabulary or self._vocabulary)).tokens
        return Point(seqs, tokens, rank if made.method != "full" else 0, tile)

    def _at(self, seqs: int, tokens: int, rank: int) -> TrainSetup:
        """Two micro-batches show what the first and what every later one does, of a rank the first is enough; the
        optimizer adds nothing here."""
        return self.setup.replace(
            checkpointing=self._every,
            micro_batch_seqs=seqs,
            seq_len_tokens=tokens,
            lora_rank=rank if self.setup.method != "full" else 0,
            accumulation_steps=1 if self._of_rank else 2,
            optimizer="sgd",
        )

    def pieces(self, wanted: Sequence[Span], sizes: Sizes) -> Pieces:
        """The moments of each span.

        Raises:
            NoPolynomial: its runs are none in their sizes.
        """
        try:
            return self._pieces(wanted, sizes)
        except RepetitionError:
            if any(plan.wider is None for plan in self._plans):
                raise
            self._plans = [plan.wider() for plan in self._plans if plan.wider is not None]
            self._every = self.setup.checkpointing
            self._check()
            return self.pieces(wanted, sizes)

    def _pieces(self, wanted: Sequence[Span], sizes: Sizes) -> Pieces:
        usual = {span: [self.point(seqs, _length(span, units), rank) for seqs, units, rank in USUAL] for span in wanted}
        alone = {span: [self.point(1, *point[1:3]) for point in points] for span, points in usual.items()}
        keys = [(span, single) for span in wanted for single in (False, True)]
        points = {key: (alone if key[1] else usual)[key[0]] for key in keys}
        runs = dict(zip(keys, self._run([points[key][0] for key in keys]), strict=True))
        pieces: Pieces = {}
        for key in keys:
            forms = self._forms(runs[key], points[key], sizes)
            first, single = points[key][0], alone[key[0]][0]
            values = values_at([single])[0]
            shown = ((*made, form) for made, form in zip(_sources(runs[key]), forms, strict=True))
            for source, size, form in dict.fromkeys(shown):  # what a run has shown, also of one sequence of its length
                sizes.learn(first, source, size, form)
                if first != single:
                    sizes.learn(single, source, round(value_of(form, values)), form)
            classes, depths = self._named(runs[key], forms)
            every = max(1, self.setup.checkpointing)
            grids = [values_at(self._grid(key, member.vocabulary)) for member in self._members]
            scale = Scale([
                Model(member.size, member.num_layers // every, values)
                for member, values in zip(self._members, grids, strict=True)
            ])  # fmt: skip
            moments = moments_of(depths, classes, scale)
            profiled = [moment for moment in moments if not self._of_rank or moment.phase in RANK_PHASES]
            pieces[key] = SpanMoments(moments=profiled, scale=scale)
        return pieces

    def _forms(self, first: Trace, points: Sequence[Point], sizes: Sizes) -> list[Form]:
        """The form of every allocation of the run at the first point; what is not known is found with the others."""
        forms = [sizes.form(points[0], source, size) for source, size in _sources(first)]
        if None not in forms:
            return [form for form in forms if form is not None]
        runs = [first, *(self._run([point])[0] for point in points[1:])]
        return _fitted(runs, points, tiled=self.setup.loss != "full")

    def _run(self, points: Sequence[Point]) -> list[Trace]:
        """The runs at points of one rank, up to the optimizer's phase."""
        setups = [self._at(*point[:3]) for point in points]
        key = self._plan.depth, *setups
        if key in self._shared_runs:
            return self._shared_runs[key]
        traces = []
        # bitsandbytes' layers move their statistics and cast their biases in their first forward
        groups = [[setup] for setup in setups] if self.setup.quantized else [setups]
        run = partial(trace_samples, capability=self._capability, num_layers=self._plan.depth)
        for trace in chain.from_iterable(run(copy.deepcopy(self._plan.config), group) for group in groups):
            end = next(i for i, event in enumerate(trace.events) if isinstance(event, Phase) and event.name == "step")
            traces.append(replace(trace, events=trace.events[:end]))
        if self._every == _FOURTH or len(self._plans) > 1:
            self._shared_runs[key] = traces
        return traces

    def _named(self, trace: Trace, forms: Sequence[Form]) -> tuple[list[Class], list[Depth]]:
        """Each class of storages, and the traces of each depth with numbers of classes as sizes."""
        kinds = [(form, False) for form in forms]
        if self._of_rank:
            made = zip(_made(trace), forms, strict=True)
            kinds = [(() if is_state(trace, number) else form, is_gradient(trace, number)) for number, form in made]
        classes = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        numbers = dict(zip(_made(trace), [classes[kind] for kind in kinds], strict=True))
        events = [Alloc(event.id, numbers[event.id]) if isinstance(event, Alloc) else event for event in trace.events]
        origins = {number: trace.origins[number]._replace(size_bytes=kind) for number, kind in numbers.items()}
        named = replace(trace, events=events, origins=origins)
        traces = [
            named if plan.layers is None else repeat_layers(named, plan.layers, self.setup) for plan in self._plans
        ]
        if self._of_rank:
            traces = [moments_of_rank(whole, self.setup.checkpointing) for whole in traces]
        terms = [({(index, factor, 0): 1 for index, factor in form}, apart) for form, apart in classes]
        return terms, [Depth(trace=whole, repeats=many) for whole, many in zip(traces, self._repeats, strict=True)]

    def _grid(self, key: tuple[Span, bool], vocabulary: tuple[int, int]) -> list[Point]:
        """Where moments are compared."""
        span, alone = key
        last = span.longest_tokens or LENGTHS[-1]
        lengths = [length for length in LENGTHS if span.shortest_tokens <= length <= last] or [
            _length(span, USUAL[0][1])
        ]
        return [
            self.point(seqs, tokens, rank, vocabulary)
            for seqs in ((1,) if alone else SEQS)
            for tokens in lengths
            for rank in (RANKS if self.setup.method != "full" else (0,))
            if seqs * tokens <= MAX_TOKENS or tokens == lengths[0]
        ]


_FOURTH = 4


def _as_every_fourth(config: Any, setup: TrainSetup) -> DepthPlan | None:
    """Where every eighth, or a rarer layer is checkpointed: a few layers of which every fourth is stand for all of a
    model of like ones. None where they do not."""
    if setup.checkpointing <= _FOURTH:
        return None
    plan = plan_depth(config, checkpointing=_FOURTH, full_depth=False)
    if plan.layers is None or len({*layer_kinds(config)}) > 1:
        return None
    short = [layer % _FOURTH == 0 for layer in range(plan.depth)]
    try:
        stands = _alike([layer % setup.checkpointing == 0 for layer in range(plan.full)], short)
    except KeyError:  # the last layer has no such neighbours here
        return None
    return replace(plan, layers=LayerMap(stands), wider=None)


def _alike(kinds: Sequence[bool], chosen: Sequence[bool]) -> tuple[int, ...]:
    """For each layer one of `chosen` of its kind between neighbours of the same kinds: from the last checkpointed one
    on one of those from the last one of `chosen` on.

    Raises:
        KeyError: there is none, or one of `chosen` stands for nothing.
    """

    there, wanted = neighbourhoods(chosen), neighbourhoods(kinds)
    tail, end = (len(flags) - 1 - flags[::-1].index(True) for flags in ([*chosen], [*kinds]))
    before = {case: place for place, case in enumerate(there[: tail + 1])}
    after = {case: place for place, case in enumerate(there) if place >= tail}
    representatives = (*(before[case] for case in wanted[:end]), *(after[case] for case in wanted[end:]))
    if len({*representatives}) < len(chosen):
        raise KeyError("one stands for nothing")
    return representatives


def has_room(span: Span) -> bool:
    """Whether a span holds as many lengths as it takes to run."""
    return span.longest_tokens is None or (span.longest_tokens - span.shortest_tokens) // UNIT >= len(USUAL)


def _length(span: Span, units: int) -> int:
    """A length in the span for the usual number of units."""
    if span.longest_tokens is None:
        return (span.shortest_tokens // UNIT + units) * UNIT
    order = sorted(sizes[1] for sizes in USUAL).index(units)
    step = (span.longest_tokens - span.shortest_tokens) // UNIT / len(USUAL)
    return (span.shortest_tokens // UNIT + 1 + int(step * order)) * UNIT


def _made(trace: Trace) -> list[int]:
    """The numbers of what was allocated, in order; they count from 0."""
    return [event.id for event in trace.events if isinstance(event, Alloc)]


def _sources(trace: Trace) -> Iterator[tuple[tuple[bool, str], int]]:
    """Of each allocation whether the loss makes it, what it is known for (else its operator), and its bytes."""
    for number in _made(trace):
        origin, owner = trace.origins[number], trace.owners.get(number)
        yield (origin.phase == "loss", owner[0] if owner else origin.op), origin.size_bytes


def _fitted(runs: Sequence[Trace], points: Sequence[Point], *, tiled: bool) -> list[Form]:
    """The form of every allocation of the first run."""
    split: list[list[tuple[str, list[Alloc]]]] = []
    for run in runs:
        split.append([])
        for event in run.events:
            if isinstance(event, Phase):
                split[-1].append((event.name, []))
            elif isinstance(event, Alloc):
                split[-1][-1][1].append(event)
    if len({tuple(name for name, _ in segments) for segments in split}) > 1:
        raise NoPolynomial("the runs pass through other phases")
    forms: dict[int, Form] = {}
    seen: dict[tuple[int, ...], Form] = {}

    def form_of(sizes: tuple[int, ...]) -> Form:
        if sizes not in seen:
            seen[sizes] = fit(points[: len(sizes)], sizes, tiled=tiled)
        return seen[sizes]

    for parts in zip(*split, strict=True):
        every = [
            [(event.id, run.origins[event.id]) for event in events]
            for run, (_, events) in zip(runs, parts, strict=True)
        ]
        made = every
        if parts[0][0] != "loss":  # but what kernels make for themselves, some from a size on
            made = [[pair for pair in each if not pair[1].op.endswith(" workspace")] for each in every]
        if len({tuple(origin.op for _, origin in each) for each in made}) == 1:
            for row in zip(*made, strict=True):
                forms[row[0][0]] = form_of(tuple(origin.size_bytes for _, origin in row))
        elif parts[0][0] != "loss":
            raise NoPolynomial(f"the number of allocations in {parts[0][0]} depends on the size")
        forms |= _by_operator([pair for pair in every[0] if pair[0] not in forms], every, points, form_of)
    return [forms[number] for number in sorted(forms)]


def _by_operator(
    left: Sequence[tuple[int, Any]], made: Sequence[Sequence[tuple[int, Any]]], points: Sequence[Point], form_of: Any
) -> dict[int, Form]:
    """Where loops over tiles turn differently often: what an operator makes, size by size in order of appearance. What
    that does not tell belongs to a last, smaller tile, and counts as the next larger that the operator makes."""
    sizes: list[dict[str, list[int]]] = []
    for run in made:
        sizes.append(defaultdict(list))
        for _, origin in run:
            if origin.size_bytes not in sizes[-1][origin.op]:
                sizes[-1][origin.op].append(origin.size_bytes)
    forms: dict[str, dict[int, Form]] = defaultdict(dict)
    for op in {origin.op for _, origin in left}:
        lists = [by_op[op] for by_op in sizes]
        for size in sorted(lists[0], reverse=True):
            place = lists[0].index(size)
            row = tuple(op_sizes[place] for op_sizes in lists if place < len(op_sizes))
            form = None
            if len(row) == len(lists):
                with suppress(NoPolynomial):
                    form = form_of(row)
                if form is not None and {index for index, _ in form} == _LINE and points[0].micro_batch_seqs > 1:
                    form = None  # the rows of a last tile lay on a line by chance
            if form is None:
                larger = [candidate for candidate in forms[op] if candidate >= size]
                tiles = (size_bytes / point.tile_tokens for size_bytes, point in zip(row, points, strict=False))
                form = forms[op][min(larger)] if larger else ((_TILE, max(tiles)),)
            forms[op][size] = form
    return {number: forms[origin.op][origin.size_bytes] for number, origin in left}


RANK_PHASES = frozenset({"forward", LOSS_BEGINS, "loss", HEAD, FIRST, TURN, LAST, "step"})
"""What a profile of ranks says."""
_OTHER = "other"
"""Moments that no engine tells: the backward's before and behind the layers, and the first layer's."""
Item = Event | Repetition


# A run as a rank's: the moments that engines tell apart, and what is alive at them beside what engines hold.


def moments_of_rank(trace: Trace, every: int) -> Trace:
    """The first micro-batch of a full model's run, its backward told by the engines' moments (`MOMENTS`): as its layers
    begin, the last layer's, those of more layers, and the first ones' but the very first, which the embedding's is part
    of. When a layer is done its gradients are gone.

    Args:
        every: how many layers apart checkpoints lie.
    """
    sections = [*_first_micro_batch(trace)]
    backward = [items for name, items in sections if name.startswith("backward")]
    layers = [items for name, items in sections if name.startswith("backward/")]  # a run of the full depth
    longest = max(backward, key=len)
    layers = [_reduced(trace, layer) for layer in layers or [[item] for item in longest]]
    end, inside, before = len(layers) - 1, False, list[Item]()
    at_end = max(1, end - max(2, every))
    events: list[Item] = []
    for name, items in sections:
        if name.startswith("backward/") or (name == "backward" and items is longest):
            if not inside:
                events += [*_gradients(trace, before), Phase(HEAD), Phase(FIRST), *layers[0]]
                events += [Phase(TURN), *chain(*layers[1:at_end]), Phase(LAST), *chain(*layers[at_end:end])]
                events += [Phase(_OTHER), *layers[end]]
                inside = True
            continue
        before += items
        events += [Phase(_OTHER if name == "backward" else name), *items]
    return replace(trace, events=events)


def _reduced(trace: Trace, items: list[Item]) -> list[Item]:
    """A layer's backward, its gradients released at its end."""
    gone, last = _gradients(trace, items), items[-1]
    if not isinstance(last, Repetition):
        return [*items, *gone]
    external = [*last.external, *[()] * (len(last.pattern.runs) - len(last.external))]
    return [*items[:-1], last._replace(external=[*external[:-1], [*external[-1], *gone]])]


def _gradients(trace: Trace, items: Iterable[Item]) -> list[Event]:
    """The end of the gradients that some events leave."""
    gone: list[Event] = []
    for item in items:
        if isinstance(item, Alloc) and is_gradient(trace, item.id):
            gone.append(Free(item.id))
        elif isinstance(item, Repetition):
            owners = item.pattern.owners
            places = (place for place in item.pattern.left if owners.get(place, ("",))[0] == GRADIENTS)
            gone += [Free(item.first + place) for place in places]
    return gone


def _first_micro_batch(trace: Trace) -> Iterator[tuple[str, list[Item]]]:
    name, items = "", list[Item]()
    for item in trace.events:
        if not isinstance(item, Phase):
            items.append(item)
            continue
        if name:
            yield name, items
        if item.name.startswith("forward") and name.startswith("backward"):
            return
        name, items = item.name, []
    yield name, items


def is_gradient(trace: Trace, number: int) -> bool:
    """Whether a storage is a gradient at the step's begin."""
    return trace.owners.get(number, ("",))[0] == GRADIENTS


def is_state(trace: Trace, number: int) -> bool:
    """Whether a storage is what the rank's engine says."""
    return trace.owners.get(number, ("",))[0] in STATES
