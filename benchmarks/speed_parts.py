"""Speed errors of runs with fused kernels or torch.compile, their source held out of the fit.

    python benchmarks/speed_parts.py        (two fits)

By source and part: runs, median and 90th percentile of the absolute error, the median with its sign (below 0: faster
than predicted), and the share inside the band that a plan would state.
"""

import sys
from collections import defaultdict
from math import exp
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.speed_accuracy import NOT_FITTED, percentile
from benchmarks.speed_points import load_points
from planner.choices.kernels import speed_band
from planner.throughput.calibration import load_calibration
from planner.throughput.fit import FitPoint, fit_constants, log_errors


def part_of(point: FitPoint) -> str:
    """What of the enlarged space a run has."""
    if point.setup.compile:
        return "torch.compile"
    return "fused kernels" if point.conditions.fused_norm_rope or point.conditions.fused_lora else "eager"


def main() -> None:
    """Prints the table."""
    points = load_points()
    start = load_calibration()
    sources = dict.fromkeys(point.group for point in points if part_of(point) != "eager")
    head = f"{'source held out':18} {'part':14} {'method':6} {'runs':>4} {'median':>7} {'p90':>7} {'signed':>7}"
    print(f"{head} {'inside':>7}")
    for source in sources:
        held = [point for point in points if point.group == source]
        fitted = fit_constants([p for p in points if p.group != source and p.group not in NOT_FITTED], start)
        found: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
        for point, error in zip(held, log_errors(held, fitted), strict=True):
            off, part = exp(error) - 1.0, part_of(point)
            kernels = "liger" if part == "fused kernels" else "eager"
            band = speed_band(start.band_for(point.gpu), kernels, point.gpu.key, compiled=point.setup.compile)
            found[part, point.setup.method].append((off, abs(off) <= band))
        for (part, method), errors in sorted(found.items()):
            offs = [off for off, _ in errors]
            sizes = [abs(off) for off in offs]
            print(
                f"{source:18} {part:14} {method:6} {len(offs):4d} {median(sizes):7.1%} {percentile(sizes, 0.9):7.1%} "
                f"{median(offs):+7.1%} {sum(inside for _, inside in errors) / len(errors):7.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
