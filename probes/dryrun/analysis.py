"""From one run's events to peaks by phase, with what was alive at each."""

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
        return category, {"adapters": "LoRA matrices", "gradients": "gradients"}.get(category, name)
    if full_op in SPREAD_GROUPS:
        return SPREAD_GROUPS[full_op]
    op = full_op.removeprefix("aten.")
    if "workspace" in op:
        return "workspace", op.replace(".default", "")
    if "dequantize" in op:
        return "dequantization", "dequantized weight"
    if phase == "loss":
        return "loss", op.replace(".default", "")
    if phase == "step":
        return "workspace", "optimizer temporaries"
    if phase == "load":
        return "other", "batch"
    if phase == "backward":
        return "activations", "recomputed, and gradients of activations"
    if outside_layers:
        return "activations", "before the first layer"
    return "activations", "kept by the layers for the backward"


SPREAD_GROUPS: dict[str, Group] = {
    "DDP buckets": ("gradients", "DDP buckets"),
    "gathered weights": ("workspace", "gathered weights"),
    "all-gather buffer": ("workspace", "all-gather buffer"),
    "reduce-scatter buffer": ("workspace", "reduce-scatter buffer"),
}
"""What only several GPUs have, by the names that `probes.dryrun.spread` gives it."""


def _weight_group(name: str) -> str:
    parts = name.removeprefix("base_model.model.").split(".")
    if any(part.isdigit() for part in parts[:-1]):
        return "layers"
    return ".".join(parts[-2:])


def phase_peaks(trace: Trace) -> dict[str, SegmentPeak]:
    """The highest allocated bytes inside each phase over the whole run, with what was alive then."""
    groups = {number: group_of(origin, trace.owners.get(number)) for number, origin in trace.origins.items()}
    best: dict[str, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    total, phase = 0, "load"
    highest = -1
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            size = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            sizes[event.id] = size
            total += size
            if total > highest:
                highest = total
                best[phase] = (total, index)
        elif isinstance(event, Free):
            total -= sizes.pop(event.id)
        elif isinstance(event, Phase):
            phase = event.name.partition("/")[0]
            highest = best.get(phase, (-1, 0))[0]
            if total > highest:
                highest = total
                best[phase] = (total, index)
    wanted: dict[int, list[str]] = defaultdict(list)
    for name, (_, index) in best.items():
        wanted[index].append(name)
    return _snapshots(trace, groups, wanted)


def _snapshots(trace: Trace, groups: Mapping[int, Group], wanted: Mapping[int, list[str]]) -> dict[str, SegmentPeak]:
    sums: dict[Group, int] = defaultdict(int)
    sizes: dict[int, int] = {}
    found: dict[str, SegmentPeak] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            size = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            sizes[event.id] = size
            sums[groups[event.id]] += size
        elif isinstance(event, Free):
            sums[groups[event.id]] -= sizes.pop(event.id)
        for name in wanted.get(index, ()):
            snapshot = {group: size for group, size in sums.items() if size}
            found[name] = SegmentPeak(size_bytes=sum(snapshot.values()), groups=snapshot)
    return found


def timeline(trace: Trace, points: int = 400) -> tuple[tuple[int, int], ...]:
    """(event index, allocated bytes): in each of `points` stretches of the run its highest moment."""
    width = max(1, len(trace.events) // points)
    sizes: dict[int, int] = {}
    total = 0
    found: list[tuple[int, int]] = []
    best = (0, -1)
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            sizes[event.id] = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            total += sizes[event.id]
        elif isinstance(event, Free):
            total -= sizes.pop(event.id)
        if total > best[1]:
            best = (index, total)
        if index % width == width - 1:
            found.append(best)
            best = (index + 1, -1)
    return tuple(found)
