"""A finished plan goes through a search with GPU probes; what was learned is kept for the next."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_planner.app import machine
from finetune_planner.app.history import history_of
from finetune_planner.app.progress import ProgressLine, say
from finetune_planner.app.search_space import search_candidates, tuned
from finetune_planner.app.time_left import TimeIsUp, cpu_flops_per_s, least_probe_s, until
from planner import __version__
from planner.core.errors import ConfigError, EnvironmentProblem, UsageError
from planner.core.records import dataclass
from planner.core.units import gib, seconds
from planner.memory.workload import Workload
from planner.planning.plan import Plan
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, FailureKind, Prediction, ProbeFailure
from reports.setup_text import trial_words

if TYPE_CHECKING:
    from search.problem import Evaluate, TransferObservation, Unprobed
    from search.stopping import Budget
    from search.trials import TrialRecord

DEFAULT_PROBES = 12
DEFAULT_SECONDS = 300.0


def on_this_machine(workload: Workload) -> None:
    """Refuses what no probe of one machine can measure.

    Raises:
        UsageError: a job over several nodes.
    """
    if workload.cluster is not None and workload.cluster.num_nodes > 1:
        raise UsageError(
            f"a search measures on one machine, got {workload.num_gpus} GPUs in {workload.cluster.num_nodes} nodes",
            hint="tune on the GPUs of one node (--nodes 1); without a search, plan MODEL --gpu GPU plans for all",
        )


def climb_probe(plan: Plan) -> Plan:
    """The plan after GPU probes of its finalists (search over measured tokens/s); as it is where this machine lacks the
    search's library or has fewer GPUs than were asked for, and why on stderr."""
    try:
        machine.needs_search()
        if plan.workload.num_gpus > 1:
            on_this_machine(plan.workload)
            machine.job_devices(None, plan.workload.num_gpus)
    except (EnvironmentProblem, UsageError) as error:
        say(f"no probes: {error.message} ({error.hint})")
        return plan
    return tune_plan(plan)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a search goes, and where it keeps what it learns.

    Attributes:
        study: name of the study. Default: "plan", with several GPUs their number in it.
        storage: the study's place (`search.storage.open_storage`); None: memory.
        store, corrections: files of measurements and of what was learned on several GPUs; None: the user's.
        device: the first one to probe on; None: this machine's first. "cpu" rehearses: what it measures is no fact
            about the plan's GPU, which keeps its prediction.
        slurm, partition: each probe is a cluster's job, its files in this folder; None: on this machine.
        started_s: of `time.monotonic`, when the budget's seconds begin to count.
    """

    budget: "Budget | None" = None
    sampler: str = "residual"
    dry_run: bool = True
    storage: str | Path | None = None
    study: str | None = None
    store: Path | None = None
    corrections: Path | None = None
    device: str | None = None
    slurm: Path | None = None
    partition: str | None = None
    started_s: float = field(default_factory=time.monotonic)

    def limits(self) -> "Budget":
        """When it stops, by itself after a few minutes."""
        from search.stopping import Budget

        budget = self.budget or Budget(max_probes=DEFAULT_PROBES, seconds=DEFAULT_SECONDS)
        return replace(budget, since_s=self.started_s)

    @property
    def ends_at(self) -> float:
        """Of `time.monotonic`, when the last probe is over."""
        limit_s = self.limits().seconds
        return math.inf if limit_s is None else self.started_s + limit_s

    @property
    def rehearses(self) -> bool:
        """Whether probes run on the CPU."""
        return self.device == "cpu"

    def dry_runs(self) -> bool:
        """Whether a dry run goes before each probe."""
        from finetune_planner.app.climb import dry_run_possible

        return self.dry_run and not dry_run_possible()


def tune_plan(
    plan: Plan, how: Tuning | None = None, *, evaluate: "Evaluate | None" = None, unprobed: "Unprobed | None" = None
) -> Plan:
    """The plan after a search with probes on this machine's GPUs; what was learned is kept for the next plan.

    Args:
        evaluate: stands in for the probes (tests, recorded replay).
        unprobed: what no probe here can run; default: what the prober says.

    Raises:
        UsageError: the plan is for several nodes.
        EnvironmentProblem: this machine has fewer GPUs than the plan.
    """
    from search.problem import Problem
    from search.run import Strategy, search

    workload, how = plan.workload, how or Tuning()
    on_this_machine(workload)
    learned = _Learned(workload, how.store, how.corrections)
    unprobed = unprobed or _unprobed(workload)
    problem = Problem.of(workload, search_candidates(plan, unprobed), unprobed=unprobed)
    budget = how.limits()
    line = ProgressLine(budget_s=budget.seconds, started_s=how.started_s)
    line.say(f"searching among {len(problem.candidates):,} setups")
    least_s = _least_s(workload, how, line, plan.chosen.setup) if evaluate is None else lambda setup: 0.0
    with _prober(workload, how, line, least_s) if evaluate is None else nullcontext(evaluate) as evaluator:
        result = search(
            problem,
            evaluator,
            storage=how.storage,
            study_name=how.study or study_name(workload),
            strategy=Strategy(sampler=how.sampler),
            budget=budget,
            plan=plan.chosen.setup,
            check=partial(_dry_run, workload, line, how.ends_at, least_s) if how.dry_runs() else None,
            transfer=learned.transfer(),
            on_trial=lambda record, posterior: line.advance(trial_line(record)),
        )
    line.close()
    learned.keep(result.candidates, line)
    return tuned(plan, result, unprobed, rehearsed=how.rehearses and evaluate is None)


def _least_s(workload: Workload, how: Tuning, line: ProgressLine, first: TrainSetup) -> Callable[[TrainSetup], float]:
    """The seconds that a setup's probe takes at least on the device; of a CPU it is told before anything runs."""
    rate = cpu_flops_per_s() if how.rehearses else workload.gpu.bf16_flops_per_s or math.inf
    least_s = partial(least_probe_s, workload.model, workload.gpu, flops_per_s=rate)
    if how.rehearses:
        line.note(
            f"probes run on this CPU, which is slow, not on a {workload.gpu.name}: one of the planned setup takes "
            f"{seconds(least_s(first))} at least"
        )
    return least_s


def _prober(
    workload: Workload, how: Tuning, line: ProgressLine, least_s: Callable[[TrainSetup], float]
) -> "AbstractContextManager[Evaluate]":
    from probes.gpu.request import Limits

    here = how.slurm is None
    devices = (
        machine.job_devices(how.device, workload.num_gpus) if here else machine.pick_devices(how.device or "cuda:0")
    )
    gpu = None if how.rehearses else workload.gpu
    usual, left_s = Limits(), how.ends_at - how.started_s
    slow = {"limits": replace(usual, time_s=max(usual.time_s, left_s))} if how.rehearses else {}
    return machine.prober_on(
        devices,
        workload.model,
        gpu,
        store=how.store,
        executor={"slurm": how.slurm, "partition": how.partition, "on_progress": line.event},
        ends_at=how.ends_at,
        least_s=least_s,
        **slow,
    )


class _Learned:
    """What earlier searches learned on these GPUs, and what this one adds.

    The store does not say how GPUs were linked: what was learned on several has a file of its own.
    """

    def __init__(self, workload: Workload, store: Path | None, corrections: Path | None) -> None:
        from search.corrections import CorrectionStore, place_of

        self._request, self._store = workload, store
        self._place = place_of(workload.gpu.key, workload.cluster)
        beside = machine.default_store_path().with_name("corrections.json")
        self._kept = CorrectionStore(corrections if corrections is not None else beside)

    def transfer(self) -> "Sequence[TransferObservation]":
        """What is known before the first probe."""
        from search.corrections import as_transfer_observations

        known = history_of(self._request, self._store)
        if self._request.num_gpus > 1:
            several = self._kept.load(self._place, formula_version=__version__)
            known = (*known, *(one for one in several if one.setup.num_gpus > 1))
        return as_transfer_observations(known, self._request.model.model_id, self._place)

    def keep(self, candidates: Sequence[Candidate], line: ProgressLine) -> None:
        """Adds what was measured on several GPUs, or says what kept it from being kept."""
        from search.corrections import observations_of

        if self._request.num_gpus == 1:
            return
        model = self._request.model.model_id
        try:
            self._kept.add(observations_of(candidates, gpu=self._place, model=model, formula_version=__version__))
        except (OSError, ConfigError) as error:  # what was measured is in the store and in the answer
            line.note(f"what was learned for later plans could not be kept: {error}")


def study_name(workload: Workload) -> str:
    """One GPU's study and that of several may share a directory: their probes are counted apart."""
    return "plan" if workload.num_gpus == 1 else f"plan-{workload.num_gpus}-gpus"


def _unprobed(workload: Workload) -> "Unprobed":
    if workload.num_gpus == 1:
        return lambda setup: ""
    from probes.gpu.ranks import why_not_probed

    return why_not_probed


def _dry_run(
    workload: Workload, line: ProgressLine, ends_at: float, least_s: Callable[[TrainSetup], float], setup: TrainSetup
) -> Prediction | ProbeFailure | None:
    """The dry run before a probe; None where it breaks, does not follow the layout, or would leave no time for the
    probe: the probe decides."""
    from finetune_planner.app.climb import dry_run_setup

    if time.monotonic() + least_s(setup) > ends_at:
        return None
    line.say(f"dry run: {trial_words(setup)}")
    try:
        with until(ends_at):
            found = dry_run_setup(workload.model, workload.gpu, setup)
    except TimeIsUp:
        return None
    except Exception as error:  # a prediction that breaks is no reason to end a search
        line.note(f"  dry run failed, the probe decides: {type(error).__name__}: {error}")
        return None
    unable = isinstance(found, ProbeFailure) and found.kind is FailureKind.UNSUPPORTED
    return None if unable and setup.num_gpus > 1 else found


def trial_line(record: "TrialRecord") -> str:
    """One finished trial for a person."""
    what = trial_words(record.setup)
    if record.excluded:
        return f"  excluded  {what}: {record.excluded}"
    evidence = record.evidence
    if isinstance(evidence, ProbeFailure):
        return f"  {evidence.kind.value.replace('_', ' ')}  {what}"
    if evidence is None:
        return f"  {what}"
    speed = f"{evidence.tokens_per_s:,.0f} tokens/s" if evidence.tokens_per_s else "speed not measured"
    return f"  {speed}, {gib(evidence.peak_device_bytes)}  {what}"
