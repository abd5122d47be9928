"""The runner: one child process per probe, a time limit, and an outcome whatever happens to the child.

The child runs in its own process group, which is killed as a whole at the limit and swept afterwards; if the runner
dies, the kernel kills the child (`worker.die_with_parent`). The child itself waits for its turn on a clean GPU
(`probes.gpu.device`).

A setup on several GPUs is a job of several ranks: the child is then torchrun (`probes.gpu.agent`), and the outcome is
named from what the ranks and torchrun tell (`probes.gpu.ranks`). The first rank that fails ends the job.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.core.children import child_environment, python_argv
from planner.core.errors import EnvironmentProblem
from planner.core.outputs import write_whole
from planner.setup.codec import BadOutcome, Outcome, outcome_from_dict
from planner.setup.outcome import FailureKind, Measurement, ProbeFailure
from probes.gpu.environment import child_settings
from probes.gpu.failures import classify_exit, oom_kill_count
from probes.gpu.ranks import why_not_probed
from probes.gpu.request import ProbePaths, ProbeRequest
from probes.gpu.watch import OnProgress, Watch, read_tail

WORKER_ARGV = python_argv("-m", "probes.gpu.worker")
AGENT_ARGV = python_argv("-m", "probes.gpu.agent")
JOB_VARIABLE = "FINETUNE_PLANNER_PROBE"
"""Set for every process of a probe: torchrun's ranks have sessions of their own and are found by it."""
KEPT_TAIL_CHARS = 2000
KILL_WAIT_S = 4.0
"""A process that is stuck in the driver does not die; what waits for it has promised to end within a limit."""


class ProbeStopped(Exception):
    """The probe was stopped on request; nothing was measured."""


def run_probe(
    request: ProbeRequest,
    *,
    work_dir: Path | None = None,
    argv: Sequence[str] = WORKER_ARGV,
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Runs one request in a child process and returns what came of it.

    Args:
        work_dir: where the probe's own directory is made; a temporary one by default. The directory of a failed probe
            stays (its log), that of a measured one is removed.
        argv: the worker's command; request and result paths are appended.
        stop: set by another thread to kill the child and end with `ProbeStopped`.

    Raises:
        ProbeStopped: `stop` was set.
        EnvironmentProblem: the request cannot be written or the child cannot be started; nothing was run.
        KeyboardInterrupt: Ctrl-C, after the child was killed.
    """
    if not hasattr(os, "killpg"):
        raise EnvironmentProblem(
            "probes need a system with process groups: native Windows has none",
            hint="run in WSL 2; planning works here",
        )
    reason = why_not_probed(request.setup)
    if reason:
        return ProbeFailure(level=request.level, kind=FailureKind.UNSUPPORTED, message=reason)
    paths = _written(request, work_dir)
    outcome = _run_child(request, paths, tuple(argv), on_progress, stop)
    if isinstance(outcome, ProbeFailure):
        tail = read_tail(paths.log)[-KEPT_TAIL_CHARS:]  # the log itself stays behind on a lent machine
        return replace(outcome, log_path=str(paths.log) if paths.log.exists() else None, log_tail=tail)
    shutil.rmtree(paths.directory, ignore_errors=True)
    return outcome


def _written(request: ProbeRequest, work_dir: Path | None) -> ProbePaths:
    """The probe's directory with the request in it."""
    try:
        if work_dir is not None:
            work_dir.mkdir(parents=True, exist_ok=True)
        paths = ProbePaths(Path(tempfile.mkdtemp(prefix="probe-", dir=work_dir)))
        write_whole(paths.request, json.dumps(request.to_dict()).encode(), sync=True)
    except OSError as error:
        place = work_dir or tempfile.tempdir or "any folder"  # None: `gettempdir` ends so itself
        raise EnvironmentProblem(
            f"cannot make a directory for the probe in {place}: {error.strerror or error}",
            hint="free some disk space, or set TMPDIR to a directory you may write",
        ) from error
    return paths


def _run_child(
    request: ProbeRequest,
    paths: ProbePaths,
    argv: tuple[str, ...],
    on_progress: OnProgress | None,
    stop: threading.Event | None,
) -> Outcome:
    kills_before = oom_kill_count()
    read_end, write_end = os.pipe()
    try:
        child = _start_child(request, paths, argv, write_end)
        watch = Watch(
            child=child,
            pipe=read_end,
            log=paths.log,
            limit_s=request.limits.time_s,
            on_progress=on_progress,
            stop=stop or threading.Event(),
            size=request.num_ranks,
        )
        try:
            ending = watch.until_end()
        finally:
            killed = _kill_group(child) & (request.num_ranks == 1 or _kill_job(str(paths.directory)))
    finally:
        os.close(read_end)
    # A result that was delivered counts, even if the child hung or crashed while it was being torn down.
    delivered = _read_result(paths, watch.sent_result)
    if isinstance(delivered, (Measurement, ProbeFailure)):
        return delivered
    if ending == "stop":
        shutil.rmtree(paths.directory, ignore_errors=True)
        raise ProbeStopped
    tail, oom_killed = read_tail(paths.log), oom_kill_count() > kills_before
    verdict = watch.ranks.verdict(tail, size=request.num_ranks, oom_killed=oom_killed)
    stopped = watch.failure(ending, killed=killed)
    kind, message = verdict or stopped or classify_exit(child.returncode, tail, oom_killed=oom_killed)
    why = f"; {delivered}" if delivered and not verdict and not stopped else ""  # there is no result of its own
    return ProbeFailure(level=request.level, kind=kind, message=f"{message}{why}")


def _start_child(
    request: ProbeRequest, paths: ProbePaths, argv: tuple[str, ...], write_end: int
) -> "subprocess.Popen[bytes]":
    """The worker, or torchrun for several ranks; `write_end` of the pipe, through which it tells, is its own now."""
    try:
        log = os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:  # no room for a log is no reason not to measure
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    command = [
        *(argv if request.num_ranks == 1 else AGENT_ARGV),
        *map(str, (paths.request, paths.result, "--status-fd", write_end, "--parent", os.getpid())),
        *(() if request.num_ranks == 1 else ("--", *argv)),
    ]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(write_end,),
            env={**probe_environment(), JOB_VARIABLE: str(paths.directory)},
        )
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot start the probe's process {argv[0]}: {error.strerror}", hint="check the Python installation"
        ) from error
    finally:
        os.close(log)
        os.close(write_end)


def probe_environment() -> dict[str, str]:
    """The environment of a probe: no download, devices numbered as the driver does, and the allocator as a launch file
    sets it."""
    return {
        **child_environment(),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **child_settings(),
    }


def _kill_group(child: "subprocess.Popen[bytes]") -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # the group outlives its leader while a grandchild is left
    try:
        child.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_job(name: str) -> bool:
    deadline = time.monotonic() + KILL_WAIT_S
    while True:
        left = job_processes(name)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def job_processes(name: str) -> list[int]:
    """The live processes whose environment names this job (Linux; none elsewhere). A zombie has no environment."""
    mark = f"{JOB_VARIABLE}={name}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                pids.append(int(entry.parent.name))
    return pids


def _read_result(paths: ProbePaths, sent: object) -> Outcome | str:
    """The delivered outcome, or why there is none ("" when nothing was delivered)."""
    try:
        values = json.loads(paths.result.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if sent is None:
            return ""
        values = sent
    except (OSError, ValueError) as error:
        return f"the result cannot be read ({error})"
    try:
        return outcome_from_dict(values)
    except BadOutcome as error:
        return f"the result is not one ({error})"
