"""Recorded replay: an evaluator that answers from measurements somebody took, so that a search needs no GPU.

A grid is one model on one GPU with all the setups that were measured there. Recorded runs vary the micro-batch without
accumulation; the search keeps the effective batch constant, so every setup is given the accumulation that reaches the
grid's largest micro-batch. Tokens/s of a micro-batch do not depend on it but for the optimizer step, which these
measurements (adapters; full fine-tuning at 16,384 tokens and more per micro-batch) take once in each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.planning.evidence.measured import MeasuredRow
from planner.setup import TrainSetup
from planner.setup.outcome import (
    Candidate,
    Environment,
    Evidence,
    FailureKind,
    Fidelity,
    Measurement,
    Prediction,
    ProbeFailure,
)
from search.dimensions import key_of

MIN_SETUPS = 6
"""A grid of fewer setups compares nothing."""


@dataclass(frozen=True, kw_only=True)
class RecordedGrid:
    """What was measured for one model on one GPU.

    Attributes:
        rows: setup (with the grid's accumulation) -> every recorded run of it, under whichever software versions.
    """

    name: str
    model: str
    gpu: str
    rows: Mapping[TrainSetup, tuple[MeasuredRow, ...]]

    def candidates(self, budget_bytes: int, predict: Callable[[TrainSetup], Prediction]) -> tuple[Candidate, ...]:
        """The recorded setups with a prediction each."""
        return tuple(Candidate(setup=setup, budget_bytes=budget_bytes, formula=predict(setup)) for setup in self.rows)

    def evaluator(self, seed: int) -> Callable[[TrainSetup], Evidence]:
        """Answers with one of the recorded runs of each setup, which one the seed decides."""
        random = np.random.default_rng(seed)
        chosen = {key_of(setup): rows[int(random.integers(len(rows)))] for setup, rows in self.rows.items()}

        def evaluate(setup: TrainSetup) -> Evidence:
            row = chosen.get(key_of(setup))
            if row is None:
                message = f"nobody measured this setup in {self.name}"
                return ProbeFailure(rung=Fidelity.PROBE, kind=FailureKind.UNSUPPORTED, message=message)
            return evidence_of(row, setup)

        return evaluate


def evidence_of(row: MeasuredRow, setup: TrainSetup) -> Evidence:
    """A recorded run as what a probe would have returned.

    The device peak is the recorded one where there is one, else the allocated peak: the least that it was.
    """
    if row.status == "oom" or row.tokens_per_s is None:
        return ProbeFailure(rung=Fidelity.PROBE, kind=FailureKind.OUT_OF_MEMORY, message=f"recorded in {row.source}")
    allocated = row.allocated_bytes or row.reserved_bytes or row.device_bytes
    assert allocated is not None  # `recorded_grids` takes no row without a memory figure
    reserved = row.reserved_bytes or allocated
    return Measurement(
        rung=Fidelity.PROBE,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=row.device_bytes or reserved,
        phase_peaks_bytes={},
        step_times_s=(setup.tokens_per_step / row.tokens_per_s,),
        tokens_per_step=setup.tokens_per_step,
        layers_measured=(),
        environment=Environment(
            gpu_name=row.gpu or "",
            gpu_key=row.gpu,
            driver="",
            cuda="",
            python="",
            platform="",
            libraries=dict(row.versions),
        ),
        notes=(f"recorded: {row.source}",),
    )


def recorded_grids(rows: Iterable[MeasuredRow], *, group: str = "fms_acceleration") -> tuple[RecordedGrid, ...]:
    """Grids of one source: runs of one model on one GPU at one sequence length, that a setup can express."""
    found: dict[tuple[str, str, int], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        usable = row.group == group and row.setup is not None and row.model and row.gpu and not row.unmapped
        measured = row.tokens_per_s is not None and (row.allocated_bytes or row.reserved_bytes or row.device_bytes)
        # Of samples that differ in length tokens/s count padding: another workload.
        if usable and (measured or row.status == "oom") and row.setup is not None and not row.unmapped_memory:
            assert row.setup is not None
            found[str(row.model), str(row.gpu), row.setup.seq_len_tokens].append(row)
    grids = []
    for (model, gpu, seq_len), members in sorted(found.items()):
        largest = max(row.setup.micro_batch_seqs for row in members if row.setup)
        by_setup: dict[TrainSetup, list[MeasuredRow]] = defaultdict(list)
        for row in members:
            assert row.setup is not None
            if largest % row.setup.micro_batch_seqs == 0:
                steps = largest // row.setup.micro_batch_seqs
                by_setup[row.setup.replace(accumulation_steps=steps)].append(row)
        if len(by_setup) >= MIN_SETUPS and any(row.status == "ok" for row in members):
            grids.append(
                RecordedGrid(
                    name=f"{model} on {gpu}, {seq_len} tokens",
                    model=model,
                    gpu=gpu,
                    rows={setup: tuple(runs) for setup, runs in by_setup.items()},
                )
            )
    return tuple(grids)
