"""Which depths to run so that the full depth follows exactly, and the check that truncation kept the pattern."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from probes.stack import layer_signatures, num_layers, period_of, truncated_config
from probes.stack.build import bare_model

_MIN_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class DepthPlan:
    """Depths to run, configurations ready: one (full depth) or two, a period apart.

    Attributes:
        periods: how many periods the full depth lies beyond the deeper run.
    """

    full: int
    depths: tuple[int, ...]
    configs: tuple[Any, ...]
    period: int
    periods: int


def plan_depths(config: Any, *, checkpointing: int, full_depth: bool) -> DepthPlan:
    """Two depths one period apart, or the full depth when it is asked for, small, or cannot be truncated safely."""
    full = num_layers(config)
    whole = DepthPlan(full=full, depths=(full,), configs=(config,), period=full, periods=0)
    if full_depth or full <= _MIN_DEPTH + 1:
        return whole
    prefix, period, signatures = _pattern(config)
    if checkpointing > 1:
        period = math.lcm(period, checkpointing)
    if config.is_encoder_decoder:
        period = 2
    small = prefix + period + (full - prefix - period) % period
    while small < _MIN_DEPTH:
        small += period
    large = small + period
    if large >= full:
        return whole
    configs = []
    for depth in (small, large):
        try:
            short = truncated_config(config, depth)
            with torch.device("meta"):
                kept = layer_signatures(bare_model(truncated_config(config, depth), torch.bfloat16, "eager"))
        except (ValueError, IndexError, KeyError):
            return whole
        if kept != _expected(signatures, depth, prefix, config.is_encoder_decoder):
            return whole
        configs.append(short)
    return DepthPlan(
        full=full, depths=(small, large), configs=tuple(configs), period=period, periods=(full - large) // period
    )


def _expected(signatures: tuple[int, ...], depth: int, prefix: int, is_encoder_decoder: bool) -> tuple[int, ...]:
    if is_encoder_decoder:
        half = len(signatures) // 2
        return signatures[: depth // 2] + signatures[half : half + depth // 2]
    return signatures[:depth]


_PATTERNS: OrderedDict[str, tuple[int, int, tuple[int, ...]]] = OrderedDict()


def _pattern(config: Any) -> tuple[int, int, tuple[int, ...]]:
    """(prefix, period, signatures) of the full model, built once on meta per configuration."""
    key = config.to_json_string(use_diff=False)
    if key not in _PATTERNS:
        import copy

        signatures = layer_signatures(bare_model(copy.deepcopy(config), torch.bfloat16, "eager"))
        prefix, period = (1, 2) if config.is_encoder_decoder else period_of(signatures)
        _PATTERNS[key] = (prefix, period, signatures)
        if len(_PATTERNS) > 64:
            _PATTERNS.popitem(last=False)
    return _PATTERNS[key]
