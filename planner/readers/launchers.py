"""Accelerate and DeepSpeed configs: how a run spreads over GPUs, on top of a setup that stands elsewhere."""

from typing import Any

from planner.errors import NotPlanned
from planner.readers import common, schema
from planner.readers.fields import config
from planner.readers.sharding import Spread, fsdp, hybrid, parallel_of, stage_of, zero_spread, zero_stage
from planner.readers.types import ReadConfig
from planner.readers.values import Settings
from planner.setup import SPREAD_FIELDS, TrainSetup
from planner.setup_fields import SHARDED
from planner.tools.others import ACCELERATE, DEEPSPEED

PLANNED_TYPES = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")
OTHER_TYPES = ("MULTI_CPU", "CPU", "MEGATRON_LM", "XPU", "TPU", "MULTI_NPU")


def read_accelerate(settings: Settings) -> ReadConfig:
    """The base setup of what is known outside, under an Accelerate config.

    Raises:
        ConfigError: an unknown key, or a kind of launch that is not planned.
    """
    missing, base = _base(settings)
    settings.note_unknown(schema.accepted("accelerate"), ACCELERATE)
    kind = _kind(settings)
    processes = num_processes(settings)
    spread, changes = _spread(settings, kind, processes)
    mixed = settings.raw("mixed_precision", "no")
    if mixed in ("bf16", "fp16") and base.autocast_dtype is None and base.precision in ("fp32", "bf16-pure"):
        weights = base.weight_dtype if mixed == "bf16" else "fp32"
        changes["precision"] = common.precision(settings, weights, mixed, base.method)
    elif mixed == "fp8":
        settings.approximate("fp8 matrix multiplications are counted as bf16")
    if base.context_degree > 1 and spread.get("parallel") in SHARDED:
        spread = {"context_degree": base.context_degree, **spread}  # a program's own `ParallelismConfig`
    found = parallel_of(settings, spread, processes)
    if base.parallel == "device-map" and found["parallel"] == "none":
        found = {}
    if base.sharded_at_loading and kind == "MULTI_GPU" and base.num_gpus == processes:
        found = {}  # transformers shards while it loads; the launcher only starts the processes
    if found:
        base = base.trusted_with(**{name: getattr(TrainSetup(), name) for name in SPREAD_FIELDS})
    settings.missing = {field: reason for field, reason in missing.items() if field not in changes}
    return config(ACCELERATE, settings, {**_as_dict(base), **found, **changes})


def _kind(settings: Settings) -> str:
    """How it launches.

    Raises:
        NotPlanned: on other devices, or by another engine.
    """
    word = settings.raw("distributed_type")
    kind = "NO" if word is False else settings.text("distributed_type", "NO").upper()
    if kind not in (*PLANNED_TYPES, *OTHER_TYPES):
        raise settings.error("distributed_type", f"one of {', '.join(PLANNED_TYPES)}", kind)
    if kind in OTHER_TYPES:
        raise NotPlanned(
            f"{settings.name}: distributed_type {kind} is not planned", hint="NO, MULTI_GPU, DEEPSPEED, FSDP are"
        )
    return kind


def _spread(settings: Settings, kind: str, processes: int) -> tuple[Spread, dict[str, Any]]:
    """How the job is spread, and the other fields that the file says with it."""
    if kind == "FSDP":
        block = settings.block("fsdp_config")
        changes = {"checkpointing": 1} if block.flag("fsdp_activation_checkpointing", False) else {}
        spread = fsdp(settings, dict(block.values), version=1)  # accelerate 1.15's own default
        return spread | _mesh(settings, processes), changes
    if kind != "DEEPSPEED":
        return {"parallel": "none"}, {}
    block = settings.block("deepspeed_config")
    if block.has("deepspeed_config_file"):
        spread = zero_stage(settings, block.raw("deepspeed_config_file"))
    else:
        spread = zero_spread(
            settings,
            block.integer("zero_stage", 2),
            optimizer=block.text("offload_optimizer_device", "none"),
            parameters=block.text("offload_param_device", "none"),
        )
    steps = block.raw("gradient_accumulation_steps", "auto")
    if steps == "auto":
        return spread, {}
    return spread, {"accumulation_steps": block.integer("gradient_accumulation_steps", 1, at_least=1)}


def num_processes(settings: Settings) -> int:
    """GPUs of a launch, over all machines; 0 leaves it to the machine: those that the run is said to have."""
    return settings.integer("num_processes", 1) or settings.outside.num_gpus


def _mesh(settings: Settings, processes: int) -> Spread:
    """Hybrid sharding: the groups of Accelerate's `parallelism_config`."""
    block = settings.mapping("parallelism_config")
    inner = Settings(
        {str(key).removeprefix("parallelism_config_"): value for key, value in block.items()},
        f"{settings.name}: parallelism_config",
    )
    if inner.integer("sp_size", 1, at_least=1) > 1:
        settings.approximate("sp_size splits sequences over GPUs: counted whole")
    if inner.text("cp_comm_strategy", "allgather") != "allgather":
        settings.approximate("keys that go from GPU to GPU one by one are counted as if all were gathered")
    sizes = {key: inner.integer(f"{key}_size", 1, at_least=1) for key in ("dp_shard", "dp_replicate", "tp", "cp")}
    shard, copies, tensor, context = sizes.values()
    return hybrid(settings, processes, shard=shard, copies=copies, tensor=tensor, context=context)


def _base(settings: Settings) -> tuple[dict[str, str], TrainSetup]:
    """What a file that only spreads a job leaves open, and the setup that says it."""
    if settings.outside.base is not None:
        return {}, settings.outside.base
    names = ("model", "method", "lora_rank", "precision", "micro_batch_seqs", "accumulation_steps", "seq_len_tokens")
    return dict.fromkeys((*names, "checkpointing"), f"{settings.name} says only how the job is spread"), TrainSetup()


def read_deepspeed(settings: Settings) -> ReadConfig:
    """The base setup of what is known outside, under a DeepSpeed JSON.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    missing, base = _base(settings)
    settings.note_unknown(schema.blocks("deepspeed")[""], DEEPSPEED)
    changes: dict[str, Any] = {}
    for key, field in (
        ("train_micro_batch_size_per_gpu", "micro_batch_seqs"),
        ("gradient_accumulation_steps", "accumulation_steps"),
    ):
        if settings.has(key) and settings.raw(key) != "auto":
            changes[field] = settings.integer(key, 1, at_least=1)
        else:
            settings.assume(f"{key} is left to the trainer")
    for kind in ("bf16", "fp16"):
        block = settings.block(kind)
        if block.raw("enabled") is True and base.compute_dtype != kind:
            changes["precision"] = f"{kind}-autocast" if base.method != "full" else f"{kind}-mixed"
    spread = parallel_of(settings, stage_of(settings, settings.values))
    fields = {**_as_dict(base), **spread, **changes}
    settings.missing = {field: reason for field, reason in missing.items() if field not in changes}
    return config(DEEPSPEED, settings, fields)


def _as_dict(setup: TrainSetup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in TrainSetup.__dataclass_fields__}


READERS = {"accelerate": read_accelerate, "deepspeed": read_deepspeed}
