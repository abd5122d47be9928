"""Runs a user's command with a phantom GPU in every Python process that it starts, and reads what they found.

The processes find a `sitecustomize` of ours on `PYTHONPATH`, so that the command stays the user's own, whatever starts
the training program: python, accelerate, torchrun, a shell script. `isolation` keeps it from the machine.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.core.children import ROOT, ended_by_scheduler, python_argv
from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.inputs import read_text
from planner.frameworks.readers.loading import LARGER
from planner.frameworks.readers.program.source import of_notebook
from planner.planning.trace_result import MAX_BYTES, Protection, TraceResult
from probes.phantom import isolation
from probes.phantom.boot import VARIABLE
from probes.phantom.card import Card, TraceOptions
from probes.phantom.imports import sitecustomize

_KEEPER = "import sys; sys.path.append({root!r}); from probes.phantom.isolation import main; main()"
NOTEBOOK = ".ipynb"
_KERNEL = """import builtins, contextlib, importlib.machinery, linecache, sys
from unittest.mock import MagicMock
sys.path[0], builtins.display = {folder!r}, print
colab, kaggle = sys.modules["google.colab"], sys.modules["kaggle_secrets"] = MagicMock(), MagicMock()
colab.__spec__ = importlib.machinery.ModuleSpec("google.colab", None)
colab.userdata.get.return_value = kaggle.UserSecretsClient().get_secret.return_value = ""
with contextlib.suppress(ImportError):
    import huggingface_hub
    huggingface_hub.login = huggingface_hub.notebook_login = MagicMock()
for name, code in {cells!r}:
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    exec(compile(code, name, "exec"))
"""
"""A notebook's cells, one after the other: imports look where the kernel's would, lines are known by their cell, nobody
logs in, and what Colab and Kaggle have beside Python gives nothing."""
GUARDED = (VARIABLE, "CUDA_VISIBLE_DEVICES")
"""What a Python below must know even where it was started without its environment."""
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
        unsafe_writes: run it even where nothing keeps what it writes and deletes from the user's files.
        folder: where it runs, None: here.
        time_limit_s: after which the program is stopped without a result.
    """

    command: tuple[str, ...]
    card: Card
    options: TraceOptions
    network: bool = False
    unsafe_writes: bool = False
    time_limit_s: float = 1800.0
    environment: Mapping[str, str] | None = None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended. `results`: of every process in which PyTorch was imported, the training one first;
    `absent`: a package that it imported in vain."""

    exit_code: int
    results: tuple[TraceResult, ...]
    protection: Protection = field(default_factory=lambda: Protection(kind="none"))
    error: str = ""
    absent: str = ""


def _with_scripts(order: TraceOrder, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command's words with a script of the cells in place of a notebook that is to be run, and the script by its
    place in the private folder; lines for the shell and other languages' cells are left out. What opens notebooks by
    itself (jupyter, papermill) keeps its own."""
    words, scripts = [], {}
    num_run = 1 + Path(order.command[0]).name.startswith("python")
    for number, word in enumerate(order.command):
        notebook = Path(order.folder or "", word)
        if number < num_run and word.endswith(NOTEBOOK) and notebook.is_file():
            place = f"site/cells/{notebook.stem}.py"
            source = of_notebook(read_text(notebook, max_bytes=LARGER[NOTEBOOK]), word)
            cells: dict[str, str] = {}
            for (cell, _), line in zip(source.origin, source.text.splitlines(keepends=True), strict=False):
                name = f"{notebook.name}:cell {cell}"
                cells[name] = cells.get(name, "") + line
            scripts[place] = _KERNEL.format(folder=str(notebook.parent.absolute()), cells=list(cells.items()))
            word = str(folder / place)
        words.append(word)
    return words, scripts


def program(command: Sequence[str]) -> str:
    """The path of the command's program, as the user's shell would find it; a `python` outside any activated
    environment is the one that runs this, and the one of a notebook.

    Raises:
        UsageError: there is none.
    """
    path = os.environ.get("PATH", os.defpath)
    if "VIRTUAL_ENV" not in os.environ and "CONDA_PREFIX" not in os.environ:
        path = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    executable = shutil.which("python" if command[0].endswith(NOTEBOOK) else command[0], path=path)
    if executable is None:
        raise UsageError(
            f"no program {command[0]!r}", hint="give the command as you would run it: plan trace -- python train.py"
        )
    return executable


def protection(order: TraceOrder) -> Protection:
    """What will keep the program from the machine, found by running nothing in its place.

    Raises:
        UsageError: no such program.
        EnvironmentProblem: nothing can, and `order` does not allow it to run so.
    """
    program(order.command)
    return run_traced(replace(order, command=("true",))).protection


def run_traced(order: TraceOrder) -> Ended:
    """Runs the command; its output goes to stderr.

    Raises:
        UsageError: no such program.
        EnvironmentProblem: it cannot be started or protected from, or was stopped: too long, or too much written.
    """
    with _running(order) as (folder, outcome):
        redirected, results = outcome["redirected"], folder / "results"
        errors = [read_text(path, max_bytes=MAX_BYTES) for path in sorted(results.glob("*.error"))]
        absent = [read_text(path, max_bytes=MAX_BYTES) for path in sorted(results.glob("*.absent"))]
        return Ended(
            exit_code=outcome["code"],
            results=results_in(results, str(folder / "tree")),
            protection=Protection(kind=outcome["kind"], **{**redirected, "paths": tuple(redirected.get("paths", ()))}),
            error=errors[0] if errors else "",
            absent=absent[0] if absent else "",
        )


@contextlib.contextmanager
def _running(order: TraceOrder) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The private folder, which is there until the end, and how the command ended.

    Raises:
        EnvironmentProblem: it did not end by itself.
    """
    executable = program(order.command)
    folder = Path(tempfile.gettempdir()).resolve() / f"plan-trace-{secrets.token_hex(8)}"
    environment = _environment(order, folder)
    words, scripts = _with_scripts(order, folder)
    keeper_order = {
        "command": [executable, *words[0 if order.command[0].endswith(NOTEBOOK) else 1 :]],
        "cwd": os.path.realpath(order.folder or os.getcwd()),
        "folder": str(folder),
        "site": {"site/sitecustomize.py": sitecustomize("phantom", "boot"), **scripts},
        "network": order.network,
        "unsafe_writes": order.unsafe_writes,
        "time_limit_s": order.time_limit_s,
        "keep_free_bytes": isolation.KEEP_FREE_BYTES,
        "variable": VARIABLE,
        "guard": {"environment": {name: environment[name] for name in GUARDED}, "root": str(ROOT)},
    }
    try:
        output = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        output = subprocess.DEVNULL
    read_end, tell = os.pipe()
    keeper = subprocess.Popen(
        python_argv("-I", "-S", "-c", _KEEPER.format(root=str(ROOT)), str(tell)),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        pass_fds=(tell,),
        start_new_session=True,
    )
    os.close(tell)
    life_line: Any = keeper.stdin
    try:
        with ended_by_scheduler(), open(read_end, "rb") as answer:
            with contextlib.suppress(BrokenPipeError):
                life_line.write(f"{json.dumps(keeper_order)}\n".encode())
                life_line.flush()
            outcome = json.loads(answer.read() or '{"stopped": "keeper"}')
            if "code" not in outcome:
                raise _problem(outcome, order, executable, folder)
            yield folder, outcome
    finally:
        with contextlib.suppress(OSError):
            life_line.close()
        keeper.wait()
        if folder.exists():  # its keeper was killed
            isolation.remove(folder)


def _problem(outcome: Mapping[str, Any], order: TraceOrder, executable: str, folder: Path) -> EnvironmentProblem:
    if "no_program" in outcome:
        message = f"{executable} cannot be started: {outcome['no_program']}"
        return EnvironmentProblem(message, hint="check the program's permissions")
    if "unavailable" in outcome:
        return EnvironmentProblem(
            f"nothing here can keep the program from your files ({outcome['unavailable']}): not run",
            hint="docs/trace.md says what is needed; --unsafe-writes runs it as you would, writing and deleting",
        )
    if outcome["stopped"] == "disk":
        return EnvironmentProblem(
            f"the program was stopped: it left less than {isolation.KEEP_FREE_BYTES >> 30} GiB free in {folder.parent}",
            hint="set TMPDIR to a folder with more room",
        )
    if outcome["stopped"] == "keeper":
        return EnvironmentProblem("the process that keeps the program was killed", hint="was the memory exhausted?")
    return EnvironmentProblem(
        f"the program ran longer than {order.time_limit_s:.0f} s without {order.options.num_steps} optimizer steps",
        hint="give it less data, or fewer accumulation steps; --time-limit allows more",
    )


def _environment(order: TraceOrder, folder: Path) -> dict[str, str]:
    """The command's environment: ours is the first `sitecustomize`, no GPU is visible."""
    settings = {
        "card": asdict(order.card),
        "options": asdict(order.options),
        "network": order.network,
        "results": str(folder / "results"),
    }
    return {
        **os.environ,
        **(order.environment or {}),
        **({} if order.network else OFFLINE),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH", "")))),
        "CUDA_VISIBLE_DEVICES": "",
        VARIABLE: json.dumps(settings),
    }


def results_in(folder: Path, tree: str = "") -> tuple[TraceResult, ...]:
    """What the traced processes left, the one that trained most first; `tree` stands before the names of copies.

    Raises:
        ConfigError: something that is no trace's result.
    """
    results = (TraceResult.read(path, without=tree) for path in folder.glob("*.json"))
    return tuple(sorted(results, key=lambda result: (-result.num_steps, -result.peak_allocated_bytes)))
