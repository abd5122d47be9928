"""How a config spreads over GPUs: DeepSpeed files named inside it, FSDP blocks, and how many GPUs there are."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import ConfigError
from planner.readers.loading import parse_json, parse_yaml, read_bounded
from planner.readers.values import Settings


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is known from outside the file: the number of GPUs, and where files that it names may lie."""

    num_gpus: int = 1
    roots: tuple[Path, ...] = field(default=())


def parallel_of(settings: Settings, parallel: str, num_gpus: int) -> dict[str, Any]:
    """`num_gpus` and `parallel` of a setup. Sharding needs several GPUs; several GPUs without it are plain copies."""
    if num_gpus == 1:
        if parallel != "none":
            settings.assume(f"{parallel} is counted over one GPU, where it saves nothing (say how many with --gpus)")
        return {"num_gpus": 1, "parallel": "none"}
    return {"num_gpus": num_gpus, "parallel": "ddp" if parallel == "none" else parallel}


def zero_stage(settings: Settings, value: Any, sharding: Sharding) -> str:
    """ "zero1" to "zero3" or "none" from a DeepSpeed setting: the configuration itself or a path to it.

    Raises:
        ConfigError: a path that cannot be followed and whose name does not say the stage.
    """
    if isinstance(value, dict):
        return stage_of(settings, value)
    if not isinstance(value, str):
        raise settings.error("deepspeed", "a path or a block of settings", value)
    found = _find(value, sharding)
    if found is not None:
        text = read_bounded(found)
        return stage_of(settings, parse_json(text, value) if found.suffix == ".json" else parse_yaml(text, value)[0])
    named = re.search(r"(?:zero|z|stage)[_-]?([0-3])", Path(value).name.lower())
    if named:
        settings.assume(f"deepspeed {Path(value).name} is not at hand: its name says ZeRO stage {named[1]}")
        return f"zero{named[1]}" if named[1] != "0" else "none"
    raise ConfigError(
        f"{settings.name}: deepspeed config {value!r} cannot be read",
        hint="absolute paths and links are not followed; put it beside the config, or name its stage (zero3.json)",
    )


def stage_of(settings: Settings, config: dict[str, Any]) -> str:
    """The ZeRO stage of a DeepSpeed configuration, noting what is offloaded."""
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, dict):
        raise settings.error("zero_optimization", "a block of settings", zero)
    stage = Settings(zero, f"{settings.name}: zero_optimization").integer("stage", 0)
    for key in ("offload_optimizer", "offload_param"):
        block = zero.get(key)
        if isinstance(block, dict) and block.get("device", "none") != "none":
            settings.approximate(f"DeepSpeed's {key} is counted as if nothing left the GPU")
    if stage > 3:
        raise settings.error("zero_optimization.stage", "0 to 3", stage)
    return f"zero{stage}" if stage else "none"


def _find(value: str, sharding: Sharding) -> Path | None:
    path = Path(value)
    if path.is_absolute() or ".." in path.parts or value.startswith("~"):
        return None
    for root in sharding.roots:
        candidate = root / path
        if candidate.is_file() and not candidate.is_symlink():
            return candidate
    return None
