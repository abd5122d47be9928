"""What measuring on this machine takes: the store's place, the devices, executors."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.install import install_command
from planner.hardware.gpu import GpuSpec

if TYPE_CHECKING:
    from planner.models.spec import ModelSpec
    from probes.gpu.evaluate import Prober
    from probes.gpu.executors import Executor
    from probes.store import Store

STORE_VARIABLE = "FINETUNE_PLANNER_STORE"


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
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:  # Python 3.13 raises the first, those before the other
        raise EnvironmentProblem(f"the store {path} is a link that leads nowhere", hint="remove the link") from error


def open_store(path: Path | None) -> "Store":
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
    from probes.gpu.executors import local_devices

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
    from probes.gpu.executors import local_devices

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
    from probes.gpu.executors import local_devices
    from probes.gpu.topology import topology

    devices = local_devices()[:num_gpus]
    pairs = topology(devices).pairs.values()
    if len(devices) < num_gpus or len(pairs) < num_gpus * (num_gpus - 1) // 2:
        return None
    return "nvlink" if set(pairs) == {"NVLink"} else "pcie"


def gpu_of(name: str | None, device: str) -> GpuSpec | None:
    """The table's row of the device: the one named, else the one the driver names; None on the CPU."""
    from planner.core.errors import UnknownGpuError
    from planner.hardware.gpus import find_gpu, local_gpu

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
    from probes.gpu.executors import LocalExecutor, SubmititExecutor

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


@contextmanager
def prober_on(
    devices: tuple[str, ...], model: "ModelSpec", gpu: GpuSpec | None, *, store: Path | None, executor: Any, **how: Any
) -> Iterator["Prober"]:
    """A prober of one model on these devices; `executor`: what `executor_for` takes, `how`: what `Prober` takes."""
    from probes.gpu.evaluate import Prober

    with executor_for(devices, **executor) as runs:
        yield Prober(model=model, gpu=gpu, executor=runs, store=open_store(store), device=devices[0], **how)
