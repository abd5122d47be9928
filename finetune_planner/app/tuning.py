"""A finished plan goes through a search with GPU probes: what it chooses from (the walked space where it may fit and is
not hopelessly slow), and the plan after it. What was learned is kept for the next."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_planner.app import machine
from finetune_planner.app.history import history_of, outcomes
from finetune_planner.app.progress import ProgressLine, say
from finetune_planner.app.time_left import TimeIsUp, least_probe_s, until
from planner.core.children import ended_by_scheduler
from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.notes import measured
from planner.core.records import dataclass
from planner.core.units import gib, seconds
from planner.memory.workload import Workload
from planner.planning.decision.candidates import candidate, uneven_tokens_per_s
from planner.planning.decision.choosing import spaces
from planner.planning.decision.layouts import STAGES, Layout, layout_key, layout_name, layouts, layouts_of_one
from planner.planning.decision.node import Node, node_of_setup
from planner.planning.decision.policy import fewer_matrices, full_quality, lossiness, tie_break, worst_quality
from planner.planning.decision.results import PREFERENCE_FRACTION
from planner.planning.decision.tree import preferred_nodes
from planner.planning.plan import Plan, with_trades
from planner.planning.space import dimension_values
from planner.planning.walk import WalkedSetup, walk
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
from planner.setup.outcome import Candidate, FailureKind, Measurement, Prediction, ProbeFailure
from reports.extras import search_values
from reports.setup_text import trial_words

if TYPE_CHECKING:
    from probes.gpu.evaluate import Prober
    from search.problem import Evaluate, Unprobed
    from search.run import SearchResult
    from search.stopping import Budget
    from search.study import TrialRecord

MAX_CANDIDATES = 1500
"""Of the walked space, the fastest this many that may fit are searched: predicting one costs half a millisecond."""


NEAR_MISS_FRACTION = 0.15
"""A setup predicted this much above the budget may still fit: the formula errs by less in nearly all cases."""


SLOWEST_FRACTION = 0.5
"""What is predicted at less than this share of the best speed cannot become the best by any error seen so far."""


MIN_PER_LAYOUT = 60
"""With several GPUs so many of every layout are searched, even where another layout's fastest fill the list: how well
links are used is what the formula knows least."""


def search_candidates(plan: Plan, unprobed: "Unprobed" = lambda setup: "") -> tuple[Candidate, ...]:
    """What the search may choose from: the walked space where it may fit and is not hopelessly slow, fastest first.

    The class of the plan stands, as it does without a search (docs/choices.md): full fine-tuning is tuned among its
    own setups, a 16-bit adapter among those, a quantized base beside the 16-bit one that may fit after all. Where speed
    is preferred, or what the plan took may not fit, quantized bases are searched too. With several GPUs every way of
    spreading the job keeps its best, however fast the others are; of a way that no probe can run only the fastest that
    fits stays, told with its prediction.
    """
    workload = plan.workload
    mine, spare = node_of_setup(plan.chosen.setup), workload.prefer == "speed" or plan.chosen.verdict != "fits"
    nodes = {mine} if mine is Node.FULL else {mine, Node.LORA, *([Node.FOUR_BIT] if spare else [])}
    limit_bytes = workload.budget_bytes * (1 + NEAR_MISS_FRACTION)
    points = [
        point
        for point in _walked(plan)
        if node_of_setup(point.family) in nodes and point.peak_device_bytes <= limit_bytes
    ]
    if workload.objective == "memory":
        points.sort(key=lambda point: point.peak_device_bytes)
    else:
        points.sort(key=lambda point: -point.tokens_per_s)
    predicted: list[WalkedSetup] = []
    if workload.num_gpus > 1:
        points, predicted = _split_by_probe(points, unprobed, workload.budget_bytes)
    if workload.objective != "memory":
        fitting = [point.tokens_per_s for point in points if point.peak_device_bytes <= workload.budget_bytes]
        floor = SLOWEST_FRACTION * max(fitting, default=0.0)
        points = [point for point in points if point.tokens_per_s >= floor]
    shortlist = points[:MAX_CANDIDATES]
    if workload.num_gpus > 1:
        shortlist += _best_of_each(points)
    setups = dict.fromkeys([plan.chosen.setup, *(point.setup for point in (*shortlist, *predicted))])
    return tuple(candidate(workload, setup, padding=False) for setup in setups)


def _walked(plan: Plan) -> Iterator[WalkedSetup]:
    """The spaces that the plan was chosen from, of one GPU or of every layout; states on the host only where the plan
    or the user wants them."""
    workload, values, taken = plan.workload, dimension_values(plan.workload), plan.chosen.setup
    fewer = fewer_matrices(workload, values, ()) if taken.lora_targets == "attention" or taken.quantized else {}
    if workload.num_gpus == 1:
        chosen: tuple[Layout, ...] = layouts_of_one(workload)
    else:
        hosted = taken.offload != "none" or "offload" in workload.fixed
        chosen = layouts(workload, [stage for stage in STAGES if hosted or stage != "offload"])
    for given in (values, fewer) if chosen else ():
        for space, space_values in spaces(workload, given):
            if space.targets == workload.targets:  # a probe runs no other program than the one that was named
                yield from walk(space, space_values, chosen)


def _split_by_probe(
    points: Sequence[WalkedSetup], unprobed: "Unprobed", budget_bytes: int
) -> tuple[list[WalkedSetup], list[WalkedSetup]]:
    """(what a probe can run, of every layout that none can the first that fits)."""
    probed: list[WalkedSetup] = []
    predicted: dict[Any, WalkedSetup] = {}
    reasons: dict[Any, str] = {}
    for point in points:
        key = layout_key(point.shared)
        if key not in reasons:
            reasons[key] = unprobed(point.shared)
        if not reasons[key]:
            probed.append(point)
        elif key not in predicted and point.peak_device_bytes <= budget_bytes:
            predicted[key] = point
    return probed, list(predicted.values())


def _best_of_each(points: Sequence[WalkedSetup]) -> Iterator[WalkedSetup]:
    counts: Counter[Any] = Counter()
    for point in points:
        key = layout_key(point.shared)
        counts[key] += 1
        if counts[key] <= MIN_PER_LAYOUT:
            yield point


def tuned(
    plan: Plan, result: "SearchResult", unprobed: "Unprobed" = lambda setup: "", *, rehearsed: bool = False
) -> Plan:
    """The plan with the search's answer chosen, the others ranked by measured speed, and the search's history.

    What no probe can run stands beside it with its prediction and the reason, never among what was measured.

    Args:
        rehearsed: probes ran on the CPU, which says nothing of the plan's GPU: the choice stands on prediction.
    """
    trials = [(record.setup, record.origin, record.evidence, record.excluded) for record in result.trials]
    values: Mapping[str, object] = {
        **search_values(trials, result.reason, plan.workload.budget_bytes),
        "num_probes": result.num_probes,
        "pareto": [
            {
                "setup": setup_to_dict(point.setup),
                "tokens_per_s": point.tokens_per_s,
                "peak_device_bytes": point.memory_evidence.peak_device_bytes,
                "lora_rank": point.setup.lora_rank,
            }
            for point in result.pareto
        ],
    }
    if plan.workload.num_gpus > 1:
        rows = []
        for setup in dict.fromkeys(record.setup for record in result.trials if unprobed(record.setup)):
            formula = candidate(plan.workload, setup, padding=False).formula
            row: dict[str, Any] = {
                "spread": layout_name(setup),
                "setup": setup_to_dict(setup),
                "reason": unprobed(setup),
                "predicted_tokens_per_s": formula.tokens_per_s,
                "predicted_peak_device_bytes": formula.peak_device_bytes,
            }
            rows.append(row)
        values = {**values, "not_probed": rows}
        # One sentence for each reason.
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            speed = f"{row['predicted_tokens_per_s'] or 0:,.0f} tokens/s"
            words = f"{row['spread']} ({speed}, {gib(row['predicted_peak_device_bytes'])})"
            by_reason.setdefault(row["reason"], []).append(words)
        plan = replace(
            plan,
            notes=(
                *plan.notes,
                *[f"not measured, only predicted: {', '.join(words)}: {reason}" for reason, words in by_reason.items()],
            ),
        )
    if result.given_up:
        words = "; ".join(trial_words(setup) for setup in result.given_up)
        note = f"not measured, the planner was killed each time: {words}; call plan tune again to try it anew"
        plan = replace(plan, notes=(*plan.notes, measured(note)))
    if result.best is None or rehearsed:
        note = f"{_probes_said(plan, result, rehearsed)} ({result.reason}): the plan stands on prediction alone"
        return replace(plan, search=values, notes=(*plan.notes, measured(note)))
    chosen = _preferred(plan.workload, result.best, result.candidates)
    others = [candidate for candidate in result.candidates if candidate.fits and candidate.setup != chosen.setup]
    searched = {chosen.setup, *(candidate.setup for candidate in result.candidates)}
    ranked = (chosen, *others, *(candidate for candidate in plan.ranked if candidate.setup not in searched))
    return replace(
        plan,
        chosen=chosen,
        ranked=ranked,
        search=values,
        alternatives=with_trades(
            chosen, [alternative for alternative in plan.alternatives if alternative.candidate.setup != chosen.setup]
        ),
    )


def _probes_said(plan: Plan, result: "SearchResult", rehearsed: bool) -> str:
    answers = [record.evidence for record in result.trials if record.probed]
    failures = Counter(answer.kind.value.replace("_", " ") for answer in answers if isinstance(answer, ProbeFailure))
    failed = "".join(f", {num} {kind}" for kind, num in failures.items())
    measured = [answer for answer in answers if isinstance(answer, Measurement)]
    if not answers:
        return "no probe was measured"
    if not rehearsed:
        return f"no probe showed a setup that fits: {len(measured)} of {len(answers)} measured{failed}"
    fastest = max((measurement.tokens_per_s or 0.0 for measurement in measured), default=0.0)
    speed = f", the fastest at {fastest:,.0f} tokens/s there" if fastest else ""
    sentence = f"rehearsed on this machine's CPU: {len(measured)} of {len(answers)} measured{speed}{failed}"
    return f"{sentence}, which says nothing of a {plan.workload.gpu.name}"


def _preferred(workload: Workload, best: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The search's answer by the rules of a plan: the least approximate class that was measured to fit, in it the
    simplest of what is as fast; the fastest where speed is preferred."""
    timed = [
        (uneven_tokens_per_s(workload, candidate), candidate)  # probes run full rows
        for candidate in candidates
        if candidate.fits and isinstance(candidate.probe, Measurement) and candidate.probe.tokens_per_s
    ]
    if workload.objective != "tokens" or not timed:
        return best
    if workload.prefer == "speed":
        return max(timed, key=lambda each: each[0])[1]
    nodes = {node_of_setup(candidate.setup) for _, candidate in timed}
    node = next((node for node in preferred_nodes(workload) if node in nodes), None)
    eligible = [(speed, candidate) for speed, candidate in timed if node_of_setup(candidate.setup) is node]
    allowed = worst_quality((candidate.setup, speed) for speed, candidate in eligible)
    eligible = [each for each in eligible if full_quality(each[1].setup) <= allowed]
    eligible = [each for each in eligible if each[1].setup.lora_targets == "all-linear"] or eligible
    floor = (1 - PREFERENCE_FRACTION) * max(speed for speed, _ in eligible)
    return min(
        (each for each in eligible if each[0] >= floor),
        key=lambda each: (lossiness(each[1].setup), tie_break(each[1].setup), -each[0]),
    )[1]


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


def refine_by_probe(plan: Plan) -> Plan:
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
        store: the file of measurements; None: the user's.
        device: the first one to probe on; None: this machine's first. "cpu" rehearses: what it measures is no fact
            about the plan's GPU, which keeps its prediction.
        slurm, partition: each probe is a cluster's job, its files in this folder; None: on this machine.
        started_s: of `time.monotonic`, when the budget's seconds begin to count.
    """

    budget: "Budget | None" = None
    dry_run: bool = True
    storage: str | Path | None = None
    study: str | None = None
    store: Path | None = None
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
        return self.device == "cpu"

    def dry_runs(self) -> bool:
        from finetune_planner.app.levels import dry_run_possible

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
    from search.corrections import as_transfer_observations, place_of
    from search.problem import Problem
    from search.run import search

    workload, how = plan.workload, how or Tuning()
    on_this_machine(workload)
    if unprobed is None:
        from probes.gpu.ranks import why_not_probed  # late: one GPU needs none of it

        unprobed = why_not_probed if workload.num_gpus > 1 else lambda setup: ""
    learned = as_transfer_observations(
        history_of(workload, outcomes(how.store)), workload.model.model_id, place_of(workload.gpu.key, workload.cluster)
    )
    problem = Problem.of(workload, search_candidates(plan, unprobed), unprobed=unprobed)
    budget = how.limits()
    line = ProgressLine(budget_s=budget.seconds, started_s=how.started_s)
    line.say(f"searching among {len(problem.candidates):,} setups")
    least_s = _least_s(workload, how, line, plan.chosen.setup) if evaluate is None else lambda setup: 0.0
    rehearsed = how.rehearses and evaluate is None
    with ended_by_scheduler(), ExitStack() as stack:
        if evaluate is None:
            evaluate = prober = stack.enter_context(_prober(workload, how, line, least_s))
            problem = replace(problem, conditions=prober.conditions(plan.chosen.setup))
        result = search(
            problem,
            evaluate,
            storage=how.storage,
            study_name=how.study or study_name(workload),
            budget=budget,
            plan=plan.chosen.setup,
            check=partial(_dry_run, workload, line, how.ends_at, least_s) if how.dry_runs() else None,
            transfer=learned,
            on_trial=lambda record, posterior: line.advance(trial_line(record)),
            on_wait=line.event,
        )
    line.close()
    return tuned(plan, result, unprobed, rehearsed=rehearsed)


def _least_s(workload: Workload, how: Tuning, line: ProgressLine, first: TrainSetup) -> Callable[[TrainSetup], float]:
    rate = math.inf if how.rehearses else workload.gpu.bf16_flops_per_s or math.inf  # nobody knows this CPU's
    least_s = partial(least_probe_s, workload.model, workload.gpu, flops_per_s=rate)
    if how.rehearses:
        line.note(
            f"probes run on this CPU, which is slow, not on a {workload.gpu.name}: one of the planned setup takes "
            f"{seconds(least_s(first))} at least"
        )
    return least_s


def _prober(
    workload: Workload, how: Tuning, line: ProgressLine, least_s: Callable[[TrainSetup], float]
) -> "AbstractContextManager[Prober]":
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
        link=workload.cluster.within.key if workload.cluster is not None else "",
        **slow,
    )


def study_name(workload: Workload) -> str:
    """One GPU's study and that of several may share a directory: their probes are counted apart."""
    return "plan" if workload.num_gpus == 1 else f"plan-{workload.num_gpus}-gpus"


def _dry_run(
    workload: Workload, line: ProgressLine, ends_at: float, least_s: Callable[[TrainSetup], float], setup: TrainSetup
) -> Prediction | ProbeFailure | None:
    """The dry run before a probe; None where it breaks, does not follow the layout, or would leave no time for the
    probe: the probe decides."""
    from finetune_planner.app.levels import dry_run_setup

    if time.monotonic() + least_s(setup) > ends_at:
        return None
    line.say(f"dry run: {trial_words(setup)}")
    try:
        with until(ends_at):
            options: dict[str, Any] = {"uneven": workload.uneven, "cluster": workload.cluster}
            outcome = dry_run_setup(workload.model, workload.gpu, setup, **options)
    except TimeIsUp:
        return None
    except Exception as error:  # a prediction that breaks is no reason to end a search
        line.note(f"  dry run failed, the probe decides: {type(error).__name__}: {error}")
        return None
    unable = isinstance(outcome, ProbeFailure) and outcome.kind is FailureKind.UNSUPPORTED
    return None if unable and setup.num_gpus > 1 else outcome


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
