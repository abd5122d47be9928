"""What earlier probes of this GPU say about a plan: a query on the store of measurements, against today's formula.

The store is the one home of what was measured. Each measurement of the same GPU is compared with what the formula says
today of its model and setup; the errors move the plan's predictions as they do in a search (`search.corrections`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_planner.app import machine
from planner.core.errors import SetupError, UsageError
from planner.core.notes import measured
from planner.core.units import GIB, MIB, gib
from planner.hardware.cluster import make_cluster
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.planning.decision.candidates import uneven_tokens_per_s
from planner.planning.plan import Answer, NoPlan, Plan, trade
from planner.planning.predict import predict
from planner.setup.interchange import setup_from_dict
from planner.setup.outcome import Candidate, Measurement

if TYPE_CHECKING:
    from probes.store import Record
    from search.problem import Observation

FASTER_BY = 1.01
"""As in the tree: within a percent of the speed nothing changes hands."""
QUESTION = "What do earlier probes of this GPU say?"


def outcomes(store: Path | None = None) -> tuple["Record", ...]:
    """The last outcome of every setup in the store (default: the user's), which is read and checked once for all that
    is asked of it: 0.13 ms each."""
    path = store if store is not None else machine.default_store_path()
    return machine.open_store(path).latest() if path.exists() else ()


def history_of(workload: Workload, records: Iterable["Record"]) -> tuple["Observation", ...]:
    """The measurements of this GPU, oldest first, each beside today's formula. Only of models whose configuration is at
    hand (the request's own, the catalogue's), and for one GPU only of jobs on one."""
    observations = []
    for record in records:
        observation = _observation(record, workload)
        if observation is not None:
            observations.append(observation)
    if not observations:
        return ()
    from search.corrections import MAX_PER_GPU  # late: it loads numpy

    return tuple(observations[-MAX_PER_GPU:])


CONTEXT_BYTES = (64 * MIB, 4 * GIB)
"""What can be a training process's context: less or more beside its segments is something else."""


def with_known_context(workload: Workload, records: Iterable["Record"]) -> Workload:
    """The request on its card with the CUDA context that was last measured there: by a launch file's own run, else by a
    probe. Of one GPU."""
    if workload.num_gpus > 1:
        return workload
    seen: dict[bool, int] = {}
    for record in records:
        outcome = record.outcome
        if (
            not isinstance(outcome, Measurement)
            or record.request.get("gpu_key") != workload.gpu.key
            or outcome.rank_peaks
        ):
            continue
        context_bytes = outcome.peak_device_bytes - outcome.peak_reserved_bytes
        if (
            outcome.environment.device != "cpu"
            and outcome.device_peak_is_nvml
            and CONTEXT_BYTES[0] < context_bytes < CONTEXT_BYTES[1]
        ):
            seen[bool(outcome.program)] = context_bytes
    if not seen:
        return workload
    return replace(workload, gpu=replace(workload.gpu, measured_context_bytes=seen.get(True, seen.get(False))))


def _observation(record: "Record", workload: Workload) -> "Observation | None":
    measured = record.outcome
    if not isinstance(measured, Measurement) or record.request.get("gpu_key") != workload.gpu.key:
        return None
    if not measured.environment.device.startswith("cuda") or measured.peak_device_bytes <= 0:
        return None
    from probes.fingerprint import config_digest

    model = workload.model  # what was measured, where a configuration of the same digest is at hand
    if config_digest(model.config) != record.config_digest:
        spec = catalogue.load(record.model_id)
        if spec is None or config_digest(spec.config) != record.config_digest:
            return None
        model = spec
    try:
        setup, cluster = setup_from_dict(record.setup), None
        if setup.num_gpus > 1:
            link = record.request.get("link")
            if workload.num_gpus == 1 or not link:
                return None
            cluster = make_cluster(workload.gpu, setup.num_gpus, interconnect=link)
    except (SetupError, UsageError):  # a later version's setting, or link
        return None
    from search.corrections import place_of  # late: it loads numpy
    from search.problem import Observation

    return Observation(
        gpu=place_of(workload.gpu.key, cluster),
        model=model.model_id,
        setup=setup,
        formula=predict(model, workload.gpu, setup, cluster),
        measured_tokens_per_s=measured.tokens_per_s,
        measured_peak_device_bytes=measured.peak_device_bytes,
        program=measured.program,
    )


def with_history(plan: Plan | NoPlan, history: Sequence["Observation"]) -> Plan | NoPlan:
    """The plan with its predictions corrected by what was measured on this GPU, and the setup that is then the fastest;
    an answer in the tree says so. A plan for the least memory keeps its choice; one for several GPUs stays as it is."""
    if isinstance(plan, NoPlan) or not history or plan.workload.num_gpus > 1:
        return plan
    from search.corrections import corrected, corrections

    model = plan.workload.model.model_id
    every = {
        candidate.setup: candidate
        for candidate in (plan.chosen, *plan.ranked, *(each.candidate for each in plan.alternatives))
    }
    learned = dict(zip(every, corrections(tuple(every.values()), history, model), strict=True))
    after = {setup: corrected(candidate, learned[setup]) for setup, candidate in every.items()}
    chosen = _choice(after[plan.chosen.setup], [after[candidate.setup] for candidate in plan.ranked], plan.workload)
    factors = learned[chosen.setup]
    num = sum(observation.model == model for observation in history)
    counts = Counter(observation.program for observation in history if observation.program)
    runs = "".join(f", {num} of {name}'s own runs" for name, num in sorted(counts.items()))
    context_bytes = plan.workload.gpu.measured_context_bytes
    context = f", the CUDA context {gib(context_bytes)} as measured" if context_bytes is not None else ""
    answer = Answer(
        question=QUESTION,
        choice="kept" if chosen.setup == plan.chosen.setup else "another setup",
        reason=f"{len(history)} measurements ({num} of this model{runs}) correct its prediction: tokens/s x "
        f"{factors.speed_factor:.2f}, memory x {factors.memory_factor:.3f}{context}; --no-history plans without them",
        needed_bytes=chosen.formula.peak_device_bytes,
        budget_bytes=chosen.budget_bytes,
    )
    others = sorted(
        (after[candidate.setup] for candidate in plan.ranked if candidate.setup != chosen.setup),
        key=lambda other: -other.tokens_per_s,
    )
    alternatives = [replace(each, candidate=after[each.candidate.setup]) for each in plan.alternatives]
    return replace(
        plan,
        chosen=chosen,
        ranked=(chosen, *others),
        alternatives=tuple(
            replace(each, trade=trade(chosen, each.candidate))
            for each in alternatives
            if each.candidate.setup != chosen.setup
        ),
        tree=(*plan.tree, answer),
        notes=(measured(f"measured on this GPU: {answer.reason}"), *plan.notes),
    )


def _choice(chosen: Candidate, ranked: Sequence[Candidate], workload: Workload) -> Candidate:
    """The fastest that surely fits, where it is clearly faster than the choice or the choice does not fit."""
    fitting = [candidate for candidate in ranked if candidate.verdict == "fits"] or [
        candidate for candidate in ranked if candidate.fits
    ]
    if workload.objective == "memory" or not fitting:
        return chosen
    speeds = [uneven_tokens_per_s(workload, candidate) for candidate in fitting]
    fastest = max(speeds)
    faster = not chosen.fits or fastest > FASTER_BY * uneven_tokens_per_s(workload, chosen)
    return fitting[speeds.index(fastest)] if faster else chosen
