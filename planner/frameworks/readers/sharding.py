"""How a config spreads over GPUs: DeepSpeed files named inside it, FSDP blocks, and how many GPUs there are; and the
configs of Accelerate and DeepSpeed themselves, on top of a setup that stands elsewhere."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError, NotPlanned, Undetermined
from planner.frameworks.readers import common, versions
from planner.frameworks.readers.common import config
from planner.frameworks.readers.loading import parse_json, parse_yaml, read_bounded
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools.others import ACCELERATE, DEEPSPEED
from planner.options.layouts import SHARDED, ZERO
from planner.options.zero_buffers import AUTO, BY_MODEL, KEYS, SHIPPED, ZeroBuffers
from planner.setup import LAYOUT_FIELDS, TrainSetup

PLANNED_TYPES = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")
OTHER_TYPES = ("MULTI_CPU", "CPU", "MEGATRON_LM", "XPU", "TPU", "MULTI_NPU")
Layout = dict[str, Any]
"""Fields of a setup that say how it is spread: "parallel", "offload", "reshard_after_forward" and the degrees."""


def parallel_of(settings: Settings, layout: Layout, num_gpus: int = 0) -> dict[str, Any]:
    """`num_gpus` (0: the run's) and the layout of a setup. Several without sharding are plain copies; of one GPU what
    DeepSpeed holds for itself (fp32 masters) and what lies in the host's memory count."""
    num_gpus = num_gpus or settings.outside.num_gpus
    parallel, offload = layout.get("parallel", "none"), layout.get("offload", "none")
    if num_gpus == 1:
        if parallel != "none":
            settings.assume(f"{parallel} is counted over one GPU, where it shards nothing (say how many with --gpus)")
        if parallel in ZERO or (parallel in SHARDED and offload != "none"):
            return {"num_gpus": 1, "parallel": parallel, "offload": offload, "zero_buffers": layout.get("zero_buffers")}
        return {"num_gpus": 1, "parallel": "none"}
    degrees = {name: layout.get(name, 1) for name in ("tensor_degree", "pipeline_degree")}
    split = degrees["tensor_degree"] * degrees["pipeline_degree"]
    cut = split * layout.get("context_degree", 1)
    if num_gpus % cut:
        raise ConfigError(
            f"{settings.name}: {num_gpus} GPUs cannot be cut into tensor x pipeline x context parallelism of {cut}",
            hint="say how many GPUs the run has with --gpus",
        )
    if num_gpus == split:  # one copy: nothing to share
        experts = {name: value for name, value in layout.items() if name == "expert_degree"}
        return {**degrees, **experts, "num_gpus": num_gpus, "parallel": "none"}
    version = {"fsdp_version": 2} if split > 1 and "fsdp_version" in layout else {}
    return {**layout, **version, "num_gpus": num_gpus, "parallel": "ddp" if parallel == "none" else parallel}


def with_cut_sequences(
    settings: Settings, key: str, layout: Layout, fields: Mapping[str, Any], num_gpus: int = 0
) -> dict[str, Any]:
    """As `parallel_of`, for a tool that cuts every sequence over GPUs by attention of its own (`key`: over how many):
    counted as PyTorch's ring beside FSDP2, else as DeepSpeed's Ulysses. Sequences are padded to whole pieces.

    Source: Axolotl 0.21 `monkeypatch/ring_attn` (ring-flash-attn), ms-swift 4 `swift/trainers/sequence_parallel`
    (Ulysses, then a ring): each GPU holds its piece of a sequence, and whole states as its sharding has them.
    """
    degree, num_gpus = settings.integer(key, 1, at_least=1), num_gpus or settings.outside.num_gpus
    if degree == 1:
        return parallel_of(settings, layout, num_gpus)
    if num_gpus % degree:
        raise Undetermined(
            f"{settings.name}: {key} {degree} cuts every sequence over {degree} GPUs, of {num_gpus} in the run",
            hint=f"say how many the run has: --gpus {degree}, or a multiple of it",
        )
    if layout.get("parallel", "none") not in SHARDED:
        if fields["method"] == "full":
            raise NotPlanned(
                f"{settings.name}: {key} {degree} beside states that nothing shards is not planned",
                hint="plan check answers with DeepSpeed's ZeRO or FSDP in the config",
            )
        layout = {**layout, "parallel": "zero1"}  # of adapters: their few states alone are cut
    ring = layout["parallel"] == "fsdp2"
    how = "PyTorch's ring" if ring else "DeepSpeed's Ulysses"
    settings.approximate(f"sequences cut over GPUs ({key}) are counted as by {how}")
    pieces = degree * (2 if ring else 1)
    tokens = -(-int(fields["seq_len_tokens"]) // pieces) * pieces
    attention = {"attention": "sdpa"} if ring else {}  # whose bytes a ring of flash attention keeps
    return {
        "seq_len_tokens": tokens,
        **attention,
        **parallel_of(settings, {**layout, "context_degree": degree}, num_gpus),
    }


def device_map(settings: Settings, kwargs: Settings) -> dict[str, Any]:
    """A model whose layers lie over several GPUs, as its loading asks; nothing where it does not."""
    over_gpus = kwargs.raw("device_map") == "auto" and settings.outside.num_gpus > 1
    return {"num_gpus": settings.outside.num_gpus, "parallel": "device-map"} if over_gpus else {}


def hybrid(settings: Settings, num_gpus: int, *, shard: int, copies: int, tensor: int, context: int = 1) -> Layout:
    """The groups of a device mesh: shards within a group (over those of one sequence too), copies over the groups,
    matrices cut within `tensor`, sequences within `context`."""
    layout: Layout = {"tensor_degree": tensor} if tensor > 1 else {}
    if context > 1:
        layout["context_degree"] = context
    if copies > 1 and shard > 1:
        if num_gpus == copies * shard * tensor * context:
            layout["shard_degree"] = shard * context
        elif num_gpus > 1:
            sizes = (copies, shard, *(size for size in (tensor, context) if size > 1))
            mesh = f"{' x '.join(map(str, sizes))} = {prod(sizes)}"
            raise Undetermined(
                f"{settings.name} makes a mesh of {mesh} GPUs, of {num_gpus} in the run",
                hint=f"say how many the run has: --gpus {prod(sizes)}",
            )
    return layout


def cut_sequences(settings: Settings, mesh: Settings, layout: Layout) -> Layout:
    """What `ParallelismConfig` says of sequences: cut by PyTorch under FSDP2 (cp_size) or by DeepSpeed (sp_size), whose
    stage may be said by the launcher alone."""
    ring, ulysses = (mesh.integer(key, 1, at_least=1) for key in ("cp_size", "sp_size"))
    if ring * ulysses == 1:
        return {}
    strategies = ("fsdp2",) if ring > 1 else ("zero3", "zero2", "zero1")
    sequence_layout: Layout = {"context_degree": max(ring, ulysses)}
    if layout.get("parallel", "none") not in strategies:
        settings.assume(f"{strategies[0]} is taken beside sequences cut over GPUs: the launcher's file says what it is")
        sequence_layout["parallel"] = strategies[0]
    return sequence_layout


def distributed(settings: Settings, block: dict[str, Any]) -> Layout:
    """The spread of transformers' `DistributedConfig` (tensor parallelism, FSDP2 while loading)."""
    num_gpus = settings.outside.num_gpus
    inner = Settings(block, f"{settings.name}: distributed_config")
    shard, copies = (inner.integer(key, 1, at_least=1) for key in ("fsdp_size", "dp_replicate_size"))
    stages = inner.integer("pp_size", 1, at_least=1)
    rest = num_gpus // (shard * copies * stages) if inner.has("tp_plan") else 1
    tensor = inner.integer("tp_size", max(1, rest), at_least=1)
    layout = hybrid(settings, num_gpus // stages, shard=shard, copies=copies, tensor=tensor)
    if stages > 1:
        layout["pipeline_degree"] = stages
    if shard * copies > 1:
        layout["parallel"] = "fsdp2"
        if inner.flag("fsdp_cpu_offload", False):
            layout["offload"] = "parameters"
    experts = inner.integer("ep_size", 1, at_least=1)
    if experts > 1:
        layout["expert_degree"] = experts
    return layout


def loaded(settings: Settings, kwargs: Settings) -> Layout | None:
    """The spread that `from_pretrained`'s own arguments ask for; None where they ask for none."""
    block = kwargs.raw("distributed_config")
    if block is None and (kwargs.has("tp_plan") or kwargs.has("tp_size")):
        block = {key: kwargs.raw(key) for key in ("tp_plan", "tp_size") if kwargs.has(key)}
    return distributed(settings, block) if isinstance(block, dict) and settings.outside.num_gpus > 1 else None


_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""Accelerate's numbers for FSDP1's strategies."""


def fsdp_words(settings: Settings, words: str, block: dict[str, Any]) -> Layout:
    """The spread of TrainingArguments' `fsdp`: words such as "full_shard auto_wrap offload" (version 2 in 5.23)."""
    options = words.replace(",", " ").lower().split()
    strategy = next((word.upper() for word in options if word.endswith(("_shard", "grad_op", "zero2"))), "FULL_SHARD")
    wraps = "auto_wrap" in options or any("wrap" in key for key in block)
    values = {"sharding_strategy": strategy, "auto_wrap_policy": "auto" if wraps else "NO_WRAP", **block}
    return fsdp(settings, values | ({"offload_params": True} if "offload" in options else {}))


def fsdp(settings: Settings, block: dict[str, Any], *, version: int = 2) -> Layout:
    """The spread of an FSDP block, whose keys stand with or without the prefix "fsdp_" (Accelerate's and Axolotl's).

    Args:
        version: of FSDP where the block does not say one.
    """
    values = {str(key).removeprefix("fsdp_"): value for key, value in block.items()}
    inner = Settings(values, f"{settings.name}: fsdp_config")
    strategy = str(inner.raw("sharding_strategy", "")).upper()
    strategy = _STRATEGIES.get(strategy, strategy)
    if strategy == "NO_SHARD":
        return {"parallel": "ddp"}
    if str(inner.raw("auto_wrap_policy", "")).upper() == "NO_WRAP":
        raise NotPlanned(
            f"{settings.name}: FSDP without wrapping (NO_WRAP) gathers the whole model at once: not planned",
            hint="TRANSFORMER_BASED_WRAP gathers one layer at a time",
        )
    reshard = inner.raw("reshard_after_forward", strategy or True)
    if isinstance(reshard, str) and reshard.upper() in ("FULL_SHARD", "HYBRID_SHARD"):
        reshard = True
    elif isinstance(reshard, str) and reshard.upper() in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        reshard = False
    else:
        reshard = inner.flag("reshard_after_forward", True)
    layout: Layout = {"parallel": "fsdp2", "reshard_after_forward": reshard}
    if inner.integer("version", version) == 1:
        layout["fsdp_version"] = 1
        settings.assume("FSDP version 1 is counted like version 2, and the layer inputs that its hooks hold beside it")
    if inner.flag(inner.first("offload_params", "cpu_offload"), False):
        layout["offload"] = "parameters"
    return layout


def zero_stage(settings: Settings, value: Any) -> Layout:
    """The spread of a DeepSpeed setting: the configuration itself or a path to it; of one that is not at hand and whose
    name does not say the stage it is asked for, on one GPU too: masters and offloading stand in it."""
    if isinstance(value, dict):
        return stage_of(settings, value)
    if not isinstance(value, str):
        raise settings.error("deepspeed", "a path or a block of settings", value)
    path = settings.outside.find(value)
    # a file, or one written before
    text = read_bounded(path) if path is not None else settings.outside.read_relative(value)
    if text is not None:
        parsed = parse_json(text, value) if value.endswith(".json") else parse_yaml(text, value).values
        return stage_of(settings, parsed)
    named = re.search(r"(?:zero|z|stage)[_-]?([0-3])", Path(value).name.lower())
    if named:
        # the file's name says the stage; whether it offloads, the name of one that a tool ships alone
        name = Path(value).name
        stage = int(named[1])
        settings.assume(f"deepspeed {name} is not at hand: its name says ZeRO stage {stage}")
        if not stage:
            return {"parallel": "none"}
        layout: Layout = {"parallel": f"zero{stage}", "zero_buffers": SHIPPED[f"zero{stage}"]}
        if "offload" in name.lower():
            return layout | {"offload": "parameters" if stage == 3 else "optimizer"}
        if not _SHIPPED.fullmatch(name):
            settings.ask("offload", f": deepspeed {name} is not at hand, and its name does not say what it offloads")
        return layout
    for field in ("parallel", "offload"):
        settings.ask(field, f": the deepspeed config {value!r:.80} is not beside it")
    return {}


_SHIPPED = re.compile(r"(default-)?zero[0-3](_bf16|_torch_compile)?(\.json)?|ds_z[0-3]_config\.json")
"""Files that Axolotl, LLaMA-Factory and ms-swift ship, which offload nothing."""


def stage_of(settings: Settings, values: Mapping[str, Any]) -> Layout:
    """The ZeRO stage of a DeepSpeed configuration, and what it offloads."""
    zero = values.get("zero_optimization") or {}
    if not isinstance(zero, dict):
        raise settings.error("zero_optimization", "a block of settings", zero)
    inside = Settings(zero, f"{settings.name}: zero_optimization")
    stage = inside.integer("stage", 0)
    if stage > 3:
        raise settings.error("zero_optimization.stage", "0 to 3", stage)
    expert_parallel = values.get("expert_parallel")
    if isinstance(expert_parallel, dict) and expert_parallel.get("enabled"):
        settings.approximate(
            "experts distributed by DeepSpeed (expert_parallel) are counted as if ZeRO alone sharded them"
        )
    devices = {}
    for key, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_params")):
        block = zero.get(key)
        device = block.get("device", "none") if isinstance(block, dict) else "none"
        devices[key] = "cpu" if zero.get(old) is True else str(device or "none")
    layout = zero_layout(settings, stage, optimizer=devices["offload_optimizer"], parameters=devices["offload_param"])
    if stage:
        layout["zero_buffers"] = _zero_buffers(inside)
    cut = values.get("tensor_parallel")
    inner = Settings(cut if isinstance(cut, dict) else {}, f"{settings.name}: tensor_parallel")
    return with_autotp(settings, layout, inner.integer("autotp_size", 0))


def _zero_buffers(block: Settings) -> ZeroBuffers:
    stated: dict[str, Any] = {"overlaps": block.raw("overlap_comm") is True}
    for name, keys in KEYS.items():
        key = block.first(*keys)
        if block.raw(key) is not None:
            stated[name] = AUTO if name in BY_MODEL and block.raw(key) == "auto" else block.integer(key, 0)
    return ZeroBuffers(**stated)


def with_autotp(settings: Settings, layout: Layout, degree: int) -> Layout:
    """A DeepSpeed layout whose matrices AutoTP cuts over `degree` GPUs of each copy (0, 1: none).

    Source: deepspeed.ai/tutorials/autotp-training (stages 0, 1 and 2 alone). Measured by others: Qwen2-7B under ZeRO-2
    takes about 7 GB less with autotp_size 2 (LLaMA-Factory pull request 9602); on 8 GPUs 7.1 GiB here.
    """
    num_gpus, stage = settings.outside.num_gpus, layout["parallel"]
    if degree < 2 or num_gpus == 1:
        return layout
    if stage == "zero3" or (stage != "none" and num_gpus == degree):
        why = "DeepSpeed has it in stages 0 to 2" if stage == "zero3" else f"{degree} GPUs hold one copy, not planned"
        hint = "leave autotp_size out, or take stage 1 or 2 on a multiple of its GPUs"
        raise NotPlanned(f"{settings.name}: AutoTP over {degree} GPUs beside {stage}: {why}", hint=hint)
    settings.approximate("matrices cut by DeepSpeed's AutoTP are counted as cut by transformers' tensor parallelism")
    return {**layout, "tensor_degree": degree}


def zero_layout(settings: Settings, stage: int, *, optimizer: str, parameters: str) -> Layout:
    """The spread of a ZeRO stage with the devices ("none", "cpu", "nvme") that it offloads to."""
    if stage == 0:
        return {"parallel": "none"}
    if "nvme" in (optimizer, parameters):
        settings.approximate("offloading to NVMe is counted as offloading to the host's memory")
    layout: Layout = {"parallel": f"zero{stage}", "zero_buffers": ZeroBuffers()}
    if parameters != "none" and stage < 3:
        settings.assume(f"parameters stay on the GPU: DeepSpeed offloads them only in stage 3, not in stage {stage}")
    if parameters != "none" and stage == 3:
        if optimizer == "none":
            settings.approximate("offloaded parameters with optimizer states on the GPU are counted as all offloaded")
        layout["offload"] = "parameters"
    elif optimizer != "none":
        layout["offload"] = "optimizer"
    return layout


def read_accelerate(settings: Settings) -> ReadConfig:
    """The base setup of what is known outside, under an Accelerate config."""
    missing, base = _base(settings)
    settings.note_unknown(versions.accepted("accelerate"), ACCELERATE)
    word = settings.raw("distributed_type")
    kind = "NO" if word is False else settings.text("distributed_type", "NO").upper()
    if kind not in (*PLANNED_TYPES, *OTHER_TYPES):
        raise settings.error("distributed_type", f"one of {', '.join(PLANNED_TYPES)}", kind)
    if kind in OTHER_TYPES:
        raise NotPlanned(
            f"{settings.name}: distributed_type {kind} is not planned", hint="NO, MULTI_GPU, DEEPSPEED, FSDP are"
        )
    processes = num_processes(settings)
    layout, changes = _layout(settings, kind, processes)
    mixed = settings.raw("mixed_precision", "no")
    if mixed in ("bf16", "fp16") and base.autocast_dtype is None and base.precision in ("fp32", "bf16-pure"):
        widened = base.method != "full" or kind in ("FSDP", "DEEPSPEED")
        weights = "fp32" if mixed == "fp16" and widened else base.weight_dtype
        changes["precision"] = common.precision(settings, weights, mixed, base.method)
    elif mixed == "fp8":
        settings.approximate("fp8 matrix multiplications are counted as bf16")
    if base.context_degree > 1 and layout.get("parallel") in SHARDED:
        layout = {"context_degree": base.context_degree, **layout}  # a program's own `ParallelismConfig`
    layout_fields = parallel_of(settings, layout, processes)
    if base.parallel == "device-map" and layout_fields["parallel"] == "none":
        layout_fields = {}
    if base.sharded_at_loading and kind == "MULTI_GPU" and base.num_gpus == processes:
        layout_fields = {}  # transformers shards while it loads; the launcher only starts the processes
    if layout_fields:
        base = base.replace_trusted(**{name: getattr(TrainSetup(), name) for name in LAYOUT_FIELDS})
    settings.missing = {field: reason for field, reason in missing.items() if field not in changes}
    return config(ACCELERATE, settings, {**_fields(base), **layout_fields, **changes})


def _layout(settings: Settings, kind: str, processes: int) -> tuple[Layout, dict[str, Any]]:
    if kind == "FSDP":
        block = settings.block("fsdp_config")
        changes = {"checkpointing": 1} if common.fsdp_checkpoints(block) else {}
        layout = fsdp(settings, dict(block.values), version=1)  # accelerate 1.15's own default
        inner = _parallelism(settings)
        if inner.integer("sp_size", 1, at_least=1) > 1:
            settings.approximate("sp_size cuts sequences under DeepSpeed alone: counted whole")
        if inner.text("cp_comm_strategy", "allgather") != "allgather":
            settings.approximate("keys that go from GPU to GPU one by one are counted as if all were gathered")
        sizes = {key: inner.integer(f"{key}_size", 1, at_least=1) for key in ("dp_shard", "dp_replicate", "tp", "cp")}
        shard, copies, tensor, context = sizes.values()
        return layout | hybrid(settings, processes, shard=shard, copies=copies, tensor=tensor, context=context), changes
    if kind != "DEEPSPEED":
        return {"parallel": "none"}, {}
    block = settings.block("deepspeed_config")
    if block.has("deepspeed_config_file"):
        layout = zero_stage(settings, block.raw("deepspeed_config_file"))
    else:
        layout = zero_layout(
            settings,
            block.integer("zero_stage", 2),
            optimizer=block.text("offload_optimizer_device", "none"),
            parameters=block.text("offload_param_device", "none"),
        )
    layout |= cut_sequences(settings, _parallelism(settings), layout)
    steps = block.raw("gradient_accumulation_steps", "auto")
    if steps == "auto":
        return layout, {}
    return layout, {"accumulation_steps": block.integer("gradient_accumulation_steps", 1, at_least=1)}


def num_processes(settings: Settings) -> int:
    """GPUs of a launch, over all machines; 0 leaves it to the machine: those that the run is said to have."""
    return settings.integer("num_processes", 1) or settings.outside.num_gpus


def _parallelism(settings: Settings) -> Settings:
    block = settings.mapping("parallelism_config")
    values = {str(key).removeprefix("parallelism_config_"): value for key, value in block.items()}
    return Settings(values, f"{settings.name}: parallelism_config")


def _base(settings: Settings) -> tuple[dict[str, str], TrainSetup]:
    if settings.outside.base is not None:
        return {}, settings.outside.base
    names = ("model", "method", "lora_rank", "precision", "micro_batch_seqs", "accumulation_steps", "seq_len_tokens")
    return dict.fromkeys((*names, "checkpointing"), f"{settings.name} says only how the job is spread"), TrainSetup()


def read_deepspeed(settings: Settings) -> ReadConfig:
    """The base setup of what is known outside, under a DeepSpeed JSON."""
    missing, base = _base(settings)
    settings.note_unknown(versions.blocks("deepspeed")[""], DEEPSPEED)
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
    layout = parallel_of(settings, stage_of(settings, settings.values))
    fields = {**_fields(base), **layout, **changes}
    settings.missing = {field: reason for field, reason in missing.items() if field not in changes}
    return config(DEEPSPEED, settings, fields)


def _fields(setup: TrainSetup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in TrainSetup.__dataclass_fields__}


LAUNCHERS = {"accelerate": read_accelerate, "deepspeed": read_deepspeed}
