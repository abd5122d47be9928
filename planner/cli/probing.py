"""What the measuring commands share: the store's place, the device, executors, and a line of progress on stderr."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.output import printable
from planner.errors import EnvironmentProblem, UsageError
from planner.gpu import GpuSpec
from planner.install import install_command
from planner.units import seconds

if TYPE_CHECKING:
    from probes.executors import Executor
    from probes.store import Store

STORE_VARIABLE = "FINETUNE_PLANNER_STORE"
CHANGE_S, STILL_S = 1.5, 15.0
"""In a pipe, a change is told when the last line is so old, and what goes on unchanged again after so long."""

StorePath = Annotated[
    Path | None, typer.Option("--store", help=f"Store of measurements (default: ${STORE_VARIABLE} or the user's data).")
]
Device = Annotated[str | None, typer.Option("--device", help="cuda:N, or cpu (tiny models). Default: every GPU.")]
Slurm = Annotated[
    Path | None, typer.Option("--slurm", help="Run as cluster jobs through submitit; its folder (shared).")
]
Partition = Annotated[str | None, typer.Option("--partition", help="Slurm partition (with --slurm).")]


def needs_search() -> None:
    """Refuses to begin a search that cannot run.

    Raises:
        EnvironmentProblem: a library of the search is missing (a bare GPU machine).
    """
    if importlib.util.find_spec("optuna") is None:
        raise EnvironmentProblem("a search needs optuna, which is not installed", hint=install_command("search"))


def default_store_path() -> Path:
    """The user's store: $FINETUNE_PLANNER_STORE, or a file in the user's data directory."""
    given = os.environ.get(STORE_VARIABLE)
    if given:
        return _linked(Path(given))
    try:
        from platformdirs import user_data_path
    except ImportError:  # a bare GPU machine
        return _linked(Path.home() / ".local" / "share" / "finetune-planner" / "measurements.jsonl")
    return _linked(user_data_path("finetune-planner") / "measurements.jsonl")


def _linked(path: Path) -> Path:
    """Where a link that the user made leads; a store that is named on the command line may not be one."""
    return path.resolve() if path.is_symlink() else path


def open_store(path: Path | None) -> "Store":
    """The store at `path`, or the user's."""
    from probes.store import Store

    return Store(path if path is not None else default_store_path())


def pick_devices(device: str | None) -> tuple[str, ...]:
    """The devices to probe on: the one named, else every GPU of this machine.

    Raises:
        EnvironmentProblem: there is no GPU and none was named.
    """
    if device is not None:
        if device != "cpu" and not (device == "cuda" or device.removeprefix("cuda:").isdecimal()):
            raise UsageError(f"--device must be cpu or cuda:N, got {device!r}", hint="for example --device cuda:0")
        return ("cuda:0" if device == "cuda" else device,)
    from probes.executors import local_devices

    devices = local_devices()
    if not devices:
        raise EnvironmentProblem(
            "no NVIDIA GPU answers on this machine",
            hint="`plan doctor` says what is missing; --device cpu probes tiny models; `plan estimate` needs no GPU",
        )
    return devices


def job_devices(device: str | None, num_gpus: int) -> tuple[str, ...]:
    """The devices of one job: neighbours from the one named on, else the first ones; the CPU stands for any number.

    Raises:
        EnvironmentProblem: this machine has fewer.
    """
    first = pick_devices(device)[0]
    if num_gpus == 1 or first == "cpu":
        return (first,)
    from probes.executors import local_devices

    here = local_devices()
    start = int(first.partition(":")[2] or 0)
    if start + num_gpus > len(here):
        raise EnvironmentProblem(
            f"--gpus {num_gpus}: this machine has {len(here)} GPU{'s' if len(here) != 1 else ''}"
            + (f", counted from {first}" if start else ""),
            hint="probe with fewer; --device cpu rehearses the job with a tiny model; --slurm runs it on a larger node",
        )
    return here[start : start + num_gpus]


def local_link(num_gpus: int) -> str | None:
    """How the first GPUs of this machine talk, as `--interconnect` names it: "nvlink" where every two do so, "pcie"
    where some do not; None where the driver does not tell about all, or there are fewer."""
    from probes.executors import local_devices
    from probes.topology import topology

    devices = local_devices()[:num_gpus]
    pairs = topology(devices).pairs.values()
    if len(devices) < num_gpus or len(pairs) < num_gpus * (num_gpus - 1) // 2:
        return None
    return "nvlink" if set(pairs) == {"NVLink"} else "pcie"


def gpu_of(name: str | None, device: str) -> GpuSpec | None:
    """The table's row of the device: the one named, else the one the driver names; None on the CPU."""
    from planner.errors import UnknownGpuError
    from planner.gpus import find_gpu, local_gpu

    if name is not None and name.lower() != "local":
        return find_gpu(name)
    if device == "cpu":
        return None
    try:
        return local_gpu(device)
    except UnknownGpuError:  # measuring needs no row; only the utilisation is left out
        return None


@contextmanager
def executor_for(
    devices: tuple[str, ...],
    *,
    slurm: Path | None = None,
    partition: str | None = None,
    ahead: int = 0,
    on_progress: Any = None,
) -> Iterator["Executor"]:
    """An executor that is stopped, children and jobs included, whatever ends the block."""
    from probes.executors import LocalExecutor, SubmititExecutor

    executor: Executor
    if slurm is not None:
        parameters = {"slurm_partition": partition} if partition else {}
        executor = SubmititExecutor(slurm, parameters=parameters)
    else:
        executor = LocalExecutor(devices, ahead=ahead, on_progress=on_progress)
    try:
        yield executor
    finally:
        executor.close()


class ProgressLine:
    """What is being done, on stderr: one line that changes where a person watches; in a pipe or a log file a line for
    every change, and now and then one that says it is still so."""

    def __init__(self, *, total: int | None = None, budget_s: float | None = None) -> None:
        self._watched = sys.stderr.isatty()
        self._total, self._budget_s = total, budget_s
        self._started = time.monotonic()
        self._done = 0
        self._told: set[str] = set()  # of the probe at hand; probes at the same time take turns to speak
        self._told_at = 0.0

    def say(self, text: str) -> None:
        """This command is at `text`."""
        if self._watched:
            self._show(f"{self._head()}{text}")
        else:
            self._tell(f"{self._head()}{text}")

    def event(self, text: str, elapsed_s: float) -> None:
        """A probe is at `text`, `elapsed_s` after its start; told every half second."""
        text = text or "starting"
        shown = f"{text} ({seconds(elapsed_s)})"
        if self._watched:
            self._show(self._head() + shown)
            return
        silent_s = time.monotonic() - self._told_at
        if text not in self._told and silent_s >= CHANGE_S:
            self._told.add(text)
            self._tell(self._head() + shown)
        elif silent_s >= STILL_S:
            self._tell(f"{self._head()}still {shown}")

    def _tell(self, line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)
        self._told_at = time.monotonic()

    def advance(self, line: str = "") -> None:
        """One probe is answered; `line` stays on the screen (also in a pipe)."""
        self._done += 1
        self._told.clear()
        self._clear()
        if line:
            self.note(line)

    def note(self, line: str) -> None:
        """A line that stays on the screen."""
        self._clear()
        print(printable(line), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves a clean line."""
        self._clear()

    def _head(self) -> str:
        spent = time.monotonic() - self._started
        if self._budget_s is not None:
            return f"[{self._done} done, {seconds(max(0.0, self._budget_s - spent))} left] "
        if self._total is not None and self._done:
            left = spent / self._done * (self._total - self._done)
            return f"[{self._done} of {self._total}, {seconds(left)} left] "
        return f"[{self._done} of {self._total}] " if self._total is not None else ""

    def _show(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{printable(text[:150])}")
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._watched:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
