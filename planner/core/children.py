"""The one way to start another Python (nothing of the current folder is imported, whatever files lie there), and to be
ended without leaving one behind.

`python -m` and `python -c` put the working directory first on the import path: people `cd` into model folders that they
downloaded, and a `torch.py` there would run. `-P` keeps it out of the process itself, PYTHONSAFEPATH out of all
that it starts in turn (torchrun's ranks, the inductor's compile workers, submitit's jobs).
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
ROOT = Path(__file__).resolve().parents[__name__.count(".")]
"""The directory from which this package is imported."""


def python_argv(*words: str) -> tuple[str, ...]:
    """The command of another Python: `python_argv("-m", "probes.gpu.worker")`."""
    return (sys.executable, "-P", *words)


def child_environment() -> dict[str, str]:
    """This process's environment for a child Python: this package importable, the working directory not.

    What the user put into PYTHONPATH stays; its empty parts, which `PYTHONPATH=$PYTHONPATH:/x` leaves and which mean
    the working directory, do not.
    """
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, **SAFE_PATH, "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited])}


@contextmanager
def ended_by_scheduler() -> Iterator[None]:
    """Within it SIGTERM (a cancelled or preempted job, its time limit) ends work in the main thread as Ctrl-C does:
    children that have sessions of their own are ended, what is leased is given back.

    Raises:
        SystemExit: 143, as a shell says of a process that SIGTERM ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one does not disturb the giving back
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
