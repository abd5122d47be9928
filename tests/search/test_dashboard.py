"""`optuna-dashboard` opens on the study directly."""

import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from search_cases import empty_study, problem, scenario

from benchmarks.synthetic_gpu import SyntheticGpu
from search.run import search
from search.stopping import Budget
from search.storage import STUDY_NAME


def get(app: Any, path: str) -> Any:
    """The JSON that a WSGI application answers to a GET."""
    environment: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    setup_testing_defaults(environment)
    status: list[str] = []
    body = b"".join(app(environment, lambda code, headers, error=None: status.append(code)))
    assert status == ["200 OK"]
    return json.loads(body)


def test_dashboard_opens_on_the_study(tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard", reason="the dashboard is not installed (extra `search`)")
    from optuna.storages import RDBStorage

    search(problem(), SyntheticGpu.of(scenario(), 1), storage=empty_study(tmp_path), budget=Budget(max_probes=4))
    app = dashboard.wsgi(RDBStorage(f"sqlite:///{tmp_path}/{STUDY_NAME}"))
    (summary,) = get(app, "/api/studies")["study_summaries"]
    assert summary["study_name"] == "plan"
    study = get(app, f"/api/studies/{summary['study_id']}")
    states = [trial["state"] for trial in study["trials"]]
    assert states.count("Complete") + states.count("Pruned") == len(states)
    assert states.count("Complete") >= 3
