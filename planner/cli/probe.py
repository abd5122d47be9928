"""`plan probe`: measure one setup on a GPU. `plan confirm`: hold a written plan to its promise at full depth."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.app import machine
from planner.app.progress import ProgressLine
from planner.cli import options
from planner.cli.output import tell
from planner.cli.setup_flags import takes_options
from planner.cli.wish_options import SetupOptions
from planner.errors import EXIT_ENVIRONMENT, EXIT_NOTHING_FITS, UsageError
from planner.interchange import setup_from_dict, setup_to_dict, to_jsonable
from planner.models.resolve import resolve_model
from planner.outcome import FailureKind, Measurement, ProbeFailure
from planner.plan import NoPlan, Plan
from planner.readers.read import read_config
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.units import GIB, gib, percent, seconds
from reports.plan_json import plan_from_dict, read_plan_json

if TYPE_CHECKING:
    from probes.confirm import Confirmation

Limit = Annotated[float, typer.Option("--limit", help="Seconds one probe may take once it holds its device.")]
MeasureSeconds = Annotated[float, typer.Option("--measure-seconds", help="Cap on the timed steps of one depth.")]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How one setup is measured."""

    full_depth: Annotated[bool, typer.Option("--full-depth", help="Run every layer instead of two depths.")] = False
    memory_gib: Annotated[float | None, typer.Option(help="Let this card stand in for one with that much (GiB).")] = (
        None
    )
    limit: Limit = 180.0
    measure_seconds: MeasureSeconds = 20.0
    store: options.StorePath = None
    again: Annotated[bool, typer.Option("--again", help="Measure even if the store knows the answer.")] = False
    slurm: options.Slurm = None
    partition: options.Partition = None

    def devices(self, device: str | None, num_gpus: int) -> tuple[str, ...]:
        """What it runs on: this machine's, or the first of the one that Slurm gives."""
        if self.slurm is not None:
            return machine.pick_devices(device or "cuda:0")
        return machine.job_devices(device, num_gpus)


@takes_options
def probe(
    model: Annotated[str, typer.Argument(help="Hub id, directory or catalogue name.", show_default=False)],
    gpu: Annotated[str | None, typer.Option(help="Table row of this machine's GPU (default: asked).")] = None,
    device: options.Device = None,
    *,
    one: SetupOptions,
    how: ProbeOptions,
    lookup: options.Lookup,
    as_json: options.Json = False,
) -> int:
    """Measure memory and speed of one setup in a child process (under torchrun with --gpus); random weights, nothing is
    downloaded."""
    setup = setup_from_dict(one.values())

    from probes.gpu.request import Limits

    line = ProgressLine()
    line.say(f"reading the configuration of {model}")
    spec = options.said(lookup.model(model))
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
        known = None if how.again else prober.stored(setup)
        outcome = known or prober.finish(setup, prober.submit(setup))
    line.close()
    from_store = known is not None
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
        return [*lines, f"log: {outcome.log_path}"] if outcome.log_path else lines
    spread = max(outcome.step_times_s) - min(outcome.step_times_s)
    where = outcome.environment.gpu_name
    lines = [
        f"measured on {where}" + (" (from the store)" if from_store else ""),
        f"  peak allocated {gib(outcome.peak_allocated_bytes)}, reserved {gib(outcome.peak_reserved_bytes)}, "
        f"device {gib(outcome.peak_device_bytes)}",
        *_rank_line(outcome),
        "  phases " + ", ".join(f"{name} {gib(size)}" for name, size in outcome.phase_peaks_bytes.items()),
        f"  {_speed(outcome)}, step {seconds(outcome.step_time_s)} "
        f"(median of {len(outcome.step_times_s)}, spread {seconds(spread)})"
        + (f", MFU {percent(outcome.mfu_fraction)}" if outcome.mfu_fraction is not None else ""),
    ]
    if outcome.extrapolation_error_fraction is not None:
        lines.append(f"  extension to full depth missed a third depth by {outcome.extrapolation_error_fraction:+.2%}")
    if outcome.flags:
        lines.append(f"  flags: {', '.join(outcome.flags)}")
    return [*lines, *(f"  {note}" for note in outcome.notes)]


def _speed(outcome: Measurement) -> str:
    if outcome.tokens_per_s is None:
        return f"no speed ({', '.join(outcome.speed_spoiled_by)})"
    return f"{outcome.tokens_per_s:,.0f} tokens/s"


def _rank_line(outcome: Measurement) -> list[str]:
    """Every rank's device peak, worst first; nothing for one GPU."""
    if not outcome.rank_peaks:
        return []
    peaks = [f"{name}{f' x {num}' if num > 1 else ''} {gib(size)}" for name, num, size in outcome.rank_peaks[:8]]
    more = len(outcome.rank_peaks) - len(peaks)
    return ["  device peak of each rank: " + ", ".join(peaks) + (f" and {more} lower" if more else "")]


def confirm(
    directory: Annotated[Path, typer.Argument(help="What `plan ... --out DIR` wrote.", show_default=False)],
    target: Annotated[str | None, typer.Option(help="Read the setup back from this target's launch file.")] = None,
    device: options.Device = None,
    limit: Limit = 900.0,
    measure_seconds: MeasureSeconds = 60.0,
    store: options.StorePath = None,
    as_json: options.Json = False,
) -> int:
    """Run the planned setup at full depth for some steps and compare with what the plan promised."""
    from probes.confirm import confirm as run
    from probes.confirm import promise_of
    from probes.gpu.request import Limits

    line = ProgressLine()
    line.say("reading the plan")
    plan = _plan_in(directory)
    workload, chosen = plan.workload, plan.chosen
    setup = chosen.setup if target is None else _launched_setup(directory, target, workload.model, chosen.setup)
    spec = resolve_model(workload.model.model_id)
    devices = machine.job_devices(device, setup.num_gpus)
    card = machine.gpu_of(None, devices[0])
    limits = Limits(time_s=limit, measure_s=measure_seconds)
    events = {"on_progress": line.event}
    with machine.prober_on(devices, spec, card, store=store, executor=events, limits=limits) as prober:
        promise = promise_of(chosen.memory_evidence, chosen.speed_evidence)
        confirmation = run(prober, setup, promise, budget_bytes=chosen.budget_bytes)
    line.close()
    if card is not None and card.key != workload.gpu.key:
        reason = f"this is a {card.name}, the plan was made for a {workload.gpu.name}"
        confirmation = replace(confirmation, reasons=(*confirmation.reasons, reason))
    return _tell(confirmation, as_json=as_json)


def _plan_in(directory: Path) -> Plan:
    """The plan that was written there.

    Raises:
        UsageError: it is a refusal.
    """
    plan = plan_from_dict(read_plan_json(directory))
    if isinstance(plan, NoPlan):
        raise UsageError("this directory holds a refusal: nothing fits", hint="plan again with a larger GPU")
    return plan


def _tell(confirmation: "Confirmation", *, as_json: bool) -> int:
    """Says whether the plan held; the exit code."""
    tell(to_jsonable(confirmation), _confirmation_lines(confirmation), as_json=as_json)
    if isinstance(confirmation.outcome, ProbeFailure):
        return exit_code(confirmation.outcome)
    return 0 if confirmation.kept else EXIT_NOTHING_FITS


def _launched_setup(directory: Path, target: str, model: Any, planned: TrainSetup) -> TrainSetup:
    """The setup that a target's emitted file really says."""
    folder = directory / "launch" / target
    files = [one for one in sorted(folder.glob("*")) if one.suffix in (".yaml", ".yml", ".json", ".py")]
    if not files:
        raise UsageError(
            f"no launch file of {target!r} in {folder}", hint="leave --target out to run plan.json's setup"
        )
    return read_config(files[0], model=model, base=planned).setup


def _confirmation_lines(confirmation: "Confirmation") -> list[str]:
    promise, outcome = confirmation.promise, confirmation.outcome
    lines = outcome_lines(outcome)
    if isinstance(outcome, Measurement):
        speed = f"{promise.tokens_per_s:,.0f} tokens/s" if promise.tokens_per_s else "no speed"
        lines.append(f"promised ({promise.rung.value}): device {gib(promise.peak_device_bytes)}, {speed}")
        misses = [f"memory {confirmation.memory_miss_fraction:+.1%}"]
        if confirmation.speed_miss_fraction is not None:
            misses.append(f"speed {confirmation.speed_miss_fraction:+.1%}")
        lines.append("promise against measurement: " + ", ".join(misses))
    lines.append("the plan held" if confirmation.kept else "the plan did not hold:")
    return [*lines, *(f"  {reason}" for reason in confirmation.reasons)]
