"""Which truncated depths to run (the repeating pattern of the layers decides, never a guess), and what PyTorch's
allocator reserves at a depth that was not run.

Live tensors grow by a line per phase; what the allocator holds beyond them does not: it depends on which holes the next
size fits into. Traces replayed at full depth: a line through two depths misses full fine-tuning by -11 to +18 % with
expandable segments (-21 to +17 % without), LoRA and QLoRA by 3 %; no GPU measured it yet.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.setup import TrainSetup
from planner.setup.outcome import ProbeFailure
from probes.dryrun.api import report_for_config
from probes.dryrun.depths import layer_kinds
from probes.gpu.environment import ALLOCATOR_VARIABLES
from probes.stack.configs import load_config, num_layers, period_of, truncated_config, unequal_halves

MIN_LAYERS = 2
"""The first and the last layer of a run differ from those between (nothing to recompute after, no gradient before)."""


@dataclass(frozen=True, kw_only=True)
class Depths:
    """The depths to run: `short` and `long` are timed, `check` tells how far the extension misses; full depth alone
    where truncating saves nothing or would be wrong (`reason` says why)."""

    full: int
    short: int | None = None
    long: int | None = None
    check: int | None = None
    reason: str = ""

    @property
    def truncated(self) -> bool:
        return self.short is not None


def choose_depths(config: Mapping[str, Any], setup: TrainSetup) -> Depths:
    """Two depths that hold whole periods of the layer pattern, and a third as far beyond as they are apart.

    With every n-th layer checkpointed the pattern also repeats only every n layers. An encoder-decoder is cut in pairs.
    """
    loaded = load_config(config)
    full = num_layers(loaded)
    if unequal_halves(loaded):
        return Depths(full=full, reason="the halves have different numbers of layers: they cannot be cut in pairs")
    signatures = layer_kinds(loaded)
    prefix, period = (0, 2) if loaded.is_encoder_decoder else period_of(signatures)
    if setup.checkpointing > 1:
        period = math.lcm(period, setup.checkpointing)
        prefix = -(-prefix // setup.checkpointing) * setup.checkpointing
    step = period * -(-MIN_LAYERS // period)
    short = prefix + step
    long, third = short + step, short + 2 * step
    if (full - short) % period:
        # The model ends in the middle of a pattern: start from what is left over.
        short += (full - short) % period
        long, third = short + step, short + 2 * step
    if long >= full:
        return Depths(full=full, reason="the model is as small as the truncated depths")
    for depth in (short, long):
        cut = layer_kinds(truncated_config(loaded, depth))
        if not loaded.is_encoder_decoder and cut != signatures[:depth]:
            return Depths(full=full, reason=f"{depth} layers of this architecture differ from its first {depth}")
    return Depths(full=full, short=short, long=long, check=min(third, full))


def reserved_gap(
    config: Mapping[str, Any],
    setup: TrainSetup,
    capability: tuple[int, int],
    depth: int | None = None,
    grown: bool | None = None,
) -> int | None:
    """Bytes that the allocator reserves beyond the largest phase, at `depth` layers (None: all), from the dry run's
    events replayed through the allocator's model; None where the dry run cannot follow the setup.

    Args:
        grown: whether segments were seen to grow; None: as PYTORCH_ALLOC_CONF says. Some platforms ignore that.
    """
    if depth is not None:
        config = truncated_config(load_config(config), depth).to_dict()
    settled = setup.replace(expandable_segments=growth_asked_for() if grown is None else grown)
    report = report_for_config(config, capability, settled)
    if isinstance(report, ProbeFailure):
        return None
    return report.prediction.peak_reserved_bytes - report.prediction.peak_allocated_bytes


def growth_asked_for() -> bool:
    """Whether the environment asks for expandable segments."""
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    return "expandable_segments:True" in settings.replace(" ", "")


def segments_grow(segments: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the allocator's segments are expandable, by `torch.cuda.memory_snapshot`; None where it holds none."""
    return any(segment.get("is_expandable") for segment in segments) if segments else None
