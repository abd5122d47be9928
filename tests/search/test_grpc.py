"""Workers on Optuna's gRPC proxy, one killed: none lost, none run twice. The proxy stands before an SQLite file."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from search_worker import GRACE_S
from workers import PATIENCE_S, Workers, all_workers

import search.storage
from planner.core.errors import EnvironmentProblem
from search.heartbeat import AttributeHeartbeat
from search.storage import close_storage, open_storage
from search.trials import ALIVE_ATTR
from tests.ports import own_port

pytestmark = pytest.mark.processes

__all__ = ["all_workers"]  # a fixture

pytest.importorskip("grpc", reason="grpcio is not installed (extra `search`)")

# One request at a time: SQLite behind several threads would hand one waiting trial to two workers.
SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import optuna
storage = optuna.storages.RDBStorage(sys.argv[1])
optuna.storages.run_grpc_proxy_server(
    storage, host="127.0.0.1", port=int(sys.argv[2]), thread_pool=ThreadPoolExecutor(max_workers=1)
)
"""


@pytest.fixture
def proxy_url(tmp_path: Path, warm_programs: Path) -> Iterator[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (tmp_path / "server.log").open("wb") as log, own_port(option=socket.SO_REUSEPORT) as port:
        arguments = [str(warm_programs / "python"), "-c", SERVER, f"sqlite:///{tmp_path}/study.db", str(port)]
        server = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)
        try:
            proxy = optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=port)
            proxy.wait_server_ready(timeout=PATIENCE_S)
            proxy.close()
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            yield f"grpc://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


@pytest.mark.slow
def test_workers_on_the_grpc_proxy_lose_nothing_and_repeat_nothing(
    proxy_url: str, tmp_path: Path, all_workers: list[Workers]
) -> None:
    """Three workers, one killed in its probe and its last beat put back by two hours."""
    workers = Workers(tmp_path, proxy_url)
    all_workers.append(workers)
    lost_key = workers.share_and_lose_one(3)
    storage, heartbeat = open_storage(proxy_url)
    assert isinstance(heartbeat, AttributeHeartbeat)
    try:
        study = optuna.load_study(study_name="plan", storage=storage)
        (lost,) = [t for t in study.trials if t.state is TrialState.RUNNING and t.user_attrs["key"] == lost_key]
        assert time.time() - lost.user_attrs[ALIVE_ATTR] < PATIENCE_S
        storage.set_trial_user_attr(lost._trial_id, ALIVE_ATTR, lost.user_attrs[ALIVE_ATTR] - 2 * GRACE_S)
        workers.check_shared(lost_key)
        trials = study.trials
    finally:
        close_storage(storage)
    workers.check_trials(trials, lost_key)


@pytest.mark.slow
def test_a_proxy_that_does_not_answer_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.storage, "PROXY_WAIT_S", 0.5)
    with own_port(option=socket.SO_REUSEPORT) as port, pytest.raises(EnvironmentProblem, match="gRPC proxy"):
        open_storage(f"grpc://127.0.0.1:{port}")
