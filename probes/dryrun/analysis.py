"""From one run's events to peaks by segment, with what was alive at each."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from probes.allocator.events import Alloc, Free, Phase
from probes.dryrun.trace import Trace
from probes.dryrun.tracker import ROUND_BYTES, Origin

Segment = tuple[str, str, int]
"""(phase, "start" or "end" or "", layer counted from there): where in a step something happened."""

Group = tuple[str, str]
"""(category, name) of a memory term."""


@dataclass(frozen=True, kw_only=True)
class SegmentPeak:
    """The highest allocated bytes inside one segment, and what they were."""

    size_bytes: int
    groups: Mapping[Group, int]


def group_of(origin: Origin, owner: tuple[str, str] | None) -> Group:
    """The memory term that an allocation belongs to."""
    if owner is not None:
        category, name = owner
        if category == "weights":
            return category, _weight_group(name)
        return category, {"adapters": "LoRA matrices", "gradients": "gradients"}.get(category, name)
    op = origin.op.removeprefix("aten.")
    if "workspace" in op:
        return "workspace", op.replace(".default", "")
    if "dequantize" in op:
        return "dequantization", "dequantized weight"
    if origin.phase == "loss":
        return "loss", op.replace(".default", "")
    if origin.phase == "step":
        return "workspace", "optimizer temporaries"
    if origin.phase == "load":
        return "other", "batch"
    if origin.phase == "backward":
        return "activations", "recomputed, and gradients of activations"
    if origin.layer is None:
        return "activations", "before the first layer"
    return "activations", "kept by the layers for the backward"


def _weight_group(name: str) -> str:
    parts = name.removeprefix("base_model.model.").split(".")
    if any(part.isdigit() for part in parts[:-1]):
        return "layers"
    return ".".join(parts[-2:])


def segment_peaks(trace: Trace, reach: int) -> dict[Segment, SegmentPeak]:
    """Peaks by segment over the whole run; `reach`: how many layers from either end get a segment of their own."""
    groups = {number: group_of(origin, trace.owners.get(number)) for number, origin in trace.origins.items()}
    total = 0
    alive: dict[int, int] = {}
    current: list[Segment] = [("load", "", 0)]
    best: dict[Segment, tuple[int, int]] = {}
    segment_start_total = 0
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            size = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            alive[event.id] = size
            total += size
        elif isinstance(event, Free):
            total -= alive.pop(event.id)
            continue
        elif isinstance(event, Phase):
            current = _segments(event.name, trace.num_layers, reach)
            segment_start_total = total
        for segment in current:
            if total > best.get(segment, (-1, 0))[0]:
                best[segment] = (total, index)
    del segment_start_total
    wanted: dict[int, list[Segment]] = defaultdict(list)
    for segment, (_, index) in best.items():
        wanted[index].append(segment)
    return _snapshots(trace, groups, wanted)


def _snapshots(
    trace: Trace, groups: Mapping[int, Group], wanted: Mapping[int, list[Segment]]
) -> dict[Segment, SegmentPeak]:
    sums: dict[Group, int] = defaultdict(int)
    sizes: dict[int, int] = {}
    found: dict[Segment, SegmentPeak] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            size = -(-event.size_bytes // ROUND_BYTES) * ROUND_BYTES
            sizes[event.id] = size
            sums[groups[event.id]] += size
        elif isinstance(event, Free):
            sums[groups[event.id]] -= sizes.pop(event.id)
        if index in wanted:
            snapshot = {group: size for group, size in sums.items() if size}
            for segment in wanted[index]:
                found[segment] = SegmentPeak(size_bytes=sum(snapshot.values()), groups=snapshot)
    return found


def _segments(name: str, num_layers: int, reach: int) -> list[Segment]:
    phase, _, layer = name.partition("/")
    if not layer:
        return [(phase, "", 0)]
    index = int(layer)
    from_end = num_layers - 1 - index
    found: list[Segment] = []
    if index < reach:
        found.append((phase, "start", index))
    if from_end < reach:
        found.append((phase, "end", from_end))
    return found


def extend(
    small: Mapping[Segment, SegmentPeak], large: Mapping[Segment, SegmentPeak], *, periods: int
) -> dict[Segment, SegmentPeak]:
    """Peaks at a depth `periods` periods beyond `large`, where `large` is one period deeper than `small`.

    Inside one segment the same tensors are alive at every depth, each layer's share once per layer: the size is affine
    in the depth, term by term.
    """
    found = {}
    for segment, peak in large.items():
        below = small.get(segment)
        if below is None:
            continue
        names = set(peak.groups) | set(below.groups)
        groups = {}
        for name in names:
            high, low = peak.groups.get(name, 0), below.groups.get(name, 0)
            groups[name] = high + (high - low) * periods
        found[segment] = SegmentPeak(size_bytes=sum(groups.values()), groups={k: v for k, v in groups.items() if v})
    return found


def phase_peaks(peaks: Mapping[Segment, SegmentPeak]) -> dict[str, SegmentPeak]:
    """The highest segment of each phase."""
    found: dict[str, SegmentPeak] = {}
    for (phase, _, _), peak in peaks.items():
        if phase not in found or peak.size_bytes > found[phase].size_bytes:
            found[phase] = peak
    return found
