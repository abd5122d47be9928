"""Fits the formula's constants to published throughputs (`benchmarks.speed_accuracy`).

A fit starts from the constants in use and may move each of them only as far as the points justify: the loss is the
error of log(tokens/s) with a soft clip, one vote per group whatever its size, plus the squared distance of each
log-constant from its start in units of its stated uncertainty. With no points, the constants stay.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, sqrt

from planner.speed.roofline.calibration import Calibration, Constants
from planner.speed.roofline.points import Point, log_errors

UNCERTAINTY: dict[str, float] = {
    "training_share": 0.08,
    "wave_loss": 0.3,
    "k_half": 0.4,
    "attention_forward_share": 0.2,
    "attention_backward_share": 0.2,
    "attention_math_passes": 0.3,
    "bandwidth_share": 0.08,
    "loss_bandwidth_share": 0.15,
    "dequantize_share": 0.35,
    "lora_share": 0.4,
    "kernel_gap_s": 0.3,
    "published_host": 0.5,
    "elementwise_scale": 0.25,
    "optimizer_share": 0.15,
    "compile_bytes": 0.3,
    "compile_host": 0.4,
    "l2_gain": 0.5,
    "flash_1_share": 0.2,
}
"""Standard deviation of each fitted constant's logarithm before any point is seen; the others keep their value."""

SOFT_CLIP = 0.15
POINT_NOISE = 0.05
GROUP_NOISE = 0.08  # what a whole source is off by (clocks, cooling, host, versions), never carried to another source


def group_weights(points: Sequence[Point]) -> list[float]:
    """A weight per point so that a group of n points counts sqrt(n) points: many runs of one place say little more."""
    sizes: dict[str, int] = {}
    for point in points:
        sizes[point.group] = sizes.get(point.group, 0) + 1
    return [1.0 / sqrt(sizes[point.group]) for point in points]


def fit_constants(
    points: Sequence[Point], start: Calibration, *, names: Sequence[str] = tuple(UNCERTAINTY)
) -> Calibration:
    """The start's calibration with its general constants moved to fit the points.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("a fit needs at least one point")
    base = {name: float(getattr(Constants(**start.constants), name)) for name in names}

    def moved(shift: Sequence[float]) -> Calibration:
        values = {name: base[name] * exp(UNCERTAINTY[name] * z) for name, z in zip(names, shift, strict=True)}
        return replace(start, constants={**start.constants, **values})

    return moved(
        fit_shift(
            lambda shift: log_errors(points, moved(shift)),
            len(names),
            weights=[weight / POINT_NOISE for weight in group_weights(points)],
            offsets_of=[point.group for point in points],
            offset_noise=GROUP_NOISE,
            step=0.02,
            max_evaluations=12,
        )
    )


def fit_shift(
    errors: Callable[[Sequence[float]], list[float]],
    width: int,
    *,
    weights: Sequence[float],
    offsets_of: Sequence[Hashable],
    offset_noise: float,
    step: float,
    max_evaluations: int,
) -> list[float]:
    """The shift of `width` log-constants, in standard deviations, that fits the points best without going far.

    Args:
        errors: a shift -> log(predicted / measured) of each point.
        weights: what each point's error counts.
        offsets_of: what each point belongs to that may be off as a whole, which no constant answers for.
        offset_noise: standard deviation of such an offset's logarithm.
        step: relative step of the numerical derivative.
    """
    from scipy.optimize import least_squares  # late: slow

    groups = {name: index for index, name in enumerate(sorted(set(offsets_of), key=str))}
    member = [groups[name] for name in offsets_of]
    errors_at = lru_cache(maxsize=4)(errors)  # moving an offset alone asks for the same constants again

    def residuals(parameters: Sequence[float]) -> list[float]:
        shift = [float(z) for z in parameters]
        clipped = [
            _soft(error - offset_noise * shift[width + group]) * weight
            for error, weight, group in zip(errors_at(tuple(shift[:width])), weights, member, strict=True)
        ]
        return [*clipped, *shift]

    start_at = [0.0] * (width + len(groups))
    best = least_squares(residuals, start_at, max_nfev=max_evaluations, diff_step=step, bounds=(-4.0, 4.0))
    return [float(z) for z in best.x[:width]]


def _soft(error: float) -> float:
    """Quadratic for small errors, square-root growth for large ones: one odd row must not bend the constants."""
    size = abs(error)
    if size <= SOFT_CLIP:
        return error
    return (SOFT_CLIP * sqrt(2.0 * size / SOFT_CLIP - 1.0)) * (1.0 if error > 0 else -1.0)
