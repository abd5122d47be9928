"""Small problems that the search tests share."""

import sqlite3
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path

from benchmarks.synthetic_gpu import SCENARIOS, Scenario
from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate, Environment, Evidence, FailureKind, Fidelity, Measurement, ProbeFailure
from search.problem import Observation, Problem
from search.storage import STUDY_NAME, close_storage, open_storage

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
ENVIRONMENT = Environment(
    gpu_name="test", gpu_key=None, driver="0", cuda="0", python="3", platform="none", libraries={"torch": "2.13"}
)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
"""A configuration that a probe builds in no time."""


@cache
def all_candidates(name: str) -> tuple[Candidate, ...]:
    return BY_NAME[name].candidates()


@cache
def small_candidates(name: str = "8b-80g") -> tuple[Candidate, ...]:
    """A tenth of a scenario: one loss, no compile, no eager attention."""
    return tuple(
        c
        for c in all_candidates(name)
        if c.setup.loss == "liger" and not c.setup.compile and c.setup.attention != "eager"
    )


def problem(name: str = "8b-80g", **changes: object) -> Problem:
    return Problem(candidates=small_candidates(name), **changes)  # type: ignore[arg-type]


def scenario(name: str = "8b-80g") -> Scenario:
    return BY_NAME[name]


def measurement(setup: TrainSetup, tokens_per_s: float, peak_bytes: float) -> Measurement:
    return Measurement(
        level=Fidelity.PROBE,
        peak_allocated_bytes=int(peak_bytes),
        peak_reserved_bytes=int(peak_bytes),
        peak_device_bytes=int(peak_bytes),
        phase_peaks_bytes={"backward": int(peak_bytes)},
        step_times_s=(setup.tokens_per_step / tokens_per_s,),
        tokens_per_step=setup.tokens_per_step,
        layers_measured=(2, 4),
        environment=ENVIRONMENT,
    )


def out_of_memory() -> ProbeFailure:
    return ProbeFailure(level=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")


def exact(candidate: Candidate, *, speed_error: float = 0.0, memory_error: float = 0.0) -> Evidence:
    """What a probe measures when the formula is off by exactly these logarithms."""
    formula = candidate.formula
    assert formula.tokens_per_s is not None
    peak = formula.peak_device_bytes * exp(memory_error)
    return measurement(candidate.setup, formula.tokens_per_s * exp(speed_error), peak)


def with_budget(candidates: tuple[Candidate, ...], budget_gib: float) -> tuple[Candidate, ...]:
    return tuple(replace(candidate, budget_bytes=int(budget_gib * GIB)) for candidate in candidates)


@cache
def _tables() -> bytes:
    """An empty study's file: making its tables takes longer than a test."""
    with tempfile.TemporaryDirectory() as folder:
        close_storage(open_storage(folder))
        return (Path(folder) / STUDY_NAME).read_bytes()


def empty_study(folder: Path) -> Path:
    """The folder, made where it is missing, with an empty study in it."""
    folder.mkdir(exist_ok=True)
    (folder / STUDY_NAME).write_bytes(_tables())
    return folder


def make_old(folder: Path) -> int:
    """Every running trial's heartbeat ends two hours ago, as a dead worker's does; how many there are. The grace is one
    hour, and Optuna compares whole seconds: what is just an hour old is stale in the next second alone."""
    with sqlite3.connect(folder / STUDY_NAME) as database:
        return database.execute("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-2 hour')").rowcount


def observations_of(candidates: Iterable[Candidate], *, model: str, gpu: str = "test") -> tuple[Observation, ...]:
    """What was measured, each beside its formula."""
    return tuple(
        Observation(
            gpu=gpu,
            model=model,
            setup=candidate.setup,
            formula=candidate.formula,
            measured_tokens_per_s=candidate.probe.tokens_per_s,
            measured_peak_device_bytes=candidate.probe.peak_device_bytes,
        )
        for candidate in candidates
        if isinstance(candidate.probe, Measurement)
    )
