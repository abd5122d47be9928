"""The space: every combination of the dimensions, walked completely, with shared parts computed once.

A branch (method, precision, quantization, rank) decides what is resident; attention, checkpointing and the micro-batch
decide activations; loss and optimizer add their own. The walk evaluates the same functions as `predict_memory`
(a test compares them), each part once, and every micro-batch by the parts' affine form.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.errors import SetupError, UsageError
from planner.expressed import branches_as_run, variants_as_run
from planner.gpu import GpuSpec
from planner.kernels import attention_kernel, missing_kernels, supported_attentions
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.dtypes import flow_of
from planner.memory.micro_batch import activation_parts
from planner.memory.moments import backward_moments, halves_stay_apart, loss_parts, loss_parts_logits, loss_peak
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.trained import trained_parameters
from planner.memory.weights import weight_bytes
from planner.memory.workspace import context_bytes, cublas_workspace_bytes
from planner.models.spec import ModelSpec
from planner.models.stored import stored_refusal
from planner.setup import METHODS, TrainSetup
from planner.throughput import Calibration, load_calibration, throughput_profile
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.parallel.strategies import Spread

BRANCH_FIELDS = ("method", "precision", "quantization", "kbit_fp32_cast", "lora_rank", "lora_targets")
LOSSES = ("chunked", "liger", "full")
PLANNED_OPTIMIZERS = ("adamw-fused", "adamw-8bit", "paged-adamw-8bit")
"""Optimizers a plan chooses from: all are AdamW. Others change what is optimized and are taken only when asked for."""
PLANNED_CHECKPOINTING = (0, 2, 1)


class Point(NamedTuple):
    """One walked setup in short: what was shared, what is its own, and its figures. `setup` builds the whole."""

    shared: TrainSetup
    attention: str
    loss: str
    optimizer: str
    micro_batch_seqs: int
    accumulation_steps: int
    peak_device_bytes: int
    tokens_per_s: float

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
    floor = workload.min_rank
    values: dict[str, tuple[Any, ...]] = {
        "method": METHODS,
        "precision": (f"{half}-autocast", *(("bf16-pure",) if half == "bf16" else ()), f"{half}-mixed"),
        "quantization": ("none", "int8", "nf4", "nf4-double"),
        "kbit_fp32_cast": (False, True),
        "lora_rank": tuple(rank for rank in (floor, 2 * floor) if rank <= 4096) or (floor,),
        "lora_targets": ("all-linear",),
        "optimizer": PLANNED_OPTIMIZERS,
        "attention": supported_attentions(workload.model, gpu),
        "checkpointing": PLANNED_CHECKPOINTING,
        "loss": LOSSES,
    }
    for name, allowed in fixed.items():
        values[name] = tuple(allowed)
    quantized = TrainSetup(method="qlora", quantization="nf4")
    if refused := stored_refusal(quantized, workload.model):
        values["method"] = tuple(one for one in values["method"] if one != "qlora")
        values["quantization"] = tuple(one for one in values["quantization"] if one == "none")
        if not values["method"] or not values["quantization"]:
            raise UsageError(f"a quantized base cannot be kept: {refused}", hint="use --method lora or full")
    best_attention = supported_attentions(workload.model, gpu)[0]
    for name in ("optimizer", "loss", "attention"):
        tried = {value: TrainSetup(**{"attention": best_attention, name: value}) for value in values[name]}
        missing = {value: missing_kernels(workload.model, gpu, setup) for value, setup in tried.items()}
        values[name] = tuple(value for value in values[name] if not missing[value])
        if not values[name]:
            reason = next(iter(missing.values()))
            raise UsageError(
                f"--{name} cannot be kept: {reason}", hint=f"leave --{name} out, or name another GPU or model"
            )
    return values


def branches(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[TrainSetup]:
    """One setup for every branch that can exist (method, precision, quantization, cast, rank, targets).

    Full fine-tuning is planned with fp32 master weights under autocast; 16-bit master weights lose small updates and
    are taken only when the user fixes the method to full or the precision. Adapters over fp32 weights (the "-mixed"
    precisions) are walked only when asked for: they cost twice the memory and buy nothing. peft's fp32 cast is walked
    at the rank floor only: it never wins, and is there so that the tree can say what it would cost.
    """
    asked_precision = "precision" in workload.fixed
    only_full = tuple(values["method"]) == ("full",)
    for method in values["method"]:
        quantizations = ("none",) if method != "qlora" else tuple(q for q in values["quantization"] if q != "none")
        if method != "qlora" and "none" not in values["quantization"]:
            continue
        ranks = (0,) if method == "full" else values["lora_rank"]
        for precision in values["precision"]:
            mixed = precision.endswith("-mixed")
            if not asked_precision and method != "full" and mixed:
                continue
            if (
                not asked_precision
                and method == "full"
                and not mixed
                and not (only_full and precision != "fp16-autocast")
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
                                    packing=bool(values.get("packing", (False,))[0]),
                                    lora_dropout=values.get("lora_dropout", (0.0,))[0],
                                )
                            except SetupError:
                                continue
                            yield from branches_as_run(branch, workload) if workload.targets else (branch,)


def walk(
    workload: Workload,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    spreads: "Sequence[Spread]" = (),
) -> Iterator[Point]:
    """Every setup of the space with its device peak and tokens/s, branch by branch; under every spread where some are
    given (the peak is then the worst rank's, tokens/s those of all GPUs). Where launch targets were named, only what
    they express.
    """
    values = values if values is not None else dimension_values(workload)
    if spreads:
        from planner.parallel.walk import walk_spreads  # one GPU never needs it, and starts faster without

        points = walk_spreads(workload, values, spreads)
    else:
        points = _walk_one_gpu(workload, values)
    return _expressed(points, workload) if workload.targets else points


def _expressed(points: Iterable[Point], workload: Workload) -> Iterator[Point]:
    """The points that the first target runs as they are, and the others at all.

    A point that another target runs otherwise has the larger of both peaks: each file has to fit.
    """
    from planner.predict import device_peak_bytes  # late: it needs what the walk needs

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
                peak = max(peak, device_peak_bytes(workload.model, workload.gpu, other.with_(**steps)))
        yield point if peak == point.peak_device_bytes else point._replace(peak_device_bytes=peak)


def kinds(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], spreads: "Sequence[Spread]" = ()
) -> Iterator[TrainSetup]:
    """A setup for every branch, spread, loss and attention that the options allow, whatever runs it."""
    fields = [dict(spread.fields) for spread in spreads] or [{}]
    for branch in branches(replace(workload, targets=()), values):
        for spread, loss, attention in product(fields, values["loss"], values["attention"]):
            try:
                yield branch.with_(**spread, loss=loss, attention=attention, optimizer=values["optimizer"][0])
            except SetupError:
                continue


def _walk_one_gpu(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[Point]:
    """Attention implementations that run the same kernels in every layer share their figures."""
    model, gpu = workload.model, workload.gpu
    batches = values.get("micro_batch_seqs") or micro_batches(workload.global_batch_seqs)
    pairs = [(m, workload.global_batch_seqs // m) for m in batches if workload.global_batch_seqs % m == 0]
    calibration = load_calibration()
    for branch in branches(workload, values):
        weights = sum(weight_bytes(model, branch).values()) + cublas_workspace_bytes(gpu) + context_bytes(gpu)
        chains = [_Chain(model, branch.trusted_with(loss=loss)) for loss in values["loss"]]
        for attentions in same_kernels(model, gpu, branch, values["attention"]):
            for checkpointing in values["checkpointing"]:
                shared = branch.trusted_with(attention=attentions[0], checkpointing=checkpointing)
                family = _Family(model, gpu, shared, calibration, weights)
                for chain in chains:
                    for optimizer, figures in family.figures(chain, values["optimizer"], pairs):
                        for attention in attentions:
                            for micro, steps, peak, speed in figures:
                                yield Point(shared, attention, chain.loss, optimizer, micro, steps, peak, speed)


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


class _Chain:
    """The loss chain of one branch and loss."""

    def __init__(self, model: ModelSpec, setup: TrainSetup) -> None:
        self.loss = setup.loss
        self.logits = loss_parts_logits(model, setup)
        self.apart = halves_stay_apart(model, setup)
        self._model, self._setup = model, setup
        self._at: dict[int, Any] = {}

    def at(self, micro_batch_seqs: int) -> Any:
        """The chain at one micro-batch: tiles and chunks make it no straight line."""
        found = self._at.get(micro_batch_seqs)
        if found is None:
            found = loss_parts(self._model, self._setup.trusted_with(micro_batch_seqs=micro_batch_seqs))
            self._at[micro_batch_seqs] = found
        return found


class _Family:
    """What all losses, optimizers and micro-batches of one branch, kernel and checkpointing share."""

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, shared: TrainSetup, calibration: Calibration, weights: int
    ) -> None:
        self.model, self.gpu, self.shared, self.calibration = model, gpu, shared, calibration
        self.one = activation_parts(model, gpu, shared)
        self.trained = trained_parameters(model, shared)
        self.weights = weights if shared.method == "full" else weights + self.trained.size_bytes
        two = activation_parts(model, gpu, shared.trusted_with(micro_batch_seqs=2))
        self.lines = {
            (accumulated, apart): [
                (a, b - a)
                for a, b in zip(
                    _moments(model, self.one, self.trained, accumulated=accumulated, apart=apart),
                    _moments(model, two, self.trained, accumulated=accumulated, apart=apart),
                    strict=True,
                )
            ]
            for accumulated in (False, True)
            for apart in (False, True)
        }

    def figures(
        self, chain: _Chain, optimizers: tuple[str, ...], pairs: list[tuple[int, int]]
    ) -> Iterator[tuple[str, list[tuple[int, int, int, float]]]]:
        """Per optimizer: (micro-batch, accumulation, device peak in bytes, tokens/s) at every micro-batch."""
        trained, model = self.trained, self.model
        phases = []
        for micro, steps in pairs:
            (l0, l1), *others = self.lines[steps > 1, chain.apart]
            more = micro - 1
            in_loss = sum(loss_peak(chain.at(micro), self.one, trained, micro * chain.logits))
            phases.append(max(l0 + more * l1 + in_loss, *(one + more * slope for one, slope in others)))
        for optimizer in optimizers:
            states = state_bytes(trained.num, trained.dtype, optimizer, matrix_edge_sum=trained.edge_sum)
            temporary = step_bytes(trained.num, trained.dtype, optimizer, largest_tensor=trained.largest)
            resident, step = self.weights + states, trained.size_bytes + temporary
            setup = self.shared.trusted_with(loss=chain.loss, optimizer=optimizer)
            at = throughput_profile(model, self.gpu, setup, calibration=self.calibration).at
            found = []
            for (micro, steps), largest in zip(pairs, phases, strict=True):
                dynamic = max(step, largest)
                peak = resident + dynamic + allocator_gap_bytes(resident, dynamic)
                found.append((micro, steps, peak, at(micro, steps)[1]))
            yield optimizer, found


def _moments(model: ModelSpec, parts: Any, trained: Any, *, accumulated: bool, apart: bool) -> tuple[int, ...]:
    """Dynamic bytes of what the loss chain stands on, of the forward, and of the backward's moments: each of them
    affine in the micro-batch."""
    grads = trained.size_bytes if accumulated else 0
    stored = parts.stored_total + grads
    cached = parts.weight_casts[0] + parts.adapter_casts
    return (
        stored + parts.weight_casts[1] + parts.final_norm,
        stored + cached + parts.forward_temp + parts.dequantized,
        *(grads + peak.total for peak in backward_moments(model, parts, trained, accumulated=accumulated, apart=apart)),
    )
