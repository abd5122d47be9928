"""`plan trace -- python train.py`: anyone's training program on a GPU that computes nothing; and `plan MODEL --out DIR
--verify TARGET`: a plan's launch file, run so by its own tool."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune_planner.app.folders import write_files
from finetune_planner.app.progress import say
from finetune_planner.app.running import with_run
from finetune_planner.cli import options
from finetune_planner.cli.output import tell
from finetune_planner.cli.setup_flags import takes_options
from planner.core.errors import EXIT_NOTHING_FITS, EXIT_OK, EnvironmentProblem, PlannerError, UsageError
from planner.core.notes import Note
from planner.core.notes import measured as noted
from planner.core.records import dataclass
from planner.core.redaction import secrets_known, without_secrets_in, without_secrets_in_words
from planner.core.units import gib
from planner.frameworks.exporters import Launch
from planner.hardware.cluster import known_link
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.options.stacks import TARGET_ROWS
from planner.planning.expressed import as_run
from planner.planning.option_values import positive
from planner.planning.plan import Plan
from planner.planning.trace_result import TraceResult
from planner.setup.outcome import FailureKind, Fidelity, Measurement, Prediction, ProbeFailure
from reports.trace import PROTECTIONS, document, text_lines

if TYPE_CHECKING:
    from planner.speed.traced import TracedSpeed
    from probes.phantom.runner import TraceOrder

NUM_TOKENS = 8192
"""Of a stand-in text, where a program's data set is not at hand."""
IMAGE_SIZE = "1024x1024"
TIME_LIMIT_S = 1800


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """What stands in where the program's data are not at hand."""

    seq_len: Annotated[
        int | None,
        typer.Option(help=f"Tokens of stand-in texts, where a data set is not at hand. Default {NUM_TOKENS}."),
    ] = None
    image_size: Annotated[str, typer.Option(help="Pixels of stand-in pictures, WIDTHxHEIGHT.")] = IMAGE_SIZE


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """How far a program is followed."""

    steps: Annotated[int, typer.Option(help="Optimizer steps to run.")] = 2
    network: Annotated[bool, typer.Option("--network", help="Let the program use the network.")] = False
    unsafe_writes: Annotated[
        bool, typer.Option("--unsafe-writes", help="Let it write and delete as when you run it, protected by nothing.")
    ] = False
    every_micro_batch: Annotated[
        bool, typer.Option("--every-micro-batch", help="Run also those that repeat the one before, byte for byte.")
    ] = False
    time_limit: Annotated[int, typer.Option(help="Seconds after which the program is stopped.")] = TIME_LIMIT_S

    def order(self, command: Sequence[str], card: GpuSpec, data: StandIns, memory_bytes: int) -> "TraceOrder":
        """What is to be run, and how.

        Raises:
            UsageError: an option that makes no sense, or a card that runs no CUDA programs.
        """
        from probes.phantom.card import TraceOptions, card_of
        from probes.phantom.runner import TraceOrder

        if card.compute_capability is None and card.vendor == "NVIDIA":
            raise UsageError(
                f"plan trace needs the compute capability of {card.name}", hint=f'for example --gpu "{card.key}:sm86"'
            )
        if card.compute_capability is None:
            raise UsageError(f"plan trace follows CUDA programs; {card.name} runs none", hint="name an NVIDIA GPU")
        width, _, height = data.image_size.partition("x")
        if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
            raise UsageError(
                f"--image-size {data.image_size}: expected WIDTHxHEIGHT in pixels", hint="for example 1024x768"
            )
        return TraceOrder(
            command=tuple(command),
            card=card_of(card, memory_bytes),
            options=TraceOptions(
                num_steps=positive("steps", self.steps) or 2,
                num_tokens=positive("seq-len", data.seq_len) or NUM_TOKENS,
                image_size=(int(width), int(height)),
                every_micro_batch=self.every_micro_batch,
            ),
            network=self.network,
            unsafe_writes=self.unsafe_writes,
            time_limit_s=float(positive("time-limit", self.time_limit) or TIME_LIMIT_S),
        )


ONE_NODE = options.Links()


@takes_options
def trace(
    command: Annotated[list[str], typer.Argument(help="After --: the command as you run it.", metavar="COMMAND")],
    gpu: options.Gpu,
    *,
    follow: FollowOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run the program without asking.")] = False,
    data: StandIns,
    memory: options.Memory,
    links: options.Links,
    out: Annotated[Path | None, typer.Option(help="Directory for trace.json.")] = None,
    as_json: options.Json = False,
) -> int:
    """Run a training program on a phantom GPU: what it needs, where, and whether it fits. Nothing is computed.

    It executes the program, on the CPU alone and without weights, and stops it after --steps optimizer steps.

    Exit codes: 0 fits, 1 does not fit, 2 bad input or the program's own error, 3 cannot be followed.
    """
    from probes.phantom.runner import program, protection

    card = options.announced(find_gpu(gpu))
    for link in links.interconnect.lower().split("+") if links.interconnect else ():
        known_link(link.strip())  # before the program runs, whose ranks only its end tells
    order = follow.order(command, card, data, memory.of(card)[0])
    ask(order, program(command), protection(order).kind, yes)
    answer = answer_of(order, card, memory.of(card), links)
    if out is not None:
        write_files(out, {"trace.json": json.dumps(answer, indent=2) + "\n"})
    tell(answer, text_lines(answer), as_json=as_json)
    return EXIT_NOTHING_FITS if answer["verdict"] == "does not fit" else EXIT_OK


def answer_of(
    order: "TraceOrder", card: GpuSpec, memory_and_reserve: tuple[int, int], links: options.Links = ONE_NODE
) -> dict[str, Any]:
    """Runs the program and says what it needs, as the document that --json prints.

    Args:
        memory_and_reserve: of the card, and what of it stays free, in bytes.
        links: between the GPUs of a program of several.

    Raises:
        EnvironmentProblem: the program cannot be followed.
        UsageError: the program's own error.
    """
    memory, reserve = memory_and_reserve
    trace, needs = traced(order), None
    # out of memory, unless the program caught it and went on
    if trace.refusal is not None and not (trace.status in ("done", "ended") and trace.num_steps):
        print("plan trace: out of memory; once more without a limit, to see what it needs", file=sys.stderr)
        try:
            needs = traced(replace(order, options=replace(order.options, limited=False)))
        except (EnvironmentProblem, UsageError) as error:
            say(f"plan trace: {error.message}")
    answer = document(
        trace,
        needs,
        command=without_secrets_in_words(order.command),
        gpu_key=card.key,
        gpu_name=card.name,
        memory_bytes=memory,
        budget_bytes=memory - reserve,
        num_steps=order.options.num_steps or trace.num_steps,
        speed=speed_of(needs or trace, card, links),
    )
    shown: dict[str, Any] = without_secrets_in(answer, secrets_known(order.command))
    return shown


def speed_of(trace: TraceResult, card: GpuSpec, links: options.Links = ONE_NODE) -> "TracedSpeed | None":
    """The speed of the program's last step; None where no step ended, under tensor parallelism, and where what the
    traced process wrote makes no program (the program could write to it too)."""
    if trace.program is None:
        return None
    from planner.speed.traced import traced_speed

    try:
        num_gpus = int(trace.program.get("num_ranks", 1))
        cluster = options.cluster_of(card, num_gpus, links.nodes, links.interconnect) if num_gpus > 1 else None
        return traced_speed(trace.program, card, cluster)
    except UsageError as error:  # the memory is known all the same
        say(f"plan trace: no speed is said: {error.message}")
        return None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError):
        return None


def ask(order: "TraceOrder", executable: str, protection: str, yes: bool) -> None:
    """Says what will be executed and asks once.

    Raises:
        UsageError: nobody can be asked.
        typer.Abort: the answer is no.
    """
    print(
        f"plan trace executes this program: {shlex.join(without_secrets_in_words(order.command))}\n"
        f"  ({executable}; CPU only, {'with' if order.network else 'no'} network, stopped after "
        f"{order.options.num_steps} optimizer steps; {PROTECTIONS[protection]})",
        file=sys.stderr,
    )
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("plan trace executes your program and nobody can be asked here", hint="add --yes")
    if not typer.confirm("Run it?", err=True):
        raise typer.Abort


TRAINERS = (
    "unsloth", "unsloth_zoo", "axolotl", "llamafactory", "swift", "torchtune", "litgpt", "liger_kernel", "trl", "peft",
    "accelerate", "bitsandbytes", "lightning", "pytorch_lightning", "sentence_transformers", "setfit", "verl",
)  # fmt: skip
"""Packages that train, which may be in another environment; what a program lacks beside them is its own."""


def traced(order: "TraceOrder") -> TraceResult:
    """What the one training process of the command found, and what kept it from the machine.

    Raises:
        EnvironmentProblem: the program cannot be followed.
        UsageError: the program's own error.
    """
    from probes.phantom.runner import run_traced

    ended = run_traced(order)
    if ended.absent in TRAINERS and not any(result.num_steps for result in ended.results):
        file = next(
            (word for word in order.command if word.endswith((".py", ".ipynb", ".yaml", ".yml", ".sh"))), "FILE"
        )
        raise EnvironmentProblem(
            f"this program cannot be followed: it needs {ended.absent}, which is not installed here",
            hint=f"run it in the environment that has {ended.absent}; plan check {file} --gpu GPU reads "
            "it without running it",
        )
    if ended.error:
        last = ended.error.strip().splitlines()[-1]
        raise EnvironmentProblem(
            f"the phantom GPU could not be set up: {last}",
            hint="plan trace supports torch 2.13 and transformers 5.23; the traceback is above",
        )
    if not ended.results and ended.exit_code:
        raise UsageError(
            f"the program failed (exit code {ended.exit_code}) before it imported PyTorch", hint="its output is above"
        )
    if not ended.results:
        raise EnvironmentProblem(
            f"the program ended (exit code {ended.exit_code}) without PyTorch on the phantom GPU",
            hint="is it a Python program that imports torch, in an environment that has it?",
        )
    trained = [result for result in ended.results if result.num_steps]
    if len(trained) > 1:
        raise EnvironmentProblem(
            f"this program cannot be followed: {len(trained)} of its processes trained",
            hint="trace one training program of one process at a time",
        )
    stopped = [result for result in ended.results if result.status in ("refused", "untraceable")]
    trace = (trained or stopped or ended.results)[0]  # a launcher that waits for it fails after it
    if trace.status == "refused":
        raise EnvironmentProblem(f"this program cannot be followed: {trace.error}", hint="docs/trace.md lists what can")
    if trace.status == "untraceable":
        raise EnvironmentProblem(
            f"this program cannot be followed: it failed, as it may do here alone: {trace.error}",
            hint="its traceback is above; docs/trace.md lists what is followed",
        )
    if trace.status == "failed":
        raise UsageError(f"the program failed: {trace.error}", hint="its traceback is above; does it run elsewhere?")
    if trace.status == "ended" and ended.exit_code and trace.refusal is None:
        raise UsageError(f"the program ended with exit code {ended.exit_code}", hint="its output is above")
    if trace.status == "ended" and not trace.num_events:
        raise EnvironmentProblem(
            "the program ended without putting anything on the GPU", hint="does it train, and on CUDA?"
        )
    return replace(trace, protection=ended.protection)


BAND_FRACTION = 0.03
"""Half-width of the error band: the worst of 11 public runs, in reserved bytes (docs/trace.md)."""
_PROGRAMS = {name: row.program for name, row in TARGET_ROWS.items() if row.program}
"""Target -> what starts its launch file; the other targets start several processes, none of their own, or Unsloth."""


def check_tools(targets: Sequence[str]) -> None:
    """Whether the launch files of `targets` can be traced here at all.

    Raises:
        UsageError: a target whose files are not followed.
        EnvironmentProblem: one whose tool is not installed.
    """
    from probes.phantom.runner import program

    for target in targets:
        if target not in _PROGRAMS:
            raise UsageError(
                f"--verify {target}: its launch files cannot be traced", hint=f"one of {', '.join(_PROGRAMS)} can"
            )
        try:
            program([_PROGRAMS[target]])
        except UsageError as error:
            raise EnvironmentProblem(
                f"--verify {target}: its tool is not installed here: {error.message}",
                hint=f"activate the environment that has {_PROGRAMS[target]}, or leave --verify {target} out",
            ) from None


def trace_files(
    plan: Plan, launches: Sequence[Launch], folder: Path, targets: Sequence[str]
) -> dict[str, Prediction | ProbeFailure]:
    """What the launch files of `targets` in `folder` need, or why nobody can say, by target; one without files is left
    out."""
    return {
        launch.target: _traced(plan, launch, folder) for launch in launches if launch.target in targets and launch.files
    }


def with_trace(plan: Plan, traces: Mapping[str, Prediction | ProbeFailure]) -> Plan:
    """The plan whose chosen setup carries the trace of the launch file that runs just that setup, its own stack's
    first."""
    setup = plan.chosen.setup
    same = sorted(
        (name for name in traces if as_run(name, setup, plan.workload) == setup), key=lambda name: name != setup.stack
    )
    if not same:
        return plan
    return with_run(plan, replace(plan.chosen, trace=traces[same[0]]))


def withdraw(before: Sequence[Launch], after: Sequence[Launch], folder: Path) -> None:
    """Removes the files that were written for a trace which then said that they run out of memory."""
    remaining = {file.path for launch in after for file in launch.files}
    for launch in before:
        for file in launch.files:
            if file.path not in remaining:
                (folder / "launch" / file.path).unlink(missing_ok=True)


def sentence(target: str, traced: Prediction | ProbeFailure, below: Prediction | Measurement) -> Note:
    """What the trace said of a target's file, beside the level below it."""
    if isinstance(traced, ProbeFailure):
        return noted(f"Traced, launch/{target}: not possible: {traced.message}")
    words = below.level.value.replace("_", " ")
    return noted(
        f"Traced, launch/{target} as its own tool runs it: {gib(traced.peak_device_bytes)} on the device, {words}: "
        f"{gib(below.peak_device_bytes)} ({gib(traced.peak_allocated_bytes)} allocated, "
        f"{gib(traced.peak_reserved_bytes)} reserved)"
    )


def _traced(plan: Plan, launch: Launch, folder: Path) -> Prediction | ProbeFailure:
    from probes.phantom.card import TraceOptions, card_of
    from probes.phantom.runner import TraceOrder

    words = shlex.split(launch.command)
    environment: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith(("-", "/")):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    setup, gpu = plan.chosen.setup, plan.workload.gpu
    say(f"tracing launch/{launch.target}: {shlex.join(without_secrets_in_words(words))}")
    try:
        seen = traced(
            TraceOrder(
                command=tuple(words),
                card=card_of(gpu, plan.workload.memory_bytes),
                options=TraceOptions(
                    limited=False, num_steps=2, num_tokens=setup.seq_len_tokens + 1, objective=setup.objective
                ),
                environment=environment,
                folder=folder,
            )
        )
        if not seen.num_steps:
            raise EnvironmentProblem("it ended without an optimizer step")
    except (PlannerError, ValueError) as error:
        return ProbeFailure(level=Fidelity.TRACE, kind=FailureKind.UNSUPPORTED, message=str(error))
    return Prediction(
        level=Fidelity.TRACE,
        peak_allocated_bytes=seen.peak_allocated_bytes,
        peak_reserved_bytes=seen.peak_reserved_bytes,
        peak_device_bytes=seen.peak_device_bytes,
        peak_phase=seen.peak_phase,
        phase_peaks_bytes=seen.phase_peaks_bytes,
        terms=(),
        memory_band_fraction=BAND_FRACTION,
        notes=seen.notes,
    )
