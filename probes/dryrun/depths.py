"""Which depths to run so that the full depth follows exactly, and the check that truncation kept the pattern."""

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from probes.dryrun.layer_map import LayerMap
from probes.stack.build import bare_model
from probes.stack.configs import config_of_layers, layer_signatures, layers_of, num_layers, period_of


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """The depth to run, its configuration, and which of its layers stand for the full model's (None: no layer
    is missing).

    `wider` plans more layers, for a model whose first layer allocates otherwise than the second.
    """

    full: int
    depth: int
    config: Any
    whole: Any
    layers: LayerMap | None
    wider: "Callable[[], DepthPlan] | None" = None


def plan_depth(config: Any, *, checkpointing: int, full_depth: bool, unlike: int = 0, reach: int = 1) -> DepthPlan:
    """Layers enough to hold every kind of layer between every kind of neighbours, or all when that is asked for, when
    no fewer do, or when a model of those layers alone has others, or others outside them (Gemma 4's table of every
    layer's embeddings).

    Args:
        unlike: layers at the start that do what others of their kind do not.
        reach: how many layers on either side are neighbours.
    """
    try:
        full = num_layers(config)
    except ValueError:  # several stacks of layers, and no field that tells their depth
        full, full_depth = len(layer_kinds(config)), True
    whole = DepthPlan(full=full, depth=full, config=config, whole=config, layers=None)
    one_by_one = any(re.search(r"\d", name) for name in getattr(config, "kept_modules", ()))  # no layer repeats
    if full_depth or config.is_encoder_decoder or one_by_one:
        return whole  # an encoder-decoder's two halves grow together, and its models are small
    signatures, outside = _pattern(config)
    if len(signatures) != full:  # the layers run more than once
        return whole
    text = config.get_text_config()
    shared = {*range(full - int(getattr(text, "num_kv_shared_layers", 0) or 0), full)}
    shared |= {*(getattr(text, "cross_attention_layers", None) or ())}  # all of them look at the same pictures
    last = {signature: layer for layer, signature in enumerate(signatures)}
    for every in dict.fromkeys((checkpointing or 1, math.lcm(period_of(signatures)[1], checkpointing or 1))):
        kinds: list[Kind] = [
            (signature, layer % every, min(layer, unlike), layer in shared and last[signature] == layer)
            for layer, signature in enumerate(signatures)
        ]
        chosen = fewest(kinds, reach)
        if len(chosen) == full:
            break
        try:
            short = config_of_layers(config, chosen)
            made_signatures, made_outside = _pattern(short)
        except (ValueError, IndexError, KeyError):
            continue
        if made_outside == outside and made_signatures == tuple(signatures[layer] for layer in chosen):
            layers = LayerMap(standing_for(kinds, chosen, reach))
            wider = partial(
                plan_depth, config, checkpointing=checkpointing, full_depth=reach > 1, unlike=unlike, reach=reach + 1
            )
            return DepthPlan(full=full, depth=len(chosen), config=short, whole=config, layers=layers, wider=wider)
    return whole


Kind = tuple[int, int, int, bool]
"""What a layer does: its signature, its place among those of which one is checkpointed, its place where that matters,
and whether it is the last of its signature among those that take another's keys and values, or look at pictures (in the
backward it is the first, and makes the gradient that the others add to)."""


def fewest(kinds: Sequence[Hashable], reach: int = 1) -> tuple[int, ...]:
    """Layers that, one after another, are each between neighbours as somewhere in the whole, and leave none of those
    cases out: what is left when the longest run of layers that can go has gone, again and again."""
    chosen = list(range(len(kinds)))
    cases = set(neighbourhoods(kinds, reach))
    length = len(chosen) - 1
    while length:
        for start in range(1, len(chosen) - length):
            rest = chosen[:start] + chosen[start + length :]
            if set(neighbourhoods([kinds[layer] for layer in rest], reach)) == cases:
                chosen = rest
                break
        else:
            length -= 1
            continue
        length = min(length, len(chosen) - 1)
    return tuple(chosen)


def standing_for(kinds: Sequence[Hashable], chosen: Sequence[int], reach: int = 1) -> tuple[int, ...]:
    """For each layer a place in `chosen`: its own, or that of one of its kind between neighbours of the same kinds."""
    places = {layer: place for place, layer in enumerate(chosen)}
    cases = neighbourhoods([kinds[layer] for layer in chosen], reach)
    alike = {case: place for place, case in enumerate(cases)}
    return tuple(
        places[layer] if layer in places and cases[places[layer]] == case else alike[case]
        for layer, case in enumerate(neighbourhoods(kinds, reach))
    )


def neighbourhoods(kinds: Sequence[Hashable], reach: int = 1) -> list[tuple[Hashable, ...]]:
    """Each layer's kind with those of its neighbours, None beyond the ends."""
    padded = [*[None] * reach, *kinds, *[None] * reach]
    return [tuple(padded[layer : layer + 2 * reach + 1]) for layer in range(len(kinds))]


_Pattern = tuple[tuple[int, ...], tuple[tuple[str, tuple[int, ...]], ...]]
"""One number per layer, equal ones for layers that behave alike; name and shape of every parameter that is no layer's.
"""
_PATTERNS: OrderedDict[str, _Pattern] = OrderedDict()


def layer_kinds(config: Any) -> tuple[int, ...]:
    """One number per layer of a decoder, equal ones for layers that behave alike."""
    return _pattern(config)[0]


def _pattern(config: Any) -> _Pattern:
    """That of the full model, built once on meta per configuration."""
    key = config.to_json_string(use_diff=False)
    if key not in _PATTERNS:
        model = bare_model(copy.deepcopy(config), torch.bfloat16, "eager")
        inside = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
        outside = (pair for pair in model.named_parameters() if id(pair[1]) not in inside)
        _PATTERNS[key] = layer_signatures(model), tuple((name, tuple(weight.shape)) for name, weight in outside)
        if len(_PATTERNS) > 64:
            _PATTERNS.popitem(last=False)
    return _PATTERNS[key]
