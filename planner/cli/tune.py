"""`plan tune`: search with GPU probes for the fastest setup that fits; `tune_plan` does the same to a finished plan."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options, probing
from planner.cli.wish import positive, resolve_gpu, workload
from planner.errors import EXIT_NOTHING_FITS, UsageError
from planner.outcome import Candidate, Measurement, Prediction, ProbeFailure
from planner.plan import NoPlan, Plan
from planner.setup import TrainSetup
from planner.workload import Workload

if TYPE_CHECKING:
    from search.problem import Evaluate
    from search.run import SearchResult
    from search.sampler import Belief
    from search.stopping import Budget
    from search.study import TrialRecord

MAX_CANDIDATES = 1500
"""Of the walked space, the fastest this many that may fit are searched: predicting one costs half a millisecond."""
NEAR_MISS_FRACTION = 0.15
"""A setup predicted this much above the budget may still fit: the formula errs by less in nearly all cases."""
SLOWEST_FRACTION = 0.5
"""What is predicted at less than this share of the best speed cannot become the best by any error seen so far."""
DEFAULT_PROBES = 12
DEFAULT_SECONDS = 300.0


def tune(
    model: options.Model,
    gpu: Annotated[str, typer.Option("--gpu", help="Table row of this machine's GPU, or 'local'.")] = "local",
    gpus: Annotated[int | None, typer.Option("--gpus", help="Only 1: a search probes one GPU.")] = None,
    seq_len: options.SeqLen = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="Sequences per optimizer step, kept constant. Default 32.")
    ] = None,
    method: options.Methods = None,
    rank: options.Rank = None,
    min_rank: Annotated[int | None, typer.Option("--min-rank", help="LoRA rank never falls below this.")] = None,
    targets: options.Targets = None,
    optimizer: options.Optimizer = None,
    precision: options.Precision = None,
    quantization: options.Quantization = None,
    attention: options.Attention = None,
    checkpointing: options.Checkpointing = None,
    checkpoint_every: options.CheckpointEvery = None,
    packing: options.Packing = None,
    loss: options.Loss = None,
    memory_gib: options.MemoryGib = None,
    headroom: options.Headroom = None,
    dataset_tokens: Annotated[int | None, typer.Option("--dataset-tokens", help="Tokens of one epoch.")] = None,
    price: Annotated[float | None, typer.Option("--price", help="US dollars per GPU hour.")] = None,
    objective: Annotated[str, typer.Option("--objective", help="tokens, cost or memory.")] = "tokens",
    budget: Annotated[str, typer.Option("--budget", help="Stop after this long: 5m, 90s, 1.5h.")] = "5m",
    max_probes: Annotated[int, typer.Option("--max-probes", help="Stop after this many probes.")] = DEFAULT_PROBES,
    sampler: Annotated[str, typer.Option("--sampler", help="residual (ours), tpe, gp, random or grid.")] = "residual",
    storage: Annotated[
        str | None,
        typer.Option("--storage", help="Study: a directory, or sqlite://, postgresql://, mysql://, grpc://."),
    ] = None,
    study: Annotated[
        str, typer.Option("--study", help="Name of the study: workers that share it work together.")
    ] = "plan",
    out: Annotated[Path | None, typer.Option("--out", help="Directory for the study and the plan's files.")] = None,
    no_dry_run: options.NoDryRun = False,
    device: probing.Device = None,
    store: probing.StorePath = None,
    revision: options.Revision = None,
    hub: options.AskHub = False,
    as_json: options.Json = False,
) -> None:
    """Search with GPU probes for the fastest setup that fits. Call it again to go on where it stopped."""
    from planner.cli.campaign import parse_budget
    from planner.cli.output import console, print_json
    from planner.models.resolve import resolve_model
    from planner.planning import plan_workload
    from search.stopping import Budget

    fixed = options.fixed_fields(
        targets=targets,
        rank=rank,
        checkpointing=options.checkpointing_value(checkpointing, checkpoint_every),
        packing=packing,
        method=method,
        optimizer=optimizer,
        precision=precision,
        quantization=quantization,
        attention=attention,
        loss=loss,
    )
    options.check_ranks(rank, min_rank)
    if (positive("gpus", gpus) or 1) > 1:
        raise UsageError(
            f"plan tune searches with probes of one GPU, got --gpus {gpus}",
            hint=f"plan {model} --gpu GPU --gpus {gpus} plans for several without a search",
        )
    limits = Budget(max_probes=positive("max-probes", max_probes), seconds=parse_budget(budget))
    spec = resolve_model(model, revision=revision, ask_hub=hub)
    wish = workload(
        spec,
        resolve_gpu(gpu),
        fixed=fixed,
        seq_len=seq_len,
        global_batch=global_batch,
        memory_gib=memory_gib,
        headroom_gib=headroom,
        min_rank=min_rank,
        dataset_tokens=dataset_tokens,
        price=price,
        objective=objective,
    )
    plan = plan_workload(wish)
    if isinstance(plan, Plan):
        plan = tune_plan(
            plan,
            budget=limits,
            sampler=sampler,
            storage=storage if storage is not None else (str(out) if out is not None else None),
            study=study,
            dry_run=not no_dry_run,
            device=device,
            store=store,
        )
    if out is not None:
        from planner.cli.writing import write_out

        write_out(plan, out, targets=None, dataset=None, command=["tune", model, "--gpu", gpu])
    if as_json:
        from reports.plan_json import plan_to_dict

        print_json(plan_to_dict(plan))
    else:
        from reports.terminal import render_no_plan, render_plan

        if isinstance(plan, NoPlan):
            render_no_plan(plan, console())
        else:
            render_plan(plan, console())
    if isinstance(plan, NoPlan):
        raise typer.Exit(EXIT_NOTHING_FITS)


def tune_plan(
    plan: Plan,
    *,
    budget: "Budget | None" = None,
    sampler: str = "residual",
    storage: str | Path | None = None,
    study: str = "plan",
    dry_run: bool = True,
    device: str | None = None,
    store: Path | None = None,
    corrections: Path | None = None,
    evaluate: "Evaluate | None" = None,
) -> Plan:
    """The plan after a search with probes on this machine's GPU; what was learned is kept for the next plan.

    `evaluate` stands in for the probes (tests, recorded replay).
    """
    from planner import __version__
    from planner.cli.rungs import dry_run_possible, dry_run_setup
    from search.corrections import CorrectionStore, as_elsewhere, observations_of
    from search.problem import Problem
    from search.run import search
    from search.stopping import Budget

    wish = plan.workload
    model, gpu = wish.model.model_id, wish.gpu.key
    kept = CorrectionStore(corrections if corrections is not None else default_corrections_path())
    problem = Problem.of(wish, search_candidates(plan))
    line = probing.ProgressLine(budget_s=budget.seconds if budget is not None else DEFAULT_SECONDS)

    def show(record: "TrialRecord", belief: "Belief") -> None:
        line.advance(trial_line(record))

    def check(setup: TrainSetup) -> Prediction | ProbeFailure:
        return dry_run_setup(wish.model, wish.gpu, setup)

    with ExitStack() as stack:
        if evaluate is None:
            evaluate = _prober(stack, wish, device=device, store=store, line=line)
        result = search(
            problem,
            evaluate,
            storage=storage,
            study_name=study,
            sampler=sampler,
            budget=budget or Budget(max_probes=DEFAULT_PROBES, seconds=DEFAULT_SECONDS),
            plan=plan.chosen.setup,
            check=check if dry_run and not dry_run_possible() else None,
            elsewhere=as_elsewhere(kept.load(gpu, formula_version=__version__), model),
            on_trial=show,
        )
    line.close()
    kept.add(observations_of(result.candidates, gpu=gpu, model=model, formula_version=__version__))
    return tuned(plan, result)


def _prober(
    stack: ExitStack, wish: Workload, *, device: str | None, store: Path | None, line: probing.ProgressLine
) -> "Evaluate":
    from probes.evaluate import Prober

    devices = probing.pick_devices(device)[:1]
    executor = stack.enter_context(probing.executor_for(devices, on_progress=line.event))
    return Prober(
        model=wish.model,
        gpu=None if devices == ("cpu",) else wish.gpu,
        executor=executor,
        store=probing.open_store(store),
        device=devices[0],
    )


def search_candidates(plan: Plan) -> tuple[Candidate, ...]:
    """What the search may choose from: the walked space where it may fit and is not hopelessly slow, fastest first.

    The tree's first answer stands: a plan for full fine-tuning is tuned among full fine-tuning setups, one for
    adapters among adapters (quantized or not).
    """
    from planner.planning import candidate
    from planner.space import walk

    wish = plan.workload
    full = plan.chosen.setup.method == "full"
    limit_bytes = wish.budget_bytes * (1 + NEAR_MISS_FRACTION)
    points = [
        point
        for point in walk(wish)
        if (point.family.method == "full") == full and point.peak_device_bytes <= limit_bytes
    ]
    fitting = [point.tokens_per_s for point in points if point.peak_device_bytes <= wish.budget_bytes]
    if wish.objective == "memory":
        points.sort(key=lambda point: point.peak_device_bytes)
    else:
        floor = SLOWEST_FRACTION * max(fitting, default=0.0)
        points = sorted((p for p in points if p.tokens_per_s >= floor), key=lambda point: -point.tokens_per_s)
    setups = dict.fromkeys([plan.chosen.setup, *(point.setup for point in points[:MAX_CANDIDATES])])
    return tuple(candidate(wish, setup) for setup in setups)


def tuned(plan: Plan, result: "SearchResult") -> Plan:
    """The plan with the search's answer chosen, its rivals ranked by measured speed, and the search's history."""
    from planner.tree import QUANTIZE_GAIN_FRACTION
    from reports.evidence import search_values

    trials = [(record.setup, record.origin, record.evidence, record.excluded) for record in result.trials]
    values: Mapping[str, object] = {
        **search_values(trials, result.reason, plan.workload.budget_bytes),
        "num_probes": result.num_probes,
        "pareto": [_pareto_point(one) for one in result.pareto],
    }
    if result.best is None:
        note = f"no probe showed a setup that fits ({result.reason}): the plan stands on prediction alone"
        return replace(plan, search=values, notes=(*plan.notes, note))
    chosen = result.best
    if plan.workload.objective == "tokens" and chosen.setup.method == "qlora":
        chosen = _unquantized(chosen, result.candidates, QUANTIZE_GAIN_FRACTION)
    rivals = [one for one in result.candidates if one.fits and one.setup != chosen.setup]
    known = {chosen.setup, *(one.setup for one in result.candidates)}
    ranked = (chosen, *rivals, *(one for one in plan.ranked if one.setup not in known))
    return replace(
        plan,
        chosen=chosen,
        ranked=ranked,
        search=values,
        alternatives=tuple(each for each in plan.alternatives if each.candidate.setup != chosen.setup),
    )


def _unquantized(best: Candidate, candidates: Sequence[Candidate], gain_fraction: float) -> Candidate:
    """A measured 16-bit LoRA nearly as fast goes before QLoRA: quantize to fit, or where the whole is faster."""
    for one in candidates:
        near = one.tokens_per_s * (1 + gain_fraction) >= best.tokens_per_s
        if one.setup.method == "lora" and isinstance(one.probe, Measurement) and one.fits and near:
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

    setup = record.setup
    words = [setup.method, setup.precision, setup.attention, f"checkpointing {setup.checkpointing}", setup.loss]
    if setup.quantized:
        words.insert(1, setup.quantization)
    what = f"{', '.join(words)}, {setup.micro_batch_seqs} x {setup.accumulation_steps}"
    if record.excluded:
        return f"  excluded  {what}: {record.excluded}"
    evidence = record.evidence
    if isinstance(evidence, ProbeFailure):
        return f"  {evidence.kind.value.replace('_', ' ')}  {what}"
    if evidence is None:
        return f"  {what}"
    speed = f"{evidence.tokens_per_s:,.0f} tokens/s" if evidence.tokens_per_s else "speed not measured"
    return f"  {speed}, {gib(evidence.peak_device_bytes)}  {what}"


def default_corrections_path() -> Path:
    """Beside the user's store of measurements."""
    return probing.default_store_path().with_name("corrections.json")
