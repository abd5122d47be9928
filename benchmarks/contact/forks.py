"""Readings in forks of one process that has imported what they import: that takes fifteen seconds once, not ten times.

The process itself never touches a GPU, so every fork begins with none of its own, as a process of its own would.
"""

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probes.gpu.worker import die_with_parent

LIBRARIES = ("torch", "transformers")
Lines = Iterable[Mapping[str, Any]]


def warm_up() -> None:
    """Imports what is here of the libraries that readings use, but bitsandbytes and peft, which imports it: it
    asks the GPU for its capability when it is imported, and then no fork can use CUDA any more (H200 and H100,
    November 2026).

    Raises:
        RuntimeError: an import has initialised CUDA all the same.
    """
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a reading that needs it says so itself
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        if getattr(sys.modules.get("torch"), "cuda", None) and sys.modules["torch"].cuda.is_initialized():
            raise RuntimeError(f"importing {name} initialised CUDA: every fork would fail")


def begin(name: str, lines: Callable[[], Lines]) -> int:
    """Starts a fork that prints the lines of one reading, each at once; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        die_with_parent(parent)
        for line in lines():
            write({"reading": name, **line})
        status = 0
    except BaseException:  # the log has it, the status says it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # as a probe's child: tearing a full device down may hang
    raise AssertionError("unreachable")


def end(child: int, limit_s: float) -> int:
    """The fork's status, once it has ended; it is killed at its limit, 124 then."""
    watched = os.pidfd_open(child)
    try:
        late = not select.select([watched], [], [], max(0.0, limit_s))[0]
        if late:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(watched)
    return 124 if late else status


def run_each(readings: Mapping[str, tuple[Callable[[], Lines], float]]) -> int:
    """Every reading (its lines, and its limit in seconds) in a fork, one after another, a line for how each ended; 0
    where all ended well. What ends late is killed, with what it started."""
    statuses = []
    for name, (lines, limit_s) in readings.items():
        began = time.monotonic()
        statuses.append(end(begin(name, lines), limit_s))
        write({"reading": name, "ended": statuses[-1], "seconds": round(time.monotonic() - began, 1)})
    return int(any(statuses))


def write(line: Mapping[str, Any]) -> None:
    """One JSON line in one write: forks that run beside each other share the file."""
    os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())
