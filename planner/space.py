"""The space: every combination of the dimensions, walked completely, with shared parts computed once.

A branch (method, precision, quantization, rank) decides what is resident; attention, checkpointing and the micro-batch
decide activations; loss and optimizer add their own. The walk evaluates the composition of `planner.memory.step` (a
test compares it with `predict_memory`), each part once, and every micro-batch by the moments' straight lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.choices.kernels import planned_kernels
from planner.choices.losses import PLANNED_LOSSES, LossChain
from planner.choices.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.choices.objectives import OBJECTIVES, Objective
from planner.choices.optimizers import PLANNED_OPTIMIZERS
from planner.choices.packages import PACKAGED
from planner.choices.precisions import PRECISIONS, precision_of
from planner.engines import engine_of, why_not
from planner.errors import SetupError, UsageError
from planner.expressed import branches_as_run, variants_as_run
from planner.gpu import GpuSpec
from planner.kernels import attention_kernel, missing_kernels, supported_attentions
from planner.memory.dtypes import flow_of
from planner.memory.micro_batch import ActivationParts, activation_parts
from planner.memory.model import predict_memory
from planner.memory.rank_part import RankPart, rank_parts
from planner.memory.rank_part import in_flight as micro_batches_in_flight
from planner.memory.state import RankState
from planner.memory.step import (
    Lines,
    boundary_bytes,
    computing,
    in_flight_bytes,
    loss_beside,
    loss_terms,
    peak_bytes,
    total_bytes,
)
from planner.memory.workspace import communicator_bytes, context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.models.stored import stored_bits, stored_refusal
from planner.setup import METHODS, TrainSetup
from planner.speed import speed_profile
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.decision.spreads import Spread

BRANCH_FIELDS = ("method", "precision", "quantization", "kbit_fp32_cast", "lora_rank", "lora_targets")
PLANNED_CHECKPOINTING = (0, 2, 1)
PREFERENCE_FRACTION = 0.03
"""So much speed, less than the speed model can tell apart, is given for what is preferred: memory to spare by more than
the formula errs, then what is simpler (`decision.facts`), then the smaller peak."""


class Point(NamedTuple):
    """One walked setup in short: what was shared, what is its own, and its figures. `setup` builds the whole.

    Attributes:
        beyond: how many larger micro-batches of it, none of which fits, are counted here and not listed.
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

    @property
    def family(self) -> TrainSetup:
        """The setup at micro-batch 1 without accumulation."""
        return self.shared.trusted_with(attention=self.attention, loss=self.loss, optimizer=self.optimizer)

    @property
    def setup(self) -> TrainSetup:
        """The complete setup, validated."""
        return self.family.with_(micro_batch_seqs=self.micro_batch_seqs, accumulation_steps=self.accumulation_steps)


def micro_batches(global_batch_seqs: int) -> tuple[int, ...]:
    """The divisors of the global batch that are walked: all of them, at most 64 (the smallest), in rising order."""
    small = [n for n in range(1, min(global_batch_seqs, 4096) + 1) if global_batch_seqs % n == 0]
    return tuple(small[:64])


def dimension_values(workload: Workload) -> dict[str, tuple[Any, ...]]:
    """The values each dimension takes in this workload: the user's where given, else what a plan chooses from; only
    those with kernels on the GPU.

    Raises:
        UsageError: the GPU has no kernel for anything that the user asked for.
    """
    gpu, fixed = workload.gpu, workload.fixed
    half = "bf16" if gpu.bf16 else "fp16"
    pairs = ((half, half), (half, None), ("fp32", half))
    floor = workload.min_rank
    values: dict[str, tuple[Any, ...]] = {
        "method": METHODS,
        "precision": tuple(name for types in pairs if PRECISIONS[name := precision_of(*types)].offered),
        "quantization": ("none", "int8", "nf4", "nf4-double"),
        "kbit_fp32_cast": (False, True),
        "lora_rank": tuple(rank for rank in (floor, 2 * floor) if rank <= 4096) or (floor,),
        "lora_targets": ("all-linear",),
        "optimizer": PLANNED_OPTIMIZERS,
        "attention": supported_attentions(workload.model, gpu),
        "checkpointing": PLANNED_CHECKPOINTING,
        "loss": PLANNED_LOSSES,
        "kernels": planned_kernels(workload.targets),
        "activation_offload": (False, True) if offloading_matters(workload) else (False,),
        "quantize_experts": (False,),
    }
    for name, needs in PACKAGED.items():
        values[name] = tuple(value for value in values[name] if needs.get(value) not in workload.absent_packages)
    for name, allowed in fixed.items():
        values[name] = tuple(allowed)
    if "objective" in fixed:
        objective = OBJECTIVES[fixed["objective"][0]]
        values["loss"] = _losses_of(
            objective, values["loss"], any_trainer=objective.supervised or bool(workload.targets or "loss" in fixed)
        )
        if workload.global_batch_seqs < objective.least_samples:
            raise UsageError(
                f"--objective {objective.name} needs {objective.least_samples} {objective.sample}s in a forward, "
                f"--global-batch is {workload.global_batch_seqs}",
                hint=f"give --global-batch {objective.least_samples} or more",
            )
    quantized = TrainSetup(method="qlora", quantization="nf4")
    if bits := stored_bits(workload.model):
        values["method"] = tuple(one for one in values["method"] if one == "qlora")
        values["quantization"] = tuple(one for one in values["quantization"] if one == bits)
        if not values["method"] or not values["quantization"]:
            reason = f"{workload.model.model_id} is published in {bits} by bitsandbytes and loads as that"
            raise UsageError(reason, hint=f"use --method qlora --quantization {bits}, or name a 16-bit copy of it")
    elif refused := stored_refusal(quantized, workload.model):
        values["method"] = tuple(one for one in values["method"] if one != "qlora")
        values["quantization"] = tuple(one for one in values["quantization"] if one == "none")
        if not values["method"] or not values["quantization"]:
            raise UsageError(f"a quantized base cannot be kept: {refused}", hint="use --method lora or full")
    best_attention = supported_attentions(workload.model, gpu)[0]
    if values["quantize_experts"] == (True,):
        if "lora_targets" not in fixed:
            values["lora_targets"] = ("attention",)
        fields = {"quantization": "nf4", "quantize_experts": True, "lora_targets": values["lora_targets"][0]}
        packed = TrainSetup(method="qlora", attention=best_attention, **fields)
        if reason := missing_kernels(workload.model, gpu, packed):
            raise UsageError(f"--quantize-experts cannot be kept: {reason}", hint="leave --quantize-experts out")
    for name in ("optimizer", "loss", "attention", "kernels"):
        tried = {value: TrainSetup(**{"attention": best_attention, name: value}) for value in values[name]}
        missing = {value: missing_kernels(workload.model, gpu, setup) for value, setup in tried.items()}
        values[name] = tuple(value for value in values[name] if not missing[value])
        if not values[name]:
            reason = next(iter(missing.values()))
            raise UsageError(
                f"--{name} cannot be kept: {reason}", hint=f"leave --{name} out, or name another GPU or model"
            )
    return values


def _losses_of(objective: Objective, losses: tuple[str, ...], *, any_trainer: bool) -> tuple[str, ...]:
    """Of these losses, those that some trainer of the objective has; of the default stack's trainer, its own.

    Raises:
        UsageError: none of them.
    """
    found = tuple(one for one in losses if one in objective.losses[: None if any_trainer else 1])
    if not found:
        raise UsageError(
            f"--loss cannot be kept: no trainer of --objective {objective.name} has {', '.join(losses)}",
            hint=f"leave --loss out, or use --loss {objective.losses[0]}",
        )
    return found


def branches(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[TrainSetup]:
    """One setup for every branch that can exist (method, precision, quantization, cast, rank, targets).

    Full fine-tuning is planned with fp32 master weights under autocast; 16-bit master weights lose small updates and
    are taken only when the user fixes the method to full or the precision. Adapters over fp32 weights (the "-mixed"
    precisions) are walked only when asked for: they cost twice the memory and buy nothing. peft's fp32 cast is walked
    at the rank floor only: it never wins, and is there so that the tree can say what it would cost.
    """
    asked_precision = "precision" in workload.fixed
    only_full = tuple(values["method"]) == ("full",)
    objective = values.get("objective", (DEFAULT_OBJECTIVE,))[0]
    for method in values["method"]:
        quantizations = ("none",) if method != "qlora" else tuple(q for q in values["quantization"] if q != "none")
        if method != "qlora" and "none" not in values["quantization"]:
            continue
        ranks = (0,) if method == "full" else values["lora_rank"]
        for precision in values["precision"]:
            row = PRECISIONS[precision]
            if not asked_precision and method != "full" and row.wide_weights:
                continue
            if (
                not asked_precision
                and method == "full"
                and not row.wide_weights
                and not (only_full and row.trains_weights)
            ):
                continue
            for quantization in quantizations:
                for cast in values["kbit_fp32_cast"] if method == "qlora" else (False,):
                    for rank in ranks[:1] if cast else ranks:  # the cast is there to be compared
                        for targets in values["lora_targets"] if method != "full" else ("all-linear",):
                            try:
                                branch = TrainSetup(
                                    method=method,
                                    precision=precision,
                                    quantization=quantization,
                                    kbit_fp32_cast=cast,
                                    lora_rank=rank,
                                    lora_targets=targets,
                                    seq_len_tokens=workload.seq_len_tokens,
                                    packing=bool(values.get("packing", (OBJECTIVES[objective].packed,))[0]),
                                    lora_dropout=values.get("lora_dropout", (0.0,))[0],
                                    objective=objective,
                                    loss="full" if OBJECTIVES[objective].supervised else values["loss"][0],
                                    adapter="lora" if method == "full" else values.get("adapter", ("lora",))[0],
                                    checkpointing=0 if values["checkpointing"] == (0,) else 1,
                                    quantize_experts=values["quantize_experts"][0],
                                )
                            except SetupError:
                                continue
                            yield from branches_as_run(branch, workload) if workload.targets else (branch,)


def walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    spreads: "Sequence[Spread]" = (),
    known: "Known | None" = None,
    limit_bytes: int | None = None,
) -> Iterator[Point]:
    """Every setup of the space under every spread that the engines run (none given: on one GPU), with its fullest GPU's
    device peak and the tokens/s of all of them, branch by branch. Where launch targets were named, only what they
    express.

    Args:
        known: what walks of the same model on other cards computed.
        limit_bytes: of micro-batches larger than the largest within it, only the number is told (`Point.beyond`).
    """
    values = values if values is not None else dimension_values(workload)
    limit_bytes = None if workload.targets else limit_bytes
    points = _walk(workload, values, spreads, known if known is not None else Known(), limit_bytes)
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


def kinds(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], spreads: "Sequence[Spread]" = ()
) -> Iterator[TrainSetup]:
    """A setup for every branch, spread, loss, attention and kernel family that the options allow, whatever runs it."""
    fields = [dict(spread.fields) for spread in spreads] or [{}]
    for branch in branches(replace(workload, targets=()), values):
        for spread, *three in product(fields, values["loss"], values["attention"], values["kernels"]):
            choice = dict(zip(("loss", "attention", "kernels"), three, strict=True))
            try:
                yield branch.with_(**spread, **choice, optimizer=values["optimizer"][0])
            except SetupError:
                continue


def _walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]],
    spreads: "Sequence[Spread]",
    known: "Known",
    limit_bytes: int | None,
) -> Iterator[Point]:
    """Attention implementations that run the same kernels in every layer share their figures."""
    model, gpu = workload.model, workload.gpu
    card = gpu.for_memory()
    activations, all_peaks = known.of(model, card)
    open_kernels = "kernels" not in workload.fixed and not workload.targets
    for branch in branches(workload, values):
        kernels = same_kernels(model, gpu, branch, values["attention"])
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
            least = setup.aim.least_samples
            pairs = tuple([(m, own_batch // m) for m in batches if own_batch % m == 0 and m >= least])
            ranks: list[_Rank] = []
            for attentions in kernels:
                for layers in own_layers(setup, values):
                    shared = setup.trusted_with(attention=attentions[0], **layers)
                    if open_kernels and _outrun(workload, shared, values, pairs):
                        continue
                    families: list[_Family] = []
                    for loss, optimizers in choices.items():
                        key = (shared, loss, optimizers, pairs)
                        every = all_peaks.get(key)
                        if every is None:
                            ranks = ranks or [_Rank(part, card, setup, activations) for part in _distinct(model, setup)]
                            families = families or [_Family(rank, shared) for rank in ranks]
                            every = all_peaks[key] = _worst_peaks(families, loss, optimizers, pairs)
                        for optimizer, peaks in zip(optimizers, every, strict=True):
                            whole = shared.trusted_with(loss=loss, optimizer=optimizer)
                            at = speed_profile(model, gpu, whole, workload.cluster).at
                            listed = _num_listed(peaks, limit_bytes)
                            speeds = [at(micro, steps)[1] for micro, steps in pairs[:listed]]
                            for attention in attentions:
                                left = len(pairs)
                                for (micro, steps), peak, speed in zip(pairs, peaks, speeds, strict=False):
                                    left -= 1
                                    beyond = left if left + listed == len(pairs) else 0
                                    yield Point(shared, attention, loss, optimizer, micro, steps, peak, speed, beyond)


def _outrun(
    workload: Workload, shared: TrainSetup, values: Mapping[str, tuple[Any, ...]], pairs: Sequence[tuple[int, int]]
) -> bool:
    """Whether the first kernel family beats this one, at the smallest and the largest micro-batch, by more than simpler
    setups are preferred for: it is never larger, so that no point with this one can be taken."""
    best = values["kernels"][0]
    if shared.kernels == best:
        return False
    whole = shared.trusted_with(loss=values["loss"][0], optimizer=values["optimizer"][0])
    try:
        first = whole.with_(kernels=best)
    except SetupError:
        return False
    at, at_best = (speed_profile(workload.model, workload.gpu, one, workload.cluster).at for one in (whole, first))
    return all(at(*pair)[1] < (1 - PREFERENCE_FRACTION) * at_best(*pair)[1] for pair in (pairs[0], pairs[-1]))


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


def offloading_matters(workload: Workload) -> bool:
    """Whether one sequence's checkpoints would take so much of the card that moving them can change the plan; of the
    card, not of the budget, because more memory must not take a choice away."""
    model = workload.model
    held = model.num_layers * model.hidden_size * 2 * workload.seq_len_tokens
    return held > OFFLOAD_FROM_FRACTION * workload.gpu.memory_bytes


OFFLOAD_FROM_FRACTION = 0.05
OFFLOADED_CHECKPOINTING = 1
"""Checkpoints go to the host only where every layer has one: what else a walk keeps would be larger than they are."""


def own_layers(setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """How layers are computed and kept: the kernel families, checkpointing and offloading that can exist beside what a
    branch and a spread decide."""
    found = []
    asked = False not in values["activation_offload"]
    for kernels, every, offload in product(values["kernels"], values["checkpointing"], values["activation_offload"]):
        if offload and not asked and every != OFFLOADED_CHECKPOINTING:
            continue
        layers = {"kernels": kernels, "checkpointing": every, "activation_offload": offload}
        with suppress(SetupError):
            setup.with_(**layers)
            found.append(layers)
    return found


def same_kernels(model: ModelSpec, gpu: GpuSpec, branch: TrainSetup, attentions: tuple[str, ...]) -> list[list[str]]:
    """The attention implementations that can exist here, those with the same kernels in every layer together."""
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
        groups.setdefault(kernels, []).append(attention)
    return list(groups.values())


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


_KnownActivations = dict[tuple[ModelSpec, bool, TrainSetup], _Activations]
"""The activations of parts: shared by all spreads that compute in the same types."""
_KnownPeaks = dict[tuple[TrainSetup, str, tuple[str, ...], tuple[tuple[int, int], ...]], list[list[int]]]
"""By what a family shares, loss, optimizers and (micro-batch, accumulation): per optimizer the device peaks."""


class Known:
    """The memory that walks computed, for those of one model on cards that run the same kernels."""

    def __init__(self) -> None:
        self._of: dict[tuple[ModelSpec, GpuSpec], tuple[_KnownActivations, _KnownPeaks]] = {}

    def of(self, model: ModelSpec, card: GpuSpec) -> tuple[_KnownActivations, _KnownPeaks]:
        """Of one model on one `GpuSpec.for_memory`."""
        return self._of.setdefault((model, card), ({}, {}))


class _Rank:
    """One part of the job under one branch and spread: its states and its loss chains, each found once."""

    def __init__(self, part: RankPart, gpu: GpuSpec, setup: TrainSetup, known: _KnownActivations) -> None:
        self.part, self._gpu, self._known = part, gpu, known
        self.engine = engine_of(setup)
        self.workspace = cublas_workspace_bytes(gpu)
        self.outside = context_bytes(gpu) + communicator_bytes(gpu, setup)
        self._states: dict[tuple[bool, str, bool], tuple[RankState, dict[str, tuple[int, int]]]] = {}
        self._losses: dict[tuple[str, int, int], tuple[LossChain, int, int]] = {}
        self._in_loss: dict[tuple[str, int, int, int, bool], tuple[int, int]] = {}

    def activations(self, inner: TrainSetup) -> _Activations:
        """The part's activations; `inner` has micro-batch 1."""
        part = self.part
        key = (part.model, part.last, inner)
        found = self._known.get(key)
        if found is None:
            one = activation_parts(part.model, self._gpu, inner)
            two = activation_parts(part.model, self._gpu, inner.trusted_with(micro_batch_seqs=2))
            at_one, at_two = (
                tuple([(moment.name, moment.size_bytes) for moment in computing(part.model, parts, last=part.last)])
                for parts in (one, two)
            )
            found = self._known[key] = _Activations(one, at_one, at_two)
        return found

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

    def __init__(self, rank: _Rank, setup: TrainSetup) -> None:
        self._rank, self._setup = rank, setup
        self._inner = rank.engine.computes(setup)
        self._activations = rank.activations(self._inner)
        self._lines: dict[tuple[int, ...], Lines] = {}  # losses whose states weigh alike share them

    def peaks(self, loss: str, optimizers: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Per optimizer, the device peak at every (micro-batch, accumulation)."""
        rank, setup, part, parts = self._rank, self._setup, self._rank.part, self._activations.parts
        found: list[list[int]] = [[] for _ in optimizers]
        variants = [self._variant(loss, optimizers, accumulated=accumulated) for accumulated in (False, True)]
        for micro, steps in pairs:
            state, lines, stepping = variants[steps > 1]
            resident = state.moment_bytes["resident"] + rank.workspace
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
