"""When step times count as settled, and how figures of truncated depths become those of the full depth. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.setup.outcome import SETTLED_FRACTION
from probes.gpu.request import Limits

TimedSteps = Callable[[int], Sequence[float]]
"""Runs that many steps and returns the seconds of each."""

PHASE_OF_BUILDING = "load"


def settled(times_s: Sequence[float], window_steps: int, stable_fraction: float) -> bool:
    """Whether the medians of the last two windows differ by at most `stable_fraction` of the last."""
    if len(times_s) < 2 * window_steps:
        return False
    last = median(times_s[-window_steps:])
    previous = median(times_s[-2 * window_steps : -window_steps])
    return abs(last - previous) <= stable_fraction * last


def timed_until_settled(
    run_steps: TimedSteps, limits: Limits, clock: Callable[[], float], *, expected_step_s: float
) -> tuple[tuple[float, ...], bool]:
    """(seconds of every step, whether they settled), by the rule of `Limits`.

    Steps run in windows; a window is cut short when the time left would not hold it, but one step always runs. Of steps
    so long that two windows do not fit into the time, a window has fewer. Medians that agree count once the steps have
    taken `min_measure_s` (half of the cap where that is less): few short steps may agree by chance.

    Args:
        expected_step_s: the last warm-up step's time, to size the first window.
    """
    started = clock()
    times: list[float] = []
    enough_s = min(limits.min_measure_s, limits.measure_s / 2)
    window = limits.window_steps
    if expected_step_s > 0:
        window = min(window, max(1, int(limits.measure_s / 2 / expected_step_s)))
    while True:
        step_s = median(times[-window:]) if times else expected_step_s
        left_s = limits.measure_s - (clock() - started)
        room = min(limits.max_steps - len(times), int(left_s / step_s) if step_s > 0 else window)
        agree = settled(times, window, SETTLED_FRACTION)
        if agree and (sum(times) >= enough_s or room < 1):
            return tuple(times), True
        if times and room < 1:
            return tuple(times), False
        times.extend(run_steps(max(1, min(window, room))))


@dataclass(frozen=True, kw_only=True)
class DepthRun:
    """What one depth showed, or (`extend`) would show.

    Attributes:
        phase_peaks_bytes: allocated peak of each phase.
        reserved_bytes: peak held by the caching allocator (equals allocated on the CPU, which has none).
        context_bytes: device memory in use beyond what the allocator holds.
        step_times_s: empty where only memory was asked for.
        grown: whether the allocator's segments grow; None where that is not known.
        layer_s: of an extension, seconds of a layer.
    """

    depth: int
    phase_peaks_bytes: Mapping[str, int]
    reserved_bytes: int
    context_bytes: int
    step_times_s: tuple[float, ...] = ()
    settled: bool = True
    flags: tuple[str, ...] = ()
    nvml: bool = False
    kernels: tuple[str, ...] = ()
    grown: bool | None = None
    layer_s: float = 0.0

    @property
    def allocated_bytes(self) -> int:
        """The largest phase; at full depth it need not be the phase that was largest in the truncated runs."""
        return max(self.phase_peaks_bytes.values())


def extend(short: DepthRun, long: DepthRun, depth: int) -> DepthRun:
    """The straight line through two depths at a third one: every phase by itself, then the largest.

    Both memory and time are affine in the number of identical layers. Step times keep the scatter of the longer run and
    are shifted by the layers' median time.

    Raises:
        ValueError: the two depths are equal.
    """
    if short.depth == long.depth:
        raise ValueError(f"two different depths are needed, got {short.depth} twice")
    factor = (depth - long.depth) / (long.depth - short.depth)
    phases = {
        name: max(0, round(long.phase_peaks_bytes[name] + factor * (long.phase_peaks_bytes[name] - value)))
        for name, value in short.phase_peaks_bytes.items()
    }
    reserved = max(
        round(long.reserved_bytes + factor * (long.reserved_bytes - short.reserved_bytes)), max(phases.values())
    )
    layer_s = 0.0
    times: tuple[float, ...] = ()
    if short.step_times_s and long.step_times_s:
        layer_s = (median(long.step_times_s) - median(short.step_times_s)) / (long.depth - short.depth)
        shift = max(layer_s, 0.0) * (depth - long.depth)
        times = tuple(time_s + shift for time_s in long.step_times_s)
    return DepthRun(
        depth=depth,
        phase_peaks_bytes=phases,
        reserved_bytes=reserved,
        context_bytes=max(short.context_bytes, long.context_bytes),
        step_times_s=times,
        layer_s=layer_s,
    )


def miss_fraction(predicted: float, measured: float) -> float:
    """How far a prediction missed, as a fraction of what was measured, signed."""
    return (predicted - measured) / measured if measured else 0.0
