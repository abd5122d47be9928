"""What a person's own measurements say of their machine: how much slower its card and its host are than taken.

Two numbers a card, tested on what they did not see. They hold for step programs, dry runs and the formula alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from math import ceil, exp, log
from statistics import median

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.memory.rank_part import headed
from planner.speed.roofline.calibration import Calibration, load_calibration
from planner.speed.roofline.points import Point, log_errors
from planner.speed.sized import program_speed

MIN_POINTS = 4
SCALES = tuple(2.0 ** (step / 2) for step in range(-5, 6))
"""Of the host beside the card at which a step's seconds are worked out; in between they are interpolated."""
UNCERTAINTY, NOISE, SOFT_CLIP = 0.5, 0.05, 0.15
"""Standard deviations of the logarithms of either number before a point is seen, and of a point's; where an error
counts less than its square."""
COVERAGE = 0.9


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """A calibration by own measurements, and how it was tested.

    Attributes:
        scales: card -> (seconds of its kernels, of its host) beside what is taken.
        num_held_out: groups (of one model and method each) that were left out in turn.
        before_median, after_median: errors of what was left out, without the numbers and by those of the others.
        band_fraction: half-width of the band that holds nine in ten of the latter.
    """

    calibration: Calibration
    scales: dict[str, tuple[float, float]]
    num_held_out: int
    before_median: float
    after_median: float
    band_fraction: float

    @property
    def improved(self) -> bool:
        """Whether unseen points are predicted better than without."""
        return self.after_median < self.before_median


class _Timed:
    """A point with the logarithm of its predicted seconds by the scale of its host."""

    def __init__(self, point: Point, start: Calibration) -> None:
        self.point = point
        seconds_s = _by_program(point, start) or partial(_by_formula_s, point, start)
        host_scale = start.constants_for(point.gpu).host_scale
        measured_s = point.setup.tokens_per_step / point.tokens_per_s
        self.errors = [log(seconds_s(host_scale * scale) / measured_s) for scale in SCALES]

    def error(self, card: float, host: float) -> float:
        """log(predicted / measured) where card and host take e to these times as long: both together do so of all."""
        place = (host - card - log(SCALES[0])) / (log(SCALES[-1] / SCALES[0]) / (len(SCALES) - 1))
        below = min(max(int(place), 0), len(SCALES) - 2)
        first, second = self.errors[below : below + 2]
        return card + first + (second - first) * min(max(place - below, 0.0), 1.0)


def _by_program(point: Point, start: Calibration) -> Callable[[float], float] | None:
    """Seconds of a step by its program at a scale of the host."""
    setup, trainer = point.setup, point.conditions.trainer_overhead
    speed = program_speed(headed(point.model, setup.objective_spec.head), point.gpu, setup)
    if speed is None:
        return None
    card = start.constants_for(point.gpu).card_scale / load_calibration().constants_for(point.gpu).card_scale
    return lambda scale: card * speed.seconds_at(setup, scale / card, trainer=trainer)


def _by_formula_s(point: Point, start: Calibration, scale: float) -> float:
    """Seconds of a step by the formula."""
    constants = {**start.architectures.get(point.gpu.key, {}), "host_scale": scale}
    used = replace(start, architectures={**start.architectures, point.gpu.key: constants})
    return point.setup.tokens_per_step / point.tokens_per_s / exp(log_errors([point], used)[0])


def _scales(points: Sequence[_Timed]) -> tuple[float, float]:
    """The logarithms of what card and host of these points take longer, as likely as the points make them."""

    def cost(card: float, host: float) -> float:
        errors = (abs(sample.error(card, host)) for sample in points)
        soft = sum(error**2 if error < SOFT_CLIP else SOFT_CLIP * (2 * error - SOFT_CLIP) for error in errors)
        return soft / NOISE**2 + (card**2 + host**2) / UNCERTAINTY**2

    card = host = 0.0
    best, step = cost(card, host), 0.3
    while step > 0.002:
        around = [(card + step, host), (card - step, host), (card, host + step), (card, host - step)]
        around += [(card + step, host + step), (card - step, host - step)]
        candidate = min(around, key=lambda scales: cost(*scales))
        if cost(*candidate) < best:
            best, (card, host) = cost(*candidate), candidate
        else:
            step /= 2
    return card, host


def _by_card(points: Sequence[_Timed]) -> dict[str, tuple[float, float]]:
    cards = sorted({sample.point.gpu.key for sample in points})
    return {card: _scales([sample for sample in points if sample.point.gpu.key == card]) for card in cards}


def calibrate(points: Sequence[Point], start: Calibration) -> CalibrationReport:
    """The start's calibration with each card's own two numbers, tested by leaving out a model and method at a time.

    Raises:
        UsageError: too few points, or all of one model and method.
    """
    if len(points) < MIN_POINTS:
        raise UsageError(
            f"a calibration needs at least {MIN_POINTS} usable measurements, got {len(points)}",
            hint="measure more setups: plan probe MODEL --gpu local",
        )
    timed = [_Timed(point, start) for point in points]
    groups = sorted({_group(sample) for sample in timed})
    if len(groups) < 2:
        raise UsageError(
            "all measurements are of one model and method: nothing can be held out",
            hint="measure a second model or method",
        )
    before: list[float] = []
    after: list[float] = []
    for group in groups:
        others = _by_card([sample for sample in timed if _group(sample) != group])
        held_out = [sample for sample in timed if _group(sample) == group]
        before += [abs(sample.error(0.0, 0.0)) for sample in held_out]
        after += [abs(sample.error(*others.get(sample.point.gpu.key, (0.0, 0.0)))) for sample in held_out]
    scales = {card: (exp(card_scale), exp(host)) for card, (card_scale, host) in _by_card(timed).items()}
    band = exp(band_of(after)) - 1.0
    return CalibrationReport(
        calibration=_named(start, points, scales, band),
        scales=scales,
        num_held_out=len(groups),
        before_median=exp(median(before)) - 1.0,
        after_median=exp(median(after)) - 1.0,
        band_fraction=band,
    )


def band_of(errors: Sequence[float], coverage: float = COVERAGE) -> float:
    """The smallest error that such a share of unseen ones does not exceed.

    Source: Vovk et al. 2005, Algorithmic learning in a random world, split conformal: the ceil((n + 1) c)-th smallest.
    """
    ordered = sorted(errors)
    return ordered[min(len(ordered), ceil((len(ordered) + 1) * coverage)) - 1]


def _group(sample: _Timed) -> tuple[str, str]:
    return sample.point.labels.get("model", sample.point.model.model_id), sample.point.setup.method


def _named(
    start: Calibration, points: Sequence[Point], scales: dict[str, tuple[float, float]], band: float
) -> Calibration:
    """The calibration with its date, its points, and a band for the cards that it saw."""
    architectures = dict(start.architectures)
    for gpu in {point.gpu.key: point.gpu for point in points}.values():
        used, (card, host) = start.constants_for(gpu), scales[gpu.key]
        fitted = {"card_scale": used.card_scale * card, "host_scale": used.host_scale * host}
        architectures[gpu.key] = {**architectures.get(gpu.key, {}), **fitted}
    sources: dict[str, int] = {}
    for point in points:
        sources[point.group] = sources.get(point.group, 0) + 1
    return replace(
        start,
        date=date.today().isoformat(),
        architectures=architectures,
        bands={**start.bands, **dict.fromkeys(scales, max(band, 0.05))},
        points={"sources": sources, "from": start.date or "stated constants"},
    )
