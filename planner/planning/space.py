"""The space: every combination of the dimensions that a workload leaves open; `walk` walks it completely.

A branch (method, precision, quantization, rank) decides what is resident; attention, checkpointing and the micro-batch
decide activations; loss and optimizer add their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from planner.core.errors import SetupError, UsageError
from planner.memory.attention_kernels import missing_kernels, planned_linear_attentions, supported_attentions
from planner.memory.workload import Workload
from planner.models.stored import stored_bits, stored_refusal
from planner.models.targets import head_refusal
from planner.options.images import WITH_IMAGES
from planner.options.kernels import COMPILES_NOTHING, planned_kernels
from planner.options.losses import PLANNED_LOSSES
from planner.options.objectives import DEFAULT as DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES, Objective, packs
from planner.options.optimizers import OPTIMIZERS, PLANNED_OPTIMIZERS
from planner.options.precisions import FP16_DIVERGES, PRECISIONS, precision_of
from planner.options.sound import HALVES_STACK, WITH_SOUND, WITH_TWO_HALVES
from planner.options.stacks import DEFAULT as DEFAULT_STACK
from planner.options.stacks import STACKS
from planner.planning.expressed import branches_as_run
from planner.planning.lora_rank import planned_ranks
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS, METHODS, XFORMERS
from planner.setup.packages import PACKAGED

if TYPE_CHECKING:
    from planner.planning.decision.layouts import Layout

BRANCH_FIELDS = ("method", "precision", "quantization", "kbit_fp32_cast", "lora_rank", "lora_targets")
PLANNED_CHECKPOINTING = (0, 16, 8, 4, 3, 2, 1)
"""None, every n-th layer, every layer: what transformers' `every_n_layers` says (TRL, Axolotl, the plain script)."""
FINER_CHECKPOINTING = (0, 32, 24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
"""The same for who asks for speed: up to 2 % of it lies between, for twice the walk."""
PLANNED_CACHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Sequences at once under a gradient cache, which costs one more forward: taken where the whole batch does not fit."""
PREFERENCE_FRACTION = 0.03
"""So much speed, less than the speed model can tell apart, is given for what is preferred: memory to spare by more than
the formula errs, then what is simpler (`decision.policy`), then the smaller peak."""


def micro_batches(global_batch_seqs: int) -> tuple[int, ...]:
    """The divisors of the global batch that are walked: all of them, at most 64 (the smallest), in rising order."""
    small = [n for n in range(1, min(global_batch_seqs, 4096) + 1) if global_batch_seqs % n == 0]
    return tuple(small[:64])


OF_ENCODERS = ("classification", "embedding")
"""Objectives of encoders alone."""
Values = dict[str, tuple[Any, ...]]


def dimension_values(workload: Workload) -> Values:
    """The values each dimension takes in this workload: the user's where given, else what a plan chooses from; only
    those with kernels on the GPU.

    Raises:
        UsageError: the GPU has no kernel for anything that the user asked for.
    """
    values = _open_values(workload)
    for name, allowed in workload.fixed.items():
        values[name] = tuple(allowed)
    if workload.images is not None:
        _keep_allowed(values, workload, WITH_IMAGES, "images are")
    if workload.model.is_encoder_decoder:
        has_audio = workload.model.front_end is not None
        _keep_allowed(values, workload, WITH_SOUND if has_audio else WITH_TWO_HALVES, f"{workload.model.model_type} is")
    if workload.model.reads_both_ways and workload.fixed.get("objective", ("sft",))[0] not in OF_ENCODERS:
        raise UsageError(
            f"{workload.model.model_id} is an encoder: it predicts no next token, and masked words are not planned",
            hint=f"give --objective {' or '.join(OF_ENCODERS)}",
        )
    if workload.objective_spec.head == "score" and workload.model.unscored:
        raise UsageError(workload.model.unscored, hint="give another model")
    if workload.fixed.get("method") == ("qlora",):
        usual = {"method": "qlora", "quantization": "nf4", "objective": workload.objective_spec.name}
        if refused := head_refusal(workload.model, TrainSetup().replace_trusted(**usual)):
            raise UsageError(refused, hint="leave --method out, or give --method lora")
    if "lora_targets" in workload.fixed and "chunked" in workload.objective_spec.losses:
        stack = HALVES_STACK if workload.model.is_encoder_decoder else (*workload.targets, DEFAULT_STACK)[0]
        usual = {"lora_targets": workload.fixed["lora_targets"][0], "loss": "chunked", "stack": stack}
        if refused := head_refusal(workload.model, TrainSetup().replace_trusted(**usual)):
            raise UsageError(refused, hint="another program trains one: --target axolotl")
    if "objective" in workload.fixed:
        _keep_for_objective(values, workload, OBJECTIVES[workload.fixed["objective"][0]])
    _keep_as_stored(values, workload)
    if values["quantize_experts"] == (True,):
        if "lora_targets" not in workload.fixed:
            grouped = STACKS[_branch_stack(workload)].grouped_experts
            values["lora_targets"] = (EXPERT_TARGETS if grouped else "attention",)
            values["lora_rank"] = planned_ranks(workload, values["lora_targets"][0])
        attention = supported_attentions(workload.model, workload.gpu)[0]
        fields = {"quantization": "nf4", "quantize_experts": True, "lora_targets": values["lora_targets"][0]}
        packed = TrainSetup(method="qlora", attention=attention, stack=_branch_stack(workload), **fields)
        if reason := missing_kernels(workload.model, workload.gpu, packed):
            raise UsageError(f"--quantize-experts cannot be kept: {reason}", hint="leave --quantize-experts out")
    if True in values.get("compile", ()) and 0 not in values["checkpointing"]:
        values["attention"] = tuple(name for name in values["attention"] if name != "flash-attention-2")
        if not values["attention"]:
            raise UsageError(COMPILES_NOTHING, hint="use --attention sdpa, or leave --compile out")
    for name in ("optimizer", "loss", "attention", "checkpointing", "kernels", "linear_attention", "compile"):
        if name in values:
            _keep_what_runs(values, workload, name)
    return values


def _open_values(workload: Workload) -> Values:
    gpu = workload.gpu
    half = "bf16" if gpu.bf16 else "fp16"
    pairs: tuple[tuple[str, str | None], ...] = ((half, half), (half, None), ("fp32", half))
    if half == "fp16" and workload.model.model_type in FP16_DIVERGES and workload.targets[:1] != ("unsloth",):
        pairs = (("fp32", None),)  # Unsloth's own code computes in fp32 what overflows
    packed_by_axolotl = workload.targets[:1] == ("axolotl",) and packs(workload.fixed)
    xformers = [XFORMERS] if packed_by_axolotl and not gpu.flash_attention_2 else []
    offloads = offloading_matters(workload) and not gpu.shares_host_memory
    # scales in 32 bits cost 0.4 bits a weight, and gain less than a plan gives up for what is simpler; MLX has no other
    plain = workload.prefer == "speed" or stored_bits(workload.model) == "nf4" or gpu.vendor == "Apple"
    values: Values = {
        "method": METHODS,
        "precision": tuple(name for types in pairs if PRECISIONS[name := precision_of(*types)].offered),
        "quantization": ("none", "int8", *["nf4"] * plain, "nf4-double"),
        "kbit_fp32_cast": (False, True),
        "lora_rank": planned_ranks(workload, workload.fixed.get("lora_targets", ("all-linear",))[0]),
        "lora_targets": ("all-linear",),
        # where host and GPU share their memory nothing is moved out of it
        "optimizer": tuple(
            name for name in PLANNED_OPTIMIZERS if not (OPTIMIZERS[name].paged and gpu.shares_host_memory)
        ),
        "attention": (*supported_attentions(workload.model, gpu), *xformers),
        "checkpointing": FINER_CHECKPOINTING if workload.prefer == "speed" else PLANNED_CHECKPOINTING,
        "loss": PLANNED_LOSSES,
        "kernels": planned_kernels(workload.targets, workload.objective_spec.name),
        "linear_attention": planned_linear_attentions(workload.model, gpu),
        "activation_offload": (False, True) if offloads else (False,),
        "quantize_experts": (False,),
        "selective_checkpointing": (False, True) if selecting_matters(workload) else (False,),
    }
    for name, needs in PACKAGED.items():
        values[name] = tuple(value for value in values[name] if needs.get(value) not in workload.absent_packages)
    return values


def _keep_allowed(values: Values, workload: Workload, with_it: Mapping[str, tuple[object, ...]], what: str) -> None:
    """Of every dimension the values that go with what is trained; `what`: it, for people."""
    for name, allowed in with_it.items():
        if name in values:
            values[name] = tuple(value for value in values[name] if value in allowed)
            if not values[name]:
                raise UsageError(
                    f"{what} not planned with {name} {', '.join(map(str, workload.fixed[name]))}",
                    hint=f"planned: {', '.join(map(str, allowed))}",
                )


def _keep_for_objective(values: Values, workload: Workload, objective: Objective) -> None:
    fixed = workload.fixed
    any_trainer = objective.supervised or bool(workload.targets or "loss" in fixed)
    # Of these losses, those that some trainer of the objective has; of the default stack's trainer, its own.
    losses = values["loss"]
    allowed = tuple(loss for loss in losses if loss in objective.losses[: None if any_trainer else 1])
    if not allowed and "loss" not in fixed:
        raise UsageError(
            f"{workload.model.model_type} is not planned with objective {objective.name}: its loss is "
            f"{', '.join(losses)}, which no trainer of that has",
            hint="give another model or another objective",
        )
    if not allowed:
        raise UsageError(
            f"--loss cannot be kept: no trainer of --objective {objective.name} has {', '.join(losses)}",
            hint=f"leave --loss out, or use --loss {objective.losses[0]}",
        )
    values["loss"] = allowed
    if workload.global_batch_seqs < objective.least_samples:
        raise UsageError(
            f"--objective {objective.name} needs {objective.least_samples} {objective.sample}s in a forward, "
            f"--global-batch is {workload.global_batch_seqs}",
            hint=f"give --global-batch {objective.least_samples} or more",
        )
    if objective.rolls_out:
        from planner.planning.rollouts import planned_rollouts  # late: few objectives generate

        values["rollout"] = planned_rollouts(workload)
    if objective.whole_batch:
        if max(fixed.get("cached_seqs", (0,))) > workload.global_batch_seqs:
            raise UsageError("--cached-seqs is more than --global-batch", hint="give fewer, or 0 for no cache")
        caches = (0, *(size for size in PLANNED_CACHES if size < workload.global_batch_seqs))
        values["cached_seqs"] = fixed.get("cached_seqs", caches)


def _keep_as_stored(values: Values, workload: Workload) -> None:
    model, quantized = workload.model, TrainSetup(method="qlora", quantization="nf4")
    if bits := stored_bits(model):
        kept: dict[str, tuple[str, ...]] = {"method": ("qlora",), "quantization": (bits,)}
        reason = f"{model.model_id} is published in {bits} by bitsandbytes and loads as that"
        hint = f"use --method qlora --quantization {bits}, or name a 16-bit copy of it"
    elif refused := stored_refusal(quantized, model):
        kept = {"method": ("full", "lora"), "quantization": ("none",)}
        reason, hint = f"a quantized base cannot be kept: {refused}", "use --method lora or full"
    else:
        return
    for name, allowed in kept.items():
        values[name] = tuple(value for value in values[name] if value in allowed)
        if not values[name]:
            raise UsageError(reason, hint=hint)


def _keep_what_runs(values: Values, workload: Workload, name: str) -> None:
    usual: dict[str, Any] = {
        "attention": supported_attentions(workload.model, workload.gpu)[0],
        "images": workload.images,
        **({"checkpointing": 0} if "checkpointing" in workload.model.lacks else {}),
    }
    tried = {value: TrainSetup(**usual).replace_trusted(**{name: value}) for value in values[name]}
    missing = {value: missing_kernels(workload.model, workload.gpu, setup) for value, setup in tried.items()}
    values[name] = tuple(value for value in values[name] if not missing[value])
    if not values[name]:
        reason, option = next(iter(missing.values())), name.replace("_", "-")
        hint = f"leave --{option} out, or name another GPU or model"
        raise UsageError(f"--{option} cannot be kept: {reason}", hint=hint)


def planned_values(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Mapping[str, tuple[Any, ...]]:
    """The dimensions as a plan walks them: at the rank floor and without peft's fp32 cast, where nobody asked.

    By the formula a larger rank and the cast are never smaller or faster, so no point of them is taken; a search,
    which measures, has both. A launch target may always cast: with one named both stay.
    """
    left_out = ("lora_rank",) if workload.targets else ("lora_rank", "kbit_fp32_cast")
    return {**values, **{name: values[name][:1] for name in left_out if name not in workload.fixed}}


def branches(workload: Workload, values: Mapping[str, tuple[Any, ...]]) -> Iterator[TrainSetup]:
    """One setup for every branch that can exist (method, precision, quantization, cast, rank, targets).

    Full fine-tuning is planned with fp32 master weights under autocast; 16-bit master weights lose small updates and
    are taken only when the user fixes the method to full or the precision. Adapters over fp32 weights (the "-mixed"
    precisions) are walked only when asked for: they cost twice the memory and buy nothing. peft's fp32 cast is walked
    at the rank floor only: it never wins, and is there so that the tree can say what it would cost.
    """
    for method in values["method"]:
        adapted, shared = method != "full", _common_fields(workload, values, method)
        precisions = [name for name in values["precision"] if _precision_planned(workload, values, method, name)]
        quantizations = [bits for bits in values["quantization"] if (bits != "none") == (method == "qlora")]
        casts = values["kbit_fp32_cast"] if method == "qlora" else (False,)
        ranks = values["lora_rank"] if adapted else (0,)
        targets = values["lora_targets"] if adapted else ("all-linear",)
        opened = (targets, values.get("rollout", (None,)), values.get("cached_seqs", (0,)))
        for precision, quantization, cast in product(precisions, quantizations, casts):
            kind = {"precision": precision, "quantization": quantization, "kbit_fp32_cast": cast}
            for combination in product(ranks[:1] if cast else ranks, *opened):  # the cast is there to be compared
                adapter_fields = zip(("lora_rank", "lora_targets", "rollout", "cached_seqs"), combination, strict=True)
                try:
                    branch = TrainSetup(method=method, **kind, **dict(adapter_fields), **shared)
                except SetupError:
                    continue
                if head_refusal(workload.model, branch):
                    continue
                yield from branches_as_run(branch, workload) if workload.targets else (branch,)


def _precision_planned(workload: Workload, values: Mapping[str, tuple[Any, ...]], method: str, precision: str) -> bool:
    if "precision" in workload.fixed:
        return True
    row, only_full = PRECISIONS[precision], tuple(values["method"]) == ("full",)
    return row.wide_weights or (only_full and row.trains_weights) if method == "full" else not row.wide_weights


def _common_fields(workload: Workload, values: Mapping[str, tuple[Any, ...]], method: str) -> dict[str, Any]:
    objective = OBJECTIVES[values.get("objective", (DEFAULT_OBJECTIVE,))[0]]
    usual = {
        "lora_dropout": 0.0, "precomputed_reference": False, "hard_negatives": 0, "images": None, "compile": False,
        "frozen_encoder": False, "trained_layers": 0, "linear_attention": "torch",
    }  # fmt: skip
    return {
        **{field: values.get(field, (default,))[0] for field, default in usual.items()},
        "seq_len_tokens": workload.seq_len_tokens,
        "packing": bool(values.get("packing", (objective.packed,))[0]),
        "objective": objective.name,
        "stack": HALVES_STACK if workload.model.is_encoder_decoder else objective.stack(_branch_stack(workload)),
        "loss": "full" if objective.supervised else values["loss"][0],
        "adapter": "lora" if method == "full" else values.get("adapter", ("lora",))[0],
        "checkpointing": 0 if values["checkpointing"] == (0,) else 1,
        "quantize_experts": values["quantize_experts"][0],
    }


def _branch_stack(workload: Workload) -> str:
    """The stack that a branch is made for before its target runs it: another's where the default has no such setup."""
    grouped = [name for name in workload.targets if name in STACKS and STACKS[name].grouped_experts]
    return grouped[0] if grouped else DEFAULT_STACK


def sample_setups(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], layouts: "Sequence[Layout]" = ()
) -> Iterator[TrainSetup]:
    """A setup for every branch, spread, loss, attention and kernel family that the options allow, whatever runs it."""
    fields = [dict(layout.fields) for layout in layouts] or [{}]
    for branch in branches(replace(workload, targets=()), values):
        for layout, *three in product(fields, values["loss"], values["attention"], values["kernels"]):
            choice = dict(zip(("loss", "attention", "kernels"), three, strict=True))
            try:
                yield branch.replace(**layout, **choice, optimizer=values["optimizer"][0])
            except SetupError:
                continue


def offloading_matters(workload: Workload) -> bool:
    """Whether one sequence's checkpoints would take so much of the card that moving them can change the plan; of the
    card, not of the budget, because more memory must not take a choice away."""
    model = workload.model
    checkpoints_bytes = model.num_layers * model.hidden_size * 2 * workload.seq_len_tokens
    return checkpoints_bytes > OFFLOAD_FROM_FRACTION * workload.gpu.memory_bytes


OFFLOAD_FROM_FRACTION = 0.05
OFFLOADED_CHECKPOINTING = 1
"""Checkpoints go to the host only where every layer has one: what else a walk keeps would be larger than they are."""


def selecting_matters(workload: Workload) -> bool:
    """Whether sequences are so long that recomputing attention takes more than about 8 % of a forward: longer than the
    stream is wide (causal scores of s tokens against 12 products of the stream's width)."""
    return workload.seq_len_tokens > workload.model.hidden_size


def layer_variants(setup: TrainSetup, values: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """How layers are computed and kept: the kernel families, checkpointing and offloading that can exist beside what a
    branch and a layout decide."""
    variants, names = [], ("kernels", "checkpointing", "activation_offload", "selective_checkpointing")
    offload_requested, chosen = (False not in values[name] for name in names[2:])
    for kernels, every, offload, selective in product(*(values[name] for name in names)):
        if ((offload and not offload_requested) or (selective and not chosen)) and every != OFFLOADED_CHECKPOINTING:
            continue
        if selective and not chosen and setup.parallel not in ("none", "ddp"):
            continue  # no dry run of it there
        layers = dict(zip(names, (kernels, every, offload, selective), strict=True))
        with suppress(SetupError):
            setup.replace(**layers)
            variants.append(layers)
    return variants
