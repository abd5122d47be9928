"""Runs a user's command with a phantom GPU in every Python process that it starts, and reads what they found.

The processes find a `sitecustomize` of ours on `PYTHONPATH`, so that the command stays the user's own, whatever starts
the training program: python, accelerate, torchrun, a shell script. No real GPU is visible to it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from planner.errors import EnvironmentProblem, UsageError
from planner.records import dataclass
from planner.trace_result import TraceResult
from probes.phantom.boot import VARIABLE
from probes.phantom.card import Card, TraceOptions

_ROOT = Path(__file__).parent.parent.parent
_SITE = """import sys
sys.path.append({root!r})
from probes.phantom import boot
boot.begin()
"""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",  # a tool that cannot send its figures tries for minutes
    "AXOLOTL_DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, kw_only=True)
class TraceOrder:
    """What shall be traced.

    Attributes:
        command: the user's command, program first.
        network: whether it may reach other machines.
        folder: where it runs, None: here.
        time_limit_s: after which the program is stopped without a result.
    """

    command: tuple[str, ...]
    card: Card
    options: TraceOptions
    network: bool = False
    time_limit_s: float = 1800.0
    environment: Mapping[str, str] | None = None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended. `results`: of every process in which PyTorch was imported, the training one first."""

    exit_code: int
    results: tuple[TraceResult, ...]
    error: str = ""


def program(command: Sequence[str]) -> str:
    """The path of the command's program, as the user's shell would find it; a `python` outside any activated
    environment is the one that runs this.

    Raises:
        UsageError: there is none.
    """
    path = os.environ.get("PATH", os.defpath)
    if "VIRTUAL_ENV" not in os.environ and "CONDA_PREFIX" not in os.environ:
        path = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    found = shutil.which(command[0], path=path)
    if found is None:
        raise UsageError(
            f"no program {command[0]!r}", hint="give the command as you would run it: plan trace -- python train.py"
        )
    return found


def run_traced(order: TraceOrder) -> Ended:
    """Runs the command; its output goes to stderr.

    Raises:
        UsageError: no such program.
        EnvironmentProblem: it cannot be started, or ran longer than the limit.
    """
    with tempfile.TemporaryDirectory(prefix="plan-trace-") as folder:
        site, results = Path(folder, "site"), Path(folder, "results")
        site.mkdir()
        results.mkdir()
        (site / "sitecustomize.py").write_text(_SITE.format(root=str(_ROOT)))
        child = _started(order, _environment(order, site, results))
        try:
            with _terminable():
                code = child.wait(timeout=order.time_limit_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            raise EnvironmentProblem(
                f"the program ran longer than {order.time_limit_s:.0f} s without {order.options.num_steps} optimizer "
                "steps",
                hint="give it less data, or fewer accumulation steps; --time-limit allows more",
            ) from None
        except BaseException:
            _kill(child)
            raise
        errors = [one.read_text() for one in sorted(results.glob("*.error"))]
        found = results_in(results)
    return Ended(exit_code=code, results=found, error=errors[0] if errors else "")


def _environment(order: TraceOrder, site: Path, results: Path) -> dict[str, str]:
    """The command's environment: ours is the first `sitecustomize`, no GPU is visible."""
    said = {
        "card": asdict(order.card),
        "options": asdict(order.options),
        "network": order.network,
        "results": str(results),
    }
    return {
        **os.environ,
        **(order.environment or {}),
        **({} if order.network else OFFLINE),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", "")))),
        "CUDA_VISIBLE_DEVICES": "",
        VARIABLE: json.dumps(said),
    }


def _started(order: TraceOrder, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    executable = program(order.command)
    try:
        return subprocess.Popen(
            [executable, *order.command[1:]],
            env=environment,
            cwd=order.folder,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentProblem(
            f"{executable} cannot be started: {error.strerror or error}", hint="check the program's permissions"
        ) from error


def results_in(folder: Path) -> tuple[TraceResult, ...]:
    """What the traced processes left, the one that trained most first.

    Raises:
        ConfigError: something that is no trace's result.
    """
    found = (TraceResult.read(one) for one in folder.glob("*.json"))
    return tuple(sorted(found, key=lambda one: (-one.num_steps, -one.peak_allocated_bytes)))


def _has_descriptor(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds this process: the child has a session of its own, so nothing else would end it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
