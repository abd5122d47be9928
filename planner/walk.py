"""The walk over the whole space: every setup's peak on its fullest GPU and its tokens/s, what many share computed once.

Memory is shared by cards that run the same kernels, layers by all losses, optimizers and micro-batches; every
micro-batch's peak comes from the moments' straight lines. It evaluates the composition of `planner.memory.step` (a test
compares it with `predict_memory`).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.choices.losses import LossChain
from planner.engines import engine_of, why_not
from planner.errors import SetupError
from planner.expressed import variants_as_run
from planner.gpu import GpuSpec
from planner.kernels import attention_generation, attention_kernel, takes_cudnn
from planner.memory.dtypes import flow_of
from planner.memory.layer_costs import LayerCosts, in_common
from planner.memory.micro_batch import ActivationParts, costs_of
from planner.memory.model import predict_memory
from planner.memory.rank_part import RankPart, rank_parts
from planner.memory.rank_part import in_flight as micro_batches_in_flight
from planner.memory.rollout import generation_terms, resident_vllm
from planner.memory.state import RankState
from planner.memory.step import (
    Lines,
    boundary_bytes,
    computing,
    in_flight_bytes,
    loss_beside,
    loss_terms,
    peak_bytes,
    step_parts,
    total_bytes,
)
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.space import PREFERENCE_FRACTION, branches, dimension_values, micro_batches, own_layers
from planner.speed import family_speeds
from planner.useful import useful_speeds
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.decision.spreads import Spread


class Point(NamedTuple):
    """One walked setup in short: what was shared, what is its own, and its figures. `setup` builds the whole.

    Attributes:
        beyond, slower: how many setups beside it are counted here and not listed, because they do not fit or are slower
            than what is looked at.
    """

    shared: TrainSetup
    attention: str
    loss: str
    optimizer: str
    micro_batch_seqs: int
    accumulation_steps: int
    peak_device_bytes: int
    tokens_per_s: float
    beyond: int = 0
    slower: int = 0

    @property
    def family(self) -> TrainSetup:
        """The setup at micro-batch 1 without accumulation."""
        return self.shared.trusted_with(attention=self.attention, loss=self.loss, optimizer=self.optimizer)

    @property
    def setup(self) -> TrainSetup:
        """The complete setup, validated."""
        return self.family.with_(micro_batch_seqs=self.micro_batch_seqs, accumulation_steps=self.accumulation_steps)


def walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    spreads: "Sequence[Spread]" = (),
    known: "Known | None" = None,
    limit_bytes: int | None = None,
    floor: Callable[[TrainSetup], float] | None = None,
) -> Iterator[Point]:
    """Every setup of the space under every spread that the engines run (none given: on one GPU), with its fullest GPU's
    device peak and the tokens/s of all of them, branch by branch. Where launch targets were named, only what they
    express.

    Args:
        known: what walks of the same model on other cards computed.
        limit_bytes: what does not fit into it, micro-batches larger than the largest that fits, is only counted.
        floor: tokens/s up to which points that fit are only counted, asked anew all along; only with a limit.
    """
    values = values if values is not None else dimension_values(workload)
    limit_bytes = None if workload.targets else limit_bytes
    points = _walk(workload, values, spreads, known if known is not None else Known(), limit_bytes, floor)
    return _expressed(points, workload) if workload.targets else points


def _expressed(points: Iterable[Point], workload: Workload) -> Iterator[Point]:
    """The points that the first target runs as they are, and the others at all.

    A point that another target runs otherwise has the larger of both peaks: each file has to fit.
    """
    shared: TrainSetup | None = None
    variants: dict[tuple[str, ...], list[TrainSetup] | None] = {}
    for point in points:
        if point.shared is not shared:  # points come in runs that share their branch
            shared, variants = point.shared, {}
        key = (point.attention, point.loss, point.optimizer)
        if key not in variants:
            variants[key] = variants_as_run(point.family, workload)
        others = variants[key]
        if others is None:
            continue
        peak = point.peak_device_bytes
        for other in others:
            if peak <= workload.budget_bytes:
                steps = {"micro_batch_seqs": point.micro_batch_seqs, "accumulation_steps": point.accumulation_steps}
                peak = max(peak, predict_memory(workload.model, workload.gpu, other.with_(**steps)).peak_device_bytes)
        yield point if peak == point.peak_device_bytes else point._replace(peak_device_bytes=peak)


class _Peaks(NamedTuple):
    """The device peaks of a run with one loss.

    Attributes:
        by_optimizer: at every (micro-batch, accumulation); `first`: which of them is the smallest at the first.
        lowest: the smallest of all optimizers at every pair.
        ordered: all of them, rising.
    """

    by_optimizer: list[list[int]]
    first: int
    lowest: list[int]
    ordered: list[int]

    @classmethod
    def of(cls, by_optimizer: list[list[int]]) -> "_Peaks":
        """All of it from the peaks."""
        first = min(range(len(by_optimizer)), key=lambda number: by_optimizer[number][0])
        lowest = [min(column) for column in zip(*by_optimizer, strict=True)]
        return cls(by_optimizer, first, lowest, sorted(peak for peaks in by_optimizer for peak in peaks))


@dataclass(slots=True)
class _Run:
    """A branch under one spread with its attention kernels and layers: only loss, optimizer and micro-batch are open.

    Attributes:
        attentions: implementations that run the same `kernels` in every layer, and share all figures.
        choices: loss -> the optimizers that can be had with it; `wholes`: loss -> the setup with the first of them.
        pairs: (micro-batch, accumulation).
        rivals: the setup at the first loss and optimizer, and the same with the first kernel family; None where this is
            the first family, or all are asked for.
        ranks: shared by all runs of the branch and spread, made when the first of them asks.
        families: one of each rank, made when the first loss asks.
        peaks: by loss.
    """

    setup: TrainSetup
    shared: TrainSetup
    attentions: tuple[str, ...]
    kernels: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    wholes: Mapping[str, TrainSetup]
    pairs: tuple[tuple[int, int], ...]
    rivals: tuple[TrainSetup, TrainSetup] | None
    ranks: "list[_Rank]"
    families: "list[_Family]" = field(default_factory=list)
    peaks: dict[str, _Peaks] = field(default_factory=dict)


def _walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    spreads: "Sequence[Spread]",
    known: "Known",
    limit_bytes: int | None,
    floor: Callable[[TrainSetup], float] | None,
) -> Iterator[Point]:
    """Attention implementations that run the same kernels in every layer share their figures."""
    for run in known.runs(workload, values, spreads):
        if run.rivals is not None and _outrun(workload, run):
            continue
        shared, pairs = run.shared, run.pairs
        for loss, optimizers in run.choices.items():
            peaks, speeds_of = known.peaks(workload, run, loss), None
            if limit_bytes is not None:
                if peaks.ordered[0] > limit_bytes:
                    yield _counted(run, loss, peaks, limit_bytes)
                    continue
                speeds_of = useful_speeds(workload, run.wholes[loss])
                least = floor(shared) if floor is not None else -1.0
                most = pairs[: _num_listed(peaks.lowest, limit_bytes)]
                if least > 0 and max(speeds_of(None, most)) <= least:
                    yield _counted(run, loss, peaks, limit_bytes)
                    continue
            speeds_of = speeds_of or useful_speeds(workload, run.wholes[loss])
            for optimizer, own in zip(optimizers, peaks.by_optimizer, strict=True):
                listed = _num_listed(own, limit_bytes)
                speeds = speeds_of(optimizer, pairs[:listed])
                for attention in run.attentions:
                    left = len(pairs)
                    for (micro, steps), peak, speed in zip(pairs, own, speeds, strict=False):
                        left -= 1
                        beyond = left if left + listed == len(pairs) else 0
                        yield Point(shared, attention, loss, optimizer, micro, steps, peak, speed, beyond)


def _counted(run: _Run, loss: str, peaks: _Peaks, limit_bytes: int) -> Point:
    """The smallest of a run's points with one loss, without a speed, for all of them: none can be kept."""
    optimizer, own = run.choices[loss][peaks.first], peaks.by_optimizer[peaks.first]
    fitting = bisect_right(peaks.ordered, limit_bytes) * len(run.attentions)
    others = len(peaks.ordered) * len(run.attentions) - fitting
    mine = own[0] <= limit_bytes
    micro, steps = run.pairs[0]
    return Point(
        run.shared, run.attentions[0], loss, optimizer, micro, steps, own[0], 0.0, others - (not mine), fitting - mine
    )


def _outrun(workload: Workload, run: _Run) -> bool:
    """Whether the first kernel family beats this one, at the smallest and the largest micro-batch, by more than simpler
    setups are preferred for: it is never larger, so that no point with this one can be taken."""
    assert run.rivals is not None
    ends = (run.pairs[0], run.pairs[-1])
    mine, first = (
        family_speeds(workload.model, workload.gpu, one, workload.cluster)(one.optimizer, ends) for one in run.rivals
    )
    return all(own < (1 - PREFERENCE_FRACTION) * best for own, best in zip(mine, first, strict=True))


def _runs(workload: Workload, values: Mapping[str, tuple[Any, ...]], spreads: "Sequence[Spread]") -> Iterator[_Run]:
    """The runs of a workload, in the order in which they are walked."""
    model, gpu = workload.model, workload.gpu
    best = values["kernels"][0] if "kernels" not in workload.fixed and not workload.targets else None
    for branch in branches(workload, values):
        groups = same_kernels(model, gpu, branch, values["attention"])
        for fields in [one.fields for one in spreads] or [{}]:
            try:
                setup = branch.with_(**fields)
            except SetupError:
                continue
            choices = _choices(model, setup, values)
            own_batch, rest = divmod(workload.global_batch_seqs, setup.data_degree)
            if rest or not choices:
                continue
            batches = values.get("micro_batch_seqs") or micro_batches(own_batch)
            least = setup.aim.least(own_batch)
            pairs = tuple([(m, own_batch // m) for m in batches if own_batch % m == 0 and m >= least])
            if branch.rollout is not None and (made := branch.rollout.generation_batch_seqs):
                pairs = tuple([one for one in pairs if made % one[0] == 0])
            if not pairs:
                continue
            ranks: list[_Rank] = []
            layers_of = own_layers(setup, values)
            for kernels, attentions in groups.items():
                for layers in layers_of:
                    shared = setup.trusted_with(attention=attentions[0], **layers)
                    rivals = _rivals(shared, best, values)
                    wholes = {
                        loss: shared.trusted_with(loss=loss, optimizer=any_of[0]) for loss, any_of in choices.items()
                    }
                    yield _Run(setup, shared, tuple(attentions), kernels, choices, wholes, pairs, rivals, ranks)


def _rivals(
    shared: TrainSetup, best: str | None, values: Mapping[str, tuple[Any, ...]]
) -> tuple[TrainSetup, TrainSetup] | None:
    if best is None or shared.kernels == best:
        return None
    whole = shared.trusted_with(loss=values["loss"][0], optimizer=values["optimizer"][0])
    try:
        return whole, whole.with_(kernels=best)
    except SetupError:
        return None


def _num_listed(peaks: Sequence[int], limit_bytes: int | None) -> int:
    """How many micro-batches are worth a point: up to the largest that fits, at least one."""
    if limit_bytes is None:
        return len(peaks)
    return next((num for num in range(len(peaks), 1, -1) if peaks[num - 1] <= limit_bytes), min(1, len(peaks)))


def _choices(model: ModelSpec, setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[str, ...]]:
    """The optimizers that the engines run with each loss; losses without any are left out."""
    if setup.num_gpus == 1:
        return dict.fromkeys(values["loss"], tuple(values["optimizer"]))
    found = {}
    for loss in values["loss"]:
        fitting = tuple(
            optimizer
            for optimizer in values["optimizer"]
            if not why_not(model, setup.trusted_with(loss=loss, optimizer=optimizer))
        )
        if fitting:
            found[loss] = fitting
    return found


def same_kernels(
    model: ModelSpec, gpu: GpuSpec, branch: TrainSetup, attentions: tuple[str, ...]
) -> dict[tuple[str, ...], list[str]]:
    """The attention implementations that can exist here, by the kernels that they run in every layer."""
    groups: dict[tuple[str, ...], list[str]] = {}
    flow = flow_of(branch)
    dtype = flow.attention_input
    for attention in attentions:
        try:
            attended = branch.with_(attention=attention)
        except SetupError:
            continue
        kernels = tuple(
            attention_kernel(model, attended, gpu, layer.attention, dtype) if layer.attention else "none"
            for layer in model.layer_kinds
        )
        alike = groups.setdefault(kernels, [])
        if not (alike and takes_cudnn(gpu, alike[0])):  # the same bytes at a lower rate are not walked
            alike.append(attention)
    return groups


def _distinct(model: ModelSpec, setup: TrainSetup) -> list[RankPart]:
    """The parts of a job that differ; of alike stages the first, which holds the most in flight."""
    alike: dict[tuple[ModelSpec, bool, bool], RankPart] = {}
    for part in rank_parts(model, setup):
        alike.setdefault((part.model, part.first, part.last), part)
    return list(alike.values())


def _worst_peaks(
    families: "Sequence[_Family]", loss: str, optimizers: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Per optimizer, the device peak of the fullest rank at every (micro-batch, accumulation)."""
    every = [family.peaks(loss, optimizers, pairs) for family in families]
    if len(every) == 1:
        return every[0]
    return [[max(ranks) for ranks in zip(*peaks, strict=True)] for peaks in zip(*every, strict=True)]


class _Activations(NamedTuple):
    """A part's activations at micro-batch 1, and what its moments hold there and at 2."""

    parts: ActivationParts
    one: tuple[tuple[str, int], ...]
    two: tuple[tuple[str, int], ...]


class Known:
    """What walks of one model computed: the runs and their memory, for cards that run the same kernels."""

    def __init__(self) -> None:
        self._model: ModelSpec | None = None
        self._runs: dict[Any, tuple[_Run, ...]] = {}
        self._peaks: dict[Any, _Peaks] = {}
        self._activations: dict[Any, _Activations] = {}
        self._costs: dict[Any, tuple[tuple[LayerCosts, ...], tuple[LayerCosts, ...]]] = {}

    def runs(
        self, workload: Workload, values: Mapping[str, tuple[Any, ...]], spreads: "Sequence[Spread]"
    ) -> Iterable[_Run]:
        """The runs of a workload; where launch targets were named not kept, as those may ask what card it is."""
        if self._model is not workload.model:
            self.__init__()  # type: ignore[misc]
            self._model = workload.model
        if workload.targets:
            return _runs(workload, values, spreads)
        wish = (workload.seq_len_tokens, workload.global_batch_seqs, workload.num_gpus, *workload.fixed.items())
        spread = tuple(tuple(one.fields.items()) for one in spreads)
        key = (_memory_kind(workload), wish, tuple(values.items()), spread)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = tuple(_runs(workload, values, spreads))
        return found

    def peaks(self, workload: Workload, run: _Run, loss: str) -> _Peaks:
        """The peaks of a run with one loss, of the fullest rank."""
        found = run.peaks.get(loss)
        if found is None:
            optimizers = run.choices[loss]
            key = (_memory_kind(workload), run.kernels, run.shared, loss, optimizers, run.pairs)
            found = self._peaks.get(key)
            if found is None:
                if not run.ranks:
                    parts = _distinct(workload.model, run.setup)
                    run.ranks.extend(_Rank(part, workload.gpu, run.setup, self) for part in parts)
                if not run.families:
                    run.families.extend(_Family(rank, run.shared, run.kernels) for rank in run.ranks)
                found = self._peaks[key] = _Peaks.of(_worst_peaks(run.families, loss, optimizers, run.pairs))
            run.peaks[loss] = found
        return found

    def activations(self, part: RankPart, gpu: GpuSpec, inner: TrainSetup, kernels: tuple[str, ...]) -> _Activations:
        """A part's activations with these attention kernels; `inner` has micro-batch 1."""
        key = (part.model, part.last, inner, kernels)
        found = self._activations.get(key)
        if found is None:
            batched = inner.trusted_with(micro_batch_seqs=2)
            alike = (part.model, in_common(inner), kernels)
            costs = self._costs.get(alike)
            if costs is None:
                costs = self._costs[alike] = costs_of(part.model, gpu, inner), costs_of(part.model, gpu, batched)
            one = step_parts(part.model, gpu, inner, costs[0])
            two = step_parts(part.model, gpu, batched, costs[1])
            at_one, at_two = (
                tuple([(moment.name, moment.size_bytes) for moment in computing(part.model, parts, last=part.last)])
                for parts in (one, two)
            )
            found = self._activations[key] = _Activations(one, at_one, at_two)
        return found


def _memory_kind(workload: Workload) -> tuple[Any, ...]:
    """What of a card decides how much memory a setup takes there."""
    gpu = workload.gpu
    linked = workload.num_gpus > 1 and gpu.nvlink_bytes_per_s > 0
    shared = gpu.memory_bytes if "rollout" in workload.fixed else 0  # of which vLLM takes its share
    apple = gpu.vendor == "Apple"
    return attention_generation(gpu), cublas_workspace_bytes(gpu), context_bytes(gpu), apple, linked, shared


class _Rank:
    """One part of the job under one branch and spread: its states and its loss chains, each found once."""

    def __init__(self, part: RankPart, gpu: GpuSpec, setup: TrainSetup, known: Known) -> None:
        self.part, self.gpu, self.known = part, gpu, known
        self.engine = engine_of(setup)
        self.workspace = cublas_workspace_bytes(gpu)
        self.outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
        self.beside = resident_vllm(gpu, setup)
        self._states: dict[tuple[bool, str, bool], tuple[RankState, dict[str, tuple[int, int]]]] = {}
        self._losses: dict[tuple[str, int, int], tuple[LossChain, int, int]] = {}
        self._in_loss: dict[tuple[str, int, int, int, bool], tuple[int, int]] = {}

    def generating(self, setup: TrainSetup, state: RankState) -> int:
        """Bytes of generation at its largest moment beyond what is resident."""
        return total_bytes(generation_terms(self.part.model, self.gpu, setup, state.trained.size_bytes))

    def state(self, setup: TrainSetup, loss: str, *, accumulated: bool) -> tuple[RankState, dict[str, tuple[int, int]]]:
        """What the rank holds, which knows checkpointing from none; and by optimizer its states and the step's
        moment."""
        key = (setup.checkpointing > 0, loss, accumulated)
        found = self._states.get(key)
        if found is None:
            state = self.engine.state(self.part, setup.trusted_with(loss=loss), accumulated=accumulated)
            found = self._states[key] = (state, {})
        return found

    def in_loss(
        self, setup: TrainSetup, loss: str, micro: int, flight: int, state: RankState, parts: ActivationParts
    ) -> tuple[int, int]:
        """Bytes of the loss at its largest moment, that of other micro-batches in flight included, and of the logits
        that the stack's loop holds all along."""
        key = (loss, micro, flight, parts.cast_cache, setup.checkpointing > 0)
        found = self._in_loss.get(key)
        if found is None:
            chain = self._losses.get(key[:3])
            if chain is None:
                inner = state.setup.trusted_with(micro_batch_seqs=micro)
                chain = self._losses[key[:3]] = loss_beside(self.part, setup, inner, flight)
            found = total_bytes(loss_terms(state, chain[0], parts, chain[1], loss)) + chain[2], chain[0].kept_bytes
            self._in_loss[key] = found
        return found


class _Family:
    """What all losses, optimizers and micro-batches of one rank, kernel and checkpointing share."""

    def __init__(self, rank: _Rank, setup: TrainSetup, kernels: tuple[str, ...]) -> None:
        self._rank, self._setup = rank, setup
        self._inner = rank.engine.computes(setup)
        self._activations = rank.known.activations(rank.part, rank.gpu, self._inner, kernels)
        self._lines: dict[tuple[int, ...], Lines] = {}  # losses whose states weigh alike share them

    def peaks(self, loss: str, optimizers: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Per optimizer, the device peak at every (micro-batch, accumulation)."""
        rank, setup, part, parts = self._rank, self._setup, self._rank.part, self._activations.parts
        found: list[list[int]] = [[] for _ in optimizers]
        variants = [self._variant(loss, optimizers, accumulated=accumulated) for accumulated in (False, True)]
        for micro, steps in pairs:
            state, lines, stepping = variants[steps > 1]
            resident = state.moment_bytes["resident"] + rank.workspace + rank.beside
            resident += micro * steps * parts.tower.inputs
            flight = in_flight = in_loss = 0
            if setup.pipeline_degree > 1:
                flight = micro_batches_in_flight(setup, part.stage, steps)
                kept = lines.kept[0] + (micro - 1) * lines.kept[1]
                in_flight = in_flight_bytes(state, setup, kept, flight, steps)
                batched = self._inner.trusted_with(micro_batch_seqs=micro)
                resident += boundary_bytes(part, setup, batched, micro_batches=steps, flight=flight)
            if part.last:
                in_loss, kept_outputs = rank.in_loss(setup, loss, micro, flight, state, parts)
                resident += kept_outputs
            largest = lines.largest(micro, in_flight=in_flight, in_loss=in_loss)
            if setup.aim.rolls_out:
                whole = setup.trusted_with(micro_batch_seqs=micro, accumulation_steps=steps)
                largest = max(largest, rank.generating(whole, state))
            for peaks, (states, step) in zip(found, stepping, strict=True):
                peaks.append(peak_bytes(resident, largest, states, step, rank.outside))
        return found

    def _variant(
        self, loss: str, optimizers: Sequence[str], *, accumulated: bool
    ) -> tuple[RankState, Lines, list[tuple[int, int]]]:
        """(state, lines, per optimizer its states and the step's moment) with accumulation or without."""
        state, stepping = self._rank.state(self._setup, loss, accumulated=accumulated)
        for optimizer in optimizers:
            if optimizer not in stepping:
                states, temporaries = state.optimizer_bytes(optimizer)
                stepping[optimizer] = (states, state.moment_bytes["step"] + temporaries)
        key = tuple(state.moment_bytes.values())
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = Lines.through(state, self._activations.one, self._activations.two)
        return state, lines, [stepping[optimizer] for optimizer in optimizers]
