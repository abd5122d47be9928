"""A campaign's YAML: blocks of models and setups, most valuable first, as chains of growing micro-batches."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from planner.errors import ConfigError, SetupError
from planner.inputs import number, whole
from planner.interchange import setup_from_dict
from planner.readers.loading import parse_yaml, read_bounded
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.units import GIB
from probes.gpu.request import Limits

MAX_MICRO_BATCH = 1024
MAX_COMBINATIONS = 100_000
"""Of one block's grid: a probe takes seconds, nobody waits for more."""
_BLOCK_KEYS = {
    "name", "models", "base", "grid", "variants", "micro_batch", "depths", "why", "memory_gib", "check_depth",
}  # fmt: skip
_TOP_KEYS = {"name", "gpu", "limits", "blocks", "output"}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One setup of one model, tried at growing micro-batches until it runs out of memory.

    Attributes:
        model: a model name as `plan` takes it, or a configuration itself.
        setup: at the first micro-batch.
        micro_batches: in order; the chain ends at the first that does not fit.
        depths: () truncated, (0,) full depth.
        check_depth: run a third depth as well, to see how far the extension misses.
    """

    block: str
    model: str
    config: Mapping[str, Any] | None = field(repr=False)
    setup: TrainSetup
    micro_batches: tuple[int, ...]
    depths: tuple[int, ...]
    limits: Limits
    check_depth: bool = True

    def at(self, index: int) -> TrainSetup:
        """The setup of the chain's index-th micro-batch."""
        return self.setup.with_(micro_batch_seqs=self.micro_batches[index])


@dataclass(frozen=True, kw_only=True)
class CampaignSpec:
    """What a campaign measures, in order of value."""

    name: str
    gpu: str
    chains: tuple[Chain, ...]
    impossible: int
    """Combinations of the grids that cannot exist as a setup; left out."""


def read_spec(path: Path) -> CampaignSpec:
    """The campaign of a YAML file.

    Raises:
        ConfigError: not YAML, an unknown key, or a value that makes no sense.
    """
    return parse_spec(parse_yaml(read_bounded(path), str(path))[0], str(path))


def parse_spec(values: Any, source: str) -> CampaignSpec:
    """The campaign of already parsed YAML."""
    if not isinstance(values, Mapping) or not isinstance(values.get("blocks"), list) or not values["blocks"]:
        raise ConfigError(f"{source}: a campaign needs a list of blocks", hint="see docs/probes.md for the form")
    _known(values, _TOP_KEYS, source)
    limits = _limits(values.get("limits") or {}, source)
    chains: list[Chain] = []
    impossible = 0
    for index, block in enumerate(values["blocks"]):
        where = f"{source}: block {index + 1}"
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {type(block).__name__}")
        _known(block, _BLOCK_KEYS, where)
        found, left_out = _chains(block, limits, where)
        chains.extend(found)
        impossible += left_out
    return CampaignSpec(
        name=str(values.get("name", Path(source).stem)),
        gpu=str(values.get("gpu", "local")),
        chains=tuple(_unique(chains)),
        impossible=impossible,
    )


def _chains(block: Mapping[str, Any], limits: Limits, where: str) -> tuple[list[Chain], int]:
    models = block.get("models")
    if not isinstance(models, list) or not models:
        raise ConfigError(f"{where} names no models", hint="models: [Qwen/Qwen2.5-0.5B]")
    depths = _depths(block.get("depths", "truncated"), where)
    if block.get("memory_gib") is not None:
        try:
            limits = replace(limits, memory_bytes=int(number(block["memory_gib"], "memory_gib") * GIB))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    chains, impossible = [], 0
    # Setups outside, models inside: when the budget ends early, every model has been seen.
    for values in _combinations(block, where):
        micro_batches = _micro_batches(values.pop("micro_batch", block.get("micro_batch", "doubling")), where)
        try:
            setup = setup_from_dict({**values, "micro_batch_seqs": micro_batches[0]})
        except SetupError as error:
            if error.message.startswith("unknown setup key"):  # the others are combinations that cannot exist
                raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
            impossible += 1
            continue
        for model in models:
            name, config = _named(model, where)
            chains.append(
                Chain(
                    block=str(block.get("name", where)),
                    model=name,
                    config=config,
                    setup=setup,
                    micro_batches=micro_batches,
                    depths=depths,
                    limits=limits,
                    check_depth=bool(block.get("check_depth", True)),
                )
            )
    return chains, impossible


def _named(model: object, where: str) -> tuple[str, Mapping[str, Any] | None]:
    """A model's name, and its configuration where it is given by one."""
    if isinstance(model, str):
        return model, None
    if not isinstance(model, Mapping):
        raise ConfigError(f"{where}: a model is a name or a configuration, got {model!r:.80}")
    name = str(model.get("name", model.get("model_type", "config")))
    return name, {key: value for key, value in model.items() if key != "name"}


def _combinations(block: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    base = block.get("base") or {}
    grid = block.get("grid") or {}
    variants = block.get("variants") or [{}]
    if not isinstance(base, Mapping) or not isinstance(grid, Mapping) or not isinstance(variants, list):
        raise ConfigError(f"{where}: base and grid are mappings, variants is a list of mappings")
    if not all(isinstance(variant, Mapping) for variant in variants):
        raise ConfigError(f"{where}: variants is a list of mappings")
    axes, num = [], len(variants)
    for name, options in grid.items():
        if not isinstance(options, list) or not options:
            raise ConfigError(f"{where}: grid.{name} must be a list of values, got {options!r}")
        axes.append([(name, option) for option in options])
        num *= len(options)
    if num > MAX_COMBINATIONS:
        raise ConfigError(f"{where} has {num:,} combinations, at most {MAX_COMBINATIONS:,} are read")
    for point in itertools.product(*axes):
        for variant in variants:
            yield {**base, **variant, **dict(point)}


def _micro_batches(value: Any, where: str) -> tuple[int, ...]:
    if value == "doubling":
        return tuple(1 << power for power in range(MAX_MICRO_BATCH.bit_length()))
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list) and value and all(type(one) is int and 1 <= one <= MAX_MICRO_BATCH**2 for one in value):
        return tuple(sorted(set(value)))
    raise ConfigError(f"{where}: micro_batch must be 'doubling', a number or a list of numbers, got {value!r}")


def _depths(value: Any, where: str) -> tuple[int, ...]:
    if value == "truncated":
        return ()
    if value == "full":
        return (0,)
    if isinstance(value, list) and len(value) >= 2 and all(type(one) is int and 1 <= one <= 10_000 for one in value):
        return tuple(value)
    raise ConfigError(f"{where}: depths must be 'truncated', 'full' or two depths, got {value!r}")


def _limits(values: Mapping[str, Any], source: str) -> Limits:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: limits must be a mapping, got {type(values).__name__}")
    kinds = {one.name: one.type for one in fields(Limits)}
    _known(values, set(kinds), f"{source}: limits")
    try:
        for name, value in values.items():
            if value is None and "None" in str(kinds[name]):
                continue
            if name != "cpu_clock":
                (whole if "int" in str(kinds[name]) else number)(value, f"limits.{name}")
        return Limits(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _known(values: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(set(map(str, values)) - allowed)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}", hint=f"known keys: {', '.join(sorted(allowed))}")


def _unique(chains: list[Chain]) -> Iterator[Chain]:
    """Chains in order, the first of equals: blocks may overlap."""
    seen = set()
    for chain in chains:
        key = (chain.model, chain.setup, chain.micro_batches, chain.depths, chain.limits)
        if key not in seen:
            seen.add(key)
            yield chain
