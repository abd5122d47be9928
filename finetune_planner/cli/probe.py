"""`plan probe`: measure one setup on a GPU. `plan confirm`: hold a written plan to its promise at full depth."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune_planner.app import machine
from finetune_planner.app.progress import ProgressLine
from finetune_planner.cli import options
from finetune_planner.cli.output import tell
from finetune_planner.cli.request_options import SetupOptions
from finetune_planner.cli.setup_flags import takes_options
from planner.core.errors import EXIT_ENVIRONMENT, EXIT_NOTHING_FITS, UsageError
from planner.core.records import dataclass
from planner.core.units import GIB, gib, percent, seconds
from planner.setup.interchange import setup_from_dict, setup_to_dict, to_jsonable
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure

if TYPE_CHECKING:
    pass

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
        return [*lines, f"log: {outcome.log_path}"] if outcome.log_path else lines
    layout, phases = max(outcome.step_times_s) - min(outcome.step_times_s), outcome.phase_peaks_bytes
    where = outcome.environment.gpu_name
    lines = [
        f"measured on {where}" + (" (from the store)" if from_store else ""),
        f"  peak allocated {gib(outcome.peak_allocated_bytes)}, reserved {gib(outcome.peak_reserved_bytes)}, "
        f"device {gib(outcome.peak_device_bytes)}",
        *_rank_line(outcome),
        *(["  phases " + ", ".join(f"{name} {gib(size)}" for name, size in phases.items())] if phases else []),
        f"  {_speed(outcome)}, step {seconds(outcome.step_time_s)} "
        f"(median of {len(outcome.step_times_s)}, spread {seconds(layout)})"
        + (f", MFU {percent(outcome.mfu_fraction)}" if outcome.mfu_fraction is not None else ""),
    ]
    if outcome.program:
        lines.append(f"  of which {seconds(outcome.between_steps_s)} are the trainer's, between two steps")
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
