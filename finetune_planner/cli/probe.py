"""`plan probe`: measure one setup on a GPU. `plan confirm`: hold a written plan to its promise at full depth."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune_planner.app import machine
from finetune_planner.app.progress import ProgressLine, say
from finetune_planner.app.running import HowToRun, installed_targets, launch_of, launched_setup, on_card, run_target
from finetune_planner.app.time_left import START_S
from finetune_planner.cli import options
from finetune_planner.cli.estimate import SetupOptions
from finetune_planner.cli.output import tell
from finetune_planner.cli.setup_flags import takes_options
from planner.core.errors import EXIT_ENVIRONMENT, EXIT_NOTHING_FITS, EnvironmentProblem, UsageError
from planner.core.records import dataclass
from planner.core.units import GIB, gib, percent, seconds
from planner.models.resolve import model_beside, resolve_model
from planner.planning.decision.candidates import candidate
from planner.planning.option_values import positive
from planner.planning.plan import NoPlan, Plan
from planner.setup.interchange import setup_from_dict, setup_to_dict, to_jsonable
from planner.setup.memory_terms import PHASES
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from reports.html import entry_of
from reports.plan_json import read_plan_json

if TYPE_CHECKING:
    from probes.confirm import Confirmation

Limit = Annotated[float, typer.Option("--limit", help="Seconds one probe may take once it holds its device.")]
MeasureSeconds = Annotated[float, typer.Option("--measure-seconds", help="Cap on the timed steps of one depth.")]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    full_depth: Annotated[bool, typer.Option("--full-depth", help="Run every layer instead of two depths.")] = False
    memory_gib: Annotated[float | None, typer.Option(help="Let this card stand in for one with that much (GiB).")] = (
        None
    )
    limit: Limit = 180.0
    measure_seconds: MeasureSeconds = 20.0
    store: options.StorePath = None
    again: Annotated[bool, typer.Option("--again", help="Measure even if the store has this measurement.")] = False
    slurm: options.Slurm = None
    partition: options.Partition = None

    def devices(self, device: str | None, num_gpus: int) -> tuple[str, ...]:
        """What it runs on: this machine's, or the first of the one that Slurm gives."""
        options.no_partition_alone(self.slurm, self.partition)
        if self.slurm is not None:
            return machine.pick_devices(device or "cuda:0")
        return machine.job_devices(device, num_gpus)


@takes_options
def probe(
    model: Annotated[str, typer.Argument(help="Hub id, directory or catalogue name.", show_default=False)],
    gpu: Annotated[str | None, typer.Option(help="Table row of this machine's GPU (default: asked).")] = None,
    device: options.Device = None,
    *,
    setup_options: SetupOptions,
    how: ProbeOptions,
    lookup: options.Lookup,
    as_json: options.Json = False,
) -> int:
    """Measure memory and speed of one setup in a child process (under torchrun with --gpus); random weights, nothing is
    downloaded."""
    setup = setup_from_dict(setup_options.values())

    from probes.gpu.request import Limits

    line = ProgressLine()
    line.say(f"reading the configuration of {model}")
    spec = options.announced(lookup.model(model))
    devices = how.devices(device, setup.num_gpus)
    card = machine.gpu_of(gpu, devices[0]) if how.slurm is None or gpu else None
    memory = _memory_limit(how.memory_gib, devices[0], card)
    limits = Limits(time_s=how.limit, measure_s=how.measure_seconds, **memory)
    ranks = f"{setup.num_gpus} ranks on " if setup.num_gpus > 1 else ""
    line.say(f"starting {ranks}{', '.join(devices)}, at most {how.limit:g} s")
    where = {"slurm": how.slurm, "partition": how.partition, "on_progress": line.event}
    depths = (0,) if how.full_depth else ()
    with machine.prober_on(
        devices, spec, card, store=how.store, executor=where, limits=limits, depths=depths
    ) as prober:
        stored = None if how.again else prober.stored(setup)
        outcome = stored or prober.finish(setup, prober.submit(setup))
    line.close()
    from_store = stored is not None
    document = {"setup": {"model": spec.model_id, **setup_to_dict(setup)}, "outcome": to_jsonable(outcome)}
    tell({**document, "from_store": from_store}, outcome_lines(outcome, from_store=from_store), as_json=as_json)
    return exit_code(outcome)


def _memory_limit(memory_gib: float | None, device: str, card: Any) -> dict[str, Any]:
    if memory_gib is None:
        return {}
    if memory_gib <= 0:
        raise UsageError(f"--memory-gib must be above 0, got {memory_gib}")
    if device == "cpu":
        return {"cpu_memory_bytes": int(memory_gib * GIB)}
    from probes.gpu.environment import device_status

    status = device_status(device)
    total = status.total_bytes if status is not None else (card.memory_bytes if card is not None else 0)
    if total and memory_gib * GIB > total:
        raise UsageError(
            f"--memory-gib {memory_gib:g} is more than this GPU has ({gib(total)})", hint="leave it out, or give less"
        )
    return {"memory_bytes": int(memory_gib * GIB)}


def exit_code(outcome: Measurement | ProbeFailure) -> int:
    """0 measured, 1 does not fit, 3 anything else that kept the probe from measuring."""
    if isinstance(outcome, Measurement):
        return 0
    return EXIT_NOTHING_FITS if outcome.kind is FailureKind.OUT_OF_MEMORY else EXIT_ENVIRONMENT


def outcome_lines(outcome: Measurement | ProbeFailure, *, from_store: bool = False) -> list[str]:
    """One outcome for a person."""
    if isinstance(outcome, ProbeFailure):
        lines = [f"{outcome.kind.value.replace('_', ' ')}: {outcome.message}"]
        if from_store:
            longer = " or a longer --limit" if outcome.kind is FailureKind.TIMEOUT else ""
            lines[0] += f" (from the store; --again{longer} measures anew)"
        return [*lines, f"log: {outcome.log_path}"] if outcome.log_path else lines
    times = outcome.step_times_s
    spread = f"median of {len(times)}, spread {seconds(max(times) - min(times))}" if len(times) > 1 else "one step"
    phases = {name: outcome.phase_peaks_bytes[name] for name in PHASES if name in outcome.phase_peaks_bytes}
    where = outcome.environment.gpu_name
    spoiled = ", ".join(outcome.speed_spoiled_by)
    speed = f"no speed ({spoiled})" if outcome.tokens_per_s is None else f"{outcome.tokens_per_s:,.0f} tokens/s"
    peaks = [f"{name}{f' x {num}' if num > 1 else ''} {gib(size)}" for name, num, size in outcome.rank_peaks[:8]]
    more = f" and {len(outcome.rank_peaks) - len(peaks)} lower" if len(outcome.rank_peaks) > len(peaks) else ""
    lines = [
        f"measured on {where}" + (" (from the store)" if from_store else ""),
        f"  peak allocated {gib(outcome.peak_allocated_bytes)}, reserved {gib(outcome.peak_reserved_bytes)}, "
        f"device {gib(outcome.peak_device_bytes)}",
        *(["  device peak of each rank: " + ", ".join(peaks) + more] if peaks else []),
        *(["  phases " + ", ".join(f"{name} {gib(size)}" for name, size in phases.items())] if phases else []),
        f"  {speed}, step {seconds(outcome.step_time_s)} ({spread})"
        + (f", MFU {percent(outcome.mfu_fraction)}" if outcome.mfu_fraction is not None else ""),
    ]
    if outcome.program:
        lines.append(f"  of which {seconds(outcome.between_steps_s)} are the trainer's, between two steps")
    if outcome.extrapolation_error_fraction is not None:
        lines.append(f"  extension to full depth missed a third depth by {outcome.extrapolation_error_fraction:+.2%}")
    if outcome.flags:
        lines.append(f"  flags: {', '.join(outcome.flags)}")
    return [*lines, *(f"  {note}" for note in outcome.notes)]


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
    from probes.confirm import confirm as run_step
    from probes.confirm import promise_of
    from probes.gpu.request import Limits

    line = ProgressLine()
    line.say("reading the plan")
    entry = entry_of(read_plan_json(directory))
    plan = entry.plan
    if isinstance(plan, NoPlan):
        raise UsageError("this directory holds a refusal: nothing fits", hint="plan again with a larger GPU")
    workload, chosen = plan.workload, plan.chosen
    setup = chosen.setup
    if target is not None:
        launch = launch_of(entry.extras, target, watched=False)
        setup = launched_setup(directory, launch, workload.model, setup)
    spec = resolve_model(model_beside(workload.model.model_id, directory))
    devices = machine.job_devices(device, setup.num_gpus)
    card = machine.gpu_of(None, devices[0])
    limits = Limits(time_s=limit, measure_s=measure_seconds)
    events = {"on_progress": line.event}
    with machine.prober_on(devices, spec, card, store=store, executor=events, limits=limits) as prober:
        planned = chosen if setup == chosen.setup else candidate(workload, setup)
        promise = promise_of(planned.memory_evidence, planned.speed_evidence, workload.gpu)
        confirmation = run_step(prober, setup, promise, budget_bytes=chosen.budget_bytes)
    line.close()
    confirmation = on_card(confirmation, card, workload)
    tell(to_jsonable(confirmation), _confirmation_lines(confirmation), as_json=as_json)
    return _code(confirmation)


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


def _code(confirmation: "Confirmation") -> int:
    if isinstance(confirmation.outcome, ProbeFailure):
        return exit_code(confirmation.outcome)
    return 0 if confirmation.kept else EXIT_NOTHING_FITS


def _confirmation_lines(confirmation: "Confirmation") -> list[str]:
    promise, outcome = confirmation.promise, confirmation.outcome
    lines = outcome_lines(outcome)
    if isinstance(outcome, ProbeFailure) and outcome.level is Fidelity.RUN:
        lines += [f"  | {line}" for line in outcome.log_tail.splitlines()[-SHOWN_LINES:]]
    if isinstance(outcome, Measurement):
        speed = f"{promise.tokens_per_s:,.0f} tokens/s" if promise.tokens_per_s else "no speed"
        peak = f"device {gib(promise.peak_device_bytes)}"
        if outcome.environment.device == "cpu":  # which has no context of a GPU's driver
            tensors = gib(promise.peak_allocated_bytes - promise.workspace_bytes)
            peak, speed = f"allocated {tensors} without cuBLAS's workspaces", "the speed is of another machine"
        lines.append(f"promised ({promise.level.value}): {peak}, {speed}")
        fractions = {"memory": confirmation.memory_miss_fraction, "speed": confirmation.speed_miss_fraction}
        misses = [f"{name} {fraction:+.1%}" for name, fraction in fractions.items() if fraction is not None]
        if misses:
            lines.append("promise against measurement: " + ", ".join(misses))
    rehearsed = isinstance(outcome, Measurement) and confirmation.memory_miss_fraction is None
    verdict = "rehearsed: nothing here to hold the plan to" if rehearsed else "the plan held"
    lines.append(verdict if confirmation.kept else "the plan did not hold:")
    return [*lines, *(f"  {reason}" for reason in confirmation.reasons)]
