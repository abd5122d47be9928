"""Runs a launch file by its own tool for a few steps and says what it took: the last level.

The file is run as it was written, in a folder of its own, where what it names and this machine lacks is a directory of
that name: the model with random weights, texts that fill every sequence. It is watched from inside (`watch`). Nothing
is downloaded, and nothing of the run is kept but what was seen.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.core.children import child_environment, python_argv
from planner.core.errors import ConfigError, EnvironmentProblem
from planner.core.inputs import parse_object, read_text
from planner.core.outputs import write_whole
from planner.core.redaction import without_secrets, without_secrets_in_words
from planner.core.units import gib
from planner.setup.codec import Outcome, decode
from planner.setup.outcome import FailureKind, Fidelity, Measurement, ProbeFailure
from probes.gpu.device import lease_all
from probes.gpu.environment import device_status, read_environment
from probes.gpu.executors import Executor
from probes.gpu.failures import classify_exit, oom_kill_count
from probes.gpu.request import ProbeRequest
from probes.gpu.watch import OnProgress, read_tail
from probes.launched.watch import PROGRESS, VARIABLE, site_folder
from probes.phantom.runner import OFFLINE

NUM_STEPS = 10
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): (.+)")
WARM_UP_STEPS = 2
"""Of them: kernels are compiled in the first, and the allocator's segments are complete after the second."""
LIMIT_S = 900.0
POLL_S = 0.2
HELD_OUT_ROWS = 64
"""More rows than are trained on: some are held out."""
DISK_MARGIN = 1.05
MAX_SEEN_BYTES = 1 << 20
ENVIRONMENT = {**OFFLINE, "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True)
class LaunchedFile:
    """A training file that its own tool can run.

    Attributes:
        target: the tool: a launch target's name.
        command: as a shell would be given it, with the variables that stand in front of it.
        prepare: the command before it that makes its data, "" where they are read as they are.
        files: what is copied beside it: path below the run's folder -> text; `links`: what is only seen from there.
        program_folder: where the tool's program is looked for first ("" : where this machine's shell would look).
        model_name: as the file names the model; `dataset_names`: as it names its data sets.
        columns: what a row of its data must have (`prepare.row_of`); `splits`: the parts that it asks for.
        model_here, data_here: the model's weights, the data set are on this machine: neither is made.
    """

    target: str
    command: str
    files: Mapping[str, str]
    links: Mapping[str, Path] = field(default_factory=dict)
    prepare: str = ""
    model_name: str
    dataset_names: tuple[str, ...]
    columns: str = "text"
    splits: tuple[str, ...] = ("train",)
    program_folder: str = ""
    model_here: bool = False
    data_here: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one process of a run wrote of itself (`watch`); the program can write there what it likes."""

    device: str
    step_s: tuple[float, ...]
    between_s: tuple[float, ...]
    peak_resident_bytes: int
    loaded_bytes: int
    python: str
    cuda: str
    libraries: Mapping[str, str]
    gpu: str = ""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_alloc_retries: int = 0
    used_bytes: int | None = None
    processes: tuple[tuple[int, int], ...] = ()


def read_seen(path: Path) -> Seen:
    """What a process wrote.

    Raises:
        ConfigError: not that.
    """
    seen = decode(Seen, parse_object(read_text(path, max_bytes=MAX_SEEN_BYTES), path.name), path.name)
    if min((seen.peak_resident_bytes, seen.loaded_bytes, *seen.step_s), default=0) < 0 or 0.0 in seen.step_s:
        raise ConfigError(f"{path.name}: a step of no time, or memory below zero")
    return seen


class FileExecutor(Executor):
    """Runs one launch file for every request: `probes.gpu.evaluate.Prober` stores what came of it as it stores a probe.

    Args:
        model_bytes: of the weights that may have to be written.
        limit_s: when the commands end, counted from the start of the first; what is made before them is not ended.
    """

    def __init__(
        self,
        file: LaunchedFile,
        *,
        model_bytes: int,
        num_steps: int = NUM_STEPS,
        limit_s: float = LIMIT_S,
        work_dir: Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._file, self._model_bytes, self._num_steps, self._limit_s = file, model_bytes, num_steps, limit_s
        self._work_dir, self._on_progress = work_dir, on_progress

    def submit(self, request: ProbeRequest) -> "Future[Outcome]":
        future: Future[Outcome] = Future()
        future.set_result(self._run(request))
        return future

    def close(self) -> None:
        """Nothing is left running."""

    def _run(self, request: ProbeRequest) -> Outcome:
        if request.setup.num_gpus > 1:
            return _failure(FailureKind.UNSUPPORTED, "a launch file of several GPUs is not watched yet")
        started = time.monotonic()

        def say(text: str) -> None:
            if self._on_progress is not None:
                self._on_progress(text, time.monotonic() - started)

        folder = Path(tempfile.mkdtemp(prefix="plan-run-", dir=self._work_dir))
        try:
            with lease_all((request.device,), lambda begins: None):
                self._prepare(request, folder, say)
                return self._watched(request, folder, started + self._limit_s, say)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _prepare(self, request: ProbeRequest, folder: Path, say: Callable[[str], None]) -> None:
        """Lays out the run's folder.

        Raises:
            EnvironmentProblem: no room for it, or what it needs cannot be made.
        """
        file, setup = self._file, request.setup
        if not file.model_here and shutil.disk_usage(folder).free < DISK_MARGIN * self._model_bytes:
            raise EnvironmentProblem(
                f"the model's random weights need {gib(self._model_bytes)} on disk, {folder.parent} has less",
                hint="set TMPDIR to a directory with room",
            )
        for path, text in file.files.items():
            write_whole(folder / path, text.encode(), inside=folder)
        for path, place in file.links.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(place)
        seqs = setup.micro_batch_seqs * setup.accumulation_steps
        order = {
            "config": dict(request.config),
            "model": "" if file.model_here else str(_below(folder, file.model_name)),
            "texts": [] if file.data_here else [str(_below(folder, name)) for name in file.dataset_names],
            "columns": file.columns,
            "splits": list(file.splits),
            "num_rows": seqs * (self._num_steps + 1) * (2 if setup.packing else 1) + HELD_OUT_ROWS,
            "num_tokens": setup.seq_len_tokens,
        }
        if not order["model"] and not order["texts"]:
            return
        say("making what the file names" + " (random weights)" * bool(order["model"]))
        order_path = folder / "order.json"
        order_path.write_text(json.dumps(order), encoding="utf-8")
        made = subprocess.run(
            python_argv("-m", "probes.launched.prepare", str(order_path)),
            env={**child_environment(), **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no word"])[-1]
            raise EnvironmentProblem(f"the model or its data could not be made for the run: {last}")

    def _watched(self, request: ProbeRequest, folder: Path, ends_at: float, say: Callable[[str], None]) -> Outcome:
        """What the run took, or why it took nothing."""
        device, log = request.device, folder / "log.txt"
        (folder / "seen").mkdir()
        before = None if device == "cpu" else device_status(device)
        kills_before = oom_kill_count()
        code: int | None = 0
        if self._file.prepare:
            say(f"starting {without_secrets(self._file.prepare)}")
            code = self._wait(self._file.prepare, device, folder, ends_at, say)
        if code == 0:
            say(f"starting {shlex.join(without_secrets_in_words(split_command(self._file.command)[0]))}")
            code = self._wait(self._file.command, device, folder, ends_at, say)
        observed, damaged = list[Seen](), ""
        for path in sorted((folder / "seen").glob("seen-*.json")):
            try:
                observed.append(read_seen(path))
            except ConfigError as error:
                damaged = f"what it showed of itself cannot be read: {error.message}"
        tail = without_secrets(read_tail(log))
        if not observed and damaged:
            return _failure(FailureKind.CRASHED, damaged, tail)
        if not observed:
            if code is None:
                return _failure(FailureKind.TIMEOUT, f"no {self._num_steps} steps within the limit", tail)
            kind, message = classify_exit(code, tail, oom_killed=oom_kill_count() > kills_before)
            if missing := _MISSING.findall(tail):  # says nothing about the setup
                kind, message = FailureKind.MACHINE, f"the program lacks a package: {missing[-1]}"
            if code == 0:
                kind, message = FailureKind.UNSUPPORTED, "it ended without a step of transformers' Trainer"
            return _failure(kind, message, tail)
        best = max(observed, key=lambda seen: len(seen.step_s))
        if len(best.step_s) <= WARM_UP_STEPS:
            return _failure(FailureKind.CRASHED, f"it ended after {len(best.step_s)} optimizer steps", tail)
        return measurement(self._file, request, best, before.used_bytes if before is not None else None)

    def _wait(self, command: str, device: str, folder: Path, ends_at: float, say: Callable[[str], None]) -> int | None:
        """The command's exit code, None where it was stopped at its limit."""
        words, variables = split_command(command)
        with open(folder / "log.txt", "ab") as output:
            try:
                child = subprocess.Popen(
                    words, cwd=folder, env=self._environment(variables, device, folder), stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise EnvironmentProblem(
                    f"{words[0]} cannot be started: {error.strerror or error}",
                    hint=f"bash launch/run.sh install {self._file.target}",
                ) from error
        try:
            while time.monotonic() < ends_at:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(POLL_S)
                with contextlib.suppress(ConfigError, ValueError):
                    step = int(read_text(folder / "seen" / PROGRESS, max_bytes=20))
                    say(f"step {step} of {self._num_steps}")
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _environment(self, variables: Mapping[str, str], device: str, folder: Path) -> dict[str, str]:
        """What the program finds: the user's own, the file's, no network, and our `sitecustomize`."""
        order = {"folder": str(folder / "seen"), "num_steps": self._num_steps, "device": device.partition(":")[0]}
        path = os.pathsep.join(filter(None, (self._file.program_folder, os.environ.get("PATH", os.defpath))))
        site = [str(site_folder(folder / "site")), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            **variables,
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(filter(None, site)),
            "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            VARIABLE: json.dumps(order),
        }
        if device == "cpu":
            return {**environment, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        index = int(device.partition(":")[2] or 0)
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        return {**environment, "CUDA_VISIBLE_DEVICES": visible[index] if visible else str(index)}


def _below(folder: Path, name: str) -> Path:
    """The directory of that name in the run's folder.

    Raises:
        EnvironmentProblem: the name leads out of it.
    """
    path = (folder / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(folder.resolve()):
        raise EnvironmentProblem(
            f"the file names {name!r}, which is not on this machine and cannot stand in the run's folder",
            hint="name a hub id, or what is there",
        )
    return path


def measurement(file: LaunchedFile, request: ProbeRequest, seen: Seen, used_before: int | None) -> Measurement:
    """What a run took, from what it showed; `used_before`: the device's bytes in use before it."""
    setup = request.setup
    on_cpu, allocated, reserved = seen.device == "cpu", seen.peak_allocated_bytes, seen.peak_reserved_bytes
    reserved = seen.peak_resident_bytes if reserved is None else reserved
    added = seen.used_bytes - used_before if used_before is not None and seen.used_bytes is not None else None
    between = sorted(seen.between_s[WARM_UP_STEPS - 1 :])
    here = read_environment(request.device, request.gpu_key, cuda=seen.cuda)
    return Measurement(
        level=Fidelity.RUN,
        peak_allocated_bytes=seen.peak_resident_bytes if allocated is None else allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved if added is None else added,
        phase_peaks_bytes={"load": seen.loaded_bytes} if seen.loaded_bytes else {},
        step_times_s=seen.step_s[WARM_UP_STEPS:],
        tokens_per_step=setup.tokens_per_step,
        layers_measured=(),
        environment=replace(here, python=seen.python, libraries=seen.libraries),
        flags=("allocator-retries",) if seen.num_alloc_retries else (),
        notes=tuple(_notes(file, seen, on_cpu=on_cpu)),
        device_peak_is_nvml=added is not None,
        between_steps_s=between[len(between) // 2] if between else 0.0,
        program=file.target,
    )


def _notes(file: LaunchedFile, seen: Seen, *, on_cpu: bool) -> Iterator[str]:
    yield (
        f"{shlex.join(split_command(file.command)[0])}: {len(seen.step_s)} optimizer steps of its own trainer, "
        f"the first {WARM_UP_STEPS} not counted"
    )
    if not file.model_here:
        yield "random weights: the model's are not on this machine"
    if not file.data_here:
        yield "texts that fill every sequence stood in for the data set"
    if on_cpu:
        yield "a rehearsal on the CPU: memory is the process's own, speed this CPU's"
    mine = [size for _, size in seen.processes if size]
    if len(mine) > 1:
        yield f"{len(mine)} processes held memory of the device: {', '.join(gib(size) for size in mine)}"


def split_command(command: str) -> tuple[list[str], dict[str, str]]:
    """Words and environment of a launch command; `python` is this Python where none is on the path."""
    words, variables = shlex.split(command), dict[str, str]()
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return words, variables


def _failure(kind: FailureKind, message: str, tail: str = "") -> ProbeFailure:
    return ProbeFailure(level=Fidelity.RUN, kind=kind, message=message, log_tail=tail[-4000:])
