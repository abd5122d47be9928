"""Which depths to run so that the full depth follows exactly, and the check that truncation kept the pattern."""

import copy
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from probes.dryrun.splice import Block
from probes.stack import layer_signatures, num_layers, period_of, truncated_config
from probes.stack.build import bare_model


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """The depth to run, its configuration, and the block of layers that stands for the missing ones (None: no layer
    is missing)."""

    full: int
    depth: int
    config: Any
    whole: Any
    block: Block | None


def plan_depth(config: Any, *, checkpointing: int, full_depth: bool, unlike: int = 0) -> DepthPlan:
    """The smallest depth that holds every kind of neighbourhood of layers, or the full depth when it is asked for, not
    much deeper, or when the truncated model's layers are not the full model's first ones.

    Before the block of one period stand the irregular prefix and one regular layer, after it one regular layer and the
    last one.

    Args:
        unlike: layers at the start that do what others of their kind do not.
    """
    full = num_layers(config)
    whole = DepthPlan(full=full, depth=full, config=config, whole=config, block=None)
    one_by_one = any(re.search(r"\d", name) for name in getattr(config, "kept_modules", ()))  # no layer repeats
    if full_depth or config.is_encoder_decoder or one_by_one:
        return whole  # an encoder-decoder's two halves grow together, and its models are small
    prefix, period, signatures = _pattern(config)
    if checkpointing > 1:
        period = math.lcm(period, checkpointing)
    prefix = max(prefix, unlike)
    start = prefix + 1 if prefix else 2
    depth = start + period + 2
    depth += (full - depth) % period
    if depth >= full:
        return whole
    try:
        short = truncated_config(config, depth)
        with torch.device("meta"):
            kept = layer_signatures(bare_model(copy.deepcopy(short), torch.bfloat16, "eager"))
    except (ValueError, IndexError, KeyError):
        return whole
    if kept != signatures[:depth]:
        return whole
    block = Block(start=start, period=period, copies=(full - depth) // period)
    return DepthPlan(full=full, depth=depth, config=short, whole=config, block=block)


_PATTERNS: OrderedDict[str, tuple[int, int, tuple[int, ...]]] = OrderedDict()


def layer_kinds(config: Any) -> tuple[int, ...]:
    """One number per layer of a decoder, equal ones for layers that behave alike."""
    return _pattern(config)[2]


def _pattern(config: Any) -> tuple[int, int, tuple[int, ...]]:
    """(prefix, period, signatures) of the full model, built once on meta per configuration."""
    key = config.to_json_string(use_diff=False)
    if key not in _PATTERNS:
        signatures = layer_signatures(bare_model(copy.deepcopy(config), torch.bfloat16, "eager"))
        prefix, period = period_of(signatures)
        _PATTERNS[key] = (prefix, period, signatures)
        if len(_PATTERNS) > 64:
            _PATTERNS.popitem(last=False)
    return _PATTERNS[key]
