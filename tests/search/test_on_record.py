"""What the search does on synthetic machines, as on record: no posterior, no order and no stop changes unnoticed.

Whether it is good at it other tests say; this one says that it changed. `UPDATE_DOCS=1 pytest
tests/search/test_on_record.py` writes the record anew: look at the difference before committing.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_cases import observations_of, problem, scenario

from benchmarks.synthetic_gpu import SyntheticGpu
from planner.setup.interchange import setup_to_dict
from search.corrections import as_transfer_observations
from search.problem import Observation
from search.run import SearchResult, search
from search.sampler import Posterior
from search.stopping import Budget
from search.study import TrialRecord

RECORD = Path(__file__).with_name("on_record.json")
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "8b-80g": (1, {}),
    "8b-24g": (2, {"objective": "memory"}),
    "1b-24g": (3, {"objective": "cost", "min_rank": 16}),
    "32b-80g": (4, {}),
}
ROUNDING = 1e-4
"""Of posteriors: another linear algebra may differ in late digits."""


def told(name: str, transfer: Sequence[Observation] = ()) -> tuple[dict[str, Any], SearchResult]:
    """One search in short: every probe with what was believed after it, and how it ended."""
    seed, wishes = RUNS[name]
    steps: list[list[Any]] = []

    def note(record: TrialRecord, posterior: Posterior) -> None:
        mean, layout = posterior.score_moments()
        moments = (mean, layout, posterior.probability_fits(), posterior.probability_runs(), posterior.open)
        micro, checkpointing = record.setup.micro_batch_seqs, record.setup.checkpointing
        setup = f"{record.setup.method} {record.setup.optimizer} {record.setup.attention} {micro} {checkpointing}"
        steps.append([record.origin, setup, *(float(np.mean(values)) for values in moments)])

    gpu = SyntheticGpu.of(scenario(name), seed)
    result = search(problem(name, **wishes), gpu, budget=Budget(max_probes=8), transfer=transfer, on_trial=note)
    ended = {
        "steps": steps,
        "reason": result.reason,
        "best": None if result.best is None else setup_to_dict(result.best.setup),
        "pareto": [candidate.tokens_per_s for candidate in result.pareto],
        "excluded": [trial.excluded for trial in result.trials if trial.excluded][:3],
    }
    return ended, result


def found() -> dict[str, Any]:
    """All searches, and one that knows what another learned on the same GPU."""
    searches = {name: told(name)[0] for name in RUNS}
    learned = observations_of(told("8b-80g")[1].candidates, model="8b")
    searches["32b-80g after 8b-80g"] = told("32b-80g", as_transfer_observations(learned, "32b"))[0]
    return searches


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path."""
    if isinstance(value, dict):
        return {at: leaf for key, child in value.items() for at, leaf in flat(child, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {at: leaf for key, child in enumerate(value) for at, leaf in flat(child, f"{path}/{key}").items()}
    return {path: value}


def test_every_step_of_the_search_is_on_record() -> None:
    now = json.loads(json.dumps(found()))
    if os.environ.get("UPDATE_DOCS"):
        RECORD.write_text(json.dumps(now, indent=0) + "\n")
    was, now = flat(json.loads(RECORD.read_text())), flat(now)
    changed = [
        f"{path}: {was.get(path)} -> {value}"
        for path, value in now.items()
        if (pytest.approx(was.get(path), rel=ROUNDING, abs=1e-9) if isinstance(value, float) else was.get(path))
        != value
    ]
    changed += [f"{path}: gone" for path in was if path not in now]
    assert not changed, "\n".join(changed[:20])
