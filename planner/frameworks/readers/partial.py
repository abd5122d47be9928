"""Layers that train alone, as the tools' settings name them: `TrainSetup.trained_layers`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.frameworks.readers.values import Settings
from planner.models.spec import LayerSpec, ModelSpec

NAMED = "only some parameters are trained (unfrozen_parameters): counted as full fine-tuning"


def spelled(numbers: Sequence[int], full: int) -> int | tuple[int, ...]:
    """Layers of so many by their numbers as a setup says them: so many of the last or first, else all numbers."""
    ordered = tuple(sorted(set(numbers)))
    if ordered == tuple(range(full)):
        return 0
    if ordered == tuple(range(ordered[0], full)):
        return len(ordered)
    return -len(ordered) if ordered == tuple(range(len(ordered))) else ordered


def adapted_layers(settings: Settings, key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The layers that carry adapters; nothing where a setting names none, or cannot be followed, which is said."""
    numbers, model = settings.raw(key), settings.model
    if numbers in (None, False, [], ""):
        return {}
    named = [numbers] if type(numbers) is int else numbers if isinstance(numbers, list) else []
    counted = fields["method"] != "full" and fields.get("objective", "sft") in ("sft", "pretrain")
    valid = model is not None and all(type(number) is int and 0 <= number < model.num_layers for number in named)
    if counted and named and valid and model is not None:
        layers = spelled(named, model.num_layers)
        if is_last(layers) or _apart(fields):
            return {"trained_layers": layers} if layers else {}
    settings.approximate(f"adapters on some layers ({key}) are counted on all of them")
    return {}


def frozen_but(settings: Settings, model: ModelSpec | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The layers that Axolotl's `unfrozen_parameters` leaves training, of which single parameters count as the whole
    layer; nothing where parameters outside the layers train too.

    Source: axolotl 0.21 `utils/freeze.py` LayerNamePattern (matched from a name's beginning, every dot is one, an index
    range behind in brackets).
    """
    patterns = settings.names("unfrozen_parameters")
    if not patterns:
        return {}
    layers, whole = _matched(model, patterns) if model is not None else ((), False)
    trained_layers = spelled(layers, model.num_layers) if layers and model is not None else 0
    if not trained_layers or fields["method"] != "full" or not (is_last(trained_layers) or _apart(fields)):
        settings.approximate(NAMED)
        return {}
    if not whole:
        settings.approximate("unfrozen_parameters trains parts of some layers: these are counted whole, an upper bound")
    return {"trained_layers": trained_layers}


def is_last(layers: int | tuple[int, ...]) -> bool:
    """Whether they are the last ones, which every engine's memory is known of."""
    return isinstance(layers, int) and layers >= 0


def _apart(fields: Mapping[str, Any]) -> bool:
    """Whether every GPU holds the whole model."""
    return fields.get("parallel", "none") in ("none", "ddp")


def _matched(model: ModelSpec, patterns: Sequence[str]) -> tuple[Sequence[int], bool]:
    """(Layers of which a pattern names a parameter, whether it names all of theirs); none where one names a parameter
    outside the layers, or a pattern is none."""
    try:
        named = [
            re.compile(re.sub(r"\.(?!\+)", r"\\.", re.sub(r"\[\d*(:\d*)?\]$", "", pattern))) for pattern in patterns
        ]
    except re.error:
        return (), False
    outer = [embedding.name for embedding in model.embeddings]
    outer += [norm.name for norm in model.outer_norms]
    outer += [linear.name for linear in model.outer_linears]
    outer += [model.head.name] if model.head is not None else []
    if any(pattern.match(f"{name}.weight") for pattern in named for name in outer):
        return (), False
    numbers, whole = [], not any(re.search(r"\[\d*(:\d*)?\]$", pattern) for pattern in patterns)
    for number, kind in enumerate(model.layer_order):
        layer = model.layer_kinds[kind]
        hits = [any(pattern.match(f"{layer.path}.{number}.{name}") for pattern in named) for name in _parameters(layer)]
        if any(hits):
            numbers.append(number)
            whole = whole and all(hits)
    return numbers, whole


def _parameters(layer: LayerSpec) -> list[str]:
    """Names of a layer's parameters below its number."""
    weights = [linear.name if linear.module == "parameter" else f"{linear.name}.weight" for linear in layer.linears]
    return [*weights, *(f"{norm.name}.weight" for norm in layer.norms)]
