"""Python processes that start with the training libraries loaded.

Importing transformers' trainer, TRL and Accelerate takes 10 to 14 CPU seconds in every process that trains. Here one
server imports them, and each `python`, `accelerate`, `torchrun` or `trl` that a test starts is a fork of it: with its
own arguments, directory, environment, files, process group and end, as if it had been started. The programs are the
real ones; what is not tested this way is that they start, so one test of every kind of launch starts them.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("python", "python3")
PROGRAMS = (*PYTHONS, "accelerate", "torchrun", "trl")
LIBRARIES = (
    "torch", "torch.distributed.run", "transformers", "transformers.trainer", "peft", "datasets", "trl", "trl.cli",
    "trl.scripts.sft", "accelerate.commands.launch",
)  # fmt: skip


@contextmanager
def programs(libraries: Sequence[str] = LIBRARIES) -> Iterator[Path]:
    """A directory for PATH in which Python and the launchers start as forks of one server that has imported these."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        path = Path(folder) / "socket"
        for name in PROGRAMS:
            program = Path(folder) / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {HERE}/client.py {path} {name} "$@"\n')
            program.chmod(0o755)
        command = [sys.executable, "-P", str(HERE / "server.py"), str(path), *libraries]
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            ) as server,
        ):
            assert server.stdout
            assert server.stdout.readline() == "ready\n", log.read_text()
            yield Path(folder)
