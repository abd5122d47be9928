"""Python processes that start with the training libraries loaded.

Importing transformers' trainer, TRL and Accelerate takes 10 to 14 CPU seconds in every process that trains, Optuna and
SQLAlchemy one in every search. Here one server imports them when it is first asked, and each `python`, `accelerate`,
`torchrun` or `trl` that a test starts is a fork of it: with its own arguments, directory, environment, files, process
group and end, as if it had been started. The programs are the real ones; what is not tested this way is that they
start, so one test of every kind of launch starts them.
"""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

HERE = Path(__file__).parent
PYTHON = sys.executable
"""The real one: a test may have put a warm one in its place."""
PYTHONS = ("python", "python3")
PROGRAMS = (*PYTHONS, "accelerate", "torchrun", "trl")
LIBRARIES = (
    "torch", "torch.distributed.run", "torch.distributed.fsdp", "transformers", "transformers.trainer", "bitsandbytes",
    "peft", "datasets", "trl", "trl.cli", "trl.scripts.sft",
    "accelerate.commands.launch", "search.run", "optuna.storages._rdb.models", "alembic.command", "psycopg",
)  # fmt: skip
"""Not among them: TRL's trainers of preferences and rewards. Where one was imported before the phantom GPU, a trace of
SFT with the chunked loss came to 2.94 GB, 1.21 of two layers without."""


@contextmanager
def programs(folder: Path) -> Iterator[Path]:
    """`folder`, for PATH: Python and the launchers in it are forks of one server that has imported these.

    The server starts at the first use of a program, and ends with this process.
    """
    folder.mkdir()
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {PYTHON} -IS {HERE}/client.py {folder}/socket {name} "$@"\n')
        program.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    end, open_until_the_end = os.pipe()
    waiting = Thread(target=_serve_when_asked, args=(listener, end, folder))
    waiting.start()
    try:
        yield folder
    finally:
        os.close(open_until_the_end)
        waiting.join()
        os.close(end)


def _serve_when_asked(listener: socket.socket, end: int, folder: Path) -> None:
    with listener:
        if end in select.select([listener, end], [], [])[0]:
            return
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        number = listener.fileno()
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [PYTHON, "-P", str(HERE / "server.py"), str(number), str(folder), *LIBRARIES],
                env=environment, pass_fds=[number], stdin=end, stdout=log, stderr=log,
            )  # fmt: skip
    server.wait()  # this end of the socket is closed: nobody waits for a server that died
