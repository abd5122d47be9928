"""How a config spreads over GPUs: DeepSpeed files named inside it, FSDP blocks, and how many GPUs there are."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import ConfigError, NotPlanned, Undetermined
from planner.readers.loading import parse_json, parse_yaml, read_bounded
from planner.readers.values import Settings

Spread = dict[str, Any]
"""Fields of a setup that say how it is spread: "parallel", "offload", "reshard_after_forward" and the degrees."""


def parallel_of(settings: Settings, spread: Spread, num_gpus: int = 0) -> dict[str, Any]:
    """`num_gpus` (0: the run's) and the spread of a setup. Sharding needs several; without it they are plain copies."""
    num_gpus = num_gpus or settings.outside.num_gpus
    parallel = spread.get("parallel", "none")
    if num_gpus == 1:
        if parallel != "none":
            settings.assume(f"{parallel} is counted over one GPU, where it saves nothing (say how many with --gpus)")
        if spread.get("offload", "none") != "none":
            settings.approximate("offloading from one GPU is counted as if nothing left it")
        return {"num_gpus": 1, "parallel": "none"}
    degrees = {name: spread.get(name, 1) for name in ("tensor_degree", "pipeline_degree")}
    split = degrees["tensor_degree"] * degrees["pipeline_degree"]
    cut = split * spread.get("context_degree", 1)
    if num_gpus % cut:
        raise ConfigError(
            f"{settings.name}: {num_gpus} GPUs cannot be cut into tensor x pipeline x context parallelism of {cut}",
            hint="say how many GPUs the run has with --gpus",
        )
    if num_gpus == split:  # one copy: nothing to share
        dealt = {name: value for name, value in spread.items() if name == "expert_degree"}
        return {**degrees, **dealt, "num_gpus": num_gpus, "parallel": "none"}
    version = {"fsdp_version": 2} if split > 1 and "fsdp_version" in spread else {}
    return {**spread, **version, "num_gpus": num_gpus, "parallel": "ddp" if parallel == "none" else parallel}


def device_map(settings: Settings, kwargs: Settings) -> dict[str, Any]:
    """A model whose layers lie over several GPUs, as its loading asks; nothing where it does not."""
    spread_out = kwargs.raw("device_map") == "auto" and settings.outside.num_gpus > 1
    return {"num_gpus": settings.outside.num_gpus, "parallel": "device-map"} if spread_out else {}


def hybrid(settings: Settings, num_gpus: int, *, shard: int, copies: int, tensor: int, context: int = 1) -> Spread:
    """The groups of a device mesh: shards within a group (over those of one sequence too), copies over the groups,
    matrices cut within `tensor`, sequences within `context`."""
    spread: Spread = {"tensor_degree": tensor} if tensor > 1 else {}
    if context > 1:
        spread["context_degree"] = context
    if copies > 1 and shard > 1:
        if num_gpus == copies * shard * tensor * context:
            spread["shard_degree"] = shard * context
        elif num_gpus > 1:
            settings.assume(
                f"{copies} x {shard} x {tensor * context} GPUs of the mesh are not the {num_gpus} of the run: left out"
            )
    return spread


def cut_sequences(settings: Settings, mesh: Settings, spread: Spread) -> Spread:
    """What `ParallelismConfig` says of sequences: cut by PyTorch under FSDP2 (cp_size) or by DeepSpeed (sp_size), whose
    stage may be said by the launcher alone."""
    ring, ulysses = (mesh.integer(key, 1, at_least=1) for key in ("cp_size", "sp_size"))
    if ring * ulysses == 1:
        return {}
    own = ("fsdp2",) if ring > 1 else ("zero3", "zero2", "zero1")
    found: Spread = {"context_degree": max(ring, ulysses)}
    if spread.get("parallel", "none") not in own:
        settings.assume(f"{own[0]} is taken beside sequences cut over GPUs: the launcher's file says what it is")
        found["parallel"] = own[0]
    return found


def distributed(settings: Settings, block: dict[str, Any]) -> Spread:
    """The spread of transformers' `DistributedConfig` (tensor parallelism, FSDP2 while loading)."""
    num_gpus = settings.outside.num_gpus
    inner = Settings(block, f"{settings.name}: distributed_config")
    shard, copies = (inner.integer(key, 1, at_least=1) for key in ("fsdp_size", "dp_replicate_size"))
    stages = inner.integer("pp_size", 1, at_least=1)
    rest = num_gpus // (shard * copies * stages) if inner.has("tp_plan") else 1
    tensor = inner.integer("tp_size", max(1, rest), at_least=1)
    spread = hybrid(settings, num_gpus, shard=shard, copies=copies, tensor=tensor)
    if stages > 1:
        spread["pipeline_degree"] = stages
    if shard * copies > 1:
        spread["parallel"] = "fsdp2"
        if inner.flag("fsdp_cpu_offload", False):
            spread["offload"] = "parameters"
    experts = inner.integer("ep_size", 1, at_least=1)
    if experts > 1:
        spread["expert_degree"] = experts
    return spread


def loaded(settings: Settings, kwargs: Settings) -> Spread | None:
    """The spread that `from_pretrained`'s own arguments ask for; None where they ask for none."""
    block = kwargs.raw("distributed_config")
    if block is None and (kwargs.has("tp_plan") or kwargs.has("tp_size")):
        block = {key: kwargs.raw(key) for key in ("tp_plan", "tp_size") if kwargs.has(key)}
    return distributed(settings, block) if isinstance(block, dict) and settings.outside.num_gpus > 1 else None


_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""Accelerate's numbers for FSDP1's strategies."""


def fsdp_words(settings: Settings, words: str, block: dict[str, Any]) -> Spread:
    """The spread of TrainingArguments' `fsdp`: words such as "full_shard auto_wrap offload" (version 2 in 5.23)."""
    said = words.replace(",", " ").lower().split()
    strategy = next((word.upper() for word in said if word.endswith(("_shard", "grad_op", "zero2"))), "FULL_SHARD")
    wraps = "auto_wrap" in said or any("wrap" in key for key in block)
    values = {"sharding_strategy": strategy, "auto_wrap_policy": "auto" if wraps else "NO_WRAP", **block}
    return fsdp(settings, values | ({"offload_params": True} if "offload" in said else {}))


def fsdp(settings: Settings, block: dict[str, Any], *, version: int = 2) -> Spread:
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
    spread: Spread = {"parallel": "fsdp2", "reshard_after_forward": reshard}
    if inner.integer("version", version) == 1:
        spread["fsdp_version"] = 1
        settings.assume("FSDP version 1 is counted like version 2, and the layer inputs that its hooks hold beside it")
    if inner.flag(inner.first("offload_params", "cpu_offload"), False):
        spread["offload"] = "parameters"
    return spread


def zero_stage(settings: Settings, value: Any) -> Spread:
    """The spread of a DeepSpeed setting: the configuration itself or a path to it.

    Raises:
        ConfigError: a path that cannot be followed and whose name does not say the stage.
    """
    if isinstance(value, dict):
        return stage_of(settings, value)
    if not isinstance(value, str):
        raise settings.error("deepspeed", "a path or a block of settings", value)
    if (found := settings.outside.find(value)) is not None:
        text = read_bounded(found)
        config = parse_json(text, value) if found.suffix == ".json" else parse_yaml(text, value).values
        return stage_of(settings, config)
    named = re.search(r"(?:zero|z|stage)[_-]?([0-3])", Path(value).name.lower())
    if named:
        settings.assume(f"deepspeed {Path(value).name} is not at hand: its name says ZeRO stage {named[1]}")
        return {"parallel": f"zero{named[1]}" if named[1] != "0" else "none"}
    if settings.outside.num_gpus == 1:
        settings.assume(f"deepspeed config {value} is not beside it: on one GPU it shards nothing")
        return {"parallel": "none"}
    raise Undetermined(
        f"{settings.name}: the deepspeed config {value!r:.80} is not beside it and decides how the job is spread",
        hint="put it beside the config, or say --set parallel=zero2|zero3",
    )


def stage_of(settings: Settings, config: Mapping[str, Any]) -> Spread:
    """The ZeRO stage of a DeepSpeed configuration, and what it offloads."""
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, dict):
        raise settings.error("zero_optimization", "a block of settings", zero)
    stage = Settings(zero, f"{settings.name}: zero_optimization").integer("stage", 0)
    if stage > 3:
        raise settings.error("zero_optimization.stage", "0 to 3", stage)
    dealt = config.get("expert_parallel")
    if isinstance(dealt, dict) and dealt.get("enabled"):
        settings.approximate(
            "experts dealt out by DeepSpeed (expert_parallel) are counted as if ZeRO alone sharded them"
        )
    devices = {}
    for key, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_params")):
        block = zero.get(key)
        device = block.get("device", "none") if isinstance(block, dict) else "none"
        devices[key] = "cpu" if zero.get(old) is True else str(device or "none")
    return zero_spread(settings, stage, optimizer=devices["offload_optimizer"], parameters=devices["offload_param"])


def zero_spread(settings: Settings, stage: int, *, optimizer: str, parameters: str) -> Spread:
    """The spread of a ZeRO stage with the devices ("none", "cpu", "nvme") that it offloads to."""
    if stage == 0:
        return {"parallel": "none"}
    if "nvme" in (optimizer, parameters):
        settings.approximate("offloading to NVMe is counted as offloading to the host's memory")
    spread: Spread = {"parallel": f"zero{stage}"}
    if parameters != "none" and stage < 3:
        settings.assume(f"parameters stay on the GPU: DeepSpeed offloads them only in stage 3, not in stage {stage}")
    if parameters != "none" and stage == 3:
        if optimizer == "none":
            settings.approximate("offloaded parameters with optimizer states on the GPU are counted as all offloaded")
        spread["offload"] = "parameters"
    elif optimizer != "none":
        spread["offload"] = "optimizer"
    return spread
