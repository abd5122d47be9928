"""Memory over micro-batches of varying lengths: a step's events as a function of the length, replayed in turn.

A cached block serves a request of its size or less, so on fixed segments every longer micro-batch takes new memory
while the old stays cached. The step is dry-run at three lengths; where its events are the same but for their sizes,
each size is the parabola through three points (activations grow with the length, attention's scores with its square).
Where they are not (a loss in chunks has more of them), lengths are rounded up to `NUM_RUN` that are run.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from planner.hardware.gpu import GpuSpec
from planner.memory.attention_kernels import sdpa_capability
from planner.models.spec import ModelSpec
from planner.samples.lengths import OverLengths
from planner.setup import TrainSetup
from probes.allocator.events import Alloc, Event, Free, Phase, flat
from probes.allocator.replay import ReplayResult, replay
from probes.dryrun.api import overhead_bytes
from probes.dryrun.depths import plan_depth
from probes.dryrun.engine import full_trace
from probes.dryrun.startup import collection_paused, load_libraries
from probes.dryrun.trace import Trace
from probes.stack.configs import load_config

NUM_RUN = 8
WHOLE = 128
"""The step is run at multiples of so many tokens: attention kernels pad some rows (the softmax's), which is not counted
at lengths between."""
MICRO, STEP = "micro-batch", "step"

Key = tuple[str, str, int]
"""Where a storage that outlives its part was made, its parameter's name or its operator, and which of those it is."""


class Part(NamedTuple):
    """Loading, a micro-batch or an optimizer's phase, and its events."""

    kind: str
    events: list[Event]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Two steps at one length, cut into parts; `crossing`: number -> key of what is not released where it was made."""

    parts: tuple[Part, ...]
    crossing: dict[int, Key]

    @cached_property
    def both(self) -> list[tuple[tuple[Part, ...], Part]]:
        """Micro-batches and optimizer's phase of the first step, in which workspaces and the optimizer's states appear,
        and of every later one."""
        ends = [0, *(index for index, part in enumerate(self.parts) if part.kind == STEP)]
        return [(self.parts[begin + 1 : end], self.parts[end]) for begin, end in pairwise(ends)]


Sized = tuple[Steps, list[int]]
"""Steps and the sizes in bytes of their storages, by number."""


def over_lengths(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    batches: Sequence[int],
    *,
    source: str,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> OverLengths:
    """Peaks over micro-batches padded to `batches` tokens, `setup.accumulation_steps` of them to a step.

    Raises:
        ValueError: a setup whose micro-batches are all alike, or whose step does not end as it began.
    """
    if setup.num_gpus > 1 or setup.packing or setup.objective != "sft":
        raise ValueError("lengths vary in padded supervised training on one GPU")

    def run(length: int) -> Trace:
        say(f"dry run of the step at {length:,} tokens ...")
        plan = plan_depth(load_config(model.config), checkpointing=setup.checkpointing, full_depth=False)
        capability = sdpa_capability(gpu, setup)
        return full_trace(plan, capability, setup.replace(seq_len_tokens=length)).flat()

    def run_epoch(lengths: Sequence[int], **limit: int) -> ReplayResult:
        events = _Epoch(at).events(lengths, setup.accumulation_steps)
        return replay(events, expandable_segments=setup.expandable_segments, **limit)

    with collection_paused():
        load_libraries()
        at, rounded = _by_length(sorted({*batches}), run)
        say(f"replaying {len(batches)} micro-batches ...")
        epoch = run_epoch(batches)
        constant = run_epoch([max(batches)] * (2 * setup.accumulation_steps))
        retries: int | None = 0  # of all micro-batches under the card's limit; None: they run out
        limit_bytes = gpu.memory_bytes - overhead_bytes(gpu, setup)
        if epoch.peak_reserved_bytes > limit_bytes:
            within = run_epoch(batches, limit_bytes=max(0, limit_bytes))
            retries = within.num_retries if within.fits else None
    return OverLengths(
        source=source,
        seed=seed,
        num_micro_batches=len(batches),
        num_lengths=len({*batches}),
        shortest_tokens=min(batches),
        longest_tokens=max(batches),
        rounded=rounded,
        peak_allocated_bytes=epoch.peak_allocated_bytes,
        peak_reserved_bytes=epoch.peak_reserved_bytes,
        constant_reserved_bytes=constant.peak_reserved_bytes,
        num_retries=retries,
    )


def _by_length(lengths: list[int], run: Callable[[int], Trace]) -> tuple[Callable[[int], Sized], bool]:
    """The steps of any of `lengths` (ascending), and whether it is rounded up to another."""
    ends = {lengths[0], lengths[len(lengths) // 2], lengths[-1]}
    anchors = sorted(ends if len(lengths) == 1 else {-(-end // WHOLE) * WHOLE for end in ends})
    traces = {length: run(length) for length in anchors}
    first = traces[anchors[0]]
    if all(_shape(trace) == _shape(first) for trace in traces.values()):
        steps = steps_of(first)
        sizes = {length: _sizes(trace) for length, trace in traces.items()}
        return cache(lambda length: (steps, _through(sizes, length))), False
    count = min(NUM_RUN, len(lengths))
    chosen = {lengths[-(-(index + 1) * len(lengths) // count) - 1] for index in range(count)}
    traces |= {length: run(length) for length in sorted(chosen - traces.keys())}
    sized = {length: (steps_of(trace), _sizes(trace)) for length, trace in traces.items()}
    return lambda length: sized[min(candidate for candidate in sized if candidate >= length)], True


def _shape(trace: Trace) -> list[tuple[Any, ...]]:
    return [(Alloc, event.id) if isinstance(event, Alloc) else (type(event), *event) for event in flat(trace.events)]


def _sizes(trace: Trace) -> list[int]:
    return [trace.origins[number].size_bytes for number in range(len(trace.origins))]


def _through(sizes: dict[int, list[int]], length: int) -> list[int]:
    """Sizes in bytes at `length` by the polynomial through those at the lengths that were run."""
    if length in sizes:
        return sizes[length]
    weights = [math.prod((length - other) / (node - other) for other in sizes if other != node) for node in sizes]

    @cache  # a step has thousands of storages and some dozens of sizes
    def at(*given: int) -> int:
        return max(0, round(sum(weight * size for weight, size in zip(weights, given, strict=True))))

    return [*map(at, *sizes.values())]


def steps_of(trace: Trace) -> Steps:
    parts: list[Part] = []
    phase, made = "", dict[int, None]()
    crossing: dict[int, Key] = {}

    def begin(kind: str) -> None:
        close()
        parts.append(Part(kind=kind, events=[]))

    def close() -> None:
        seen: dict[str, int] = defaultdict(int)
        for number in made:
            owner = trace.owners.get(number)
            name = f"{owner[0]} {owner[1]}" if owner is not None else trace.origins[number].op
            crossing[number] = (parts[-1].kind, name, seen[name])
            seen[name] += 1
        made.clear()

    begin("load")
    for event in flat(trace.events):
        if isinstance(event, Phase):
            if event.name == "forward" and phase != "forward":
                begin(MICRO)
            elif event.name == "step":
                begin(STEP)
            phase = event.name
        elif isinstance(event, Alloc):
            made[event.id] = None
        elif isinstance(event, Free):
            made.pop(event.id, None)
        parts[-1].events.append(event)
    close()
    return Steps(parts=tuple(parts), crossing=crossing)


class _Epoch:
    """The events of many steps, micro-batch after micro-batch of its own length."""

    def __init__(self, at: Callable[[int], Sized]) -> None:
        self._at = at
        self._held: dict[Key, deque[int]] = defaultdict(deque)
        self._sizes: list[int] = []
        self._bytes = 0

    def events(self, batches: Sequence[int], per_step: int) -> Iterator[Event]:
        """Loading and a step for every `per_step` of `batches`, the last perhaps of fewer."""
        base, sizes = self._at(max(batches))
        yield from self._part(base.parts[0], base, sizes)
        after: list[int] = []
        for start in range(0, len(batches), per_step):
            mine = batches[start : start + per_step]
            for index, length in enumerate(mine):
                steps, sizes = self._at(length)
                micros, optimizer = steps.both[min(start, 1)]
                yield from self._part(micros[min(index, len(micros) - 1)], steps, sizes)
            yield from self._part(optimizer, steps, sizes)
            after.append(self._bytes)
        if len({*after[1:]}) > 1:
            raise ValueError("a step does not end as it began: its memory cannot be repeated")

    def _part(self, part: Part, steps: Steps, sizes: list[int]) -> Iterator[Event]:
        local: dict[int, int] = {}
        of = self._sizes
        for event in part.events:
            if isinstance(event, Alloc):
                size = sizes[event.id]
                local[event.id] = number = len(of)
                of.append(size)
                self._bytes += size
                yield Alloc(number, size)
            elif isinstance(event, Free):
                mine = local.pop(event.id, None)
                if mine is None:
                    queue = self._held[steps.crossing[event.id]]
                    mine = queue.popleft() if queue else None
                if mine is not None:
                    self._bytes -= of[mine]
                    yield Free(mine)
            else:
                yield event
        for number, mine in local.items():
            self._held[steps.crossing[number]].append(mine)
