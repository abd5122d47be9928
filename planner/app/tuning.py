"""A finished plan after a search with GPU probes: what is searched, what it costs, what the answer becomes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.app import machine
from planner.app.progress import ProgressLine, say
from planner.errors import ConfigError, EnvironmentProblem, UsageError
from planner.outcome import Candidate, FailureKind, Measurement, Prediction, ProbeFailure
from planner.plan import Plan, with_trades
from planner.setup import TrainSetup
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.walk import Point
    from search.problem import Elsewhere, Evaluate, Unprobed
    from search.run import SearchResult
    from search.stopping import Budget
    from search.trials import TrialRecord

MAX_CANDIDATES = 1500
"""Of the walked space, the fastest this many that may fit are searched: predicting one costs half a millisecond."""
NEAR_MISS_FRACTION = 0.15
"""A setup predicted this much above the budget may still fit: the formula errs by less in nearly all cases."""
SLOWEST_FRACTION = 0.5
"""What is predicted at less than this share of the best speed cannot become the best by any error seen so far."""
MIN_PER_SPREAD = 60
"""With several GPUs so many of every spread are searched, even where another spread's fastest fill the list: how well
links are used is what the formula knows least."""
DEFAULT_PROBES = 12
DEFAULT_SECONDS = 300.0


def on_this_machine(wish: Workload) -> None:
    """Refuses what no probe of one machine can measure.

    Raises:
        UsageError: a job over several nodes.
    """
    if wish.cluster is not None and wish.cluster.num_nodes > 1:
        raise UsageError(
            f"a search measures on one machine, got {wish.num_gpus} GPUs in {wish.cluster.num_nodes} nodes",
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


def tune_plan(
    plan: Plan,
    *,
    budget: "Budget | None" = None,
    sampler: str = "residual",
    storage: str | Path | None = None,
    study: str | None = None,
    dry_run: bool = True,
    device: str | None = None,
    store: Path | None = None,
    corrections: Path | None = None,
    evaluate: "Evaluate | None" = None,
    unprobed: "Unprobed | None" = None,
) -> Plan:
    """The plan after a search with probes on this machine's GPUs; what was learned is kept for the next plan.

    Args:
        study: name of the study. Default: "plan", with several GPUs their number in it.
        evaluate: stands in for the probes (tests, recorded replay).
        unprobed: what no probe here can run; default: what the prober says.

    Raises:
        UsageError: the plan is for several nodes.
        EnvironmentProblem: this machine has fewer GPUs than the plan.
    """
    from planner.app.climb import dry_run_possible
    from search.problem import Problem
    from search.run import Strategy, search
    from search.stopping import Budget

    wish = plan.workload
    on_this_machine(wish)
    learned = _Learned(wish, store, corrections)
    unprobed = unprobed or _unprobed(wish)
    problem = Problem.of(wish, search_candidates(plan, unprobed), unprobed=unprobed)
    budget = budget or Budget(max_probes=DEFAULT_PROBES, seconds=DEFAULT_SECONDS)
    line = ProgressLine(budget_s=budget.seconds)
    line.say(f"searching among {len(problem.candidates):,} setups")

    with ExitStack() as stack:
        if evaluate is None:
            evaluate = _prober(stack, wish, device=device, store=store, line=line)
        result = search(
            problem,
            evaluate,
            storage=storage,
            study_name=study or study_name(wish),
            strategy=Strategy(sampler=sampler),
            budget=budget,
            plan=plan.chosen.setup,
            check=partial(_dry_run, wish, line) if dry_run and not dry_run_possible() else None,
            elsewhere=learned.elsewhere(),
            on_trial=lambda record, belief: line.advance(trial_line(record)),
        )
    line.close()
    if problem_words := learned.keep(result.candidates):
        line.note(problem_words)
    return tuned(plan, result, unprobed)


class _Learned:
    """What earlier searches learned on these GPUs, and what this one adds.

    The store does not say how GPUs were linked: what was learned on several has a file of its own.
    """

    def __init__(self, wish: Workload, store: Path | None, corrections: Path | None) -> None:
        from search.corrections import CorrectionStore, place_of

        self._wish, self._store = wish, store
        self._place = place_of(wish.gpu.key, wish.cluster)
        self._kept = CorrectionStore(corrections if corrections is not None else default_corrections_path())

    def elsewhere(self) -> "Sequence[Elsewhere]":
        """What is known before the first probe."""
        from planner import __version__
        from planner.app.history import history_of
        from search.corrections import as_elsewhere

        known = history_of(self._wish, self._store)
        if self._wish.num_gpus > 1:
            several = self._kept.load(self._place, formula_version=__version__)
            known = (*known, *(one for one in several if one.setup.num_gpus > 1))
        return as_elsewhere(known, self._wish.model.model_id, self._place)

    def keep(self, candidates: Sequence[Candidate]) -> str:
        """Adds what was measured on several GPUs; what kept it from being kept, or ""."""
        from planner import __version__
        from search.corrections import observations_of

        if self._wish.num_gpus == 1:
            return ""
        model = self._wish.model.model_id
        try:
            self._kept.add(observations_of(candidates, gpu=self._place, model=model, formula_version=__version__))
        except (OSError, ConfigError) as error:  # what was measured is in the store and in the answer
            return f"what was learned for later plans could not be kept: {error}"
        return ""


def study_name(wish: Workload) -> str:
    """One GPU's study and that of several may share a directory: their probes are counted apart."""
    return "plan" if wish.num_gpus == 1 else f"plan-{wish.num_gpus}-gpus"


def _unprobed(wish: Workload) -> "Unprobed":
    if wish.num_gpus == 1:
        return lambda setup: ""
    from probes.ranks import why_not_probed

    return why_not_probed


def _dry_run(wish: Workload, line: ProgressLine, setup: TrainSetup) -> Prediction | ProbeFailure | None:
    """The dry run before a probe; None where it breaks, or does not follow the spread: the probe decides."""
    from planner.app.climb import dry_run_setup

    line.say(f"dry run: {setup_words(setup)}")
    try:
        found = dry_run_setup(wish.model, wish.gpu, setup)
    except Exception as error:  # a prediction that breaks is no reason to end a search
        line.note(f"  dry run failed, the probe decides: {type(error).__name__}: {error}")
        return None
    unable = isinstance(found, ProbeFailure) and found.kind is FailureKind.UNSUPPORTED
    return None if unable and setup.num_gpus > 1 else found


def _prober(
    stack: ExitStack, wish: Workload, *, device: str | None, store: Path | None, line: ProgressLine
) -> "Evaluate":
    from probes.evaluate import Prober

    devices = machine.job_devices(device, wish.num_gpus)
    executor = stack.enter_context(machine.executor_for(devices, on_progress=line.event))
    return Prober(
        model=wish.model,
        gpu=None if devices == ("cpu",) else wish.gpu,
        executor=executor,
        store=machine.open_store(store),
        device=devices[0],
    )


def search_candidates(plan: Plan, unprobed: "Unprobed" = lambda setup: "") -> tuple[Candidate, ...]:
    """What the search may choose from: the walked space where it may fit and is not hopelessly slow, fastest first.

    The tree's first answer stands: a plan for full fine-tuning is tuned among full fine-tuning setups, one for
    adapters among adapters (quantized or not). With several GPUs every way of spreading the job keeps its best, however
    fast the others are; of a way that no probe can run only the fastest that fits stays, told with its prediction.
    """
    from planner.decision.candidates import candidate

    wish = plan.workload
    full = plan.chosen.setup.method == "full"
    limit_bytes = wish.budget_bytes * (1 + NEAR_MISS_FRACTION)
    points = [
        point
        for point in _walked(plan)
        if (point.family.method == "full") == full and point.peak_device_bytes <= limit_bytes
    ]
    if wish.objective == "memory":
        points.sort(key=lambda point: point.peak_device_bytes)
    else:
        points.sort(key=lambda point: -point.tokens_per_s)
    told: list[Point] = []
    if wish.num_gpus > 1:
        points, told = _probed_and_told(points, unprobed, wish.budget_bytes)
    if wish.objective != "memory":
        fitting = [point.tokens_per_s for point in points if point.peak_device_bytes <= wish.budget_bytes]
        floor = SLOWEST_FRACTION * max(fitting, default=0.0)
        points = [point for point in points if point.tokens_per_s >= floor]
    kept = points[:MAX_CANDIDATES]
    if wish.num_gpus > 1:
        kept += _best_of_each(points, MIN_PER_SPREAD)
    setups = dict.fromkeys([plan.chosen.setup, *(point.setup for point in (*kept, *told))])
    return tuple(candidate(wish, setup) for setup in setups)


def _walked(plan: Plan) -> "Iterable[Point]":
    """The space of one GPU, or that of every spread; states on the host only where the plan or the user wants them."""
    from planner.space import dimension_values
    from planner.walk import walk

    wish = plan.workload
    if wish.num_gpus == 1:
        return walk(wish)
    from planner.decision.spreads import STAGES, spreads

    hosted = plan.chosen.setup.offload != "none" or "offload" in wish.fixed
    found = spreads(wish, [stage for stage in STAGES if hosted or stage != "offload"])
    return walk(wish, dimension_values(wish), found) if found else ()


def _probed_and_told(
    points: "Sequence[Point]", unprobed: "Unprobed", budget_bytes: int
) -> "tuple[list[Point], list[Point]]":
    """(what a probe can run, of every spread that none can the first that fits)."""
    from planner.decision.spreads import spread_key

    probed: list[Point] = []
    told: dict[Any, Point] = {}
    reasons: dict[Any, str] = {}
    for point in points:
        key = spread_key(point.shared)
        if key not in reasons:
            reasons[key] = unprobed(point.shared)
        if not reasons[key]:
            probed.append(point)
        elif key not in told and point.peak_device_bytes <= budget_bytes:
            told[key] = point
    return probed, list(told.values())


def _best_of_each(points: "Sequence[Point]", num: int) -> "Iterator[Point]":
    """The first points of every spread."""
    from planner.decision.spreads import spread_key

    counts: Counter[Any] = Counter()
    for point in points:
        key = spread_key(point.shared)
        counts[key] += 1
        if counts[key] <= num:
            yield point


MEASURED_GAIN_FRACTION = 0.05
"""A quantized base replaces a LoRA that fits where it was measured faster by more than this."""


def tuned(plan: Plan, result: "SearchResult", unprobed: "Unprobed" = lambda setup: "") -> Plan:
    """The plan with the search's answer chosen, its rivals ranked by measured speed, and the search's history.

    What no probe can run stands beside it with its prediction and the reason, never among what was measured.
    """
    from reports.evidence import search_values

    trials = [(record.setup, record.origin, record.evidence, record.excluded) for record in result.trials]
    values: Mapping[str, object] = {
        **search_values(trials, result.reason, plan.workload.budget_bytes),
        "num_probes": result.num_probes,
        "pareto": [_pareto_point(one) for one in result.pareto],
    }
    if plan.workload.num_gpus > 1:
        told = _predicted_only(plan, result, unprobed)
        values = {**values, "not_probed": told}
        plan = replace(plan, notes=(*plan.notes, *_unprobed_notes(told)))
    if result.given_up:
        words = "; ".join(setup_words(setup) for setup in result.given_up)
        note = f"not measured, the planner was killed each time: {words}; call plan tune again to try it anew"
        plan = replace(plan, notes=(*plan.notes, note))
    if result.best is None:
        note = f"no probe showed a setup that fits ({result.reason}): the plan stands on prediction alone"
        return replace(plan, search=values, notes=(*plan.notes, note))
    chosen = result.best
    if plan.workload.objective == "tokens" and chosen.setup.method == "qlora":
        chosen = _unquantized(chosen, result.candidates, MEASURED_GAIN_FRACTION)
    rivals = [one for one in result.candidates if one.fits and one.setup != chosen.setup]
    known = {chosen.setup, *(one.setup for one in result.candidates)}
    ranked = (chosen, *rivals, *(one for one in plan.ranked if one.setup not in known))
    return replace(
        plan,
        chosen=chosen,
        ranked=ranked,
        search=values,
        alternatives=with_trades(chosen, [one for one in plan.alternatives if one.candidate.setup != chosen.setup]),
    )


def _predicted_only(plan: Plan, result: "SearchResult", unprobed: "Unprobed") -> list[dict[str, Any]]:
    """Of every spread that no probe here can run: its setup in the study, why, and what the formula says of it."""
    from planner.decision.candidates import candidate
    from planner.decision.spreads import spread_name
    from planner.interchange import setup_to_dict

    rows = []
    for setup in dict.fromkeys(record.setup for record in result.trials if unprobed(record.setup)):
        formula = candidate(plan.workload, setup).formula
        row = {
            "spread": spread_name(setup),
            "setup": setup_to_dict(setup),
            "reason": unprobed(setup),
            "predicted_tokens_per_s": formula.tokens_per_s,
            "predicted_peak_device_bytes": formula.peak_device_bytes,
        }
        rows.append(row)
    return rows


def _unprobed_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each reason."""
    from planner.units import gib

    by_reason: dict[str, list[str]] = {}
    for row in rows:
        speed = f"{row['predicted_tokens_per_s'] or 0:,.0f} tokens/s"
        words = f"{row['spread']} ({speed}, {gib(row['predicted_peak_device_bytes'])})"
        by_reason.setdefault(row["reason"], []).append(words)
    return [f"not measured, only predicted: {', '.join(words)}: {reason}" for reason, words in by_reason.items()]


def _unquantized(best: Candidate, candidates: Sequence[Candidate], gain_fraction: float) -> Candidate:
    """A measured 16-bit LoRA nearly as fast goes before QLoRA: quantize to fit, or where the whole is faster."""
    for one in candidates:
        near = one.tokens_per_s * (1 + gain_fraction) >= best.tokens_per_s
        timed = isinstance(one.probe, Measurement) and one.probe.tokens_per_s is not None
        if one.setup.method == "lora" and timed and one.fits and near:
            return one
    return best


def _pareto_point(candidate: Candidate) -> dict[str, Any]:
    from planner.interchange import setup_to_dict

    return {
        "setup": setup_to_dict(candidate.setup),
        "tokens_per_s": candidate.tokens_per_s,
        "peak_device_bytes": candidate.memory_evidence.peak_device_bytes,
        "lora_rank": candidate.setup.lora_rank,
    }


def trial_line(record: "TrialRecord") -> str:
    """One finished trial for a person."""
    from planner.units import gib

    what = setup_words(record.setup)
    if record.excluded:
        return f"  excluded  {what}: {record.excluded}"
    evidence = record.evidence
    if isinstance(evidence, ProbeFailure):
        return f"  {evidence.kind.value.replace('_', ' ')}  {what}"
    if evidence is None:
        return f"  {what}"
    speed = f"{evidence.tokens_per_s:,.0f} tokens/s" if evidence.tokens_per_s else "speed not measured"
    return f"  {speed}, {gib(evidence.peak_device_bytes)}  {what}"


def setup_words(setup: TrainSetup) -> str:
    """A setup on one line."""
    words = [setup.method, setup.precision, setup.attention, f"checkpointing {setup.checkpointing}", setup.loss]
    if setup.quantized:
        words.insert(1, setup.quantization)
    batch = f"{setup.micro_batch_seqs} x {setup.accumulation_steps}"
    if setup.num_gpus > 1:
        from planner.decision.spreads import spread_name

        words.insert(0, spread_name(setup))
        batch += f" x {setup.data_degree} copies"
    return f"{', '.join(words)}, {batch}"


def default_corrections_path() -> Path:
    """Beside the user's store of measurements."""
    return machine.default_store_path().with_name("corrections.json")
