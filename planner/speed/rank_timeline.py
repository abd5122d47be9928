"""The step of a rank from its operators: beside host and device a third clock, of the link over which it exchanges with
others (`probes.dryrun.streams`).

Collectives run one after another in the order in which they are issued, each when the link is free and its data are
there; the model's stream waits for them where the program's own events say so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from planner.hardware.cluster import Cluster
from planner.speed.host import Host
from planner.speed.operators import COLLECTIVE, GRADIENT, ISSUERS, JOIN, MARK, Operator, Program
from planner.speed.rates import CardRates
from planner.speed.roofline.calibration import load_calibration
from planner.speed.several_gpus.collectives import Collectives, group_of
from planner.speed.several_gpus.exchange import DDP_BUCKET_BYTES
from planner.speed.timeline import (
    QUEUE_S,
    SYNCHRONIZE,
    ClockMap,
    Exchange,
    Loop,
    PricedProgram,
    RunTime,
    Stage,
    Timeline,
    compose,
)

NUM_ISSUERS = len(ISSUERS)
FIRST_BUCKET_BYTES = 2**20
"""The first gradients that DistributedDataParallel reduces together; later ones: DDP_BUCKET_BYTES. Source: PyTorch 2.13
`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`."""
_SIMULATED = 4
"""Micro-batches that are run through: of more, those between the first two and the last are alike."""
_REDUCING = ("reduce_scatter", "_reduce_scatter", "allreduce")
"""What sums gradients up, apart from the model's stream."""


Item = ClockMap | Exchange


class Clocks:
    """The clocks of host, device and link.

    Args:
        all_reduce_s: of a bucket of so many bytes.
    """

    def __init__(self, all_reduce_s: Callable[[float], float]) -> None:
        self.host = self.device = self.link = 0.0
        self.busy_s = 0.0
        self._all_reduce_s = all_reduce_s
        self._marks: list[float] = []
        self._done: list[float] = []
        self._bucket, self._limit = 0.0, FIRST_BUCKET_BYTES

    @property
    def at(self) -> float:
        """When host and device are done."""
        return max(self.host, self.device)

    def run(self, items: Iterable[Item], *, reducing: bool) -> None:
        """Goes through what is issued; without `reducing` gradients stay with their ranks."""
        for item in items:
            if isinstance(item, ClockMap):
                self.host, self.device = item.apply(self.host, self.device)
            elif item.what == MARK:
                self._marks.append(self.at)
            elif item.what == JOIN:
                if item.ago <= len(self._done):
                    self.device = max(self.device, self._done[-item.ago])
            elif item.what == GRADIENT:
                if reducing:
                    self._collected(item.amount)
            elif reducing or not item.reduces:
                after = 0.0 if not item.ago else self.at if item.ago < 0 else self._mark(item.ago)
                self._exchange(item.amount, after)
                self._done.append(self.link)
                if item.ago < 0:
                    self.device = self.link
            else:
                self._done.append(0.0)

    def _mark(self, ago: int) -> float:
        return self._marks[-ago] if ago <= len(self._marks) else 0.0

    def _exchange(self, seconds: float, after: float) -> None:
        self.link = max(self.link, self.host + QUEUE_S, after) + seconds
        self.busy_s += seconds

    def _collected(self, size_bytes: float) -> None:
        self._bucket += size_bytes
        if self._bucket >= self._limit:
            self._reduce()

    def _reduce(self) -> None:
        self._exchange(self._all_reduce_s(self._bucket), self.at)
        self._bucket, self._limit = 0.0, DDP_BUCKET_BYTES

    def reduced(self) -> None:
        """The last bucket, and the end of all: the model's stream waits."""
        if self._bucket:
            self._reduce()
        self.device, self._limit = max(self.device, self.link), FIRST_BUCKET_BYTES


class RankProgram(PricedProgram):
    """A rank's program with its prices and those of its collectives.

    Args:
        exchange_s: of a collective.
        all_reduce_s: of a bucket of so many bytes.
        overlap_cost: the share of hidden communication that compute pays for.
        reduces_each: whether gradients are reduced after every micro-batch, else after the last.
    """

    def __init__(
        self,
        program: Program,
        rates: CardRates,
        *,
        exchange_s: Callable[[Operator], float],
        all_reduce_s: Callable[[float], float],
        overlap_cost: float,
        reduces_each: bool,
    ) -> None:
        super().__init__(program, rates)
        self._exchange_s, self._all_reduce_s = exchange_s, all_reduce_s
        self._overlap_cost, self._reduces_each = overlap_cost, reduces_each
        self._stages: dict[float, tuple[Timeline, Sequence[Stage]]] = {}
        self._exchanges = {
            number: self._exchange(operator)
            for number, operator in enumerate(program.operators)
            if operator.name.startswith(COLLECTIVE) or operator.name in (MARK, JOIN, GRADIENT)
        }

    def _exchange(self, operator: Operator) -> Exchange:
        if not operator.name.startswith(COLLECTIVE):
            amount = operator.numbers[0] if operator.numbers else 0.0
            return Exchange(operator.name, amount, int(amount) if operator.name == JOIN else 0)
        ago = int(operator.numbers[-1])
        reduces = ago >= 0 and operator.name.removeprefix(COLLECTIVE).startswith(_REDUCING)
        return Exchange(COLLECTIVE, self._exchange_s(operator), ago, reduces)

    def stage(self, phase: str, calls: Sequence[int], scale: float) -> Stage:
        """Calls of a phase, with what is exchanged between them."""
        items: list[Item] = []
        for exchanges, group in groupby(calls, key=lambda call: call // NUM_ISSUERS in self._exchanges):
            if exchanges:
                items += [self._exchanges[call // NUM_ISSUERS] for call in group]
            else:
                items.append(self.clock_map(group, scale))
        return Stage(phase, compose([item for item in items if isinstance(item, ClockMap)]), items)

    def stages(self, scale: float) -> tuple[Timeline, Sequence[Stage]]:
        """As of one GPU, each scale's once: it is asked alone and together."""
        stages = self._stages.get(scale)
        if stages is None:
            stages = self._stages[scale] = super().stages(scale)
        return stages

    def time(self, loop: Loop, host: Host) -> RunTime:
        """The time of a step: what the rank takes by itself, and what the others add."""
        alone = super().time(loop, host)
        scales = (host.scale, host.slowest, host.fastest)
        (phases, added), (_, slower), (_, faster) = [self._together(loop, scale) for scale in scales]
        return replace(
            alone,
            step_s=alone.step_s + added,
            parts_s={**alone.parts_s, "communication": added},
            phases_s=phases,
            slower_host_s=alone.slower_host_s + slower,
            faster_host_s=alone.faster_host_s + faster,
        )

    def _together(self, loop: Loop, scale: float) -> tuple[Mapping[str, float], float]:
        """Seconds by phase of a step with all that is exchanged, and how many of all these that adds."""
        timeline, step = self.stages(scale)
        clocks, phases, busy_s = Clocks(self._all_reduce_s), defaultdict[str, float](float), 0.0
        turns = min(loop.accumulation, _SIMULATED)
        for turn in range(turns):
            last = turn == turns - 1
            added = [Stage("", timeline.added)] if turn else []
            times, busy_before = 1 + (loop.accumulation - turns) * (turn == turns - 2), clocks.busy_s
            for stage in (*timeline.micro_batch(loop), *added, Stage("", timeline.value_read(loop))):
                at = clocks.at
                clocks.run(stage.items or (stage.clock_map,), reducing=last or self._reduces_each)
                phases[stage.phase] += times * (clocks.at - at)
            if last or self._reduces_each:
                at = clocks.at
                clocks.reduced()
                phases["backward"] += times * (clocks.at - at)
            busy_s += times * (clocks.busy_s - busy_before)
        at, busy_before = clocks.at, clocks.busy_s
        for stage in (Stage("", timeline.before_step(loop)), *step, Stage("", SYNCHRONIZE)):
            clocks.run(stage.items or (stage.clock_map,), reducing=True)
        phases["step"] += clocks.at - at
        exposed = sum(phases.values()) - timeline.seconds(loop, [stage.clock_map for stage in step])
        hidden = max(0.0, busy_s + clocks.busy_s - busy_before - exposed)
        del phases[""]
        return dict(phases), exposed + self._overlap_cost * hidden


def rank_program(program: Program, rates: CardRates, cluster: Cluster, *, reduces_each: bool) -> RankProgram:
    """A rank's program with its collectives as long as the cluster's links take (`Collectives`)."""
    constants = load_calibration().layout_constants
    collectives, everyone = Collectives(cluster, constants), group_of(cluster, cluster.num_gpus)

    def exchange_s(operator: Operator) -> float:
        size_bytes, ranks, stride, _ = operator.numbers
        group, name = group_of(cluster, int(ranks), int(stride)), operator.name.removeprefix(COLLECTIVE)
        if name.startswith(("allreduce", "all_reduce")):
            return collectives.all_reduce_s(size_bytes, group)
        passed_on = name.startswith(("broadcast", "send", "recv"))
        return collectives.send_s(size_bytes, group) if passed_on else collectives.all_gather_s(size_bytes, group)

    return RankProgram(
        program,
        rates,
        exchange_s=exchange_s,
        all_reduce_s=lambda size_bytes: collectives.all_reduce_s(size_bytes, everyone),
        overlap_cost=constants.overlap_cost,
        reduces_each=reduces_each,
    )
