"""`dry_run`: the memory of a setup's real training step, computed on meta tensors."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.around import between_steps_terms
from planner.memory.attention_kernels import sdpa_capability
from planner.memory.model import memory_of
from planner.memory.rollout import VLLM, generation_terms, resident_vllm
from planner.memory.states import in_one_memory
from planner.memory.trained import trained_parameters
from planner.memory.workspace import communicator_bytes, context_bytes
from planner.models.spec import ModelSpec
from planner.planning.evidence.bands import unknown_mixers, with_evidence
from planner.planning.evidence.followed import why_no_dry_run
from planner.planning.predict import attention_kernels
from planner.planning.run_speed import with_run_speed
from planner.setup import TrainSetup
from planner.setup.memory_terms import MemoryTerm
from planner.setup.outcome import FailureKind, Fidelity, Prediction, ProbeFailure
from probes.dryrun import cache
from probes.dryrun.helper import reported
from probes.dryrun.report import DryRunReport
from probes.dryrun.rows import carried, shorter
from probes.dryrun.startup import collection_paused, load_libraries

VERSION = 31
"""Part of the cache key: raise it whenever a figure can change."""
WALKS = "probes.dryrun.rows:walks_through_tokens"
REPORT = "probes.dryrun.api:report_for_config"
LIKE = "the model's type is unknown to transformers, which cannot build it (--like reads its sizes alone)"
APPLE = "the dry run follows CUDA's kernels and allocator, an Apple GPU has others"
log = logging.getLogger(__name__)


def dry_run(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, **options: Any) -> Prediction | ProbeFailure:
    """The memory prediction of one setup, or why it could not be traced. `options` are those of `dry_run_report`."""
    outcome = dry_run_report(model, gpu, setup, **options)
    return outcome if isinstance(outcome, ProbeFailure) else outcome.prediction


def dry_run_report(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    use_cache: bool = True,
    planned: bool = False,
    cluster: Cluster | None = None,
) -> DryRunReport | ProbeFailure:
    """Executes two training steps on meta tensors at a small depth, repeats the middle layers' events to the model's
    depth, and replays the whole through the allocator's model.

    Where PyTorch would reserve more than the card has although what is allocated fits, the replay is repeated under
    the card's limit: PyTorch then gives cached blocks back and tries again. When that suffices, the reserved peak is
    the one under the limit, and a note says so. A model that walks through its tokens is run in shorter rows
    (`probes.dryrun.rows`).

    Args:
        full_depth: run every layer instead of repeating.
        use_cache: whether an earlier run of the same point may answer, and this one is kept.
        planned: the setup is a plan's own, which keeps the band that it was chosen by.
        cluster: the machines of several GPUs, None: those that their number suggests.
    """

    def run(setup: TrainSetup) -> DryRunReport | ProbeFailure:
        options: dict[str, Any] = {"full_depth": full_depth}
        kernels = attention_kernels(model, gpu, setup) if setup.pads else frozenset()
        if setup.attention == "sdpa" and kernels and "efficient" not in kernels:  # a full batch takes the most
            setup = setup.replace_trusted(uneven=False)
        outcome = _cached_report(model, gpu, setup, options, use_cache)
        if isinstance(outcome, ProbeFailure):
            return outcome
        overhead = overhead_bytes(gpu, setup)
        limit = gpu.memory_bytes - overhead - resident_vllm(gpu, setup)
        if outcome.prediction.peak_allocated_bytes <= limit < outcome.prediction.peak_reserved_bytes:
            limited = _cached_report(model, gpu, setup, {**options, "limit_bytes": limit}, use_cache)
            outcome = outcome if isinstance(limited, ProbeFailure) else limited
        prediction = outcome.prediction
        if setup.objective_spec.rolls_out and setup.rollout_settings.colocated:
            prediction = _beside_vllm(prediction, model, gpu, setup)
        prediction = replace(prediction, peak_device_bytes=prediction.peak_reserved_bytes + overhead)
        prediction = with_run_speed(prediction, outcome.program, model, gpu, setup, cluster)
        return replace(outcome, prediction=with_evidence(prediction, gpu, setup, planned=planned))

    setup = in_one_memory(gpu, setup)
    short = shorter(model, setup) if unknown_mixers(model) and not full_depth else ()
    if not short or not reported(WALKS, dict(model.config)):
        return run(setup)
    reports = []
    for shortened in short:
        report = run(shortened)
        if isinstance(report, ProbeFailure):
            return report
        reports.append(report)
    return carried(reports, short, setup)


def _beside_vllm(prediction: Prediction, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Prediction:
    """The prediction with a colocated vLLM's share of the card, which no run of the step allocates: beside all of it,
    or, where it sleeps while the model trains, beside what lies between two steps.

    Source: trl 1.16 `VLLMGeneration`: PyTorch's cache is emptied before vLLM wakes up.
    """
    resident = resident_vllm(gpu, setup)
    if resident:
        share = MemoryTerm(category="other", name=VLLM, size_bytes=resident, phases=(prediction.peak_phase,))
        return replace(
            prediction,
            peak_allocated_bytes=prediction.peak_allocated_bytes + resident,
            peak_reserved_bytes=prediction.peak_reserved_bytes + resident,
            phase_peaks_bytes={name: size + resident for name, size in prediction.phase_peaks_bytes.items()},
            terms=tuple(sorted((*prediction.terms, share), key=lambda term: -term.size_bytes)),
        )
    lying = [
        *between_steps_terms(memory_of(model, gpu, setup)[0].breakdown),
        *generation_terms(model, gpu, setup, trained_parameters(model, setup).size_bytes),
    ]
    awake = sum(size for *_, size in lying)
    if awake <= prediction.peak_reserved_bytes:
        return prediction
    terms = (MemoryTerm(category=kind, name=name, size_bytes=size, phases=("forward",)) for kind, name, size in lying)
    return replace(
        prediction,
        peak_allocated_bytes=awake,
        peak_reserved_bytes=awake,
        peak_phase="forward",
        phase_peaks_bytes={**prediction.phase_peaks_bytes, "forward": awake},
        terms=tuple(sorted(terms, key=lambda term: -term.size_bytes)),
    )


def overhead_bytes(gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device memory outside PyTorch's count: the CUDA context, with several GPUs the communicators too."""
    if setup.num_gpus == 1:
        return context_bytes(gpu)
    return context_bytes(gpu) + communicator_bytes(gpu, setup)


def _cached_report(
    model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, options: Mapping[str, Any], use_cache: bool
) -> DryRunReport | ProbeFailure:
    refusal = APPLE if gpu.vendor == "Apple" else LIKE if model.like else why_no_dry_run(setup)
    if refusal:  # before the cache is asked: an older version may have followed it wrongly
        return _unsupported(refusal)
    capability, directory, key = sdpa_capability(gpu, setup), cache.default_directory(), ""
    if use_cache:
        key = cache.key_of(model.config, capability, setup, own_version=VERSION, options=options)
        if (cached := cache.load(directory, key)) is not None:
            return cached
    outcome: DryRunReport | ProbeFailure = reported(
        REPORT, dict(model.config), capability, setup, num_gpus=setup.num_gpus, **options
    )
    if use_cache and isinstance(outcome, DryRunReport):
        cache.save(directory, key, outcome)
    return outcome


def report_for_config(
    raw_config: Mapping[str, Any],
    capability: tuple[int, int],
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    limit_bytes: int | None = None,
) -> DryRunReport | ProbeFailure:
    """`dry_run_report` from a raw `config.json` and a compute capability, without the cache.

    Args:
        limit_bytes: what PyTorch may reserve; where that is too little, the reserved peak is the one without a limit.
    """
    started = time.perf_counter()
    if refusal := why_no_dry_run(setup):
        return _unsupported(refusal)
    try:
        with collection_paused():
            # torch is imported here, not before: a cached answer needs none of it.
            load_libraries()  # before the engine's own modules, which import transformers as a whole
            from probes.dryrun.engine import run_engine

            report = run_engine(raw_config, capability, setup, full_depth=full_depth, limit_bytes=limit_bytes)
    except Exception as error:  # whatever the libraries stumble over: the formula's answer stands
        log.debug("dry run failed", exc_info=True)
        return _unsupported(f"{raw_config.get('model_type')}: {type(error).__name__}: {error}")
    return replace(report, elapsed_s=time.perf_counter() - started)


def _unsupported(message: str) -> ProbeFailure:
    return ProbeFailure(level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message=message)
