"""What was learned about a GPU, kept for the next plan: log(measured/predicted) of every probe, for other models too.

Several GPUs are a place of their own, named by `place_of` (how many, and how they are linked): one GPU's search never
sees what was learned on them. Theirs sees the single GPU's and other numbers' observations, as those of another model.

One JSON file holds the observations, not fitted numbers: setup, the shares of the formula's parts, the two log
errors. The next search hands them to the same Gaussian process as its own probes, as observations of another model:
they share `kernel.SHARED_MODELS` of the covariance, so they move the prediction where setups have parts in common,
shrunk by how few they are, and probes of the model at hand overrule them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import exp, inf, isfinite, log
from pathlib import Path

from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_text
from planner.core.locks import lock, open_lock
from planner.core.outputs import write_whole
from planner.core.records import dataclass
from planner.hardware.cluster import Cluster
from planner.setup import TrainSetup
from planner.setup.codec import decode
from planner.setup.interchange import to_jsonable
from planner.setup.outcome import Candidate, Measurement, Prediction
from search.dimensions import key_of
from search.problem import Problem, TransferObservation
from search.sampler import Posterior

SCHEMA_VERSION = 2
MAX_BYTES = 64 * 1024 * 1024
MAX_PER_GPU = 200
"""The latest this many observations of one GPU are kept and used."""
_PLACE = ", "


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One probe against the formula of its time.

    Attributes:
        gpu: where it was measured: the GPU's key, or `place_of` several.
        formula_version: version of the planner that predicted; errors of another version's formula are not used.
        measured_at: UTC date, for people; program: the launch target whose own steps these were, "" of a probe's.
    """

    gpu: str
    model: str
    setup: TrainSetup
    formula: Prediction
    measured_tokens_per_s: float | None
    measured_peak_device_bytes: int
    formula_version: str
    measured_at: str = ""
    program: str = ""

    def __post_init__(self) -> None:
        measured = (self.measured_peak_device_bytes, self.measured_tokens_per_s)
        predicted = (self.formula.peak_device_bytes, self.formula.tokens_per_s, self.formula.step_time_s)
        if not all(value is None or 0 < value < inf for value in (*measured, *predicted)):
            raise ValueError("speeds, times and peaks must be above 0")

    @property
    def speed_error(self) -> float | None:
        if not self.measured_tokens_per_s or not self.formula.tokens_per_s:
            return None
        return log(self.measured_tokens_per_s / self.formula.tokens_per_s)

    @property
    def memory_error(self) -> float:
        return log(self.measured_peak_device_bytes / self.formula.peak_device_bytes)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors on one prediction, from what was learned; 1 where nothing was."""

    speed_factor: float
    memory_factor: float


def place_of(gpu: str, cluster: Cluster | None) -> str:
    """The name under which observations are kept: the GPU's key alone, or with number, nodes and links of several."""
    if cluster is None:
        return gpu
    words = [gpu, f"{cluster.num_gpus} GPUs", cluster.within.key]
    if cluster.between is not None:
        words += [f"{cluster.num_nodes} nodes", cluster.between.key]
    return _PLACE.join(words)


def observations_of(
    candidates: Sequence[Candidate], *, gpu: str, model: str, formula_version: str, measured_at: str = ""
) -> tuple[Observation, ...]:
    return tuple(
        Observation(
            gpu=gpu,
            model=model,
            setup=candidate.setup,
            formula=candidate.formula,
            measured_tokens_per_s=candidate.probe.tokens_per_s,
            measured_peak_device_bytes=candidate.probe.peak_device_bytes,
            formula_version=formula_version,
            measured_at=measured_at,
        )
        for candidate in candidates
        if isinstance(candidate.probe, Measurement)
    )


class CorrectionStore:
    """The file of observations; written whole beside and renamed, one writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, gpu: str, *, formula_version: str | None = None) -> tuple[Observation, ...]:
        """Observations of one place (`place_of`), oldest first; for several GPUs also those of the single one and of
        other numbers of them, which come first.

        Raises:
            ConfigError: the file cannot be read or makes no sense.
        """
        single, _, several = gpu.partition(_PLACE)
        observations = [
            observation for observation in self._read() if formula_version in (None, observation.formula_version)
        ]
        others = [
            observation
            for observation in observations
            if several and observation.gpu != gpu and observation.gpu.partition(_PLACE)[0] == single
        ]
        return (*others[-MAX_PER_GPU:], *(observation for observation in observations if observation.gpu == gpu))

    def add(self, observations: Sequence[Observation]) -> None:
        """Appends; a setup measured again (same GPU, model, formula) replaces its older observation."""
        if not observations:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open_lock(self._path.with_name(self._path.name + ".lock")) as file:
            lock(file.fileno())
            merged = {_identity(item): item for item in self._read()}
            for item in observations:
                merged.pop(_identity(item), None)
                merged[_identity(item)] = item
            kept: list[Observation] = []
            counts: dict[str, int] = {}
            for item in reversed(merged.values()):
                counts[item.gpu] = counts.get(item.gpu, 0) + 1
                if counts[item.gpu] <= MAX_PER_GPU:
                    kept.append(item)
            data = {"schema": SCHEMA_VERSION, "observations": to_jsonable(kept[::-1])}
            write_whole(self._path, json.dumps(data, indent=1).encode(), sync=True)

    def _read(self) -> list[Observation]:
        if not self._path.exists():
            return []
        hint = "move the file away: it is made anew from the next probes"
        data = parse_object(read_text(self._path, max_bytes=MAX_BYTES, hint=hint), str(self._path), hint=hint)
        try:
            if data["schema"] != SCHEMA_VERSION:
                raise ValueError(f"schema {data['schema']!r}, expected {SCHEMA_VERSION}")
            return list(decode(tuple[Observation, ...], data["observations"], "observations"))
        except (ValueError, KeyError, ConfigError) as error:
            raise ConfigError(f"cannot read the learned corrections in {self._path}: {error}", hint=hint) from error


def as_transfer_observations(
    observations: Sequence[Observation], model: str, gpu: str | None = None
) -> tuple[TransferObservation, ...]:
    """The observations as a search of `model` on `gpu` (a place) uses them: its own in group 0, every other model and
    place in a group of its own. `gpu` None: all are of one place."""
    groups: dict[tuple[str | None, str], int] = {(gpu, model): 0}
    return tuple(
        TransferObservation(
            setup=item.setup,
            formula=item.formula,
            group=groups.setdefault((gpu and item.gpu, item.model), len(groups)),
            speed_error=item.speed_error,
            memory_error=item.memory_error,
        )
        for item in observations
    )


def corrections(
    candidates: Sequence[Candidate], observations: Sequence[Observation], model: str, gpu: str | None = None
) -> tuple[Correction, ...]:
    """What the observations say about each candidate's prediction, before any probe of its own."""
    posterior = Posterior(Problem(candidates=tuple(candidates)), as_transfer_observations(observations, model, gpu))
    means = zip(posterior.speed.mean, posterior.memory.mean, strict=True)
    return tuple(
        Correction(speed_factor=exp(float(speed)), memory_factor=exp(float(memory)))
        for speed, memory in islice(means, posterior.num)
    )


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


def _identity(item: Observation) -> tuple[str, str, str, str]:
    return item.gpu, item.model, key_of(item.setup), item.formula_version
