"""Level 4: run a planned setup at full depth and hold the plan to its promise."""

from dataclasses import dataclass, replace
from functools import partial

from planner.hardware.gpu import GpuSpec
from planner.memory.workspace import cublas_workspace_bytes
from planner.setup import TrainSetup
from planner.setup.codec import Outcome
from planner.setup.outcome import Fidelity, Measurement, Prediction, ProbeFailure
from probes.gpu.evaluate import Prober

DEFAULT_MEMORY_BAND = 0.05
DEFAULT_TIME_BAND = 0.05
"""Where the promise came from a probe, it has no band of its own: a measurement repeats to a few percent."""
EVERY_MICRO_BATCH = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What the plan said of one setup, by its highest level.

    Attributes:
        workspace_bytes: of the allocated peak, cuBLAS's workspaces, which a CPU has not.
    """

    level: Fidelity
    peak_allocated_bytes: int
    peak_device_bytes: int
    tokens_per_s: float | None
    memory_band_fraction: float
    time_band_fraction: float
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The promise beside what happened.

    Attributes:
        memory_miss_fraction: promised over measured device peak (on the CPU: allocated peak, without cuBLAS's
            workspaces), minus 1; None when nothing was measured.
        speed_miss_fraction: promised over measured tokens/s, minus 1; None on the CPU.
        kept: both within the promise's bands, and the run neither failed nor exceeded the budget.
    """

    setup: TrainSetup
    promise: Promise
    outcome: Outcome
    memory_miss_fraction: float | None
    speed_miss_fraction: float | None
    kept: bool
    reasons: tuple[str, ...]


def promise_of(memory: Prediction | Measurement, speed: Prediction | Measurement, gpu: GpuSpec) -> Promise:
    """The promise from the levels that gave memory and speed of this GPU."""
    return Promise(
        level=memory.level,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_device_bytes=memory.peak_device_bytes,
        tokens_per_s=speed.tokens_per_s,
        memory_band_fraction=memory.memory_band_fraction if isinstance(memory, Prediction) else DEFAULT_MEMORY_BAND,
        time_band_fraction=max(speed.time_band_fraction or 0.0, DEFAULT_TIME_BAND),
        workspace_bytes=cublas_workspace_bytes(gpu),
    )


def confirm(prober: Prober, setup: TrainSetup, promise: Promise, *, budget_bytes: int) -> Confirmation:
    """Runs `setup` at full depth, every micro-batch of the step, and compares."""
    full = replace(
        prober,
        depths=(0,),
        level=Fidelity.CONFIRM,
        store=None,  # a confirmation is run because somebody wants to see it run
        limits=replace(prober.limits, max_accumulation=EVERY_MICRO_BATCH),
    )
    outcome = full.finish(setup, full.submit(setup))
    if prober.store is not None:
        full.store = prober.store
        full.remember(setup, outcome)
    return compare(setup, promise, outcome, budget_bytes=budget_bytes)


def compare(setup: TrainSetup, promise: Promise, outcome: Outcome, *, budget_bytes: int) -> Confirmation:
    """Holds an outcome against a promise."""
    confirmation = partial(Confirmation, setup=setup, promise=promise, outcome=outcome)
    if isinstance(outcome, ProbeFailure):
        reason = f"{outcome.kind.value}: {outcome.message}"
        return confirmation(memory_miss_fraction=None, speed_miss_fraction=None, kept=False, reasons=(reason,))
    memory: float | None
    speed = None
    if outcome.environment.device == "cpu":  # no driver context, and nobody promised this speed: live tensors only
        followed = outcome.level is not Fidelity.RUN  # of a file's own run a CPU shows the whole process
        tensors_bytes = promise.peak_allocated_bytes - promise.workspace_bytes
        memory = tensors_bytes / outcome.peak_allocated_bytes - 1.0 if followed else None
    else:
        memory = promise.peak_device_bytes / outcome.peak_device_bytes - 1.0
        if promise.tokens_per_s and outcome.tokens_per_s:
            speed = promise.tokens_per_s / outcome.tokens_per_s - 1.0
    reasons = []
    if promise.tokens_per_s and outcome.speed_spoiled_by and outcome.environment.device != "cpu":
        reasons.append(f"the speed could not be measured ({', '.join(outcome.speed_spoiled_by)})")
    if outcome.peak_device_bytes > budget_bytes and memory is not None:
        reasons.append(f"needs {outcome.peak_device_bytes} bytes, the budget is {budget_bytes}")
    if memory is not None and abs(memory) > promise.memory_band_fraction:
        reasons.append(f"memory promised {memory:+.1%} off, the band is {promise.memory_band_fraction:.1%}")
    if speed is not None and abs(speed) > promise.time_band_fraction:
        reasons.append(f"speed promised {speed:+.1%} off, the band is {promise.time_band_fraction:.1%}")
    return confirmation(
        memory_miss_fraction=memory, speed_miss_fraction=speed, kept=not reasons, reasons=tuple(reasons)
    )
