"""The part of a dry run that needs torch: depth, trace, repetition, replay, report."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.core.notes import risk
from planner.core.units import gib
from planner.planning.evidence.bands import DRY_RUN_BAND
from planner.planning.evidence.followed import rank_note
from planner.setup import TrainSetup
from planner.setup.memory_terms import PHASES, MemoryTerm
from planner.setup.outcome import Fidelity, Prediction
from probes.allocator.replay import replay
from probes.dryrun.analysis import curve_of, phase_peaks, timeline
from probes.dryrun.depths import DepthPlan, plan_depth
from probes.dryrun.operators import full_program
from probes.dryrun.repeat_layers import RepetitionError, repeat_layers
from probes.dryrun.report import DryRunReport
from probes.dryrun.trace import Trace, trace_run
from probes.stack.configs import load_config
from probes.stack.images import deep_layers
from probes.stack.objectives import forward_repeats

if TYPE_CHECKING:
    from probes.dryrun.rank import JobWorld

CONTEXT_BYTES = 500 * 1024**2
"""What the driver and libraries hold outside PyTorch's count, when nobody measured it."""

log = logging.getLogger(__name__)


def run_engine(
    raw_config: Mapping[str, Any],
    capability: tuple[int, int],
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    limit_bytes: int | None = None,
) -> DryRunReport:
    """The report of one point; raises what the libraries raise where a model or an operator cannot be traced."""

    def report(plan: DepthPlan, world: "JobWorld | None" = None) -> DryRunReport:
        return _report(plan, full_trace(plan, capability, setup, world), setup, limit_bytes)

    if setup.pipeline_degree > 1:
        from probes.dryrun.stages import run_stages

        return run_stages(raw_config, setup, report, full_depth=full_depth)
    config = load_config(raw_config)
    # layers that train are not like those that do not; a prefix is one parameter as wide as all layers together, and so
    # is the group in which FSDP2 gathers a reference
    one_group = setup.parallel == "fsdp2" and setup.copies_reference
    whole = full_depth or bool(setup.trained_layers) or setup.kind.form == "prefix" or one_group
    plan = partial(
        plan_depth, config, checkpointing=setup.checkpointing, full_depth=whole, unlike=deep_layers(setup, config)
    )
    if setup.single_gpu:
        return report(plan())
    from probes.dryrun.rank import fake_job

    with fake_job(setup) as world:
        return report(plan(), world)


def full_trace(
    plan: DepthPlan, capability: tuple[int, int], setup: TrainSetup, world: "JobWorld | None" = None
) -> Trace:
    """The events of the full model: of a run of the plan's layers, repeated, of more of them, or of a run at full depth
    where the layers turn out not to repeat. `world`: the job of which this is one rank."""
    try:
        trace = _run(plan, capability, setup, world)
    except (KeyError, IndexError, AttributeError):  # what some layers look up, others of the full model hold
        if plan.layers is None:
            raise
        log.debug("all %s layers instead of %s", plan.full, plan.depth, exc_info=True)
        plan = replace(plan, depth=plan.full, config=copy.deepcopy(plan.whole), layers=None, wider=None)
        trace = _run(plan, capability, setup, world)
    if plan.layers is not None:
        try:
            trace = (
                repeat_layers(trace, plan.layers, setup) if world is None else world.repeat_layers(trace, plan.layers)
            )
        except RepetitionError as error:
            assert plan.wider is not None
            wider = plan.wider()
            log.debug("%s of %s layers instead of %s: %s", wider.depth, plan.full, plan.depth, error)
            return full_trace(wider, capability, setup, world)
    return trace if world is None else replace(trace, notes=(*trace.notes, rank_note(setup)))


def _run(plan: DepthPlan, capability: tuple[int, int], setup: TrainSetup, world: "JobWorld | None") -> Trace:
    options: dict[str, Any] = {"capability": capability, "num_layers": plan.depth}
    if world is not None:
        return trace_run(plan.config, setup, world=world, **options)
    config = copy.deepcopy(plan.config)
    try:
        return trace_run(plan.config, setup, **options)
    except (NotImplementedError, RuntimeError) as error:
        log.debug("a run without values failed", exc_info=True)
        from probes.dryrun.valued import ValuedTracker, selecting_all  # late: few models need it

        try:
            with selecting_all():
                return trace_run(config, setup, tracker_class=ValuedTracker, **options)
        except (NotImplementedError, RuntimeError) as retry_error:
            raise retry_error from error


def _report(plan: DepthPlan, trace: Trace, setup: TrainSetup, limit_bytes: int | None) -> DryRunReport:
    curve = curve_of(trace)
    phases = phase_peaks(trace, curve)
    by_phase = {name: sum(phases[name].values()) for name in PHASES if name in phases}
    peak_phase = max(by_phase, key=lambda name: by_phase[name])
    reserved, retry_notes = _reserved(trace, setup.expandable_segments, limit_bytes)
    notes = [*trace.notes]
    if trace.log.chosen.get("math"):
        matrix = f"each layer makes a matrix of {gib(trace.log.math_matrix_bytes)} of attention scores in fp32"
        notes.append(risk(f"SDPA falls back to the math kernel ({trace.log.reasons['math']}): {matrix}"))
    terms = [
        MemoryTerm(category=category, name=name, size_bytes=size, phases=(peak_phase,))  # type: ignore[arg-type]
        for (category, name), size in phases[peak_phase].items()
    ]
    prediction = Prediction(
        level=Fidelity.DRY_RUN,
        peak_allocated_bytes=by_phase[peak_phase],
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved + CONTEXT_BYTES,
        peak_phase=peak_phase,
        phase_peaks_bytes=by_phase,
        terms=tuple(sorted(terms, key=lambda term: -term.size_bytes)),
        memory_band_fraction=DRY_RUN_BAND,
        notes=(*notes, *retry_notes),
    )
    return DryRunReport(
        prediction=prediction,
        phase_groups={name: phases[name] for name in by_phase},
        depth=plan.depth,
        num_layers=plan.full,
        kernels=dict(trace.log.chosen),
        timeline=timeline(curve),
        phases=tuple(curve.phases),
        parameter_bytes=trace.parameter_bytes,
        num_events=len(curve.totals),
        elapsed_s=0.0,
        program=None
        if trace.operators is None
        else full_program(trace.operators, trace.trainables, forward_repeats(setup)),
    )


def _reserved(trace: Trace, expandable_segments: bool, limit_bytes: int | None) -> tuple[int, tuple[str, ...]]:
    """Reserved peak, under the limit when the run survives there, and what to say about it."""
    if limit_bytes is not None:
        limited = replay(trace.events, expandable_segments=expandable_segments, limit_bytes=limit_bytes)
        if limited.fits:
            retries = (
                f"at the card's limit PyTorch has to give cached memory back and try again ({limited.num_retries} "
                "times in two steps), which costs time"
            )
            return limited.peak_reserved_bytes, (retries,) if limited.num_retries else ()
    return replay(trace.events, expandable_segments=expandable_segments).peak_reserved_bytes, ()
