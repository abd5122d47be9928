"""From one run's events to peaks by phase, with what was alive at each."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from probes.allocator.events import Alloc, Free, Phase
from probes.dryrun.report import Group
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import ROUND_BYTES, Origin


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
        if category == "weights":
            return category, _weight_group(name)
        return category, _OWNED_NAMES.get(category, name)
    if full_op in SPREAD_GROUPS:
        return SPREAD_GROUPS[full_op]
    op = full_op.removeprefix("aten.")
    if "workspace" in op:
        return "workspace", "cuBLAS workspaces" if op.startswith("cuBLAS") else op.replace(".default", "")
    if "dequantize" in op:
        return "dequantization", "dequantized weight"
    if phase == "loss":
        return "loss", "loss chain"
    if phase == "step":
        return "workspace", "optimizer temporaries"
    if phase == "load":
        return "other", "batch"
    if phase == "backward":
        return "activations", "recomputed, and gradients of activations"
    if outside_layers:
        return "activations", "before the first layer"
    return "activations", "kept for the backward"


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

SPREAD_GROUPS: dict[str, Group] = {
    "DDP buckets": ("gradients", "DDP buckets"),
    "gathered weights": ("workspace", "gathered weights"),
    "all-gather buffer": ("workspace", "all-gather buffer"),
    "reduce-scatter buffer": ("workspace", "reduce-scatter buffer"),
    "stage boundary buffers": ("activations", "stage boundary buffers"),
}
"""What only several GPUs have, by the names that `probes.dryrun.rank` gives it."""


def _weight_group(name: str) -> str:
    parts = name.removeprefix("base_model.model.").split(".")
    if any(part.isdigit() for part in parts[:-1]):
        return "weights: layers"
    last = ".".join(parts[-2:])
    return next((words for pattern, words in _WEIGHT_NAMES if pattern.search(last)), last)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Allocated bytes along a run: after every event, rounded as blocks are.

    Attributes:
        totals: allocated bytes after each event.
        best: phase -> (highest total, index of the first event at which it stood).
        sizes: rounded size of each storage; `made` and `freed`: indices of its two events (ids are not used again).
    """

    totals: list[int]
    best: dict[str, tuple[int, int]]
    sizes: dict[int, int]
    made: dict[int, int]
    freed: dict[int, int]


def curve_of(trace: Trace) -> Curve:
    """One walk over the events, from which peaks, their contents and the timeline follow."""
    sizes: dict[int, int] = {}
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    totals: list[int] = []
    best: dict[str, tuple[int, int]] = {}
    total, phase, highest = 0, "load", -1
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            size = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            sizes[event.id] = size
            made[event.id] = index
            total += size
            if total > highest:
                highest = total
                best[phase] = (total, index)
        elif isinstance(event, Free):
            freed[event.id] = index
            total -= sizes[event.id]
        elif isinstance(event, Phase):
            phase = event.name.partition("/")[0]
            highest = best.get(phase, (-1, 0))[0]
            if total > highest:
                highest = total
                best[phase] = (total, index)
        totals.append(total)
    return Curve(totals=totals, best=best, sizes=sizes, made=made, freed=freed)


def phase_peaks(trace: Trace, curve: Curve | None = None) -> dict[str, SegmentPeak]:
    """The highest allocated bytes inside each phase over the whole run, with what was alive then."""
    curve = curve or curve_of(trace)
    return {phase: _alive_at(trace, curve, index) for phase, (_, index) in curve.best.items()}


def _alive_at(trace: Trace, curve: Curve, index: int) -> SegmentPeak:
    sums: dict[Group, int] = defaultdict(int)
    freed, sizes, origins, owners = curve.freed, curve.sizes, trace.origins, trace.owners
    never = len(trace.events)
    for number, born in curve.made.items():
        if born <= index < freed.get(number, never):
            sums[group_of(origins[number], owners.get(number))] += sizes[number]
    found = {group: size for group, size in sums.items() if size}
    return SegmentPeak(size_bytes=sum(found.values()), groups=found)


def timeline(curve: Curve, points: int = 400) -> tuple[tuple[int, int], ...]:
    """(event index, allocated bytes): in each of `points` stretches of the run its highest moment."""
    totals = curve.totals
    width = max(1, len(totals) // points)
    found = []
    for start in range(0, len(totals) - width + 1, width):
        stretch = totals[start : start + width]
        highest = max(stretch)
        found.append((start + stretch.index(highest), highest))
    return tuple(found)
