"""The formula's plan, dry runs of it, and what was measured before, level by level, with progress on stderr."""

import importlib.util
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune_planner.app.history import history_of, outcomes, with_history, with_known_context
from planner.core.errors import UsageError
from planner.core.install import install_command
from planner.core.notes import risk
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Workload
from planner.models.spec import ModelSpec
from planner.planning.plan import NoPlan, Plan
from planner.planning.predict import with_padding
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, FailureKind, Fidelity, Prediction, ProbeFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from planner.hardware.cluster import Cluster
    from planner.planning.groups import WalkCache
    from planner.samples.lengths import OverLengths
    from reports.extras import Timeline
    from search.problem import Observation

NEEDED = ("torch", "transformers", "peft")


def dry_run_possible() -> str:
    """Empty where the dry run's libraries are installed, else which are missing."""
    return ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)


def dry_runs_ahead(num_gpus: int, *, first: "Callable[[Mapping[str, Any]], None] | None" = None) -> None:
    """From now on a dry run's libraries are loaded beside what is done before one, on so many GPUs, is asked for; the
    process that loads them reads module trees too. `first` is told a configuration before its tree is waited for."""
    if dry_run_possible():
        return
    from planner.models import module_tree
    from probes.dryrun.helper import load_ahead, tree_answer

    load_ahead(one_gpu=num_gpus == 1)

    def read(config: "Mapping[str, Any]") -> "Mapping[str, Any] | None":
        if first is not None:
            first(config)
        return tree_answer(config, module_tree.LIMIT_S)

    module_tree.read_with(read)


def with_dry_run(
    candidate: Candidate,
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    full_depth: bool = False,
    memory_bytes: int | None = None,
    cluster: "Cluster | None" = None,
) -> Candidate:
    """The candidate with its dry run beside the formula; `memory_bytes`: what the card has, where a flag says so."""
    options: dict[str, Any] = {"full_depth": full_depth, "memory_bytes": memory_bytes, "cluster": cluster}
    outcome = dry_run_setup(model, gpu, candidate.setup, **options)
    return replace(candidate, dry_run=outcome)


def with_memory(gpu: GpuSpec, memory_bytes: int | None) -> GpuSpec:
    """The card with the memory that `--memory-gib` gives it, the limit of a dry run's replay."""
    return gpu if memory_bytes is None else replace(gpu, memory_bytes=memory_bytes)


def dry_run_setup(
    model: ModelSpec,
    gpu: GpuSpec,
    setup: TrainSetup,
    *,
    full_depth: bool = False,
    memory_bytes: int | None = None,
    planned: bool = False,
    uneven: bool = True,
    cluster: "Cluster | None" = None,
) -> Prediction | ProbeFailure:
    """One dry run; `planned`: of a plan's own setup; `uneven`: samples may differ in length (`with_padding`);
    `cluster`: the machines, None: those that the number of GPUs suggests."""
    missing = dry_run_possible()
    if missing:
        message = f"{missing} not installed ({install_command('torch')})"
        return ProbeFailure(level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message=message)
    import logging
    import warnings

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's remark that it keeps no times of meta tensors
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' remarks about this CPU say nothing about the target GPU
        from probes.dryrun import dry_run

        card = with_memory(gpu, memory_bytes)
        outcome = dry_run(model, card, setup, full_depth=full_depth, planned=planned, cluster=cluster)
        if isinstance(outcome, ProbeFailure) or not uneven:
            return outcome
        return with_padding(outcome, model, card, setup)


OVER_MICRO_BATCHES = 128
"""Of a shuffled epoch; 1,280 reserved the same (Qwen-7B, up to 2,048 tokens: benchmarks/varying_lengths.py at
e34acc15)."""


def over_samples(
    candidate: Candidate,
    model: ModelSpec,
    gpu: GpuSpec,
    lengths: "Sequence[int]",
    source: str,
    *,
    seed: int,
    memory_bytes: int | None = None,
) -> "OverLengths | None":
    """Memory over micro-batches of a shuffled epoch of samples of these lengths; None where the setup has no dry run.

    Raises:
        UsageError: a setup whose micro-batches are all alike.
    """
    if not isinstance(candidate.dry_run, Prediction):
        return None
    from planner.samples.lengths import micro_batches
    from probes.dryrun.helper import reported

    setup = candidate.setup
    batches = micro_batches(
        lengths,
        micro_batch_seqs=setup.micro_batch_seqs,
        seq_len_tokens=setup.seq_len_tokens,
        num=OVER_MICRO_BATCHES,
        seed=seed,
    )
    try:
        card = with_memory(gpu, memory_bytes)
        over_lengths: OverLengths = reported(
            "probes.dryrun.varying:over_lengths", model, card, setup, batches, source=source, seed=seed, say=_say
        )
        return over_lengths
    except ValueError as error:
        raise UsageError(
            f"no memory over varying lengths: {error}", hint="leave --dataset and --lengths out"
        ) from error
    finally:
        _say("")


def chosen_timeline(plan: Plan | NoPlan) -> "Timeline | None":
    """Memory over the traced steps of the chosen setup, from the dry run's cache; None where it was not dry-run."""
    if not isinstance(plan, Plan) or not isinstance(plan.chosen.dry_run, Prediction):
        return None
    from probes.dryrun.api import dry_run_report
    from reports.extras import timeline_of

    card = with_memory(plan.workload.gpu, plan.workload.memory_bytes)
    report = dry_run_report(plan.workload.model, card, plan.chosen.setup)
    if isinstance(report, ProbeFailure):
        return None
    groups = report.phase_groups.get(report.prediction.peak_phase, {})
    return timeline_of(report.timeline, groups, phases=report.phases)


SHORTER = (1536, 1024, 768, 512)
"""Tokens a sequence that are tried where the usual length, which nobody asked for, does not fit."""


def answered(workload: Workload, *, dry_run: bool = True, history: bool = True) -> Plan | NoPlan:
    """The plan from the formula, proven by dry runs where torch is there, with what was measured on this GPU before;
    and which engine is faster than the planned one. Where the usual length does not fit and nobody asked for it, the
    plan is for the longest of `SHORTER` that does (by more than its band, where one does so), and says so."""
    from planner.planning.groups import WalkCache
    from planner.planning.targets import with_engine_note, with_one_node_note

    usual, workload = workload.usual_length, replace(workload, usual_length=False)
    records, walked = outcomes() if history else (), WalkCache()
    workload = with_known_context(workload, records)
    observations = history_of(workload, records)
    answer = _answered(workload, observations, walked, dry_run=dry_run)
    if isinstance(answer, NoPlan) and usual:
        answer = _of_a_shorter_length(workload, observations, walked, dry_run=dry_run) or answer
    return with_one_node_note(with_engine_note(answer, walked), walked) if isinstance(answer, Plan) else answer


def _of_a_shorter_length(
    workload: Workload, observations: "Sequence[Observation]", walked: "WalkCache", *, dry_run: bool
) -> Plan | None:
    from planner.planning.answer import plan_workload
    from planner.planning.plan_request import of_length

    def by_formula(shorter: Workload) -> Plan | NoPlan | None:
        try:
            return plan_workload(shorter, cache=walked, helped=False, explained=False)
        except UsageError:  # too short for what was asked for, completions for example
            return None

    lengths = [of_length(workload, tokens) for tokens in SHORTER if tokens < workload.seq_len_tokens]
    if lengths and isinstance(by_formula(lengths[-1]), NoPlan):
        return None
    tight: Plan | None = None
    for shorter in lengths:
        if not isinstance(by_formula(shorter), Plan):
            continue
        answer = _answered(shorter, observations, walked, dry_run=dry_run)
        if isinstance(answer, NoPlan):
            continue
        note = (
            f"{workload.seq_len_tokens:,} tokens, planned where no length is said, do not fit; "
            f"{shorter.seq_len_tokens:,} do: --seq-len or --dataset says how long your samples are"
        )
        answer = replace(answer, notes=(risk(note), *answer.notes))
        if answer.chosen.verdict == "fits":
            return answer
        tight = tight or answer
    return tight


def _answered(
    workload: Workload, observations: "Sequence[Observation]", walked: "WalkCache", *, dry_run: bool
) -> Plan | NoPlan:
    """The plan on which formula and dry run agree (`planner.planning.refine`); `observations`: measured here."""
    from planner.planning.answer import plan_workload
    from planner.planning.refine import refine

    if missing := dry_run and dry_run_possible():
        print(f"formula only: {missing} not installed ({install_command('torch')})", file=sys.stderr)
    if missing or not dry_run:
        return with_history(plan_workload(workload, cache=walked), observations)

    def run(setup: TrainSetup) -> Prediction | ProbeFailure:
        where = f" on one of {setup.num_gpus} GPUs ({setup.parallel})" if setup.num_gpus > 1 else ""
        _say(f"dry run of the real step{where}: {setup.method}, micro-batch {setup.micro_batch_seqs} ...")
        model, gpu, memory, uneven = workload.model, workload.gpu, workload.memory_bytes, workload.uneven
        options: dict[str, Any] = {"memory_bytes": memory, "planned": True, "uneven": uneven}
        return dry_run_setup(model, gpu, setup, cluster=workload.cluster, **options)

    try:
        dry_runs_ahead(workload.num_gpus)
        return refine(lambda learned: with_history(plan_workload(workload, learned, walked), observations), run)
    finally:
        _say("")


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
