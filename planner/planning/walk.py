"""The walk over the whole space: every setup's peak on its fullest GPU and its tokens/s."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.memory.attention_kernels import padded, takes_cudnn
from planner.memory.model import memory_of
from planner.memory.states import loading_refusal
from planner.memory.workload import Workload
from planner.memory.workspace import context_bytes
from planner.planning.expressed import variants_as_run
from planner.planning.groups import SetupGroup, WalkCache
from planner.planning.peaks import Peaks
from planner.planning.space import PREFERENCE_FRACTION, dimension_values
from planner.planning.useful import useful_speeds
from planner.setup import TrainSetup
from planner.speed import Speeds, family_speeds

if TYPE_CHECKING:
    from planner.planning.decision.layouts import Layout

Limit = Callable[[TrainSetup], int]
"""The largest peak that fits, of points with this shared setup."""


class WalkedSetup(NamedTuple):
    """One walked setup in short: what was shared, what is its own, and its figures. `setup` builds the whole; `beyond`:
    how many setups beside it are counted here and not listed, because they do not fit."""

    shared: TrainSetup
    attention: str
    loss: str
    optimizer: str
    micro_batch_seqs: int
    accumulation_steps: int
    peak_device_bytes: int
    tokens_per_s: float
    beyond: int = 0

    @property
    def family(self) -> TrainSetup:
        """The setup at micro-batch 1 without accumulation."""
        return self.shared.replace_trusted(attention=self.attention, loss=self.loss, optimizer=self.optimizer)

    @property
    def setup(self) -> TrainSetup:
        return self.family.replace(micro_batch_seqs=self.micro_batch_seqs, accumulation_steps=self.accumulation_steps)


def walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    layouts: "Sequence[Layout]" = (),
    cache: WalkCache | None = None,
    limit: Limit | None = None,
    sure: Limit | None = None,
) -> Iterator[WalkedSetup]:
    """Every setup of the space under every layout that the engines run (none given: on one GPU), with its fullest GPU's
    device peak and the tokens/s of all of them, branch by branch. Where launch targets were named, only what they
    express.

    Args:
        cache: what other walks of the same model computed.
        limit: what does not fit into it, micro-batches larger than the largest that fits, is only counted.
        sure: the peak up to which a point surely fits; where one without checkpoints does, checkpoints of some layers
            that are slower than it at every micro-batch are left out.
    """
    values = values if values is not None else dimension_values(workload)
    several = len(workload.targets) > 1
    limit, sure = (None, None) if several else (limit, sure)
    points = _walk(workload, values, layouts, cache if cache is not None else WalkCache(), limit, sure)
    return _for_all_targets(points, workload) if several else points


def _for_all_targets(points: Iterable[WalkedSetup], workload: Workload) -> Iterator[WalkedSetup]:
    """The points of several targets: one that another runs otherwise has the larger of both peaks, each file has to
    fit."""
    shared: TrainSetup | None = None
    variants: dict[tuple[str, ...], list[TrainSetup]] = {}
    for point in points:
        if point.shared is not shared:  # points come in runs that share their branch
            shared, variants = point.shared, {}
        key = (point.attention, point.loss, point.optimizer)
        if key not in variants:
            variants[key] = variants_as_run(point.family, workload) or []
        peak = point.peak_device_bytes
        for other in variants[key]:
            if peak <= workload.budget_bytes:
                steps = {"micro_batch_seqs": point.micro_batch_seqs, "accumulation_steps": point.accumulation_steps}
                ranks = memory_of(workload.model, workload.gpu, other.replace(**steps))
                peak = max(peak, ranks[0].breakdown.peak_device_bytes)
        yield point if peak == point.peak_device_bytes else point._replace(peak_device_bytes=peak)


class _Speeds:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._cache: dict[tuple[int, str], Speeds] = {}
        self._useful: dict[tuple[int, str], Speeds] = {}
        self._alike: dict[tuple[object, ...], Speeds] = {}

    def of_rows(self, run: SetupGroup, loss: str) -> Speeds:
        speeds = self._cache.get((id(run), loss))
        if speeds is None:
            workload, shared = self._workload, run.shared
            group = (id(run.ranks), shared.kernels, shared.attention, shared.checkpointing > 0)
            like = self._alike.get(group)
            speeds = family_speeds(workload.model, workload.gpu, run.whole(loss), workload.cluster, like)
            self._cache[id(run), loss] = speeds
            self._alike.setdefault(group, speeds)
        return speeds

    def useful(self, run: SetupGroup, loss: str) -> Speeds:
        if not self._workload.data.real_fractions:
            return self.of_rows(run, loss)
        speeds = self._useful.get((id(run), loss))
        if speeds is None:
            speeds = self._useful[id(run), loss] = useful_speeds(self._workload, run.whole(loss))
        return speeds


class Padding:
    """What samples that differ in length cost a walked point, whose figures are those of full rows
    (`TrainSetup.pads`)."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._speeds: dict[TrainSetup, Speeds] = {}
        self._kept: dict[WalkedSetup, float] = {}

    def kept_fraction(self, point: WalkedSetup) -> float:
        """Share of its walked speed that is left, at most 1; asked of a point for every choice that it is open to."""
        kept = self._kept.get(point)
        if kept is None:
            full, kept = point.setup, 1.0
            setup = padded(self._workload.model, full) or full
            if (setup.uneven or self._walked_as_sdpa(point)) and point.tokens_per_s:
                kept = min(1.0, self._tokens_per_s(point, setup) / point.tokens_per_s)
            self._kept[point] = kept
        return kept

    def with_own_speed(self, point: WalkedSetup) -> WalkedSetup:
        """The point with the speed of full rows, where it was walked with another attention's."""
        speed = self._tokens_per_s(point, point.setup) if self._walked_as_sdpa(point) else point.tokens_per_s
        return point if speed == point.tokens_per_s else point._replace(tokens_per_s=speed)

    def _walked_as_sdpa(self, point: WalkedSetup) -> bool:
        """Whether its group has one speed, of SDPA by cuDNN's kernels, which is higher on full rows."""
        flash = point.attention == "flash-attention-2" and point.shared.attention == "sdpa"
        return flash and takes_cudnn(self._workload.gpu, "sdpa")

    def _tokens_per_s(self, point: WalkedSetup, setup: TrainSetup) -> float:
        key = setup.replace_trusted(micro_batch_seqs=2, accumulation_steps=1, optimizer="adamw")
        if key not in self._speeds:
            self._speeds[key] = useful_speeds(self._workload, setup)
        pair = [(point.micro_batch_seqs, point.accumulation_steps)]
        return self._speeds[key].tokens_per_s(point.optimizer, pair)[0]

    def fits(self, point: WalkedSetup, limit_bytes: float) -> bool:
        """Whether it fits with them too."""
        model, gpu, full = self._workload.model, self._workload.gpu, point.setup
        uneven = padded(model, full)
        if uneven is None:
            return True
        before, after = (memory_of(model, gpu, each)[0].breakdown.peak_device_bytes for each in (full, uneven))
        return point.peak_device_bytes + max(0, after - before) <= limit_bytes


def _walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    layouts: "Sequence[Layout]",
    cache: WalkCache,
    limit: Limit | None,
    sure: Limit | None,
) -> Iterator[WalkedSetup]:
    """The points run by run, but for runs of which no point can be taken (`_Pruning`)."""
    pruning, context = _Pruning(workload, cache), context_bytes(workload.gpu)
    for run in cache.runs(workload, values, layouts):  # which cards of other sizes share
        if loading_refusal(workload.model, run.setup, workload.budget_bytes):
            continue
        limit_bytes = limit(run.shared) - context if limit is not None else None
        if pruning.dominated(run, limit_bytes):
            continue
        for loss, peaks in pruning.peaks(run, limit_bytes).items():
            points = [*_points(run, loss, peaks, pruning.speeds, limit_bytes, context)]
            yield from points
            if sure is not None and not run.shared.checkpointing:
                most = sure(run.shared)
                pruning.add_unchecked(run, [point for point in points if point.peak_device_bytes <= most])


class _Pruning:
    """Which runs are left out: those that another dominates (faster, never larger), and those that checkpoint some
    layers and are slower than what surely fits without checkpoints.

    Attributes:
        _unchecked: by branch, tokens/s of the fastest that surely fits and checkpoints nothing; `_alone`: the same of
            those that padding does not change, by branch, loss and optimizer.
        _dominated: identities of runs.
        _room: by the run that differs in that every layer is checkpointed, and loss: at how many pairs, from the first
            on, it fits; fewer checkpoints fit at no more.
    """

    def __init__(self, workload: Workload, cache: WalkCache) -> None:
        self.speeds = _Speeds(workload)
        self._workload, self._cache = workload, cache
        self._unchecked: dict[int, float] = {}
        self._alone: dict[tuple[int, str, str], float] = {}
        self._dominated: set[int] = set()
        self._room: dict[tuple[int, str], int] = {}

    def dominated(self, run: SetupGroup, limit_bytes: int | None) -> bool:
        """Whether the run that dominates this one is faster, or does not fit itself."""
        dominating = run.dominating
        if dominating is None:
            return False
        if run.ends is not None and {id(end) for end in run.ends} <= self._dominated:
            self._dominated.add(id(run))
            return True
        fitting = [self._num_fitting(dominating, loss, limit_bytes) for loss in self._losses(dominating)]
        fits = any(fitting)
        # what checkpoints nothing is judged even so: runs between both ends ask
        if (fits or not run.shared.checkpointing) and self._beaten(run, dominating, max(1, *fitting)):
            self._dominated.add(id(run))
        return not fits or id(run) in self._dominated

    def peaks(self, run: SetupGroup, limit_bytes: int | None) -> dict[str, Peaks]:
        """The peaks of a run by loss; none where it is left out."""
        losses = self._losses(run)
        peaks = partial(self._cache.peaks, self._workload, run)
        if run.ends is None:
            if run.shared.checkpointing:
                self._room |= {(id(run), loss): self._num_fitting(run, loss, limit_bytes) for loss in losses}
            return {loss: peaks(loss) for loss in losses}
        branch, pairs = id(run.setup), run.pairs

        def alone(loss: str, optimizer: str) -> float:
            return self._alone.get((branch, loss, optimizer), 0.0)

        fastest = self._unchecked.get(branch, 0.0)
        at_most = {loss: pairs[: self._room.get((_every(run), loss))] for loss in losses}
        if self._slower(run, dict.fromkeys(losses, pairs), lambda *_: fastest) or self._slower(run, at_most, alone):
            return {}
        room = {loss: self._num_fitting(run, loss, limit_bytes) for loss in losses}
        self._room |= {(_every(run), loss): num for loss, num in room.items()}
        fitting = {loss: pairs[:num] for loss, num in room.items()}
        return {} if self._slower(run, fitting, alone) else {loss: peaks(loss) for loss in losses}

    def add_unchecked(self, run: SetupGroup, points: Iterable[WalkedSetup]) -> None:
        """Points of a run without checkpoints that surely fit."""
        branch = id(run.setup)
        for point in points:
            self._unchecked[branch] = max(self._unchecked.get(branch, 0.0), point.tokens_per_s)
            if point.micro_batch_seqs == 1 or not self._workload.uneven:
                key = branch, point.loss, point.optimizer
                self._alone[key] = max(self._alone.get(key, 0.0), point.tokens_per_s)

    def _losses(self, run: SetupGroup) -> list[str]:
        """Those with which it may fit."""
        return [loss for loss in run.choices if self._room.get((_every(run), loss)) != 0]

    def _num_fitting(self, run: SetupGroup, loss: str, limit_bytes: int | None) -> int:
        """At how many pairs, from the first on, any optimizer fits (1, where only the last does)."""
        num = len(run.pairs)
        if limit_bytes is None:
            return num
        peaks, fitting = self._cache.peaks(self._workload, run, loss), 0
        if peaks.fit(limit_bytes):
            fitting = next((index for index in range(1, num) if min(peaks.at(index)) > limit_bytes), num)
        return fitting

    def _beaten(self, run: SetupGroup, other: SetupGroup, num_fitting: int) -> bool:
        """Whether the other run is faster, at the smallest and the largest micro-batch that may fit, by more than
        simpler setups are preferred for. What is twice as much at the smallest was so at the largest too, in all of
        2,861 pairs."""
        loss = next(iter(other.choices))
        mine, first = ((self.speeds.of_rows(each, loss).tokens_per_s, each.choices[loss][0]) for each in (run, other))
        for pair in (run.pairs[0], run.pairs[num_fitting - 1]):
            lost = 1 - mine[0](mine[1], [pair])[0] / first[0](first[1], [pair])[0]
            if lost <= PREFERENCE_FRACTION:
                return False
            if lost > 2 * PREFERENCE_FRACTION:
                break
        return True

    def _slower(
        self,
        run: SetupGroup,
        pairs_of: Mapping[str, Sequence[tuple[int, int]]],
        fastest: Callable[[str, str], float],
    ) -> bool:
        """Whether a run that checkpoints some layers is slower than the `fastest` beside a loss and an optimizer at all
        pairs `pairs_of` its losses. Seconds are nearly affine in how many layers are checkpointed (1 % is kept for what
        is not)."""
        assert run.ends is not None
        num_layers = self._workload.model.num_layers
        share = math.ceil(num_layers / run.shared.checkpointing) / num_layers
        for loss, pairs in pairs_of.items():
            none, every = (self.speeds.useful(end, loss).tokens_per_s for end in run.ends)
            for optimizer in run.choices[loss]:
                limit = 0.99 * fastest(loss, optimizer)
                for pair in reversed(pairs):  # if any is as fast, the largest
                    if not limit:
                        return False
                    plain, other = none(optimizer, [pair])[0], every(optimizer, [pair])[0]
                    if 1 / ((1 - share) / plain + share / other) > limit:
                        return False
        return True


def _every(run: SetupGroup) -> int:
    """The identity of the run that differs in that every layer is checkpointed, or of this one, which has no such."""
    return id(run.ends[1] if run.ends is not None else run)


def _points(
    run: SetupGroup, loss: str, peaks: Peaks, speeds: _Speeds, limit_bytes: int | None, context: int
) -> Iterator[WalkedSetup]:
    """The points of a run with one loss; where none fits one for all of them, the smallest, without a speed.

    Attention implementations that run the same kernels in every layer share their figures. `context` is what the
    device holds beside the peaks, which the limit has been lowered by.
    """
    shared, pairs, num = run.shared, run.pairs, len(run.pairs)
    if limit_bytes is not None and not peaks.fit(limit_bytes):
        (micro, steps), at_first = pairs[0], peaks.at(0)
        peak, others = min(at_first), num * len(at_first) * len(run.attentions) - 1
        optimizer = run.choices[loss][at_first.index(peak)]
        yield WalkedSetup(shared, run.attentions[0], loss, optimizer, micro, steps, peak + context, 0.0, others)
        return
    speeds_of = speeds.useful(run, loss)
    for place, optimizer in enumerate(run.choices[loss]):
        listed = _listed(peaks, place, num, limit_bytes)
        tokens_per_s = speeds_of.tokens_per_s(optimizer, pairs[: len(listed)])
        for attention in run.attentions:
            beyond = num - len(listed)  # counted with the last
            for index, (peak, speed) in enumerate(zip(listed, tokens_per_s, strict=True), 1):
                more = beyond if index == len(listed) else 0
                yield WalkedSetup(shared, attention, loss, optimizer, *pairs[index - 1], peak + context, speed, more)


def _listed(peaks: Peaks, place: int, num: int, limit_bytes: int | None) -> list[int]:
    """The peaks of the micro-batches that are worth a point: until the first that does not fit, at least one."""
    listed = [peaks.at(0)[place]]
    for at in range(1, num):
        peak = peaks.at(at)[place]
        if limit_bytes is not None and peak > limit_bytes:
            break
        listed.append(peak)
    return listed
