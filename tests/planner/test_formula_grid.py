"""The formula against the kept dry runs of random setups and of every kind of adapter: no torch, every point."""

import json
import statistics

import pytest

from benchmarks.adapter_kinds import AIM, cells, compared
from benchmarks.oracle import frozen
from planner.hardware.gpus import find_gpu
from planner.interchange import setup_from_dict
from planner.memory.model import predict_memory
from planner.models import catalogue
from planner.models.spec import ModelSpec

MEDIAN, HIGH, WORST = 0.004, 0.03, 0.11
"""The issue's aim is 2 % and 10 %; docs/accuracy/formula-vs-dry-run.md says what was found and names the worst."""


def _errors() -> dict[str, float]:
    found: dict[str, float] = {}
    models: dict[str, ModelSpec] = {}
    for row in frozen():
        name = row["model"]
        if name not in models:
            spec = catalogue.load(name)
            assert spec is not None, name
            models[name] = spec
        breakdown = predict_memory(models[name], find_gpu(row["gpu"]), setup_from_dict(row["setup"]))
        found[json.dumps(row)] = breakdown.peak_allocated_bytes / row["dry_run_allocated"] - 1.0
    return found


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return _errors()


def test_formula_stays_as_close_to_the_dry_run_as_the_docs_say(errors: dict[str, float]) -> None:
    ordered = sorted(abs(error) for error in errors.values())
    assert len(ordered) >= 300
    assert statistics.median(ordered) <= MEDIAN
    assert ordered[int(0.95 * len(ordered))] <= HIGH
    worst = max(errors, key=lambda line: abs(errors[line]))
    assert abs(errors[worst]) <= WORST, (errors[worst], worst[:600])


def test_the_kept_points_cover_every_type_of_the_catalogue() -> None:
    seen = {row["model_type"] for row in frozen()}
    assert seen == {entry.model_type for entry in catalogue.entries()}


def test_every_kind_of_adapter_lies_within_the_aim_on_six_model_types() -> None:
    found = {cell: error for cell, _, _, error in compared()}
    assert set(found) == set(cells())
    worst = max(found, key=lambda cell: abs(found[cell]))
    assert abs(found[worst]) <= AIM, (found[worst], worst)
