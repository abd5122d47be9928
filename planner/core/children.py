"""The one way to start another Python: nothing of the current folder is imported, whatever files lie there.

`python -m` and `python -c` put the working directory first on the import path: people `cd` into model folders that they
downloaded, and a `torch.py` there would run. `-P` keeps it out of the process itself, PYTHONSAFEPATH out of all
that it starts in turn (torchrun's ranks, the inductor's compile workers, submitit's jobs).
"""

import os
import sys
from pathlib import Path

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
