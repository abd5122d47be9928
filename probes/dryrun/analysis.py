"""From one run's events to peaks by phase, with what was alive at each."""

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain, zip_longest

from planner.core.records import dataclass
from probes.allocator.events import Alloc, Event, Free, Phase
from probes.allocator.repetitions import Repetition, rounded
from probes.dryrun.report import Group
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import Origin


@dataclass(frozen=True, kw_only=True)
class SegmentPeak:
    """The highest allocated bytes inside one phase, and what they were."""

    size_bytes: int
    groups: Mapping[Group, int]


def group_of(origin: Origin, owner: tuple[str, str] | None) -> Group:
    """The memory term that an allocation belongs to."""
    return _group(origin.phase, origin.layer is None, origin.op, owner)


@lru_cache(maxsize=65536)
def _group(phase: str, outside_layers: bool, full_op: str, owner: tuple[str, str] | None) -> Group:
    if owner is not None:
        category, name = owner
        if category != "weights":
            return category, _OWNED_NAMES.get(category, name)
        parts = name.removeprefix("base_model.model.").split(".")
        if any(part.isdigit() for part in parts[:-1]):
            return category, "weights: layers"
        last = ".".join(parts[-2:])
        return category, next((words for pattern, words in _WEIGHT_NAMES if pattern.search(last)), last)
    if full_op in LAYOUT_GROUPS:
        return LAYOUT_GROUPS[full_op]
    op = full_op.removeprefix("aten.")
    if "workspace" in op:
        return "workspace", "cuBLAS workspaces" if op.startswith("cuBLAS") else op.replace(".default", "")
    if "dequantize" in op:
        return "dequantization", "dequantized weight"
    of_forward = "before the first layer" if outside_layers else "kept for the backward"
    return _BY_PHASE.get(phase, ("activations", of_forward))


_BY_PHASE: dict[str, Group] = {
    "loss": ("loss", "loss chain"),
    "step": ("workspace", "optimizer temporaries"),
    "load": ("other", "batch"),
    "backward": ("activations", "recomputed, and gradients of activations"),
}
_OWNED_NAMES = {
    "adapters": "LoRA matrices",
    "gradients": "accumulated gradients",
    "optimizer": "states of the optimizer",
}
_WEIGHT_NAMES = (
    (re.compile(r"lm_head|embed_out|^output\."), "weights: head"),
    (re.compile(r"embed|wte|wpe|shared"), "weights: embeddings"),
    (re.compile(r"norm|ln_f"), "weights: final norm"),
)
"""The formula's words for what the model types of transformers call by many names, outside their layers."""

LAYOUT_GROUPS: dict[str, Group] = {
    "DDP buckets": ("gradients", "DDP buckets"),
    "gathered weights": ("workspace", "gathered weights"),
    "all-gather buffer": ("workspace", "all-gather buffer"),
    "reduce-scatter buffer": ("workspace", "reduce-scatter buffer"),
    "stage boundary buffers": ("activations", "stage boundary buffers"),
}
"""What only several GPUs have, by the names that `probes.dryrun.rank` gives it."""


class Curve:
    """Allocated bytes along a run, rounded as blocks are.

    Attributes:
        totals: allocated bytes after each event.
        best: phase -> (highest total, index of the first event at which it stood).
    """

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.best: dict[str, tuple[int, int]] = {}
        self._sizes: dict[int, int] = {}
        self._phase = "load"
        self._total = 0

    def add(self, event: Event) -> None:
        if isinstance(event, Alloc):
            size = self._sizes[event.id] = rounded(event.size_bytes)
            self._total += size
            self._rise(self._total, len(self.totals))
        elif isinstance(event, Free):
            self._total -= self._sizes.pop(event.id)
        elif isinstance(event, Phase):
            self._phase = event.name.partition("/")[0]
            self._rise(self._total, len(self.totals))
        self.totals.append(self._total)

    def add_repetition(self, repetition: Repetition) -> None:
        pattern = repetition.pattern
        for place in pattern.left:
            self._sizes[repetition.first + place] = rounded(pattern.sizes[place])
        for course, hole in zip_longest(pattern.courses, repetition.holes, fillvalue=()):
            if course and course.totals:
                base, start = self._total, len(self.totals)
                self._rise(base + course.totals[course.top], start + course.top)
                self._total += course.totals[-1]
                self.totals.extend([base + total for total in course.totals])
            for event in hole:
                self.add(event)

    def rebase(self) -> None:
        """From here on: the highest of this phase is what is allocated now, and nothing is known of the others."""
        self.best = {}
        self._rise(self._total, len(self.totals))

    def _rise(self, total: int, index: int) -> None:
        if total > self.best.get(self._phase, (-1, 0))[0]:
            self.best[self._phase] = total, index


def curve_of(trace: Trace) -> Curve:
    """One walk over the events, from which peaks, their contents and the timeline follow."""
    curve = Curve()
    for item in trace.events:
        if isinstance(item, Repetition):
            curve.add_repetition(item)
        else:
            curve.add(item)
    return curve


def phase_peaks(trace: Trace, curve: Curve | None = None) -> dict[str, SegmentPeak]:
    """The highest allocated bytes inside each phase over the whole run, with what was alive then."""
    best = (curve or curve_of(trace)).best
    alive = _Alive(trace, sorted({index for _, index in best.values()}))
    for item in trace.events:
        alive.add(item)
    return {phase: alive.at[index] for phase, (_, index) in best.items()}


class _Alive:
    """What is alive along a run; `at` the events of `indices` (ascending) it is summed up."""

    def __init__(self, trace: Trace, indices: list[int]) -> None:
        self.at: dict[int, SegmentPeak] = {}
        self._trace = trace
        self._indices = deque(indices)
        self._index = 0  # of the next event
        self._alive: dict[int, tuple[Group, int]] = {}

    def add(self, item: Event | Repetition) -> None:
        if not self._indices:
            return
        if not isinstance(item, Repetition):
            self._add_event(item)
        elif self._index + item.num_events > self._indices[0]:
            for event in item.events():
                self._add_event(event, item)
        else:
            for place in item.pattern.left:
                self._make(item.first + place, item)
            for event in chain.from_iterable(item.holes):
                self._add_event(event)
            self._index += item.num_own_events

    def _add_event(self, event: Event, repetition: Repetition | None = None) -> None:
        if isinstance(event, Alloc):
            self._make(event.id, repetition)
        elif isinstance(event, Free):
            del self._alive[event.id]
        if self._indices and self._index == self._indices[0]:
            sums: dict[Group, int] = defaultdict(int)
            for group, size in self._alive.values():
                sums[group] += size
            by_group = {group: size for group, size in sums.items() if size}
            self.at[self._indices.popleft()] = SegmentPeak(size_bytes=sum(by_group.values()), groups=by_group)
        self._index += 1

    def _make(self, number: int, repetition: Repetition | None) -> None:
        origin, owner = self._trace.origins.get(number), self._trace.owners.get(number)
        if origin is None:
            assert repetition is not None
            place = number - repetition.first
            origin, owner = repetition.pattern.origins[place], repetition.pattern.owners.get(place)
        self._alive[number] = group_of(origin, owner), rounded(origin.size_bytes)


def timeline(curve: Curve, points: int = 400) -> tuple[tuple[int, int], ...]:
    """(event index, allocated bytes): in each of `points` stretches of the run its highest moment."""
    totals = curve.totals
    width = max(1, len(totals) // points)
    moments = []
    for start in range(0, len(totals) - width + 1, width):
        part = totals[start : start + width]
        highest = max(part)
        moments.append((start + part.index(highest), highest))
    return tuple(moments)
