"""Where probes run: on this machine's GPUs, one at a time on each, or as jobs of a cluster. One interface for both.

A job carries the request as JSON text and brings the outcome back as JSON text; the node runs the same runner and child
as here.
"""

import json
import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.core.children import SAFE_PATH, python_argv
from planner.core.errors import EnvironmentProblem
from planner.core.install import install_command
from planner.hardware.driver import nvml, visible_handles
from planner.setup.codec import Outcome, decode, evidence_to_dict, outcome_from_dict
from planner.setup.interchange import to_jsonable
from planner.setup.outcome import Environment, FailureKind, ProbeFailure
from probes.gpu.environment import read_environment
from probes.gpu.failures import UnsupportedProbe
from probes.gpu.request import ProbeRequest
from probes.gpu.runner import WORKER_ARGV, ProbeStopped, run_probe
from probes.gpu.watch import OnProgress

SETUP_MINUTES = 5
"""Added to a probe's own limit when a cluster is asked for time: starting Python on a cold file system is slow."""


class Executor(ABC):
    """Runs probes. `submit` returns at once; results come in any order."""

    num_parallel: int = 1
    """How many requests are worth having in flight."""

    @abstractmethod
    def submit(self, request: ProbeRequest) -> "Future[Outcome]":
        """Starts a probe; the future holds its outcome."""

    def environment(self, device: str, gpu_key: str | None) -> Environment:
        """Where the probes run: here, unless told otherwise."""
        return read_environment(device, gpu_key)

    @abstractmethod
    def close(self) -> None:
        """Stops what is running and gives everything back."""

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DevicePool:
    """Devices that probes take and give back; a job on several takes neighbours, all at once.

    The CPU holds a job of any size. Each device can be taken `times` times.
    """

    def __init__(self, devices: Sequence[str], times: int = 1) -> None:
        self._devices = tuple(devices)
        self._left = [times] * len(self._devices)
        self._changed = threading.Condition()

    def take(self, num: int) -> tuple[int, ...]:
        """Waits for `num` neighbouring devices; the places of what was taken.

        Raises:
            UnsupportedProbe: there are not as many.
        """
        num = 1 if "cpu" in self._devices else num
        if not self._neighbours(num):
            available = ", ".join(self._devices)
            raise UnsupportedProbe(f"the setup needs {num} neighbouring GPUs to probe on, there are {available}")
        with self._changed:
            while True:
                places = next((run for run in self._neighbours(num) if all(self._left[place] for place in run)), ())
                if places:
                    for place in places:
                        self._left[place] -= 1
                    return places
                self._changed.wait()

    def give_back(self, places: Sequence[int]) -> None:
        with self._changed:
            for place in places:
                self._left[place] += 1
            self._changed.notify_all()

    def name(self, places: Sequence[int]) -> str:
        return self._devices[places[0]]

    def _neighbours(self, num: int) -> list[tuple[int, ...]]:
        """Every run of `num` places whose "cuda:N" are numbered one after another, as a job's ranks are."""
        runs = [tuple(range(first, first + num)) for first in range(len(self._devices) - num + 1)]
        if num == 1:
            return runs
        index = [int(name.partition(":")[2] or 0) for name in self._devices]
        return [run for run in runs if all(index[right] == index[left] + 1 for left, right in pairwise(run))]


class LocalExecutor(Executor):
    """This machine: one probe per device at a time; a setup on several GPUs takes as many devices.

    With `ahead` above 0 the next children already import their libraries while the present one measures; the device's
    lock keeps them from touching it (`probes.gpu.device`).
    """

    def __init__(
        self,
        devices: Sequence[str] = ("cuda:0",),
        *,
        ahead: int = 0,
        work_dir: Path | None = None,
        argv: Sequence[str] = WORKER_ARGV,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.num_parallel = len(devices) * (1 + ahead)
        self._devices = DevicePool(devices, 1 + ahead)
        self._pool = ThreadPoolExecutor(max_workers=self.num_parallel, thread_name_prefix="probe")
        self._stop = threading.Event()
        self._work_dir, self._argv, self._on_progress = work_dir, tuple(argv), on_progress

    def submit(self, request: ProbeRequest) -> "Future[Outcome]":
        return self._pool.submit(self._run, request)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, request: ProbeRequest) -> Outcome:
        try:
            places = self._devices.take(request.setup.num_gpus)
        except UnsupportedProbe as error:
            return ProbeFailure(level=request.level, kind=FailureKind.UNSUPPORTED, message=str(error))
        try:
            if self._stop.is_set():
                raise ProbeStopped
            return run_probe(
                replace(request, device=self._devices.name(places)),
                work_dir=self._work_dir,
                argv=self._argv,
                on_progress=self._on_progress,
                stop=self._stop,
            )
        finally:
            self._devices.give_back(places)


def run_request_text(text: str, argv: Sequence[str] | None = None) -> str:
    """What a cluster's node does: the request's JSON in, the outcome's JSON out. Never raises for a probe's sake.

    PYTHONPATH and the like come from the node's own environment.
    """
    request = ProbeRequest.from_dict(json.loads(text))
    try:
        outcome = run_probe(request, argv=tuple(argv) if argv is not None else WORKER_ARGV)
    except EnvironmentProblem as error:
        outcome = ProbeFailure(level=request.level, kind=FailureKind.MACHINE, message=f"on the node: {error.message}")
    return json.dumps(evidence_to_dict(outcome))


def environment_text(device: str, gpu_key: str | None) -> str:
    return json.dumps(to_jsonable(read_environment(device, gpu_key)))


class SubmititExecutor(Executor):
    """A cluster through submitit: every probe is a job.

    Args:
        folder: where submitit keeps its scripts and logs; shared between the nodes.
        cluster: "slurm", or "local" (child processes of this machine; what the tests use), None to detect one.
        parameters: handed to submitit's `update_parameters` ("slurm_partition", "gpus_per_node", ...).

    Raises:
        EnvironmentProblem: submitit is not installed, or there is no cluster here.
    """

    num_parallel = 8

    def __init__(
        self,
        folder: Path,
        *,
        cluster: str | None = None,
        parameters: dict[str, Any] | None = None,
        argv: Sequence[str] | None = None,
    ) -> None:
        try:
            import submitit
        except ImportError as error:
            raise EnvironmentProblem("submitit is not installed", hint=install_command("cluster")) from error
        self._argv = tuple(argv) if argv is not None else None
        os.environ.update(SAFE_PATH)  # submitit's controller and sbatch take this process's environment
        python = shlex.join(python_argv())
        self._executor = submitit.AutoExecutor(
            folder=str(folder), cluster=cluster, slurm_python=python, local_python=python
        )
        if cluster is None and self._executor.cluster == "local":  # submitit would run the jobs on this machine
            raise EnvironmentProblem(
                "no Slurm answers here: srun is not in PATH",
                hint="call it on the cluster's login node, or leave --slurm out to probe on this machine",
            )
        self._parameters = {"gpus_per_node": 1, "tasks_per_node": 1, "cpus_per_task": 4, **(parameters or {})}
        if self._executor.cluster == "local":
            self._parameters.pop("gpus_per_node")
        self._jobs: list[Any] = []
        self._closing = threading.Event()
        self._watchers = ThreadPoolExecutor(max_workers=self.num_parallel, thread_name_prefix="job")

    def submit(self, request: ProbeRequest) -> "Future[Outcome]":
        minutes = int(request.limits.time_s // 60) + SETUP_MINUTES
        parameters = {**self._parameters}
        if "gpus_per_node" in parameters:  # one task that starts its own ranks, all on one node
            parameters["gpus_per_node"] = max(int(parameters["gpus_per_node"]), request.setup.num_gpus)
        self._executor.update_parameters(timeout_min=minutes, name="plan-probe", **parameters)
        job = self._executor.submit(run_request_text, json.dumps(request.to_dict()), self._argv)
        self._jobs.append(job)
        return self._watchers.submit(self._wait, job, request)

    def environment(self, device: str, gpu_key: str | None) -> Environment:
        self._executor.update_parameters(timeout_min=SETUP_MINUTES, name="plan-environment", **self._parameters)
        job = self._executor.submit(environment_text, device, gpu_key)
        self._jobs.append(job)
        try:
            return decode(Environment, json.loads(job.result()), newer=True)
        except Exception as error:  # submitit raises what the scheduler and the job made of it
            raise EnvironmentProblem(
                f"the cluster could not run a first job: {_first_line(error)}",
                hint="look into the job's log in the executor's folder, or run on this machine",
            ) from error

    def close(self) -> None:
        self._closing.set()
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)
        self._watchers.shutdown(wait=True, cancel_futures=True)
        self._jobs.clear()  # submitit's local jobs complain where the interpreter ends before them

    def _wait(self, job: Any, request: ProbeRequest) -> Outcome:
        while not job.done():
            if self._closing.wait(0.2):
                raise ProbeStopped
        try:
            return outcome_from_dict(json.loads(job.result()))
        except Exception as error:  # lost jobs, failed nodes: each is an outcome of this probe
            return ProbeFailure(
                level=request.level,
                kind=FailureKind.CRASHED,
                message=f"job {job.job_id} ({job.state}) brought no result: {_first_line(error)}",
                log_path=str(job.paths.stderr),
            )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def local_devices() -> tuple[str, ...]:
    """ "cuda:N" for every GPU that the driver shows this process, without importing torch."""
    with nvml() as module:
        if module is None:
            return ()
        return tuple(f"cuda:{index}" for index in range(len(visible_handles(module))))
