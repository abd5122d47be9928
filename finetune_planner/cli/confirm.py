"""`plan confirm`: hold a written plan to its promise: our own step at full depth, with --run the launch file."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune_planner.app import machine
from finetune_planner.app.progress import ProgressLine, say
from finetune_planner.app.running import HowToRun, installed_targets, run_target
from finetune_planner.app.time_left import START_S
from finetune_planner.cli import options
from finetune_planner.cli.output import tell
from finetune_planner.cli.probe import Limit, MeasureSeconds, exit_code, outcome_lines
from planner.core.errors import EXIT_NOTHING_FITS, EnvironmentProblem, UsageError
from planner.core.units import gib
from planner.frameworks.readers.read import read_config
from planner.models.resolve import resolve_model
from planner.planning.option_values import positive
from planner.planning.plan import NoPlan, Plan
from planner.setup import TrainSetup
from planner.setup.interchange import to_jsonable
from planner.setup.outcome import Fidelity, Measurement, ProbeFailure
from reports.plan_json import plan_from_dict, read_plan_json
from reports.write import entry_of

if TYPE_CHECKING:
    from probes.confirm import Confirmation

NUM_STEPS, LIMIT_S = 10, 900.0
SHOWN_LINES = 12
"""Of what a failed run printed last."""


def confirm(
    directory: Annotated[Path, typer.Argument(help="What `plan ... --out DIR` wrote.", show_default=False)],
    run: Annotated[
        list[str] | None,
        typer.Option(help="Run this target's launch file itself for some steps, watched from inside; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run, the first two not counted.")] = NUM_STEPS,
    target: Annotated[str | None, typer.Option(help="Read the setup back from this target's launch file.")] = None,
    device: options.Device = None,
    limit: Limit = LIMIT_S,
    measure_seconds: MeasureSeconds = 60.0,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> int:
    """Run a plan's setup at full depth, or with --run its launch file, for some steps; compare with the promise."""
    if run:
        if target is not None:
            raise UsageError("--run runs a target's own file, --target reads a setup from one", hint="give one of them")
        how = HowToRun(num_steps=enough_steps(steps), limit_s=limit, device=device, store=store)
        confirmations: dict[str, Confirmation] = {}
        for name in dict.fromkeys(run):
            confirmations[name] = run_target(directory, read_plan_json(directory), name, how)[0]
        lines = [
            line
            for name, confirmation in confirmations.items()
            for line in (f"launch/{name}:", *_confirmation_lines(confirmation))
        ]
        tell({name: to_jsonable(confirmation) for name, confirmation in confirmations.items()}, lines, as_json=as_json)
        return max(map(_code, confirmations.values()))
    return _confirm_setup(directory, target, device, limit, measure_seconds, store, as_json=as_json)


def enough_steps(steps: int) -> int:
    """Steps of which some are left when the first are not counted.

    Raises:
        UsageError: too few.
    """
    from probes.launched.run import WARM_UP_STEPS

    num_steps = positive("steps", steps) or NUM_STEPS
    if num_steps <= WARM_UP_STEPS:
        raise UsageError(f"--steps must be above {WARM_UP_STEPS}, got {steps}", hint="the first steps are not counted")
    return num_steps


def confirmed_plan(plan: Plan, folder: Path, device: str | None, store: Path | None, *, ends_at: float) -> Plan:
    """A plan that was just written, after a run of the first of its launch files whose tool is here; as it is where
    none can be run, and why on stderr. Nothing runs after `ends_at` of `time.monotonic`."""
    document = read_plan_json(folder)
    names = installed_targets(folder, entry_of(document).extras)
    if not names:
        say("no launch file was run: none of their tools is installed here (bash launch/run.sh install TARGET)")
        return plan
    left_s = min(LIMIT_S, ends_at - time.monotonic())
    if left_s < START_S:
        say(f"launch/{names[0]} was not run: the budget is over (plan confirm {folder} --run {names[0]})")
        return plan
    how = HowToRun(num_steps=NUM_STEPS, limit_s=left_s, device=device, store=store)
    try:
        confirmation, after = run_target(folder, document, names[0], how)
    except (EnvironmentProblem, UsageError) as error:
        say(f"launch/{names[0]} was not run: {error.message}")
        return plan
    say("\n".join((f"launch/{names[0]}:", *_confirmation_lines(confirmation))))
    return after


def _confirm_setup(
    directory: Path,
    target: str | None,
    device: str | None,
    limit_s: float,
    measure_s: float,
    store: Path | None,
    *,
    as_json: bool,
) -> int:
    from probes.confirm import confirm as run_step
    from probes.confirm import promise_of
    from probes.gpu.request import Limits

    line = ProgressLine()
    line.say("reading the plan")
    plan = plan_from_dict(read_plan_json(directory))
    if isinstance(plan, NoPlan):
        raise UsageError("this directory holds a refusal: nothing fits", hint="plan again with a larger GPU")
    workload, chosen = plan.workload, plan.chosen
    setup = chosen.setup if target is None else _launched_setup(directory, target, workload.model, chosen.setup)
    spec = resolve_model(workload.model.model_id)
    devices = machine.job_devices(device, setup.num_gpus)
    card = machine.gpu_of(None, devices[0])
    limits = Limits(time_s=limit_s, measure_s=measure_s)
    events = {"on_progress": line.event}
    with machine.prober_on(devices, spec, card, store=store, executor=events, limits=limits) as prober:
        promise = promise_of(chosen.memory_evidence, chosen.speed_evidence)
        confirmation = run_step(prober, setup, promise, budget_bytes=chosen.budget_bytes)
    line.close()
    if card is not None and card.key != workload.gpu.key:
        reason = f"this is a {card.name}, the plan was made for a {workload.gpu.name}"
        confirmation = replace(confirmation, reasons=(*confirmation.reasons, reason))
    tell(to_jsonable(confirmation), _confirmation_lines(confirmation), as_json=as_json)
    return _code(confirmation)


def _code(confirmation: "Confirmation") -> int:
    """The exit code."""
    if isinstance(confirmation.outcome, ProbeFailure):
        return exit_code(confirmation.outcome)
    return 0 if confirmation.kept else EXIT_NOTHING_FITS


def _launched_setup(directory: Path, target: str, model: Any, planned: TrainSetup) -> TrainSetup:
    """The setup that a target's emitted file really says."""
    folder = directory / "launch" / target
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".yaml", ".yml", ".json", ".py")]
    if not files:
        raise UsageError(
            f"no launch file of {target!r} in {folder}", hint="leave --target out to run plan.json's setup"
        )
    return read_config(files[0], model=model, base=planned).setup


def _confirmation_lines(confirmation: "Confirmation") -> list[str]:
    promise, outcome = confirmation.promise, confirmation.outcome
    lines = outcome_lines(outcome)
    if isinstance(outcome, ProbeFailure) and outcome.level is Fidelity.RUN:
        lines += [f"  | {line}" for line in outcome.log_tail.splitlines()[-SHOWN_LINES:]]
    if isinstance(outcome, Measurement):
        speed = f"{promise.tokens_per_s:,.0f} tokens/s" if promise.tokens_per_s else "no speed"
        lines.append(f"promised ({promise.level.value}): device {gib(promise.peak_device_bytes)}, {speed}")
        fractions = {"memory": confirmation.memory_miss_fraction, "speed": confirmation.speed_miss_fraction}
        misses = [f"{name} {fraction:+.1%}" for name, fraction in fractions.items() if fraction is not None]
        if misses:
            lines.append("promise against measurement: " + ", ".join(misses))
    rehearsed = isinstance(outcome, Measurement) and confirmation.memory_miss_fraction is None
    verdict = "rehearsed: nothing here to hold the plan to" if rehearsed else "the plan held"
    lines.append(verdict if confirmation.kept else "the plan did not hold:")
    return [*lines, *(f"  {reason}" for reason in confirmation.reasons)]
