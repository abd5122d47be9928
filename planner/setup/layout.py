"""Which of the fields of a `TrainSetup` that spread it over GPUs cannot be combined."""

from dataclasses import fields
from operator import attrgetter

from planner.core.errors import SetupError
from planner.options.absent import told
from planner.options.layouts import LAYOUT_FIELDS, OFFLOADS, PARALLELS, PIPELINE_SCHEDULES, SHARDED, SPLIT_DEGREES
from planner.setup.values import SetupValues

MAX_COUNT = 1 << 40  # anything larger is a typing mistake, and would overflow nothing but patience


_layout_values = attrgetter(*LAYOUT_FIELDS)
_DEFAULTS = {one.name: one.default for one in fields(SetupValues)}
_NO_LAYOUT = tuple(_DEFAULTS[name] for name in LAYOUT_FIELDS)


def is_layout(setup: SetupValues) -> bool:
    """Whether any field says that there are several GPUs."""
    return setup.num_gpus > 1 or setup.parallel != "none" or _layout_values(setup) != _NO_LAYOUT


def check_layout(setup: SetupValues) -> None:
    """Refuses a layout that no job can have.

    Raises:
        SetupError: a value that its field does not take, or fields that contradict each other.
    """
    _check_degrees(setup)
    _check_sharing(setup)
    _check_context(setup)
    _check_experts(setup)


def _check_degrees(setup: SetupValues) -> None:
    """Over how many GPUs, cut how."""
    for name in SPLIT_DEGREES:
        count(name, getattr(setup, name), at_least=1)
    count("shard_degree", setup.shard_degree, at_least=0)
    one_of("pipeline_schedule", setup.pipeline_schedule, PIPELINE_SCHEDULES)
    one_of("offload", setup.offload, OFFLOADS)
    if not isinstance(setup.reshard_after_forward, bool):
        raise SetupError(f"reshard_after_forward must be true or false, got {setup.reshard_after_forward!r}")
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
            f"{setup.num_gpus} GPUs cannot be cut into {words}",
            hint="their product must divide the number of GPUs",
        )


def _check_context(setup: SetupValues) -> None:
    """What goes with sequences that are cut over GPUs.

    Source: accelerate 1.15 `ParallelismConfig` (`cp_size` with FSDP2, `sp_size` with DeepSpeed; not both);
    transformers 5.23 `Trainer._prepare_context_parallel_inputs` (SDPA alone); accelerate `utils/dataclasses.py`
    DeepSpeedSequenceParallelConfig (SDPA or flash attention).
    """
    degree, name = setup.context_degree, f"context_degree {setup.context_degree}"
    if degree == 1:
        return
    if setup.tensor_degree * setup.pipeline_degree > 1 or setup.parallel not in SHARDED:
        raise SetupError(
            f"{name} is planned beside {', '.join(SHARDED)} alone, got parallel {setup.parallel!r}",
            hint="use --parallel fsdp2 (a ring of keys and values) or zero3 (Ulysses)",
        )
    attentions = ("sdpa",) if setup.rings else ("sdpa", "flash-attention-2")
    if setup.attention not in attentions:
        raise SetupError(f"{name} under {setup.parallel} needs attention {' or '.join(attentions)}")
    if setup.seq_len_tokens % setup.pieces:
        raise SetupError(
            f"sequences of {setup.seq_len_tokens} tokens cannot be cut into {setup.pieces} pieces",
            hint=f"give --seq-len {-(-setup.seq_len_tokens // setup.pieces) * setup.pieces}",
        )
    if setup.compile or setup.selective_checkpointing:
        raise SetupError(f"{name} is not planned with torch.compile or selective checkpoints")


def _check_experts(setup: SetupValues) -> None:
    """What goes with experts that are dealt out over GPUs.

    Source: transformers 5.23 `DistributedConfig` (`ep_size` divides `fsdp_size`), `distributed/fsdp.py` (its plan
    always frees a layer; mixes precision in bf16).
    """
    degree, name = setup.expert_degree, f"expert_degree {setup.expert_degree}"
    if degree == 1:
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


def _check_sharing(setup: SetupValues) -> None:
    """What the copies share, and what does not go with it."""
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
    if setup.shard_degree and (setup.parallel != "fsdp2" or setup.copies % setup.shard_degree):
        raise SetupError(
            f"shard_degree {setup.shard_degree} needs parallel 'fsdp2' and must divide its {setup.copies} copies"
        )
    if not setup.reshard_after_forward and setup.parallel != "fsdp2":
        raise SetupError("reshard_after_forward off belongs to parallel 'fsdp2'")
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
    """Refuses a value that is none of these."""
    if value not in allowed:
        options = ", ".join(allowed)
        if known := told(name, value):
            raise SetupError(known[0], hint=f"{known[1]}; {name} is one of {options}")
        raise SetupError(f"{name} must be one of {options}; got {value!r}", hint=hint or f"choose one of {options}")


def count(name: str, value: object, *, at_least: int) -> None:
    """Refuses what is no whole number within sense."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SetupError(f"{name} must be a whole number, got {value!r}")
    if not at_least <= value <= MAX_COUNT:
        raise SetupError(f"{name} must be at least {at_least} and at most {MAX_COUNT}, got {value}")
