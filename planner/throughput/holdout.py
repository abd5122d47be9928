"""Calibration with a held-out split: what `plan calibrate` does.

What is held out is never a random row: a whole source where there are several, else a whole model, else a whole GPU,
else a whole method. The report gives errors of the constants in use and of the fitted ones on what they did not see.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from math import exp, log
from statistics import median

from planner.errors import UsageError
from planner.records import dataclass
from planner.throughput.calibration import Calibration, family
from planner.throughput.fit import FitPoint, band_from, fit_constants, log_errors

SPLITS: tuple[tuple[str, Callable[[FitPoint], str]], ...] = (
    ("source", lambda point: point.group),
    ("model", lambda point: point.labels.get("model", point.model.model_id)),
    ("GPU", lambda point: point.gpu.key),
    ("method", lambda point: point.setup.method),
)
MIN_POINTS = 4


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One part that was held out: its errors under the constants in use and under those fitted on the rest."""

    name: str
    num_points: int
    before_median: float
    after_median: float
    before_worst: float
    after_worst: float

    @classmethod
    def of(cls, name: str, before: Sequence[float], after: Sequence[float]) -> "HeldOut":
        """The part of these absolute errors, before and after."""
        return cls(
            name=name,
            num_points=len(before),
            before_median=median(before),
            after_median=median(after),
            before_worst=max(before),
            after_worst=max(after),
        )


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """A new calibration and how it was tested. `improved`: the median held-out error fell."""

    calibration: Calibration
    split: str
    parts: tuple[HeldOut, ...]
    before_median: float
    after_median: float
    band_fraction: float

    @property
    def improved(self) -> bool:
        """Whether the fitted constants predicted unseen points better than the ones in use."""
        return self.after_median < self.before_median


def calibrate(points: Sequence[FitPoint], start: Calibration) -> FitReport:
    """Fit the constants to the points, and test the fit on what it did not see.

    Raises:
        UsageError: too few points, or all of one source, model, GPU and method.
    """
    if len(points) < MIN_POINTS:
        raise UsageError(
            f"a calibration needs at least {MIN_POINTS} usable measurements, got {len(points)}",
            hint="measure more setups: plan probe MODEL --gpu local, or plan campaign",
        )
    split, key = _split(points)
    parts: list[HeldOut] = []
    before: list[float] = []
    after: list[float] = []
    for name in sorted({key(point) for point in points}):
        held = [point for point in points if key(point) == name]
        train = [point for point in points if key(point) != name]
        old = log_errors(held, start)
        new = log_errors(held, fit_constants(train, start, group_noise=0.0))
        before += old
        after += new
        parts.append(HeldOut.of(name, _absolute(old), _absolute(new)))
    band = band_from(after)
    fitted = fit_constants(points, start, group_noise=0.0)
    return FitReport(
        calibration=_named(fitted, start, points, band),
        split=split,
        parts=tuple(parts),
        before_median=median(_absolute(before)),
        after_median=median(_absolute(after)),
        band_fraction=band,
    )


def _split(points: Sequence[FitPoint]) -> tuple[str, Callable[[FitPoint], str]]:
    for name, key in SPLITS:
        if len({key(point) for point in points}) > 1:
            return name, key
    raise UsageError(
        "all measurements are of one source, model, GPU and method: nothing can be held out",
        hint="measure a second model or method",
    )


def _named(fitted: Calibration, start: Calibration, points: Sequence[FitPoint], band: float) -> Calibration:
    """The fitted calibration with its date, its points, and a band for the cards it saw; other bands stay."""
    sizes: dict[str, int] = {}
    for point in points:
        sizes[point.group] = sizes.get(point.group, 0) + 1
    gpus = sorted({point.gpu.key for point in points} | set(start.points.get("gpus", ())))
    families = sorted({family(point.gpu) for point in points} | set(start.points.get("families", ())))
    bands = {**start.bands, "gpu": max(band, log(1.05))}
    return replace(
        fitted,
        date=date.today().isoformat(),
        bands=bands,
        points={"sources": sizes, "gpus": gpus, "families": families, "from": start.date or "stated constants"},
    )


def _absolute(errors: Sequence[float]) -> list[float]:
    return [abs(exp(error) - 1.0) for error in errors]
