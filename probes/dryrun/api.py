"""`dry_run`: the memory of a setup's real training step, computed on meta tensors."""

import copy
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
from planner.units import gib
from probes.allocator import replay
from probes.dryrun.analysis import Group, SegmentPeak, phase_peaks, timeline
from probes.dryrun.depths import DepthPlan, plan_depth
from probes.dryrun.splice import SpliceError, splice
from probes.dryrun.trace import Trace, trace_run
from probes.stack import load_config

VERSION = 2
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
        depth: layers that were run; the middle ones stand for the rest of `num_layers`.
        kernels: attention kernels and how often each ran, with why the faster ones were refused.
        timeline: (event index, allocated bytes) over loading and two steps, thinned.
        parameter_bytes: of the module tree that was run.
    """

    prediction: Prediction
    phase_groups: Mapping[str, Mapping[Group, int]]
    depth: int
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
    """Executes two training steps on meta tensors at a small depth, repeats the middle layers' events to the model's
    depth, and replays the whole through the allocator's model.

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
        plan = plan_depth(config, checkpointing=setup.checkpointing, full_depth=full_depth)
        trace = full_trace(plan, capability, setup)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError, ImportError) as error:
        log.debug("dry run failed", exc_info=True)
        return _unsupported(f"{raw_config.get('model_type')}: {type(error).__name__}: {error}")
    return _report(plan, trace, expandable_segments, started)


def full_trace(plan: DepthPlan, capability: tuple[int, int], setup: TrainSetup) -> Trace:
    """The events of the full model: of a run at the plan's depth with its block repeated, or of a run at full depth
    where the layers turn out not to repeat."""
    whole = copy.deepcopy(plan.whole) if plan.block is not None else plan.config
    trace = trace_run(plan.config, setup, capability=capability, num_layers=plan.depth)
    if plan.block is None:
        return trace
    try:
        return splice(trace, plan.block, setup)
    except SpliceError as error:
        log.debug("full depth instead: %s", error)
        return trace_run(whole, setup, capability=capability, num_layers=plan.full)


def _refusal(setup: TrainSetup) -> str:
    if setup.num_gpus > 1:
        return f"a dry run sees one GPU, the setup has {setup.num_gpus}"
    if setup.compile:
        return "torch.compile plans its own buffers, which a dry run cannot see"
    return ""


def _unsupported(message: str) -> ProbeFailure:
    return ProbeFailure(rung=Rung.DRY_RUN, kind=FailureKind.UNSUPPORTED, message=message)


def _report(plan: DepthPlan, trace: Trace, expandable_segments: bool, started: float) -> DryRunReport:
    phases = phase_peaks(trace)
    by_phase = {name: phases[name].size_bytes for name in PHASES if name in phases}
    peak_phase = max(by_phase, key=lambda name: by_phase[name])
    peak = phases[peak_phase]
    reserved = replay(trace.events, expandable_segments=expandable_segments).peak_reserved_bytes
    prediction = Prediction(
        rung=Rung.DRY_RUN,
        peak_allocated_bytes=peak.size_bytes,
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved + CONTEXT_BYTES,
        peak_phase=peak_phase,
        phase_peaks_bytes=by_phase,
        terms=_terms(peak, peak_phase),
        memory_band_fraction=BAND_FRACTION,
        notes=_notes(trace),
    )
    return DryRunReport(
        prediction=prediction,
        phase_groups={name: phases[name].groups for name in by_phase},
        depth=plan.depth,
        num_layers=plan.full,
        kernels=dict(trace.log.chosen),
        kernel_reasons=dict(trace.log.reasons),
        timeline=timeline(trace),
        parameter_bytes=trace.parameter_bytes,
        num_events=len(trace.events),
        elapsed_s=time.perf_counter() - started,
    )


def _terms(peak: SegmentPeak, phase: str) -> tuple[MemoryTerm, ...]:
    terms = [
        MemoryTerm(category=category, name=name, size_bytes=size, phases=(phase,))  # type: ignore[arg-type]
        for (category, name), size in peak.groups.items()
    ]
    return tuple(sorted(terms, key=lambda term: -term.size_bytes))


def _notes(trace: Trace) -> tuple[str, ...]:
    notes = list(trace.notes)
    if trace.log.chosen.get("math"):
        notes.append(
            f"SDPA falls back to the math kernel ({trace.log.reasons['math']}): each layer makes a matrix of "
            f"{gib(trace.log.math_matrix_bytes)} of attention scores in fp32"
        )
    return tuple(notes)
