"""The band of a step's time, from what decides it: what priced the step, whether the card's rates were measured, and
how much of it waits for a host and for links whose speed only the machine knows.

Source: normalized split conformal prediction (Lei et al. 2018, Distribution-free predictive inference for regression,
5.2): errors are held against what each setup says of its own, and one base covers what is left of 90 % of the runs.
Measured: docs/accuracy/speed-bands.md, each source left out in turn.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from math import exp, hypot, log, sqrt
from typing import Literal, NamedTuple

from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.hardware.gpu import GpuSpec
from planner.speed.roofline.calibration import Calibration

Level = Literal["operators", "formula"]
"""What priced a step: its own operators (a step program, a dry run, a trace), or counts of work."""
SCALED = "scaled"
"""What adds to a base: rates of the card's family, where its own were not measured."""


class Base(NamedTuple):
    """Half-width, as a logarithm, of what published runs are off by beside what is known to differ; `kinds`: the level
    with one or several GPUs, and what adds to it, each independent."""

    kinds: tuple[str, ...]
    width: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """What a predicted step may be off by.

    Attributes:
        base: of the level that priced it, on such cards.
        slower, faster: how many times as long the step takes where a thing that only the machine says (its host, its
            links) or that was seen to differ (what torch.compile gains) is as slow, and as fast, as it may be; each
            independent of the others.
        unmeasured: the share of the step that nobody has measured in a run of its kind.
        judged: the least half-width, by judgement.
    """

    base: Base
    slower: tuple[float, ...] = ()
    faster: tuple[float, ...] = ()
    unmeasured: float = 0.0
    judged: float = 0.0

    @property
    def slower_fraction(self) -> float:
        """By how much longer the step may take."""
        return self._side(self.slower)

    @property
    def faster_fraction(self) -> float:
        """By how much higher its tokens/s may be."""
        return self._side(self.faster)

    def _side(self, ratios: Iterable[float]) -> float:
        return max(exp(hypot(self.base.width, *map(log, ratios))) - 1 + self.unmeasured, self.judged)

    def needed_base(self, ratio: float) -> float:
        """The least base with which a run of so many times the predicted tokens/s lies inside; 0 where any does."""
        off = exp(abs(log(ratio))) - 1
        if off <= self.judged:
            return 0.0
        spread = hypot(*map(log, self.slower if ratio < 1 else self.faster))
        return sqrt(max(0.0, log(1 + max(0.0, off - self.unmeasured)) ** 2 - spread**2))


def base_of(level: Level, gpu: GpuSpec, calibration: Calibration, *, several: bool) -> Base:
    """`Uncertainty.base` of a setup; of a card that `plan calibrate` has seen that of its own runs."""
    # a rate of this very card's matrices, not only its family's share of the data sheet
    measured = calibration.share_for(gpu)[1] == "gpu" or gpu.key in calibration.rates_flops_per_s
    level_kind = f"{level}, {'several' if several else 'one'}"
    kinds, calibrated = (level_kind, *[SCALED] * (not measured)), calibration.bands.get(gpu.key)
    return Base(kinds, hypot(*map(_widths().__getitem__, kinds)) if calibrated is None else log(1 + calibrated))


@cache
def _widths() -> Mapping[str, float]:
    cells = json.loads((DATA / "bands.json").read_text(encoding="utf-8"))
    speeds = [cell for cell in cells if cell["metric"] == "tokens_per_s"]
    names = ("level", "gpus", "stack")
    return {", ".join(filter(None, map(cell.get, names))): log(1 + cell["above"]) for cell in speeds}
