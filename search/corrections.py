"""What was measured on a GPU, for the next plan and search: log(measured/predicted) of every probe, for other models
too.

Several GPUs are a place of their own, named by `place_of` (how many, and how they are linked): one GPU's search never
sees what was learned on them. Theirs sees the single GPU's and other numbers' observations, as those of another model.

Observations are no fitted numbers: setup, the shares of the formula's parts, the two log errors. A search hands them to
the same Gaussian process as its own probes, as observations of another model: they share `kernel.SHARED_MODELS` of the
covariance, so they move the prediction where setups have parts in common, shrunk by how few they are, and probes of the
model at hand overrule them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import exp, isfinite
from typing import NamedTuple

from planner.hardware.cluster import Cluster
from planner.setup.outcome import Candidate
from search.problem import Observation, Problem
from search.sampler import Posterior

MAX_PER_GPU = 200
"""The latest this many observations of one GPU are used."""


class Correction(NamedTuple):
    """Factors on one prediction, from what was learned; 1 where nothing was."""

    speed_factor: float
    memory_factor: float


def place_of(gpu: str, cluster: Cluster | None) -> str:
    """The name of where something was measured: the GPU's key alone, or with number and link of several."""
    return gpu if cluster is None else f"{gpu}, {cluster.num_gpus} GPUs, {cluster.within.key}"


def as_transfer_observations(
    observations: Sequence[Observation], model: str, gpu: str | None = None
) -> tuple[Observation, ...]:
    """The observations as a search of `model` on `gpu` (a place) uses them: its own in group 0, every other model and
    place in a group of its own. `gpu` None: all are of one place."""
    groups: dict[tuple[str | None, str], int] = {(gpu, model): 0}
    return tuple(
        replace(item, group=groups.setdefault((gpu and item.gpu, item.model), len(groups))) for item in observations
    )


def corrections(
    candidates: Sequence[Candidate], observations: Sequence[Observation], model: str
) -> tuple[Correction, ...]:
    """What the observations say about each candidate's prediction, before any probe of its own."""
    posterior = Posterior(Problem(candidates=tuple(candidates)), as_transfer_observations(observations, model))
    means = zip(posterior.speed.mean, posterior.memory.mean, strict=True)
    return tuple(Correction(exp(float(speed)), exp(float(memory))) for speed, memory in islice(means, posterior.num))


def corrected(candidate: Candidate, correction: Correction) -> Candidate:
    """The candidate with its formula prediction corrected by what was learned on this GPU, and a note that says so."""
    formula = candidate.formula
    speed, memory = correction.speed_factor, correction.memory_factor
    if not (isfinite(speed) and isfinite(memory)):
        return candidate
    note = f"corrected by earlier probes of this GPU: tokens/s x {speed:.2f}, memory x {memory:.3f}"
    return replace(
        candidate,
        formula=replace(
            formula,
            peak_allocated_bytes=int(formula.peak_allocated_bytes * memory),
            peak_reserved_bytes=int(formula.peak_reserved_bytes * memory),
            peak_device_bytes=int(formula.peak_device_bytes * memory),
            step_time_s=formula.step_time_s / speed if formula.step_time_s else None,
            tokens_per_s=formula.tokens_per_s * speed if formula.tokens_per_s else None,
            notes=(*formula.notes, note),
        ),
    )
