"""A step's time from its operators: the host issues them, the device runs them in order, and what waits joins the
two."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from planner.records import dataclass
from planner.speed.host import MODULE_S, Host, issued_s
from planner.speed.operators import ISSUERS, WAIT, Program
from planner.speed.prices import Price, price
from planner.speed.rates import CardRates
from planner.throughput.rented import BETWEEN_S, COLLATED_TOKEN_S, METRICS_S, MICRO_BATCH_S, STEP_S, WALK_S

_ENGINE, _RECOMPUTE = ISSUERS.index("engine"), ISSUERS.index("recompute")
_NUM = len(ISSUERS)
QUEUE_S = 4e-6
"""From a launch on the host to its start on an idle device. Judgement: NVIDIA's figures for launch latency, 3 to 5."""
GAP_S = 0.7e-6
"""Between two kernels that wait in the queue. Measured: an empty one in a graph takes 1.0 microseconds (H100)."""
_SIMULATED = 3
"""Micro-batches that are run through; further ones are like the last."""
_WAITS = -1.0
"""In the place of a call's device seconds: the host waits for the device."""
HOST_BOUND_FRACTION = 0.85
"""A device that works less of its step waits for the host."""
_OWNERS = {"loss": "loss", "step": "optimizer"}
"""Phases all of whose device time is one part."""

Work = list[tuple[float, float]]
"""(seconds of the host, seconds of the device) of calls that reach the device, with those in between that do not."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the program around the operators does.

    Attributes:
        accumulation: micro-batches of a step.
        tokens: of a step.
        waits: whether it looks at metrics after every forward and at the loss after every backward, and so waits for
            all
            that was issued.
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
        slower_host_s: the step with a host that is slower by its band.
    """

    step_s: float
    parts_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    device_s: float
    num_calls: int
    host_bound: bool
    slower_host_s: float


def run_time(program: Program, rates: CardRates, loop: Loop, host: Host | None = None) -> RunTime:
    """The time of a step of `program`."""
    host = host or Host()
    priced = _Priced(program, rates)
    step_s, phases = _simulated(priced, loop, host.scale)
    slow, _ = _simulated(priced, loop, host.scale * (1 + host.band_fraction))
    parts = priced.parts(loop)
    device_s = sum(parts.values())
    between = BETWEEN_S + COLLATED_TOKEN_S * loop.tokens if loop.trainer else 0.0
    return RunTime(
        step_s=step_s + between,
        parts_s={**parts, "host": step_s - device_s, "trainer": between},
        phases_s=phases,
        device_s=device_s,
        num_calls=sum(len(program.stretches[place].calls) for place in program.micro_batch),
        host_bound=device_s < HOST_BOUND_FRACTION * step_s,
        slower_host_s=slow + between,
    )


class _Priced:
    """A program with its prices.

    Attributes:
        works: of each stretch; of the first that the backward begins in, what comes before is apart in `ahead`.
    """

    def __init__(self, program: Program, rates: CardRates) -> None:
        self.program = program
        self.prices = [price(call, rates) for call in program.operators]
        self._checkpointed = any(call % _NUM == _RECOMPUTE for one in program.stretches for call in one.calls)
        self._known: dict[int, tuple[float, float]] = {0: (MODULE_S, 0.0)}
        self.works: list[Work] = []
        self.ahead: dict[int, Work] = {}
        for place, stretch in enumerate(program.stretches):
            calls = stretch.calls
            if not self.ahead and stretch.phase != "forward":
                first = next((at for at, call in enumerate(calls) if call % _NUM == _ENGINE), None)
                if first is not None:
                    self.ahead[place], calls = self._work(calls[:first]), calls[first:]
            self.works.append(self._work(calls))
        self.added = self._work(
            [number * _NUM + _ENGINE for number, count in program.added.items() for _ in range(count)]
        )

    def _work(self, calls: Sequence[int]) -> Work:
        found: Work = []
        ahead, known = 0.0, self._known
        for call in calls:
            seconds = known.get(call)
            if seconds is None:
                seconds = known[call] = self._of(call)
            ahead += seconds[0]
            if seconds[1]:
                found.append((ahead, seconds[1]))
                ahead = 0.0
        return [*found, (ahead, 0.0)]

    def _of(self, call: int) -> tuple[float, float]:
        number, issuer = divmod(call, _NUM)
        operator, one = self.program.operators[number], self.prices[number]
        host = MODULE_S if not number else issued_s(operator, issuer, one, checkpointed=self._checkpointed)
        return host, _WAITS if operator.name == WAIT else _device_s(one)

    def parts(self, loop: Loop) -> dict[str, float]:
        """Device seconds of a step by part."""
        parts: dict[str, float] = defaultdict(float)
        times = Counter({place: loop.accumulation * n for place, n in Counter(self.program.micro_batch).items()})
        times.update(self.program.step)
        for place, repeats in times.items():
            stretch = self.program.stretches[place]
            for call, count in Counter(call // _NUM for call in stretch.calls).items():
                one = self.prices[call]
                unpacking = repeats * count * one.unpacking_s
                parts[_OWNERS.get(stretch.phase, one.part)] += repeats * count * _device_s(one) - unpacking
                if unpacking:
                    parts["dequantization"] += unpacking
        parts["optimizer"] += (loop.accumulation - 1) * sum(seconds for _, seconds in self.added)
        return dict(parts)


def _device_s(one: Price) -> float:
    """Device seconds of a call with the gaps between its kernels."""
    return one.seconds + one.kernels * GAP_S if one.kernels else 0.0


class _Clock:
    """Where host and device are; `scale`: how many times longer than the measured machine the host takes."""

    def __init__(self, scale: float) -> None:
        self.host = self.ready = 0.0
        self._scale = scale

    def run(self, work: Work) -> None:
        """Issues calls, one after another."""
        host, ready, scale = self.host, self.ready, self._scale
        for issued, seconds in work:
            host += scale * issued
            if seconds > 0:
                start = host + QUEUE_S
                ready = (start if start > ready else ready) + seconds
            elif seconds:
                host = ready = max(host, ready)
        self.host, self.ready = host, ready

    def spend(self, seconds: float) -> None:
        """The host does something else."""
        self.host += self._scale * seconds

    def join(self) -> None:
        """The host waits for the device."""
        self.host = self.ready = max(self.host, self.ready)


def _simulated(priced: _Priced, loop: Loop, scale: float) -> tuple[float, dict[str, float]]:
    """Seconds of a step and of its phases."""
    clock, phases = _Clock(scale), defaultdict[str, float](float)
    walks = priced.program.num_modules if loop.trainer else 0
    for index in range(min(loop.accumulation, _SIMULATED)):
        before = clock.host, clock.ready, dict(phases)
        clock.spend(walks * WALK_S["micro-batch"] + loop.trainer * MICRO_BATCH_S)
        _micro_batch(priced, loop, clock, phases)
        if index:
            clock.run(priced.added)
        if loop.waits:
            clock.join()
    if (more := loop.accumulation - _SIMULATED) > 0:
        clock.host += more * (clock.host - before[0])
        clock.ready += more * (clock.ready - before[1])
        for name in phases:
            phases[name] += more * (phases[name] - before[2].get(name, 0.0))
    at = max(clock.host, clock.ready)
    clock.spend(walks * WALK_S["step"] + loop.trainer * STEP_S)
    for place in priced.program.step:
        clock.run(priced.works[place])
    clock.join()
    phases["step"] += clock.ready - at
    return clock.ready, dict(phases)


def _micro_batch(priced: _Priced, loop: Loop, clock: _Clock, phases: dict[str, float]) -> None:
    for place in priced.program.micro_batch:
        at = max(clock.ready, clock.host)
        ahead = priced.ahead.get(place)
        if ahead is not None:
            clock.run(ahead)
            clock.spend(loop.trainer * METRICS_S)
            if loop.waits:
                clock.join()
        clock.run(priced.works[place])
        phases[priced.program.stretches[place].phase] += max(0.0, max(clock.ready, clock.host) - at)
