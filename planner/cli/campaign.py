"""`plan campaign`: measure a list of setups within a time budget."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.app import machine
from planner.app.progress import ProgressLine
from planner.cli import options
from planner.cli.output import tell
from planner.errors import EXIT_ENVIRONMENT
from planner.interchange import to_jsonable
from planner.models.adapters import spec_from_config
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from planner.option_values import duration_s
from planner.outcome import Measurement
from planner.units import gib, seconds
from reports.setup_text import trial_words

if TYPE_CHECKING:
    from probes.campaign import CampaignReport, Step
    from probes.campaign_spec import CampaignSpec, Chain
    from probes.store import Store


def campaign(
    spec: Annotated[Path, typer.Argument(help="A campaign's YAML file.", show_default=False)],
    budget: Annotated[str | None, typer.Option(help="Stop after this long: 9m, 90s, 1.5h.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to commit: every outcome of this campaign.")] = None,
    device: options.Device = None,
    store: options.StorePath = None,
    ahead: Annotated[int, typer.Option(min=0, max=8, help="Children that already import while one measures.")] = 1,
    slurm: options.Slurm = None,
    partition: options.Partition = None,
    dry: Annotated[bool, typer.Option("--list", help="Only say what would be measured, in order.")] = False,
    as_json: options.Json = False,
) -> int:
    """Measure a campaign, most valuable first. What the store knows is skipped: call it again to go on."""
    from probes.campaign import export_for_commit
    from probes.campaign_spec import read_spec

    plan = read_spec(spec)
    budget_s = duration_s("budget", budget, unit="s") if budget is not None else None
    if dry:
        return _list(plan, as_json=as_json)
    devices = machine.pick_devices(device if slurm is None else device or "cuda:0")
    kept = machine.open_store(store if store is not None else out)
    jobs = {"slurm": slurm, "partition": partition, "ahead": 0 if devices == ("cpu",) else ahead}
    try:
        report = _measure(plan, devices, kept, budget_s, jobs)
    finally:  # what was measured before it stopped is to be committed too
        if out is not None and store not in (None, out):
            export_for_commit(plan, kept, out)
    return _tell(report, plan, kept.path, as_json=as_json)


def _measure(
    plan: "CampaignSpec", devices: tuple[str, ...], store: "Store", budget_s: float | None, jobs: dict[str, Any]
) -> "CampaignReport":
    """The campaign's run with its progress; `jobs`: what `machine.executor_for` takes."""
    from probes.campaign import run_campaign

    gpu = None if devices == ("cpu",) else machine.gpu_of(plan.gpu, devices[0])
    first = {chain.model: chain for chain in reversed(plan.chains)}
    models = {name: _model_of(chain) for name, chain in first.items()}  # a wrong name shows now, not after an hour
    line = ProgressLine(budget_s=budget_s)
    try:
        with machine.executor_for(devices, on_progress=line.event, **jobs) as executor:
            return run_campaign(
                plan,
                executor=executor,
                store=store,
                resolve=lambda chain: models[chain.model],
                gpu=gpu,
                device=devices[0],
                budget_s=budget_s,
                on_step=lambda step, report: line.advance("" if step.from_store else step_line(step)),
            )
    finally:
        line.close()


def _tell(report: "CampaignReport", plan: "CampaignSpec", store: Path, *, as_json: bool) -> int:
    """Shows what came of it; the exit code."""
    document = _summary(report) | {"campaign": plan.name, "store": str(store)}
    tell(document, [_sentence(report)], as_json=as_json)
    return 0 if report.steps or report.finished else EXIT_ENVIRONMENT


def _summary(report: "CampaignReport") -> dict[str, Any]:
    return {
        "finished": report.finished,
        "measured": report.num_measured,
        "already_known": report.num_known,
        "failures": {kind.value: num for kind, num in report.failures().items()},
        "chains_left": report.remaining,
        "seconds": round(report.seconds, 1),
    }


def _sentence(report: "CampaignReport") -> str:
    failures = ", ".join(f"{num} {kind.value}" for kind, num in report.failures().items()) or "none"
    left = "finished" if report.finished else f"{report.remaining} chains left: call again to go on"
    measured = f"{report.num_measured} measured, {report.num_known} known before"
    return f"{measured}, failures: {failures}; {seconds(report.seconds)}; {left}"


def _model_of(chain: "Chain") -> ModelSpec:
    """A chain's model; a configuration in the YAML stands for itself."""
    if chain.config is None:
        return resolve_model(chain.model)
    return spec_from_config(chain.config, model_id=chain.model, source="campaign")


def step_line(step: "Step") -> str:
    """One answered point, for a log."""
    outcome = step.outcome
    depth = ", full depth" if step.chain.depths == (0,) else ""
    what = f"{step.chain.model}: {trial_words(step.setup)}{depth}"
    if not isinstance(outcome, Measurement):
        return f"{what}: {outcome.kind.value}: {outcome.message[:160]}"
    flags = f" [{', '.join(outcome.flags)}]" if outcome.flags else ""
    speed = f"{outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s is not None else "no speed"
    return f"{what}: {gib(outcome.peak_allocated_bytes)}, {speed}{flags}"


def _list(plan: "CampaignSpec", *, as_json: bool) -> int:
    chains = [
        {
            "block": chain.block,
            "model": chain.model,
            "setup": to_jsonable(chain.setup),
            "micro_batches": list(chain.micro_batches),
            "depths": list(chain.depths),
        }
        for chain in plan.chains
    ]
    lines = [f"{plan.name}: {len(plan.chains)} chains, {plan.impossible} combinations cannot exist"]
    lines += [f"  {name}: {num} chains" for name, num in Counter(chain.block for chain in plan.chains).items()]
    tell({"campaign": plan.name, "impossible": plan.impossible, "chains": chains}, lines, as_json=as_json)
    return 0
