"""`dry_run`: the memory of a setup's real training step, computed on meta tensors."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.gpu import GpuSpec
from planner.memory.types import PHASES, MemoryTerm
from planner.models.spec import ModelSpec
from planner.outcome import FailureKind, Prediction, ProbeFailure, Rung
from planner.setup import TrainSetup
from planner.units import GIB, gib
from probes.allocator import CannotExpand, Event, expand, replay
from probes.dryrun.analysis import Group, Segment, SegmentPeak, extend, phase_peaks, segment_peaks
from probes.dryrun.depths import DepthPlan, plan_depths
from probes.dryrun.trace import Trace, trace_run
from probes.stack import load_config

VERSION = 1
"""Part of the cache key: raise it whenever a figure can change."""
BAND_FRACTION = 0.02
DEFAULT_CAPABILITY = (8, 0)
CONTEXT_BYTES = 500 * 1024**2
"""What the driver and libraries hold outside PyTorch's count, when nobody measured it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """A dry run with its evidence.

    Attributes:
        phase_groups: what is alive at the peak of each phase, (category, name) -> bytes.
        depths: the depths that were run; one equal to the model's depth means no extension.
        kernels: attention kernels and how often each ran, with why the faster ones were refused.
        timeline: (event index, allocated bytes) of the deeper run's last step, thinned.
        parameter_bytes: of the module tree that was run.
    """

    prediction: Prediction
    phase_groups: Mapping[str, Mapping[Group, int]]
    depths: tuple[int, ...]
    num_layers: int
    kernels: Mapping[str, int]
    kernel_reasons: Mapping[str, str]
    timeline: tuple[tuple[int, int], ...]
    parameter_bytes: int
    num_events: int
    elapsed_s: float


def dry_run(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    moe: str = "balanced",
    expandable_segments: bool = False,
) -> Prediction | ProbeFailure:
    """The memory prediction of one setup, or why it could not be traced. See `dry_run_report`."""
    outcome = dry_run_report(model, gpu, setup, full_depth=full_depth, moe=moe, expandable_segments=expandable_segments)
    return outcome if isinstance(outcome, ProbeFailure) else outcome.prediction


def dry_run_report(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    moe: str = "balanced",
    expandable_segments: bool = False,
) -> DryRunReport | ProbeFailure:
    """Executes two training steps on meta tensors at one or two depths and extends them to the model's.

    Args:
        full_depth: run every layer instead of extending.
        moe: "balanced" or "worst"; transformers' grouped experts use the same memory whichever expert a token takes.
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF`.
    """
    if moe not in ("balanced", "worst"):
        raise ValueError(f"moe must be 'balanced' or 'worst', got {moe!r}")
    return report_for_config(
        model.config,
        gpu.compute_capability or DEFAULT_CAPABILITY,
        setup,
        full_depth=full_depth,
        expandable_segments=expandable_segments,
        limit_bytes=gpu.memory_bytes - CONTEXT_BYTES,
    )


def report_for_config(
    raw_config: Mapping[str, Any],
    capability: tuple[int, int],
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    expandable_segments: bool = False,
    limit_bytes: int | None = None,
) -> DryRunReport | ProbeFailure:
    """`dry_run_report` from a raw `config.json` and a compute capability.

    `limit_bytes`: what PyTorch can have of the card at most, None for no limit.
    """
    started = time.perf_counter()
    refusal = _refusal(setup)
    if refusal:
        return _unsupported(refusal)
    try:
        config = load_config(raw_config)
        plan = plan_depths(config, checkpointing=setup.checkpointing, full_depth=full_depth)
        traces = [
            trace_run(short, setup, capability=capability, num_layers=depth)
            for short, depth in zip(plan.configs, plan.depths, strict=True)
        ]
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError, ImportError) as error:
        log.debug("dry run failed", exc_info=True)
        return _unsupported(f"{raw_config.get('model_type')}: {type(error).__name__}: {error}")
    peaks = _extended(plan, traces)
    return _report(plan, traces, peaks, expandable_segments, limit_bytes, time.perf_counter() - started)


def _refusal(setup: TrainSetup) -> str:
    if setup.num_gpus > 1:
        return f"a dry run sees one GPU, the setup has {setup.num_gpus}"
    if setup.compile:
        return "torch.compile plans its own buffers, which a dry run cannot see"
    return ""


def _unsupported(message: str) -> ProbeFailure:
    return ProbeFailure(rung=Rung.DRY_RUN, kind=FailureKind.UNSUPPORTED, message=message)


def _extended(plan: DepthPlan, traces: list[Trace]) -> dict[Segment, SegmentPeak]:
    if len(traces) == 1:
        return segment_peaks(traces[0], traces[0].num_layers)
    reach = plan.depths[0] - 1
    small, large = (segment_peaks(trace, reach) for trace in traces)
    return extend(small, large, periods=plan.periods)


def _report(
    plan: DepthPlan,
    traces: list[Trace],
    peaks: Mapping[Segment, SegmentPeak],
    expandable_segments: bool,
    limit_bytes: int | None,
    elapsed_s: float,
) -> DryRunReport:
    phases = phase_peaks(peaks)
    by_phase = {name: phases[name].size_bytes for name in PHASES if name in phases}
    peak_phase = max(by_phase, key=lambda name: by_phase[name])
    peak = phases[peak_phase]
    replayed, reserved_notes = _reserved(plan, traces, expandable_segments, limit_bytes)
    reserved = max(replayed, peak.size_bytes)
    trace = traces[-1]
    prediction = Prediction(
        rung=Rung.DRY_RUN,
        peak_allocated_bytes=peak.size_bytes,
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved + CONTEXT_BYTES,
        peak_phase=peak_phase,
        phase_peaks_bytes=by_phase,
        terms=_terms(peak, peak_phase),
        memory_band_fraction=BAND_FRACTION,
        notes=(*_notes(trace, plan), *reserved_notes),
    )
    return DryRunReport(
        prediction=prediction,
        phase_groups={name: phases[name].groups for name in by_phase},
        depths=plan.depths,
        num_layers=plan.full,
        kernels=dict(trace.log.chosen),
        kernel_reasons=dict(trace.log.reasons),
        timeline=(),
        parameter_bytes=trace.parameter_bytes,
        num_events=sum(len(one.events) for one in traces),
        elapsed_s=elapsed_s,
    )


def _reserved(
    plan: DepthPlan, traces: list[Trace], expandable_segments: bool, limit_bytes: int | None
) -> tuple[int, tuple[str, ...]]:
    """Peak reserved bytes of the full depth, with a note where the card's limit shaped it.

    Reserved memory is not affine in the depth, so the events are expanded to the full depth and replayed once. Under a
    limit the allocator gives cached memory back before it gives up; what it would need without one is the answer where
    even that does not help.
    """
    try:
        events = full_events(plan, traces)
    except CannotExpand as error:
        log.debug("events cannot be expanded: %s", error)
        results = [replay(one.events, expandable_segments=expandable_segments).peak_reserved_bytes for one in traces]
        return results[1] + (results[1] - results[0]) * plan.periods, ("reserved memory extended linearly in depth",)
    free = replay(events, expandable_segments=expandable_segments)
    if limit_bytes is None or free.peak_reserved_bytes <= limit_bytes:
        return free.peak_reserved_bytes, ()
    bound = replay(events, expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    if bound.out_of_memory is not None:
        return free.peak_reserved_bytes, ()
    note = (
        f"the allocator would reserve {gib(free.peak_reserved_bytes)}, more than the card has: it gives cached memory "
        "back to go on, which costs speed"
    )
    return bound.peak_reserved_bytes, (note,)


def full_events(plan: DepthPlan, traces: list[Trace]) -> list[Event]:
    """The events of the full depth, from one full run or from two shallow ones.

    Raises:
        CannotExpand: the two runs differ by more than added layers.
    """
    if len(traces) == 1:
        return traces[0].events
    small, large = traces
    return expand(small.events, _labels(small), large.events, _labels(large), periods=plan.periods)


def _labels(trace: Trace) -> dict[int, tuple[str, str]]:
    return {number: (origin.phase, origin.op) for number, origin in trace.origins.items()}


def _terms(peak: SegmentPeak, phase: str) -> tuple[MemoryTerm, ...]:
    terms = [
        MemoryTerm(category=category, name=name, size_bytes=size, phases=(phase,))  # type: ignore[arg-type]
        for (category, name), size in peak.groups.items()
    ]
    return tuple(sorted(terms, key=lambda term: -term.size_bytes))


def _notes(trace: Trace, plan: DepthPlan) -> tuple[str, ...]:
    notes = list(trace.notes)
    if trace.log.chosen.get("math"):
        notes.append(
            f"SDPA falls back to the math kernel ({trace.log.reasons['math']}): each layer makes a matrix of "
            f"{gib(trace.log.math_matrix_bytes)} of attention scores in fp32"
        )
    if len(plan.depths) == 1 and plan.full > 8:
        notes.append(f"run at full depth ({plan.full} layers)")
    return tuple(notes)


assert GIB
