"""What changes if rank, sequence length or micro-batch moves a step, everything else as planned."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from planner.errors import SetupError
from planner.outcome import Candidate
from planner.setup import TrainSetup
from reports.extras import SensitivityPoint

NUM_STEPS = 3
"""Doublings shown on either side of the plan's value."""


def neighbours(setup: TrainSetup) -> Iterator[tuple[str, int, TrainSetup]]:
    """(field, value, setup) around the chosen setup by doubling; the effective batch stays constant.

    A micro-batch that does not divide the effective batch is left out, as the planner leaves it out.
    """
    for parameter in ("lora_rank", "seq_len_tokens", "micro_batch_seqs"):
        value = getattr(setup, parameter)
        for exponent in range(-NUM_STEPS, NUM_STEPS + 1):
            moved = value * 2**exponent if exponent >= 0 else value // 2**-exponent
            if moved < 1 or (exponent < 0 and value % 2**-exponent):
                continue
            changes = {parameter: moved}
            if parameter == "micro_batch_seqs":
                sequences = setup.micro_batch_seqs * setup.accumulation_steps
                if sequences % moved:
                    continue
                changes["accumulation_steps"] = sequences // moved
            try:
                yield parameter, moved, setup.with_(**changes)
            except SetupError:
                continue


def sensitivity(chosen: Candidate, predict: Callable[[TrainSetup], Candidate]) -> tuple[SensitivityPoint, ...]:
    """The chosen setup's neighbours as `predict` (a rung given by the caller) sees them."""
    points = []
    for parameter, value, setup in neighbours(chosen.setup):
        own = setup == chosen.setup
        candidate = predict(setup)
        points.append(
            SensitivityPoint(
                parameter=parameter,
                value=value,
                fits=candidate.fits,
                tight=candidate.verdict == "tight",
                peak_device_bytes=candidate.memory_evidence.peak_device_bytes,
                tokens_per_s=candidate.tokens_per_s,
                rung=candidate.memory_evidence.rung.value,
                chosen=own,
            )
        )
    assert all(a.parameter != b.parameter or a.value < b.value for a, b in pairwise(points))
    return tuple(points)
