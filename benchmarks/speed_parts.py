"""Speed errors of runs with fused kernels or torch.compile that the constants were not fitted on.

    python -m benchmarks.speed_parts        (two fits)

By source and part: runs, median and 90th percentile of the absolute error, the median with its sign (below 0: faster
than predicted), and the share inside the band that the speed model states (a tool that is no trainer of transformers
has the wider band of its stack, docs/accuracy/bands.md). Sources of the fit are held out whole; gathered runs
(docs/accuracy/gathered.md) are never fitted on.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import exp
from statistics import median

from benchmarks import gathered
from benchmarks.constants_fit import fit_constants
from benchmarks.speed_accuracy import NOT_FITTED, percentile
from benchmarks.speed_points import load_points
from finetune_planner.cli.accuracy import _lookup
from planner.options.kernels import speed_band
from planner.planning.predict import predict
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.points import Point, log_errors
from reports.accuracy import predicted_figure

COMPILED, FUSED = "torch.compile", "fused kernels"
Error = tuple[str, str, str, float, float]
"""Source, part, method, error, the stated band."""


def part_of(point: Point) -> str:
    """What of the enlarged space a run has."""
    if point.setup.compile:
        return COMPILED
    return FUSED if point.conditions.fused_norm_rope or point.conditions.fused_lora else "eager"


def held_out() -> Iterator[Error]:
    """Every run of a source that has such parts, by the fit to the other sources."""
    points, start = load_points(), load_calibration()
    for source in dict.fromkeys(point.group for point in points if part_of(point) != "eager"):
        held = [point for point in points if point.group == source]
        fitted = fit_constants([p for p in points if p.group != source and p.group not in NOT_FITTED], start)
        for point, error in zip(held, log_errors(held, fitted), strict=True):
            off, part = exp(error) - 1.0, part_of(point)
            kernels = "liger" if part == FUSED else "eager"
            band = speed_band(start.band_for(point.gpu), kernels, point.gpu.key, compiled=part == COMPILED)
            yield source, part, point.setup.method, off, band


def never_fitted() -> Iterator[Error]:
    """Gathered runs with torch.compile, by the constants that ship."""
    calibration = load_calibration()
    for row in gathered.rows():
        setup = row.speed_setup
        if row.status != "ok" or setup is None or not setup.compile or not row.comparable("tokens_per_s"):
            continue
        if row.num_gpus > 1 or (measured := row.measured("tokens_per_s")) is None:
            continue
        model, gpu = _lookup(row)
        predicted = predicted_figure(predict(model, gpu, setup), "tokens_per_s")
        assert predicted is not None
        off = predicted / measured - 1.0
        yield (
            row.group,
            COMPILED,
            setup.method,
            off,
            speed_band(calibration.band_for(gpu), "eager", gpu.key, compiled=True),
        )


def main() -> None:
    """Prints the table, and each part over all sources."""
    head = f"{'source':18} {'part':14} {'method':6} {'runs':>4} {'median':>7} {'p90':>7} {'signed':>7}"
    print(f"{head} {'inside':>7}")
    errors = [*held_out(), *never_fitted()]
    found: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for source, part, method, off, band in errors:
        inside = abs(off) <= band
        found[source, part, method].append((off, inside))
        if part != "eager":
            found["~ all", part, ""].append((off, inside))
            found["~ all", "~ both", ""].append((off, inside))
    for (source, part, method), rows in sorted(found.items()):
        offs = [off for off, _ in rows]
        sizes = [abs(off) for off in offs]
        print(
            f"{source:18} {part:14} {method:6} {len(offs):4d} {median(sizes):7.1%} {percentile(sizes, 0.9):7.1%} "
            f"{median(offs):+7.1%} {sum(inside for _, inside in rows) / len(rows):7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
