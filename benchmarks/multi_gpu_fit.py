"""Fits the constants of `SpreadConstants` to measured speeds on several GPUs.

As `benchmarks.constants_fit` does for one GPU: the fit starts from the stated values and moves each only as far as the
points justify, errors of log(tokens/s) are clipped softly, a source of n points counts sqrt(n) points, and every
(source, card) may be off as a whole: the compute model's own error there is not communication's to answer for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import exp, log

from benchmarks.constants_fit import POINT_NOISE, fit_shift
from benchmarks.multi_gpu_points import LayoutPoint
from planner.speed.roofline.calibration import Calibration, LayoutConstants
from planner.speed.several_gpus.speed import layout_step_time

UNCERTAINTY = {
    "nvlink_share": 0.15,
    "pcie_share": 0.3,
    "pcie_staged_share": 0.4,
    "network_share": 0.25,
    "host_copy_share": 0.2,
    "collective_s": 0.5,
    "overlap_cost": 0.7,
    "overlap_cost_fsdp_1": 0.4,
    "unit_host_s": 0.7,
    "cpu_adam_bytes_per_s": 0.4,
}
"""Standard deviation of each constant's logarithm before any point is seen; the others keep their value."""
CARD_NOISE = 0.08


def log_error(point: LayoutPoint, calibration: Calibration) -> float:
    """log(predicted / measured) tokens/s of one GPU.

    Raises:
        ValueError: a point without a speed.
    """
    if point.tokens_per_s is None:
        raise ValueError(f"{point.key} has no speed")
    answer = layout_step_time(
        point.model,
        point.gpu,
        point.speed_setup,
        point.cluster,
        calibration=calibration,
        conditions=point.conditions,
    )
    return log(answer.tokens_per_s / point.speed_setup.num_gpus / point.tokens_per_s)


def fit_layout(points: Sequence[LayoutPoint], start: Calibration, *, max_evaluations: int = 10) -> Calibration:
    """The start's calibration with its `layout` constants moved to fit the points."""
    if not points:
        return start
    base = asdict(LayoutConstants(**start.spread))
    names = tuple(UNCERTAINTY)
    sizes = Counter(point.source for point in points)

    def moved(shift: Sequence[float]) -> Calibration:
        values = {name: base[name] * exp(UNCERTAINTY[name] * z) for name, z in zip(names, shift, strict=True)}
        values |= {name: min(value, 1.0) for name, value in values.items() if name.endswith("share") or "cost" in name}
        return replace(start, spread={**base, **values})

    def errors(shift: Sequence[float]) -> list[float]:
        calibration = moved(shift)
        return [log_error(point, calibration) for point in points]

    return moved(
        fit_shift(
            errors,
            len(names),
            weights=[sizes[point.source] ** -0.25 / POINT_NOISE for point in points],
            offsets_of=[(point.source, point.gpu.key) for point in points],
            offset_noise=CARD_NOISE,
            step=0.05,
            max_evaluations=max_evaluations,
        )
    )
