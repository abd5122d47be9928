"""What each field of a `TrainSetup` may be, and which of them cannot be combined: a message and the way out."""

import re
from operator import attrgetter
from typing import TYPE_CHECKING

from planner.core.errors import SetupError
from planner.options.absent import known_unplanned
from planner.options.adapters import ADAPTERS as _ADAPTERS
from planner.options.adapters import refusal
from planner.options.images import WITH_IMAGES
from planner.options.kernels import KERNELS as _KERNELS
from planner.options.layouts import LAYOUT_FIELDS, SPLIT_DEGREES
from planner.options.layouts import OFFLOADS as OFFLOADS
from planner.options.layouts import PARALLELS as PARALLELS
from planner.options.layouts import PIPELINE_SCHEDULES as PIPELINE_SCHEDULES
from planner.options.layouts import SHARDED as SHARDED
from planner.options.losses import LOSSES as _LOSSES
from planner.options.objectives import DEFAULT as _DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES as _OBJECTIVES
from planner.options.optimizers import OPTIMIZERS as _OPTIMIZERS
from planner.options.precisions import PRECISIONS as _PRECISIONS
from planner.options.rollouts import Rollout
from planner.options.stacks import STACKS as _STACKS

if TYPE_CHECKING:
    from planner.setup import TrainSetup

MAX_COUNT = 1 << 40  # anything larger is a typing mistake, and would overflow nothing but patience


_layout_values = attrgetter("num_gpus", "parallel", *LAYOUT_FIELDS)


def _check_degrees(setup: "TrainSetup") -> None:
    for name in SPLIT_DEGREES:
        count(name, getattr(setup, name), at_least=1)
    count("shard_degree", setup.shard_degree, at_least=0)
    one_of("pipeline_schedule", setup.pipeline_schedule, PIPELINE_SCHEDULES)
    one_of("offload", setup.offload, OFFLOADS)
    for name in ("reshard_after_forward", "sync_each_batch"):
        if not isinstance(getattr(setup, name), bool):
            raise SetupError(f"{name} must be true or false, got {getattr(setup, name)!r}")
    if setup.num_gpus == 1:
        if setup.zero or (setup.parallel in SHARDED and setup.offload != "none"):
            return  # a rank of one: DeepSpeed's fp32 masters, or what is sharded in the host's memory
        if setup.parallel != "none":
            raise SetupError(f"parallel {setup.parallel!r} needs more than one GPU", hint="give --gpus 2 or more")
        raise SetupError("tensor, context, expert, pipeline and shard degrees, and offloading, need more than one GPU")
    if setup.num_gpus % setup.split_degree:
        degrees = {name: getattr(setup, name) for name in ("tensor_degree", "context_degree", "pipeline_degree")}
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        raise SetupError(
            f"{setup.num_gpus} GPUs cannot be cut into {words}", hint="their product must divide the number of GPUs"
        )


def _check_context(setup: "TrainSetup") -> None:
    """What goes with sequences that are cut over GPUs.

    Source: accelerate 1.15 `ParallelismConfig` (`cp_size` with FSDP2, `sp_size` with DeepSpeed; not both);
    transformers 5.23 `Trainer._prepare_context_parallel_inputs` (SDPA alone); accelerate `utils/dataclasses.py`
    DeepSpeedSequenceParallelConfig (SDPA or flash attention).
    """
    degree, name = setup.context_degree, f"context_degree {setup.context_degree}"
    if degree == 1:
        return
    others = {"tensor_degree": setup.tensor_degree, "pipeline_degree": setup.pipeline_degree}
    for other, number in others.items():
        if number > 1:
            raise SetupError(f"{name} beside {other} {number} is not planned", hint="leave one of them out")
    if setup.parallel not in SHARDED:
        raise SetupError(
            f"{name} is planned beside {', '.join(SHARDED)} alone, got parallel {setup.parallel!r}",
            hint="use --parallel fsdp2 (a ring of keys and values) or zero3 (Ulysses)",
        )
    attentions = ("sdpa",) if setup.uses_ring_attention else ("sdpa", "flash-attention-2")
    if setup.attention not in attentions:
        raise SetupError(f"{name} under {setup.parallel} needs attention {' or '.join(attentions)}")
    if setup.seq_len_tokens % setup.sequence_chunks:
        raise SetupError(
            f"sequences of {setup.seq_len_tokens} tokens cannot be cut into {setup.sequence_chunks} pieces",
            hint=f"give --seq-len {-(-setup.seq_len_tokens // setup.sequence_chunks) * setup.sequence_chunks}",
        )
    if setup.compile or setup.selective_checkpointing:
        raise SetupError(f"{name} is not planned with torch.compile or selective checkpoints")


def _check_experts(setup: "TrainSetup") -> None:
    """What goes with experts that are distributed over GPUs.

    Source: transformers 5.23 `DistributedConfig` (`ep_size` divides `fsdp_size`), `distributed/fsdp.py` (its plan
    always frees a layer; mixes precision in bf16).
    """
    degree, name = setup.expert_degree, f"expert_degree {setup.expert_degree}"
    if degree == 1:
        return
    if setup.parallel == "ddp" and setup.trainer.deep_ep and degree == setup.num_gpus:
        return
    if setup.split_degree > 1 or setup.parallel != "fsdp2" or setup.fsdp_version != 2:
        raise SetupError(
            f"{name} is planned beside fsdp2 alone, nothing else split; got parallel {setup.parallel!r}",
            hint="use --parallel fsdp2 without other degrees",
        )
    if setup.shards % degree:
        raise SetupError(
            f"{name} does not divide the {setup.shards} GPUs that shard the model",
            hint=f"use a degree that divides {setup.shards}",
        )
    if setup.offload != "none" or not setup.reshard_after_forward or setup.trained_layers:
        raise SetupError(f"{name} is not planned with offloading, gathered weights that stay, or frozen layers")
    if setup.autocast_dtype == "fp16":
        raise SetupError(f"{name}: transformers' own FSDP2 mixes precision in bf16 only", hint="use a bf16 precision")
    if setup.compile or setup.activation_offload or setup.selective_checkpointing:
        raise SetupError(f"{name} is not planned with torch.compile, or checkpoints that are offloaded or selective")


def _check_sharing(setup: "TrainSetup") -> None:
    split = setup.tensor_degree * setup.pipeline_degree
    if setup.quantize_experts and setup.parallel != "ddp":
        raise SetupError("quantize_experts is planned for one GPU or ddp")
    if setup.activation_offload and (split > 1 or setup.parallel not in ("none", "ddp", "fsdp2")):
        raise SetupError("activation_offload is for one GPU, ddp or fsdp2: DeepSpeed checkpoints by itself")
    if setup.tensor_degree > 1 and setup.kernels != "eager":
        raise SetupError(f"kernels {setup.kernels!r} do not take matrices and norms that tensor parallelism cuts")
    if setup.parallel in ("dp", "device-map") and split > 1:
        raise SetupError(f"parallel {setup.parallel!r} does not combine with tensor or pipeline parallelism")
    if setup.num_gpus > 1 and (setup.parallel == "none") != (setup.num_gpus == split):
        raise SetupError(
            f"parallel {setup.parallel!r} does not suit {setup.num_gpus // split} data-parallel copies",
            hint="'none' with one copy; else one of " + ", ".join(PARALLELS[1:]),
        )
    if setup.shard_degree and (setup.parallel != "fsdp2" or setup.shardable_ranks % setup.shard_degree):
        raise SetupError(
            f"shard_degree {setup.shard_degree} needs parallel 'fsdp2' and must divide "
            f"its {setup.shardable_ranks} copies"
        )
    for name in ("reshard_after_forward", "sync_each_batch"):
        if not getattr(setup, name) and setup.parallel != "fsdp2":
            raise SetupError(f"{name} off belongs to parallel 'fsdp2'")
    if setup.fsdp_version not in (1, 2) or (setup.fsdp_version == 1 and (setup.parallel != "fsdp2" or split > 1)):
        raise SetupError(
            f"fsdp_version must be 2, or 1 with parallel 'fsdp2' and nothing else split, got {setup.fsdp_version!r}"
        )
    allowed = {"zero1": OFFLOADS[:2], "zero2": OFFLOADS[:2], "zero3": OFFLOADS, "fsdp2": ("none", "parameters")}
    if setup.offload not in allowed.get(setup.parallel, ("none",)):
        raise SetupError(
            f"parallel {setup.parallel!r} cannot offload {setup.offload!r}",
            hint="zero1 and zero2 offload 'optimizer', zero3 'optimizer' or 'parameters', fsdp2 'parameters'",
        )


def one_of(name: str, value: object, allowed: tuple[str, ...], *, hint: str = "") -> None:
    if value not in allowed:
        options = ", ".join(allowed)
        if reason := known_unplanned(name, value):
            raise SetupError(reason[0], hint=f"{reason[1]}; {name} is one of {options}")
        raise SetupError(f"{name} must be one of {options}; got {value!r}", hint=hint or f"choose one of {options}")


def count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SetupError(f"{name} must be a whole number, got {value!r}")
    if not at_least <= value <= MAX_COUNT:
        raise SetupError(f"{name} must be at least {at_least} and at most {MAX_COUNT}, got {value}")


METHODS = ("full", "lora", "qlora")
PRECISIONS = tuple(name for name, row in _PRECISIONS.items() if row.offered)
"""fp32; bf16-pure: bf16 weights, no autocast; bf16-autocast: bf16 weights under autocast; bf16-mixed: fp32 weights
under autocast; fp16-autocast: frozen fp16 weights under autocast with loss scaling (adapters only: a scaler cannot
unscale fp16 gradients); fp16-mixed: fp32 weights under fp16 autocast with loss scaling. A setup of anybody's, which no
plan chooses, may also be fp16-pure (frozen fp16 weights without autocast), fp16-bf16-autocast (fp16 weights under
bf16 autocast) or bf16-fp16-autocast (the reverse)."""
QUANTIZATIONS = ("none", "int8", "nf4", "nf4-double")
OPTIMIZERS = tuple(_OPTIMIZERS)
XFORMERS = "xformers"
"""An attention of Axolotl's alone, planned where it is recommended: cards before Ampere, rows of packed samples (its
form for padded ones hands transformers 5's `_upad_input` one argument too few).

Source: axolotl@067b021 docs/attention.qmd; src/axolotl/monkeypatch/attention/xformers.py.
"""
FLEX = "flex-attention"
"""transformers' FlexAttention, for models with attention sinks alone: others have SDPA's kernels."""
ATTENTIONS = ("eager", "sdpa", "flash-attention-2", XFORMERS, FLEX)
LOSSES = tuple(_LOSSES)
KERNEL_FAMILIES = tuple(_KERNELS)
LINEAR_ATTENTIONS = ("torch", "fla")
OBJECTIVE_NAMES = tuple(_OBJECTIVES)
ADAPTER_KINDS = tuple(_ADAPTERS)
ADAPTER_DTYPES = ("auto", "fp32", "bf16", "fp16")
TARGET_SETS = ("attention", "all-linear")
EXPERT_TARGETS = "attention-experts"
"""Attention and every stacked expert, each matrix with adapters of the asked rank: where a stack has kernels for it."""
SAVED_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
SAVED_HEADS = ("lm_head", "embed_out")
SAVED_MODULES = (*SAVED_EMBEDDINGS, *SAVED_HEADS)
"""What `modules_to_save` may name: the input embeddings and the output head, as model classes call them."""
STACK_NAMES = tuple(_STACKS)
"""Whose training step a setup is for (`planner.options.stacks`)."""

_ONE_OF = {
    "method": METHODS,
    "precision": tuple(_PRECISIONS),
    "quantization": QUANTIZATIONS,
    "optimizer": OPTIMIZERS,
    "attention": ATTENTIONS,
    "loss": LOSSES,
    "kernels": KERNEL_FAMILIES,
    "linear_attention": LINEAR_ATTENTIONS,
    "adapter_dtype": ADAPTER_DTYPES,
    "adapter": ADAPTER_KINDS,
    "parallel": PARALLELS,
    "stack": STACK_NAMES,
    "objective": OBJECTIVE_NAMES,
}
_COUNTS = {
    "micro_batch_seqs": 1,
    "accumulation_steps": 1,
    "seq_len_tokens": 1,
    "num_gpus": 1,
    "lora_rank": 0,
    "checkpointing": 0,
    "hard_negatives": 0,
    "cached_seqs": 0,
}


def check(setup: "TrainSetup") -> None:
    """Refuses what no training step can be.

    Raises:
        SetupError: a value that its field does not take, or fields that contradict each other.
    """
    _check_values(setup)
    _check_base(setup)
    if setup.method == "full":
        _check_full(setup)
    else:
        _check_adapter(setup)
    if _layout_values(setup) != _layout_values(type(setup)):  # of which the class has the defaults
        _check_degrees(setup)
        _check_sharing(setup)
        _check_context(setup)
        _check_experts(setup)
    whole = setup.method == "full" and setup.num_gpus == 1 and setup.accumulation_steps == 1
    if setup.trainer.steps_in_backward and not (whole and setup.objective_spec.head == "vocabulary"):
        raise SetupError(
            f"stack {setup.stack!r} trains a whole model on one GPU, every micro-batch a step",
            hint="use --method full, and --global-batch as large as one micro-batch",
        )
    if setup.trained_layers:
        _check_partial(setup)
    if setup.frozen_encoder and (setup.method != "full" or setup.trained_layers):
        raise SetupError(
            "frozen_encoder belongs to full fine-tuning of all layers",
            hint="adapters of the decoder alone: --targets with a pattern of its modules' names",
        )
    for name, allowed in WITH_IMAGES.items() if setup.images is not None else ():
        if (value := getattr(setup, name)) not in allowed:
            raise SetupError(
                f"images are not planned with {name} {value!r}", hint=f"planned: {', '.join(map(str, allowed))}"
            )
    of_an_objective = setup.rollout or setup.hard_negatives or setup.cached_seqs or setup.precomputed_reference
    if setup.objective != _DEFAULT_OBJECTIVE or of_an_objective:
        _check_objective(setup)


def _check_partial(setup: "TrainSetup") -> None:
    trained = setup.trained_layers
    numbers = trained if isinstance(trained, tuple) else ()
    counted = all(type(number) is int and number >= 0 for number in numbers) and list(numbers) == sorted(set(numbers))
    if not isinstance(trained, (int, tuple)) or not counted:
        raise SetupError(
            f"trained_layers must be a number of layers or a list of their numbers in order, got {trained!r}",
            hint="0 trains all layers, 4 the last four, -4 the first four, [0, 4, 8] those",
        )
    if (numbers or setup.trained_layers < 0) and setup.parallel not in ("none", "ddp"):  # type: ignore[operator]
        raise SetupError(
            "first layers and lists of layers (trained_layers) are planned on one GPU and under ddp",
            hint="the last layers are planned under every engine",
        )
    if setup.pipeline_degree > 1 or setup.images is not None or setup.objective not in ("sft", "pretrain"):
        raise SetupError("trained_layers is known for supervised training on text without pipeline stages")
    if setup.method != "full" and not setup.kind.like_lora:
        raise SetupError(f"trained_layers belongs to full fine-tuning and LoRA, got adapter {setup.adapter!r}")


def _check_values(setup: "TrainSetup") -> None:
    if setup.adapter not in _ADAPTERS and (refused := refusal(str(setup.adapter))):
        raise SetupError(f"adapter {setup.adapter!r} is not planned: {refused}")
    values = setup.__dict__  # hundreds of setups of a plan are checked
    for name, allowed in _ONE_OF.items():
        if values[name] not in allowed:
            one_of(name, values[name], allowed)
    for name, at_least in _COUNTS.items():
        value = values[name]
        if type(value) is not int or not at_least <= value <= MAX_COUNT:
            count(name, value, at_least=at_least)
    for name in ("transformers_version", "bitsandbytes_version", "trl_version"):
        if values[name] and not re.fullmatch(r"\d+(\.\d+)+", str(values[name])):
            raise SetupError(f"{name} must be a version such as 4.44, got {values[name]!r:.80}", hint='"" is today\'s')
    if not 0.0 <= setup.lora_dropout < 1.0:
        raise SetupError(f"lora_dropout must be in [0, 1), got {setup.lora_dropout}")
    if isinstance(setup.lora_targets, str):
        if setup.lora_targets != EXPERT_TARGETS:
            one_of("lora_targets", setup.lora_targets, TARGET_SETS, hint="or a list of module names")
        elif not setup.trainer.grouped_experts:
            raise SetupError(
                f"stack {setup.stack!r} has no adapters on experts of 4 bits (lora_targets {EXPERT_TARGETS!r})",
                hint="use --target loggetta, or --targets attention",
            )
    elif not setup.lora_targets or not all(isinstance(name, str) and name for name in setup.lora_targets):
        raise SetupError(f"lora_targets must name at least one module, got {setup.lora_targets!r}")


def _check_base(setup: "TrainSetup") -> None:
    if setup.activation_offload and not setup.checkpointing:
        raise SetupError(
            "activation_offload moves the inputs of checkpointed layers, got checkpointing off",
            hint="switch checkpointing on",
        )
    if setup.selective_checkpointing:
        other = {
            "checkpointing off": not setup.checkpointing,
            "activation_offload": setup.activation_offload,
            "reentrant_checkpointing": setup.reentrant_checkpointing,
        }
        if conflicts := [name for name, here in other.items() if here]:
            raise SetupError(
                f"selective_checkpointing keeps the attention of checkpointed layers, got {conflicts[0]}",
                hint="leave --selective-checkpointing out",
            )
    alone = setup.trainer.grouped_experts and setup.method == "lora"
    if setup.quantize_experts and not alone and (not setup.quantized or setup.kbit_fp32_cast):
        raise SetupError(
            f"quantize_experts stores experts in the base's bits, got quantization {setup.quantization!r}"
            + (" with kbit_fp32_cast" if setup.kbit_fp32_cast else ""),
            hint="use --quantization nf4-double, nf4 or int8",
        )
    if setup.attention == "flash-attention-2" and setup.precision == "fp32":
        raise SetupError(
            "flash-attention-2 has no fp32 kernel, got precision 'fp32'",
            hint="use --attention sdpa, or a 16-bit precision",
        )
    if (
        setup.attention in (XFORMERS, FLEX) and setup.selective_checkpointing
    ):  # which knows SDPA's and flash attention's
        raise SetupError(f"selective_checkpointing does not keep what {setup.attention} computes")
    if setup.attention == FLEX and (setup.compile or setup.context_degree > 1):
        raise SetupError("flex-attention compiles itself, and is planned on whole sequences without torch.compile")
    told_apart = setup.stack == "axolotl" and setup.packing and setup.compute_dtype == "fp16"
    if setup.attention == XFORMERS and not told_apart:
        raise SetupError(
            "xformers is planned in Axolotl's packed rows in fp16 alone; elsewhere SDPA has the same kernel",
            hint="use --target axolotl --packing on a card before Ampere, or --attention sdpa",
        )


def _check_full(setup: "TrainSetup") -> None:
    if setup.quantization != "none":
        raise SetupError(
            f"method 'full' cannot train {setup.quantization} weights",
            hint="quantized weights are frozen: use --method qlora, or --quantization none",
        )
    if setup.lora_rank != 0:
        raise SetupError(f"method 'full' has no LoRA rank, got {setup.lora_rank}", hint="leave --rank out")
    if not _PRECISIONS[setup.precision].trains_weights:
        half = setup.weight_dtype
        raise SetupError(
            f"method 'full' cannot train {half} weights so: the loss scaler cannot unscale {half} gradients",
            hint="use --precision fp16-mixed (fp32 weights under fp16 autocast)",
        )
    if setup.kbit_fp32_cast:
        raise SetupError("kbit_fp32_cast belongs to method 'qlora', got method 'full'")
    if setup.modules_to_save:
        raise SetupError("modules_to_save belongs to adapters, method 'full' trains every module")
    if setup.adapter != "lora":
        raise SetupError(f"adapter {setup.adapter!r} belongs to method 'lora' or 'qlora', got method 'full'")
    if "lora" in _KERNELS[setup.kernels].parts:
        raise SetupError(f"kernels {setup.kernels!r} fuse adapters, got method 'full'", hint="use --kernels liger")


def _check_adapter(setup: "TrainSetup") -> None:
    unknown = [name for name in setup.modules_to_save if name not in SAVED_MODULES]
    if unknown or not isinstance(setup.modules_to_save, tuple):
        raise SetupError(
            f"modules_to_save must name embeddings or the head, got {', '.join(map(str, unknown))}",
            hint=f"names: {', '.join(SAVED_MODULES)}",
        )
    if setup.adapter != "lora":
        _check_kind(setup)
    elif setup.lora_rank < 1:
        raise SetupError(f"method {setup.method!r} needs a LoRA rank of at least 1, got {setup.lora_rank}")
    if setup.method == "qlora" and setup.quantization == "none":
        raise SetupError(
            "method 'qlora' needs a quantization, got 'none'",
            hint="use --quantization nf4-double, nf4 or int8; or --method lora",
        )
    if setup.method == "lora" and setup.quantization != "none":
        raise SetupError(
            f"method 'lora' has an unquantized base, got quantization {setup.quantization!r}",
            hint="use --method qlora for a quantized base",
        )
    if setup.kbit_fp32_cast and setup.method != "qlora":
        raise SetupError(f"kbit_fp32_cast belongs to method 'qlora', got method {setup.method!r}")
    if "lora" in _KERNELS[setup.kernels].parts:
        if not isinstance(setup.lora_targets, str):
            raise SetupError(
                f"kernels {setup.kernels!r} take attention or all linear layers whole, got lora_targets "
                f"{setup.lora_targets!r}",
                hint="use --kernels liger",
            )
        if setup.lora_dropout or setup.quantization == "int8":
            raise SetupError(
                f"kernels {setup.kernels!r} have neither a LoRA dropout nor 8-bit weights, got lora_dropout "
                f"{setup.lora_dropout:g}, quantization {setup.quantization!r}",
                hint="use --kernels liger",
            )


def _check_kind(setup: "TrainSetup") -> None:
    row = _ADAPTERS[setup.adapter]
    if row.size and setup.lora_rank < 1:
        raise SetupError(f"adapter {row.name!r} needs a {row.size} of at least 1, got {setup.lora_rank}")
    if not row.size and setup.lora_rank:
        raise SetupError(f"adapter {row.name!r} has no size, got rank {setup.lora_rank}", hint="give lora_rank 0")
    if setup.quantization not in row.quantizations:
        raise SetupError(
            f"adapter {row.name!r} does not take quantization {setup.quantization!r}",
            hint=f"it takes {', '.join(row.quantizations)}",
        )
    if setup.lora_dropout and not row.dropout:
        raise SetupError(f"adapter {row.name!r} has no dropout here, got lora_dropout {setup.lora_dropout:g}")
    if not row.adapts_matrices and (setup.lora_targets != "all-linear" or setup.modules_to_save or setup.packing):
        raise SetupError(
            f"adapter {row.name!r} adapts no matrices: it takes no lora_targets, no modules_to_save and no packing"
        )
    if setup.checkpointing and not row.checkpointing:
        raise SetupError(
            f"peft refuses adapter {row.name!r} under gradient checkpointing", hint="use --checkpointing off"
        )
    if row.like_lora:
        return
    other_objective = setup.objective not in (_DEFAULT_OBJECTIVE, "classification")
    fp32_logits = row.form == "scales" and setup.quantized and not setup.autocast_dtype  # which no formula here knows
    without = row.form in ("prompt", "prefix", "rows") or (row.form == "norms" and setup.objective_spec.rolls_out)
    if other_objective and (without or fp32_logits):
        raise SetupError(
            f"adapter {row.name!r} is not planned for objective {setup.objective!r}",
            hint="use --precision bf16-autocast"
            if fp32_logits
            else "use --adapter lora, or another that adapts matrices",
        )
    if "lora" in _KERNELS[setup.kernels].parts:
        raise SetupError(f"kernels {setup.kernels!r} fuse LoRA, got adapter {row.name!r}", hint="use --kernels liger")
    if setup.num_gpus > 1 and setup.parallel != "ddp":
        raise SetupError(
            f"adapter {row.name!r} is planned for one GPU or for ddp, got parallel {setup.parallel!r}",
            hint="lora, rslora, pissa and loftq take every way of sharing",
        )
    if (
        row.form in ("norms", "shared")
        and not setup.autocast_dtype
        and setup.resolved_adapter_dtype != setup.weight_dtype
    ):
        raise SetupError(
            f"adapter {row.name!r} computes in {setup.resolved_adapter_dtype} beside {setup.weight_dtype} weights, "
            "which only autocast can bring together",
            hint="use --precision bf16-autocast",
        )


def _check_objective(setup: "TrainSetup") -> None:
    row = setup.objective_spec
    if setup.loss not in row.losses:
        raise SetupError(
            f"no trainer of objective {setup.objective!r} has loss {setup.loss!r}",
            hint=f"use --loss {' or '.join(row.losses)}",
        )
    offloads = setup.activation_offload and setup.stack != "axolotl"  # which patches torch's function
    if setup.pauses_checkpointing and (setup.checkpointing > 1 or offloads):
        raise SetupError(
            f"TRL's trainer of {setup.objective!r} switches checkpointing off within a step, and on again for every "
            "layer with nothing in the host's memory",
            hint="use --checkpointing on" + ", without --activation-offload" * offloads,
        )
    if setup.packing and not row.packs:
        raise SetupError(f"objective {setup.objective!r} trains on {row.sample}s, which no trainer packs")
    if setup.num_gpus > 1 and (refused := row.layout_refusal(setup.parallel, split=setup.is_split)):
        raise SetupError(refused, hint="leave --gpus out" if row.alone else "leave --parallel and degrees out")
    if setup.precomputed_reference and not row.reference:
        raise SetupError(f"objective {setup.objective!r} asks no reference that could be computed beforehand")
    if (setup.hard_negatives or setup.cached_seqs) and not row.whole_batch:
        raise SetupError(
            f"objective {setup.objective!r} contrasts no samples: no hard negatives, no gradient cache",
            hint="use --objective embedding",
        )
    if row.rolls_out:
        _check_rollout(setup, setup.rollout_settings)
    elif setup.rollout is not None:
        raise SetupError(f"objective {setup.objective!r} generates nothing, got a rollout")


def _check_rollout(setup: "TrainSetup", rolls: Rollout) -> None:
    if rolls.completion_tokens >= setup.seq_len_tokens:
        raise SetupError(
            f"completions of {rolls.completion_tokens} tokens leave no room for a prompt in {setup.seq_len_tokens}",
            hint="give a longer --seq-len or a shorter --completion-len",
        )
    if rolls.generation_batch_seqs % (at_once := setup.micro_batch_seqs * setup.data_degree):  # trl 1.16 grpo_config.py
        gpus = f" on each of {setup.data_degree} GPUs" * (setup.data_degree > 1)
        raise SetupError(
            f"a generation of {rolls.generation_batch_seqs} completions is not cut into micro-batches of "
            f"{setup.micro_batch_seqs}{gpus}",
            hint=f"give a --generation-batch that {at_once} divides, or a smaller --micro-batch",
        )
    if setup.num_gpus > 1 and (setup.parallel == "zero3" if rolls.by_vllm else setup.parallel != "ddp"):
        # trl 1.16 generation/vllm_generation.py, _iter_named_params: adapters are merged into a whole gathered model
        raise SetupError(
            f"how generation by {rolls.generator} gathers what GPUs share under {setup.parallel} is not modelled",
            hint="use --parallel ddp" + ", fsdp2, zero1 or zero2" * rolls.by_vllm,
        )
    if rolls.by_vllm and setup.quantization != "none":
        # github.com/huggingface/trl/issues/4973, open in trl 1.16; of 8 bits its VLLMGeneration says so itself
        raise SetupError(
            "TRL hands vLLM the weights of a quantized base in another shape than vLLM holds them, and stops",
            hint="use --method lora, or --generator transformers",
        )
