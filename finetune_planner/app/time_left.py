"""A time limit that holds: what a probe takes at least, and work in this process that ends when time is up."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.speed.roofline import throughput_profile

START_S = 3.0
"""A child's Python, torch and transformers on a warm disk and a fast core (1.8 to 8 s were seen)."""
LEAST_LAYERS, LEAST_STEPS, TIMED_MICRO_BATCHES = 6, 4, 3
"""Of a truncated probe: layers of its two depths together, steps of each (two warm it up, one is the first without
marks, one is timed), micro-batches of a step with gradient accumulation (`probes.gpu.request.Limits`)."""


class TimeIsUp(BaseException):
    """The time of what ran in this process is over; no error that the work itself could take for its own."""


@contextmanager
def until(ends_at: float) -> Iterator[None]:
    """Within it work in the main thread is given up at this moment of `time.monotonic`, as Ctrl-C would end it; in any
    other thread, and where the system has no such timer, it runs to its end.

    Raises:
        TimeIsUp: at that moment.
    """
    main = threading.current_thread() is threading.main_thread()
    if not math.isfinite(ends_at) or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before, (others_s, others_every_s) = signal.signal(signal.SIGALRM, stop), signal.getitimer(signal.ITIMER_REAL)
    begun = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, max(0.001, ends_at - begun))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if others_s:
            left_s = max(0.001, others_s - (time.monotonic() - begun))
            signal.setitimer(signal.ITIMER_REAL, left_s, others_every_s)


def least_probe_s(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, flops_per_s: float) -> float:
    """Seconds that a probe of this setup takes at least, where matrices multiply at this rate.

    Not counted: all that is no product of matrices, and imports from a cold disk. What would end later by this count
    cannot end in time; what ends in time by it may still end later.
    """
    profile = throughput_profile(model, gpu, setup)
    step = setup.micro_batch_seqs, min(setup.accumulation_steps, TIMED_MICRO_BATCHES)
    head, share = profile.head_flops(*step), min(1.0, LEAST_LAYERS / max(1, len(model.layer_order)))
    return START_S + LEAST_STEPS * (share * (profile.flops(*step) - head) + 2 * head) / flops_per_s
