"""From one run's events to peaks by phase, with what was alive at each."""

import re
from collections import defaultdict, deque
from functools import lru_cache
from itertools import chain, zip_longest

from probes.allocator.events import Alloc, Event, Free, Pattern, Phase, Repetition, rounded
from probes.dryrun.report import Group
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import Origin


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
        phases: (phase, index of its first event), in order.
    """

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.best: dict[str, tuple[int, int]] = {}
        self._sizes: dict[int, int] = {}
        self._phase = "load"
        self.phases = [(self._phase, 0)]
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
            if self._phase != self.phases[-1][0]:
                self.phases.append((self._phase, len(self.totals)))
            self._rise(self._total, len(self.totals))
        self.totals.append(self._total)

    def add_repetition(self, repetition: Repetition) -> None:
        pattern = repetition.pattern
        for place in pattern.left:
            self._sizes[repetition.first + place] = rounded(pattern.sizes[place])
        for course, external in zip_longest(pattern.courses, repetition.external, fillvalue=()):
            if course and course.totals:
                base, start = self._total, len(self.totals)
                self._rise(base + course.totals[course.top], start + course.top)
                self._total += course.totals[-1]
                self.totals.extend([base + total for total in course.totals])
            for event in external:
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


def phase_peaks(trace: Trace, curve: Curve) -> dict[str, dict[Group, int]]:
    """Bytes of what is alive where each phase over the whole run has the most allocated."""
    best = curve.best
    indices = deque(sorted({index for _, index in best.values()}))
    peaks: dict[int, dict[Group, int]] = {}
    alive, index = Alive(trace), 0  # of the next event
    for item in trace.events:
        if not indices:
            break
        repetition = item if isinstance(item, Repetition) else None
        if repetition is not None and index + repetition.num_events <= indices[0]:
            alive.add_repetition(repetition)
            index += repetition.num_events
            continue
        for event in item.events() if isinstance(item, Repetition) else (item,):
            alive.add(event, repetition)
            if indices and index == indices[0]:
                sums: dict[Group, int] = defaultdict(int)
                for group, size in alive.storages.values():
                    sums[group] += rounded(size)
                peaks[indices.popleft()] = {group: size for group, size in sums.items() if size}
            index += 1
    return {phase: peaks[index] for phase, (_, index) in best.items()}


class Alive:
    """What is alive along a run.

    Attributes:
        storages: number -> group and size of each.
        count: how many there are of a group and size.
    """

    def __init__(self, trace: Trace) -> None:
        self.storages: dict[int, tuple[Group, int]] = {}
        self.count: dict[tuple[Group, int], int] = defaultdict(int)
        self._trace = trace
        self._of_pattern: dict[Pattern, list[tuple[Group, int]]] = {}

    def add(self, event: Event, repetition: Repetition | None = None) -> None:
        """An event, perhaps one of a repetition's."""
        if isinstance(event, Alloc):
            self._make(event.id, repetition)
        elif isinstance(event, Free):
            self.count[self.storages.pop(event.id)] -= 1

    def add_repetition(self, repetition: Repetition) -> None:
        """All of its events: what it leaves."""
        for place in repetition.pattern.left:
            self._make(repetition.first + place, repetition)
        for event in chain.from_iterable(repetition.external):
            self.add(event, repetition)

    def _make(self, number: int, repetition: Repetition | None) -> None:
        origin = self._trace.origins.get(number)
        if origin is not None:
            key = group_of(origin, self._trace.owners.get(number)), origin.size_bytes
        else:
            assert repetition is not None
            pattern = repetition.pattern
            if pattern not in self._of_pattern:
                self._of_pattern[pattern] = [
                    (group_of(made, pattern.owners.get(place)), made.size_bytes)
                    for place, made in enumerate(pattern.origins)
                ]
            key = self._of_pattern[pattern][number - repetition.first]
        self.storages[number] = key
        self.count[key] += 1


def timeline(curve: Curve, points: int = 400) -> tuple[tuple[int, int], ...]:
    """(event index, allocated bytes): in each of `points` equal parts of the run its highest moment."""
    totals = curve.totals
    width = max(1, len(totals) // points)
    moments = []
    for start in range(0, len(totals) - width + 1, width):
        part = totals[start : start + width]
        highest = max(part)
        moments.append((start + part.index(highest), highest))
    return tuple(moments)
