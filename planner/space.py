"""The space: every combination of the dimensions that a workload leaves open; `planner.walk` walks it completely.

A branch (method, precision, quantization, rank) decides what is resident; attention, checkpointing and the micro-batch
decide activations; loss and optimizer add their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from planner.choices.images import WITH_IMAGES
from planner.choices.kernels import planned_kernels
from planner.choices.losses import PLANNED_LOSSES
from planner.choices.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.choices.objectives import OBJECTIVES, Objective
from planner.choices.optimizers import PLANNED_OPTIMIZERS
from planner.choices.packages import PACKAGED
from planner.choices.precisions import PRECISIONS, precision_of
from planner.choices.rollouts import GENERATORS, Rollout
from planner.errors import SetupError, UsageError
from planner.expressed import branches_as_run
from planner.kernels import missing_kernels, supported_attentions
from planner.models.stored import stored_bits, stored_refusal
from planner.setup import TrainSetup
from planner.setup_fields import METHODS
from planner.stacks import DEFAULT as DEFAULT_STACK
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.decision.spreads import Spread

BRANCH_FIELDS = ("method", "precision", "quantization", "kbit_fp32_cast", "lora_rank", "lora_targets")
PLANNED_CHECKPOINTING = (0, 16, 8, 4, 3, 2, 1)
"""None, every n-th layer, every layer: what transformers' `every_n_layers` says (TRL, Axolotl, the plain script)."""
FINER_CHECKPOINTING = (0, 32, 24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
"""The same for who asks for speed: up to 2 % of it lies between, for twice the walk."""
PLANNED_CACHES = (32, 16, 8, 4, 2, 1)
"""Sequences at once under a gradient cache, which costs one more forward: taken where the whole batch does not fit."""
PREFERENCE_FRACTION = 0.03
"""So much speed, less than the speed model can tell apart, is given for what is preferred: memory to spare by more than
the formula errs, then what is simpler (`decision.facts`), then the smaller peak."""


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
        "checkpointing": FINER_CHECKPOINTING if workload.prefer == "speed" else PLANNED_CHECKPOINTING,
        "loss": PLANNED_LOSSES,
        "kernels": planned_kernels(workload.targets, workload.aim.name),
        "activation_offload": (False, True) if offloading_matters(workload) else (False,),
        "quantize_experts": (False,),
        "selective_checkpointing": (False, True) if selecting_matters(workload) else (False,),
    }
    for name, needs in PACKAGED.items():
        values[name] = tuple(value for value in values[name] if needs.get(value) not in workload.absent_packages)
    for name, allowed in fixed.items():
        values[name] = tuple(allowed)
    if workload.images is not None:
        for name, allowed in WITH_IMAGES.items():
            if name in values:
                values[name] = tuple(value for value in values[name] if value in allowed)
                if not values[name]:
                    raise UsageError(
                        f"images are not planned with {name} {', '.join(map(str, fixed[name]))}",
                        hint=f"planned: {', '.join(map(str, allowed))}",
                    )
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
        if objective.rolls_out:
            values["rollout"] = planned_rollouts(workload)
        if objective.whole_batch:
            if max(fixed.get("cached_seqs", (0,))) > workload.global_batch_seqs:
                raise UsageError("--cached-seqs is more than --global-batch", hint="give fewer, or 0 for no cache")
            caches = (0, *(size for size in PLANNED_CACHES if size < workload.global_batch_seqs))
            values["cached_seqs"] = fixed.get("cached_seqs", caches)
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
    for name in ("optimizer", "loss", "attention", "kernels", *(("compile",) if "compile" in values else ())):
        usual = {"attention": best_attention, "images": workload.images}
        tried = {value: TrainSetup(**{**usual, name: value}) for value in values[name]}
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


def planned_rollouts(workload: Workload) -> tuple[Rollout, ...]:
    """The rollouts of a plan: all completions of a step at once, as TRL has it, or half of them, a quarter, and so on
    in whole groups of a prompt's completions, where what was asked for leaves that open.

    Raises:
        UsageError: an optimizer step does not hold whole groups.
    """
    asked = workload.fixed.get("rollout", (Rollout.usual(workload.seq_len_tokens),))[0]
    step, group = workload.global_batch_seqs, asked.num_generations
    if step % group or step % asked.at_once(step):
        made = f" and whole generations of {asked.generation_batch_seqs}" if asked.generation_batch_seqs else ""
        raise UsageError(
            f"a step of {step} completions is no whole groups of {group} (num_generations){made}",
            hint=f"give --global-batch {-(-step // group) * group}, or --num-generations",
        )
    found = [asked]
    part = step // 2
    while asked.generator == GENERATORS[0] and not asked.generation_batch_seqs and part >= group:
        if step % part == 0 and part % group == 0:
            found.append(replace(asked, generation_batch_seqs=part))
        part //= 2
    return tuple(found)


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
                        kinds_of = values["lora_targets"] if method != "full" else ("all-linear",)
                        caches = values.get("cached_seqs", (0,))
                        for targets, rollout, cached in product(kinds_of, values.get("rollout", (None,)), caches):
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
                                    stack=OBJECTIVES[objective].stack(DEFAULT_STACK),
                                    loss="full" if OBJECTIVES[objective].supervised else values["loss"][0],
                                    adapter="lora" if method == "full" else values.get("adapter", ("lora",))[0],
                                    rollout=rollout,
                                    cached_seqs=cached,
                                    precomputed_reference=values.get("precomputed_reference", (False,))[0],
                                    hard_negatives=values.get("hard_negatives", (0,))[0],
                                    images=values.get("images", (None,))[0],
                                    checkpointing=0 if values["checkpointing"] == (0,) else 1,
                                    quantize_experts=values["quantize_experts"][0],
                                    compile=values.get("compile", (False,))[0],
                                )
                            except SetupError:
                                continue
                            yield from branches_as_run(branch, workload) if workload.targets else (branch,)


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


def offloading_matters(workload: Workload) -> bool:
    """Whether one sequence's checkpoints would take so much of the card that moving them can change the plan; of the
    card, not of the budget, because more memory must not take a choice away."""
    model = workload.model
    held = model.num_layers * model.hidden_size * 2 * workload.seq_len_tokens
    return held > OFFLOAD_FROM_FRACTION * workload.gpu.memory_bytes


OFFLOAD_FROM_FRACTION = 0.05
OFFLOADED_CHECKPOINTING = 1
"""Checkpoints go to the host only where every layer has one: what else a walk keeps would be larger than they are."""


def selecting_matters(workload: Workload) -> bool:
    """Whether sequences are so long that recomputing attention takes more than about 8 % of a forward: longer than the
    stream is wide (causal scores of s tokens against 12 products of the stream's width)."""
    return workload.seq_len_tokens > workload.model.hidden_size


def own_layers(setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """How layers are computed and kept: the kernel families, checkpointing and offloading that can exist beside what a
    branch and a spread decide."""
    found = []
    asked = False not in values["activation_offload"]
    names = ("kernels", "checkpointing", "activation_offload", "selective_checkpointing")
    chosen = False not in values["selective_checkpointing"]
    for kernels, every, offload, selective in product(*(values[name] for name in names)):
        if ((offload and not asked) or (selective and not chosen)) and every != OFFLOADED_CHECKPOINTING:
            continue
        if selective and not chosen and setup.parallel not in ("none", "ddp"):
            continue  # no dry run of it there
        layers = dict(zip(names, (kernels, every, offload, selective), strict=True))
        with suppress(SetupError):
            setup.with_(**layers)
            found.append(layers)
    return found
