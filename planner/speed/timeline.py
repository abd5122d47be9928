"""A step's time from its operators: the host issues them, the device runs them in order, and what waits joins the
two.

What a segment of calls does to the two clocks is linear in the (max, +) algebra (`ClockMap`), so it is worked out once
however often the segment repeats.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from planner.core.notes import measured
from planner.core.records import dataclass
from planner.core.units import percent
from planner.setup import TrainSetup
from planner.setup.outcome import HOST_BOUND
from planner.speed.host import MODULE_S, Host, Named, issued_s
from planner.speed.operators import ISSUERS, WAIT, Program
from planner.speed.prices import Price, price
from planner.speed.rates import CardRates
from planner.speed.roofline.rented import BETWEEN_S, COLLATED_TOKEN_S, METRICS_S, MICRO_BATCH_S, STEP_S, WALK_S

_ENGINE, _RECOMPUTE = ISSUERS.index("engine"), ISSUERS.index("recompute")
_NUM = len(ISSUERS)
QUEUE_S = 4e-6
"""From a launch on the host to its start on an idle device. Judgement: NVIDIA's figures for launch latency, 3 to 5."""
GAP_S = 0.7e-6
"""Between two kernels that wait in the queue. Measured: an empty one in a graph takes 1.0 microseconds (H100)."""
_SIMULATED = 3
"""Micro-batches that are run through; further ones are like the last."""
HOST_BOUND_FRACTION = 0.85
"""A device that works less of its step waits for the host."""
_PART_OF_PHASE = {"loss": "loss", "step": "optimizer"}
"""Phases all of whose device time is one part."""

HOST_NOTE_FROM_FRACTION = 0.1
"""A step that waits for the host for more of its time says so: as much as the band."""
_NEVER = float("-inf")


class ClockMap(NamedTuple):
    """What calls do to the times at which host and device are done: a 2 x 2 matrix in the (max, +) algebra.

    Attributes:
        host_host, device_host: seconds from the host's time before to the host's and the device's after.
        host_device, device_device: the same from the device's time before; -inf: no dependence.
    """

    host_host: float
    host_device: float
    device_host: float
    device_device: float

    def then(self, other: "ClockMap") -> "ClockMap":
        """These calls, then `other`."""
        return compose((self, other))

    def apply(self, host: float, device: float) -> tuple[float, float]:
        """The times of host and device after the calls."""
        return max(host + self[0], device + self[1]), max(host + self[2], device + self[3])

    def times(self, count: int) -> "ClockMap":
        """The same calls so many times."""
        if count < 1:
            return IDLE
        hh, hd, dh, dd = self
        if hd == _NEVER:  # the last turn that matters is the first or the last
            return _made(ClockMap, (hh * count, _NEVER, dh + (count - 1) * max(hh, dd), dd * count))
        total, power = IDLE, self
        while count:
            if count & 1:
                total = total.then(power)
            power, count = power.then(power), count >> 1
        return total


_made = tuple.__new__
IDLE = ClockMap(0.0, _NEVER, _NEVER, 0.0)
SYNCHRONIZE = ClockMap(0.0, 0.0, 0.0, 0.0)
"""The host waits for the device."""


Issue = tuple[float, Sequence[float], Sequence[int]]
"""Calls until the host waits: when the last is issued, and for each that the device runs, the last first, when it may
begin and its place."""


def issue_of(calls: Iterable[tuple[float, int | None]], scale: float = 1.0) -> list[Issue]:
    """Calls as the host issues them.

    Args:
        calls: seconds of the host of each, and its place: None where the device runs nothing, -1 where the host waits.
        scale: how many times longer than the measured machine the host takes.
    """
    issues: list[Issue] = []
    host, starts, places = 0.0, list[float](), list[int]()
    for seconds, place in calls:
        host += scale * seconds
        if place is not None and place >= 0:
            starts.append(host + QUEUE_S)
            places.append(place)
        elif place is not None:
            issues.append((host, starts[::-1], places[::-1]))
            host, starts, places = 0.0, [], []
    return [*issues, (host, starts[::-1], places[::-1])]


def clock_map_of(issue: Sequence[Issue], device: Mapping[int, float], device_share: float = 1.0) -> ClockMap:
    """The clock map of calls.

    Args:
        device: seconds of the device by place.
        device_share: what every device time is multiplied by.
    """
    clock_maps: list[ClockMap] = []
    for host, starts, places in issue:
        until_end = list(accumulate([device[place] for place in places]))  # from the begin of each call, the last first
        if device_share != 1.0:
            until_end = [device_share * seconds for seconds in until_end]
        ready, busy = (max(map(add, starts, until_end)), until_end[-1]) if places else (_NEVER, 0.0)
        clock_maps += [*([SYNCHRONIZE] if clock_maps else ()), _made(ClockMap, (host, _NEVER, ready, busy))]
    return compose(clock_maps) if len(clock_maps) > 1 else clock_maps[0]


class Exchange(NamedTuple):
    """What joins the device with the link over which a rank exchanges (`planner.speed.rank_timeline`).

    Attributes:
        what: MARK, JOIN, GRADIENT or COLLECTIVE of `planner.speed.operators`.
        amount: seconds of a collective, bytes of a gradient.
        ago: see COLLECTIVE and JOIN there.
        reduces: whether it sums gradients up.
    """

    what: str
    amount: float = 0.0
    ago: int = 0
    reduces: bool = False


class Stage(NamedTuple):
    """Calls as a clock map, and the phase that they are part of.

    Attributes:
        items: the same calls between which a rank exchanges, with those exchanges.
    """

    phase: str
    clock_map: ClockMap
    items: "Sequence[ClockMap | Exchange]" = ()


def compose(clock_maps: Iterable[ClockMap]) -> ClockMap:
    """The clock map of calls one after another."""
    hh, hd, dh, dd = IDLE
    for own_hh, own_hd, own_dh, own_dd in clock_maps:
        by_host, by_device = own_dh + hh, own_dd + dh
        other_by_host, other_by_device = own_dh + hd, own_dd + dd
        if own_hd == _NEVER:  # the host waits for nothing
            hh, hd = own_hh + hh, own_hh + hd
        else:
            hh, hd = max(own_hh + hh, own_hd + dh), max(own_hh + hd, own_hd + dd)
        dh = by_host if by_host > by_device else by_device
        dd = other_by_host if other_by_host > other_by_device else other_by_device
    return _made(ClockMap, (hh, hd, dh, dd))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The micro-batches of a step on the two clocks.

    Attributes:
        forward, backward: a micro-batch until its backward begins, and from then on.
        added: what adds a later micro-batch's gradients to the first one's.
        num_modules: of the model's module tree.
        scale: of the host.
    """

    forward: Sequence[Stage]
    backward: Sequence[Stage]
    added: ClockMap
    num_modules: int
    scale: float

    def _spent(self, seconds: float) -> ClockMap:
        """The host does something else."""
        return ClockMap(self.scale * seconds, _NEVER, _NEVER, 0.0)

    def micro_batch(self, loop: "Loop") -> list[Stage]:
        """The stages of a micro-batch, with what the program does around them."""
        walked = self._spent(loop.trainer * (self.num_modules * WALK_S["micro-batch"] + MICRO_BATCH_S))
        looked = [self._spent(loop.trainer * METRICS_S), self.value_read(loop)] if self.forward else []
        return [Stage("", walked), *self.forward, *(Stage("loss", clock_map) for clock_map in looked), *self.backward]

    @staticmethod
    def value_read(loop: "Loop") -> ClockMap:
        """The program reads a value back (`.item()`), which synchronizes host and device, where it does."""
        return SYNCHRONIZE if loop.waits else IDLE

    def micro_batches(self, loop: "Loop") -> tuple[ClockMap, ClockMap]:
        """The clock maps of the first micro-batch and of a later one."""
        micro_batch, looked = compose([stage.clock_map for stage in self.micro_batch(loop)]), self.value_read(loop)
        return micro_batch.then(looked), micro_batch.then(self.added).then(looked)

    def end(self, loop: "Loop", step: Iterable[ClockMap]) -> ClockMap:
        """What comes after the last backward, of which clipping, optimizer and release issue `step`."""
        return compose([self.before_step(loop), *step, SYNCHRONIZE])

    def before_step(self, loop: "Loop") -> ClockMap:
        """What the trainer does between the last backward and the optimizer."""
        return self._spent(loop.trainer * (self.num_modules * WALK_S["step"] + STEP_S))

    def seconds(self, loop: "Loop", step: Sequence[ClockMap]) -> float:
        """Seconds of a step."""
        return done_s(*self.micro_batches(loop), loop.accumulation, self.end(loop, step))

    def phases_s(self, loop: "Loop", step: Sequence[ClockMap]) -> dict[str, float]:
        """Seconds that each phase adds to the time at which the step is done."""
        phases = defaultdict[str, float](float)
        host = device = 0.0
        before: dict[str, float] = {}
        for index in range(min(loop.accumulation, _SIMULATED)):
            before = dict(phases)
            added = [Stage("", self.added)] if index else []
            for phase, clock_map, _ in (*self.micro_batch(loop), *added, Stage("", self.value_read(loop))):
                at = max(host, device)
                host, device = clock_map.apply(host, device)
                phases[phase] += max(0.0, max(host, device) - at)
        for name in phases:
            phases[name] += (
                (loop.accumulation - _SIMULATED)
                * (phases[name] - before.get(name, 0.0))
                * (loop.accumulation > _SIMULATED)
            )
        at = max(host, device)
        phases["step"] += max(self.end(loop, step).apply(host, device)) - at
        del phases[""]
        return dict(phases)


def done_s(first: ClockMap, later: ClockMap, accumulation: int, end: ClockMap) -> float:
    """Seconds from the first call to the last kernel of so many micro-batches and the end of their step."""
    host, device = first.apply(0.0, 0.0)
    if accumulation > 1:
        after = later.apply(host, device)
        if host == device and after[0] == after[1]:  # each ends with a look at a value, so that all take as long
            host = device = host + (accumulation - 1) * (after[0] - host)
        else:
            host, device = later.times(accumulation - 1).apply(host, device)
    return max(end.apply(host, device))


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the program around the operators does.

    Attributes:
        accumulation: micro-batches of a step.
        tokens: of a step.
        waits: whether it reads metrics back after every forward and the loss after every backward, which synchronizes
            host and device.
        trainer: whether it is transformers' Trainer, whose walks over the model are counted.
    """

    accumulation: int
    tokens: int
    waits: bool = True
    trainer: bool = True


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """The seconds of one optimizer step.

    Attributes:
        parts_s: by `planner.speed.prices.PARTS`; they sum to `step_s`.
        phases_s: by phase, what the step's end moves by while it is issued.
        device_s: of it the device works.
        num_calls: of modules and operators in a micro-batch.
        host_bound: whether the device waits much for the host.
        slower_host_s, faster_host_s: the step with a host as slow, and as fast, as such a machine's may be.
        host: what the host is.
    """

    step_s: float
    parts_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    device_s: float
    num_calls: int
    host_bound: bool
    slower_host_s: float
    faster_host_s: float
    host: str

    @property
    def host_sides(self) -> tuple[float, float]:
        """How many times as long it takes with a host as slow, and as fast, as such a machine's may be."""
        return self.slower_host_s / self.step_s, self.faster_host_s / self.step_s


def loop_of(setup: TrainSetup) -> Loop:
    """What a setup's stack does around its operators."""
    return Loop(
        accumulation=setup.accumulation_steps,
        tokens=setup.tokens_per_step,
        waits=setup.trainer.runs_trainer,
        trainer=setup.trainer.trainer_overhead,
    )


def host_notes(run: RunTime) -> tuple[str, ...]:
    """What to say where the host sets the pace."""
    waits = run.parts_s["host"] / run.step_s
    if not run.host_bound or waits < HOST_NOTE_FROM_FRACTION:
        return ()
    slower = run.slower_host_s / run.step_s - 1
    return (
        measured(
            f"{HOST_BOUND}the GPU waits {percent(waits)} of the step for the CPU to issue {run.num_calls:,} calls a "
            f"micro-batch, so a larger micro-batch is nearly free (a CPU twice as slow as {run.host} adds "
            f"{percent(slower)})"
        ),
    )


def run_time(program: Program, rates: CardRates, loop: Loop, host: Host | None = None) -> RunTime:
    """The time of a step of `program`."""
    return PricedProgram(program, rates).time(loop, host or Host())


TimelineForHostScale = Callable[[float], tuple[Timeline, Sequence[ClockMap]]]
"""A step with a host of some scale: its micro-batches, and what clipping, optimizer and release issue."""


class Issued(dict[int, tuple[float, int | None]]):
    """Of a call its seconds of the host, and the place of its operator as `issue_of` wants it.

    Args:
        launches: of each operator, whether the device runs anything.
    """

    def __init__(self, operators: Sequence[Named], launches: Sequence[bool], *, checkpointed: bool) -> None:
        super().__init__()
        self._operators, self._launches, self._checkpointed = operators, launches, checkpointed

    def __missing__(self, call: int) -> tuple[float, int | None]:
        number, issuer = divmod(call, _NUM)
        operator, launches = self._operators[number], self._launches[number]
        host = issued_s(operator, issuer, launches, checkpointed=self._checkpointed) if issuer else MODULE_S
        issued = self[call] = host, -1 if operator.name == WAIT else number if launches else None
        return issued


def timed(
    timeline: TimelineForHostScale, parts: Mapping[str, float], loop: Loop, num_calls: int, host: Host
) -> RunTime:
    """The time of a step.

    Args:
        parts: seconds of the device by part.
    """
    nominal, step = timeline(host.scale)
    step_s, device_s, between = nominal.seconds(loop, step), sum(parts.values()), between_s(loop, loop.tokens)
    slower, faster = (scaled.seconds(loop, each) for scaled, each in map(timeline, (host.slowest, host.fastest)))
    return RunTime(
        step_s=step_s + between,
        parts_s={**parts, "host": step_s - device_s, "trainer": between},
        phases_s=nominal.phases_s(loop, step),
        device_s=device_s,
        num_calls=num_calls,
        host_bound=device_s < HOST_BOUND_FRACTION * step_s,
        slower_host_s=slower + between,
        faster_host_s=faster + between,
        host=host.name,
    )


def between_s(loop: Loop, tokens: int) -> float:
    """Seconds of the trainer between two steps of so many tokens."""
    return BETWEEN_S + COLLATED_TOKEN_S * tokens if loop.trainer else 0.0


def price_with_gaps_s(price: Price) -> float:
    """Device seconds of a call with the gaps between its kernels."""
    return price.seconds + price.kernels * GAP_S if price.kernels else 0.0


def add_parts(parts: dict[str, float], phase: str, price: Price, count: float) -> None:
    """Adds so many calls of a phase to the device's seconds by part."""
    unpacking = count * price.unpacking_s
    parts[_PART_OF_PHASE.get(phase, price.part)] += count * price_with_gaps_s(price) - unpacking
    if unpacking:
        parts["dequantization"] += unpacking


class PricedProgram:
    """A program with its prices."""

    def __init__(self, program: Program, rates: CardRates) -> None:
        self.program = program
        self.prices = [price(call, rates) for call in program.operators]
        self._device = dict(enumerate(map(price_with_gaps_s, self.prices)))
        checkpointed = any(call % _NUM == _RECOMPUTE for segment in program.segments for call in segment.calls)
        self._issued = Issued(
            program.operators, [bool(cost.kernels) for cost in self.prices], checkpointed=checkpointed
        )

    def time(self, loop: Loop, host: Host) -> RunTime:
        """The time of a step."""
        num_calls = sum(len(self.program.segments[place].calls) for place in self.program.micro_batch)
        return timed(self.timeline, self.parts(loop), loop, num_calls, host)

    def clock_map(self, calls: Iterable[int], scale: float) -> ClockMap:
        """That of calls, with a host of this scale."""
        return clock_map_of(issue_of(map(self._issued.__getitem__, calls), scale), self._device)

    def stage(self, phase: str, calls: Sequence[int], scale: float) -> Stage:
        """Calls of a phase."""
        return Stage(phase, self.clock_map(calls, scale))

    def timeline(self, scale: float) -> tuple[Timeline, Sequence[ClockMap]]:
        """The program's with a host of this scale, and its optimizer's part."""
        timeline, step = self.stages(scale)
        return timeline, [stage.clock_map for stage in step]

    def stages(self, scale: float) -> tuple[Timeline, Sequence[Stage]]:
        """The same, of the optimizer its stages."""
        program = self.program
        stages: dict[int, Stage] = {}
        ahead: list[Stage] = []
        order: list[Stage] = []
        for place in (*program.micro_batch, *program.step):
            segment = program.segments[place]
            if place not in stages:
                calls = segment.calls
                if not ahead and segment.phase not in ("forward", "step"):
                    first = next((at for at, call in enumerate(calls) if call % _NUM == _ENGINE), None)
                    if first is not None:
                        before, calls = calls[:first], calls[first:]
                        ahead = [*order, self.stage(segment.phase, before, scale)]
                        order = []
                stages[place] = self.stage(segment.phase, calls, scale)
            order.append(stages[place])
        added = [number * _NUM + _ENGINE for number, count in program.added.items() for _ in range(count)]
        end = len(order) - len(program.step)
        timeline = Timeline(
            forward=ahead,
            backward=order[:end],
            added=self.clock_map(added, scale),
            num_modules=program.num_modules,
            scale=scale,
        )
        return timeline, order[end:]

    def parts(self, loop: Loop) -> dict[str, float]:
        """Device seconds of a step by part."""
        parts: dict[str, float] = defaultdict(float)
        times = Counter({place: loop.accumulation * n for place, n in Counter(self.program.micro_batch).items()})
        times.update(self.program.step)
        for place, repeats in times.items():
            segment = self.program.segments[place]
            for call, count in Counter(call // _NUM for call in segment.calls).items():
                add_parts(parts, segment.phase, self.prices[call], repeats * count)
        for call, count in self.program.added.items():
            parts["optimizer"] += (loop.accumulation - 1) * count * price_with_gaps_s(self.prices[call])
        return dict(parts)
