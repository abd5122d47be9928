"""The residual model: how far probes lie from predictions, by a Gaussian process over what setups share."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, exp, pi, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planner.core.units import GIB
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction
from search.dimensions import DIMENSIONS, PAIR, PAIR_MEMORY_SD, PAIR_SPEED_SD, RECIPE, Dimension, value_of

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Target = Literal["speed", "memory"]
_COEFFICIENTS = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def cdf(z: Floats) -> Floats:
    """Probability that a standard normal is below z, with a fractional error below 1.2e-7 in both tails.

    Source: Press et al., Numerical Recipes, 2nd edition 1992, section 6.2 (Chebyshev fit of the complementary error
    function). Thirty times as fast over 20,000 numbers as the C library called one by one.
    """
    x = np.clip(-np.asarray(z, dtype=np.float64) / sqrt(2.0), -30.0, 30.0)
    magnitude = np.abs(x)
    t = 1.0 / (1.0 + 0.5 * magnitude)
    exponent: Floats = np.zeros_like(t)
    for coefficient in _COEFFICIENTS:
        exponent = exponent * t + coefficient
    tail = 0.5 * t * np.exp(exponent - magnitude**2)
    result: Floats = np.where(x >= 0.0, tail, 1.0 - tail)
    return result


def pdf(z: Floats) -> Floats:
    result: Floats = np.exp(-0.5 * np.square(z)) / sqrt(2.0 * pi)
    return result


BIAS_SD = {"speed": 0.15, "memory": 0.03}
INTERACTION_SD = {"speed": 0.010, "memory": 0.002}
SHARED = 0.65  # share of an effect's variance that is the same in every recipe
SHARED_MODELS = 0.6  # share of the covariance that carries over from another model on the same GPU


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Setups as small integers: one column per dimension that varies.

    Attributes:
        dimensions: those with more than one value among the setups.
        values: their distinct values, in order of first sight (numbers ascending).
        levels: [setups, dimensions] index into `values`.
        recipes: [setups] number of the combination of the `RECIPE` fields.
        pairs: [setups] number of the combination of the `PAIR` fields.
        groups: [setups] 0 for this task, another number for setups measured on other models.
    """

    dimensions: tuple[Dimension, ...]
    values: tuple[tuple[object, ...], ...]
    levels: NDArray[np.int16]
    recipes: NDArray[np.int32]
    pairs: NDArray[np.int32]
    groups: NDArray[np.int32]


def encode(setups: Sequence[TrainSetup], groups: Sequence[int] | None = None) -> Encoding:
    """All setups that will ever be compared (candidates first, then what was measured elsewhere), encoded together."""
    columns, used, values = [], [], []
    for dimension in DIMENSIONS:
        raw = [value_of(setup, dimension.name) for setup in setups]
        distinct = list(dict.fromkeys(raw))
        if len(distinct) < 2:
            continue
        if dimension.kind == "log2":
            distinct.sort()
        index = {value: position for position, value in enumerate(distinct)}
        columns.append(np.fromiter((index[value] for value in raw), dtype=np.int16, count=len(raw)))
        used.append(dimension)
        values.append(tuple(distinct))
    levels = np.stack(columns, axis=1) if columns else np.zeros((len(setups), 0), dtype=np.int16)
    return Encoding(
        dimensions=tuple(used),
        values=tuple(values),
        levels=levels,
        recipes=_combinations(setups, RECIPE),
        pairs=_combinations(setups, PAIR),
        groups=np.asarray([0] * len(setups) if groups is None else groups, dtype=np.int32),
    )


def _combinations(setups: Sequence[TrainSetup], names: Sequence[str]) -> NDArray[np.int32]:
    index: dict[tuple[object, ...], int] = {}
    numbers = (index.setdefault(tuple(value_of(setup, name) for name in names), len(index)) for setup in setups)
    return np.fromiter(numbers, dtype=np.int32, count=len(setups))


class ErrorKernel:
    """Covariance of the formula's error between encoded setups, for speed or for memory.

    Args:
        shares: [setups, parts] from `parts.share_matrix`.
        scale: multiplies every standard deviation; 1 for a formula with the nominal error band.
    """

    def __init__(self, encoding: Encoding, target: Target, shares: Floats, *, scale: float = 1.0) -> None:
        self._encoding = encoding
        self._shares = scale * shares
        self._bias = (scale * BIAS_SD[target]) ** 2
        self._interaction = (scale * INTERACTION_SD[target]) ** 2
        self._pair = (scale * (PAIR_SPEED_SD if target == "speed" else PAIR_MEMORY_SD)) ** 2
        self._effects: list[Floats] = []
        self._likeness: list[Floats] = []
        for dimension, values in zip(encoding.dimensions, encoding.values, strict=True):
            sd = scale * (dimension.speed_sd if target == "speed" else dimension.memory_sd)
            correlation = _correlation(dimension, values)
            self._effects.append(sd**2 * correlation)
            if dimension.kind == "category":
                self._likeness.append(np.where(np.eye(len(values)) > 0, 1.0, dimension.alike))
            else:
                self._likeness.append(correlation)
        constant = self._bias + self._interaction + self._pair + sum(float(table[0, 0]) for table in self._effects)
        self.variance: Floats = constant + np.square(self._shares).sum(axis=1)
        """Prior variance of the error of every setup."""

    def column(self, row: int) -> Floats:
        return self._between(row, slice(None))

    def block(self, rows: Rows) -> Floats:
        return self._between(rows[:, None], rows)

    def _between(self, first: Any, second: Any) -> Floats:
        code = self._encoding
        shared = self._bias + np.einsum("...k,...k->...", self._shares[first], self._shares[second])
        effects: Any = 0.0
        product: Any = self._interaction
        for position, (table, likeness) in enumerate(zip(self._effects, self._likeness, strict=True)):
            pairs = code.levels[first, position], code.levels[second, position]
            effects = effects + table[pairs]
            product = product * likeness[pairs]
        same_recipe = code.recipes[first] == code.recipes[second]
        covariance = shared + effects * np.where(same_recipe, 1.0, SHARED) + product
        covariance = covariance + np.where(code.pairs[first] == code.pairs[second], self._pair, 0.0)
        same_group = code.groups[first] == code.groups[second]
        result: Floats = covariance * np.where(same_group, 1.0, SHARED_MODELS)
        return result


def _correlation(dimension: Dimension, values: Sequence[object]) -> Floats:
    """[values, values] correlation of a dimension's effect: 1 on the diagonal.

    Numbers use a Matern 3/2 in the number of doublings between them; a zero (rank 0 of full fine-tuning) is unlike any
    other value.
    """
    if dimension.kind == "category":
        return np.eye(len(values))
    numbers = np.array([float(str(value)) for value in values])
    positive = numbers > 0
    logs = np.log2(np.where(positive, numbers, 1.0))
    distance = np.sqrt(3.0) * np.abs(logs[:, None] - logs[None, :]) / dimension.length
    correlation: Floats = (1.0 + distance) * np.exp(-distance)
    correlation[positive[:, None] != positive[None, :]] = 0.0
    return correlation


VARIANTS = {
    "attention": "attention",
    "loss": "loss",
    "optimizer": "optimizer",
    "quant": "quantization",
    "activations": "checkpointing",
    "communication": "parallel",
    "in transit": "parallel",
}
"""A part whose name contains the key has one kernel (and one error) per value of the field; activations are other
tensors altogether with each way of checkpointing, and each way of spreading sends and gathers by its own code."""

TIME_SD = 0.25
TIME_SDS = {"communication": 0.60, "bubble": 0.40, "offload": 0.60}
"""Links are nominal, and how much of them compute hides is fitted to few machines: off by factors, not by quarters."""
TIME_VARIANT_SD = 0.60  # kernels for one purpose differ by factors of 1.3 to 5 in reports
SMALL_BATCH_SD = 0.35
HALF_FULL_TOKENS = 1000  # order of magnitude of the tokens at which large matrix multiplications reach half their rate
MEMORY_SD = {"weights": 0.02, "adapters": 0.10, "gradients": 0.05, "optimizer": 0.05}
MEMORY_SD_OTHER = 0.06  # activations, loss, workspace and what else
MEMORY_VARIANT_SD = 0.10
TRANSIT = ("gathered", "bucket", "reduce")
"""Words in the names of terms that an engine keeps for sending and gathering, whatever they hold."""
CONSTANT_SD = 0.5  # of one GiB that no formula counts: driver context, libraries, other processes
Parts = dict[str, tuple[float, float]]
"""Name -> (share of the whole time or of the device peak, prior standard deviation) of the parts of one prediction."""


def parts_of(setup: TrainSetup, prediction: Prediction, target: Target) -> Parts:
    """The parts of one prediction; empty where it names none."""
    parts: Parts = {}

    def add(name: str, share: float, sd: float, variant_sd: float) -> None:
        variants = [f"{name}:{getattr(setup, field)}" for word, field in VARIANTS.items() if word in name]
        for part, its_sd in ((name, sd), *((variant, variant_sd) for variant in variants)):
            parts[part] = parts.get(part, (0.0, 0.0))[0] + share, its_sd

    if target == "speed":
        total = sum(prediction.time_parts_s.values())
        for name, part_s in prediction.time_parts_s.items():
            add(name, part_s / total, TIME_SDS.get(name, TIME_SD), TIME_VARIANT_SD)
        # How far the GPU is from full with this few tokens at once: a formula's guess of it is off by a factor, and
        # launches, which many formulas leave out, weigh in the same places.
        share = HALF_FULL_TOKENS / (HALF_FULL_TOKENS + setup.tokens_per_micro_batch)
        parts["small micro-batch"] = share, SMALL_BATCH_SD
    else:
        for term in prediction.terms:
            moving = setup.num_gpus > 1 and any(word in term.name for word in TRANSIT)
            name = "in transit" if moving else term.category
            sd = MEMORY_SD.get(name, MEMORY_SD_OTHER)
            add(name, term.size_bytes / prediction.peak_device_bytes, sd, MEMORY_VARIANT_SD)
        parts["constant"] = GIB / prediction.peak_device_bytes, CONSTANT_SD
    return parts


def share_matrix(parts: Sequence[Parts]) -> Floats:
    """[setups, parts] shares times standard deviations: the covariance by parts is this matrix times its transpose."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    index = {name: column for column, name in enumerate(names)}
    matrix = np.zeros((len(parts), len(names)))
    for row, part in enumerate(parts):
        for name, (share, sd) in part.items():
            matrix[row, index[name]] = share * sd
    return matrix


SCALE_DF = 4.0  # how many measurements the prior scale of the errors is worth
MIN_VARIANCE = 1e-10
SURPRISE = 3.0  # standard deviations beyond which something else than a smooth error is at work


class Residual:
    """Posterior of the formula's log error for all setups of one kernel.

    `mean` and `variance` are arrays over setups. The overall scale of the errors is unknown too: `scale` is the
    posterior estimate of its square (inverse-gamma conjugate), 1 before anything was measured.

    Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 (Cholesky form), here
    grown by one row per measurement; O'Hagan, 1978, for the conjugate scale.
    """

    def __init__(self, kernel: ErrorKernel) -> None:
        self._kernel = kernel
        num_setups = len(kernel.variance)
        self.mean: Floats = np.zeros(num_setups)
        self._unit_variance: Floats = kernel.variance.copy()
        self._roots = np.zeros((0, num_setups))  # rows: inverse Cholesky factor times cross covariance
        self._squares = 0.0
        self._num = 0

    @property
    def scale(self) -> float:
        """Square of the factor by which errors are larger (or smaller) than the prior expected."""
        return (SCALE_DF + self._squares) / (SCALE_DF + self._num)

    @property
    def variance(self) -> Floats:
        """Posterior variance of the error of every setup."""
        result: Floats = np.maximum(self._unit_variance * self.scale, MIN_VARIANCE)
        return result

    def observe(self, row: int, value: float, noise_sd: float) -> None:
        """Setup `row` was measured: its log error is `value`, known to `noise_sd`."""
        self._add(row, value, noise_sd**2, counted=True)

    def observe_robustly(self, row: int, value: float, noise_sd: float) -> float:
        """Like `observe`, but a surprise moves little: it counts as `SURPRISE` deviations known to as many.

        Returns how many standard deviations it was.

        A fallback kernel or a thrashing allocator says nothing about the other setups' smooth errors.
        """
        sd = sqrt(float(self.variance[row]) + noise_sd**2)
        surprise = (value - float(self.mean[row])) / sd
        if abs(surprise) > SURPRISE:
            self._observe_clipped(row, SURPRISE * sd * float(np.sign(surprise)))
        else:
            self.observe(row, value, noise_sd)
        return surprise

    def _observe_clipped(self, row: int, deviation: float) -> None:
        self._add(row, float(self.mean[row]) + deviation, deviation**2, counted=False)

    def observe_censored(self, row: int, threshold: float) -> float:
        """Setup `row` ran out of memory: its log error is above `threshold`, by how much is unknown.

        Returns how many standard deviations above the mean the threshold was; beyond `SURPRISE` it is met like any
        other surprise.

        The posterior at that setup becomes the truncated normal's mean and variance; the pseudo-measurement that
        causes exactly that is handed to the Gaussian process.

        Source: Minka, 2001, Expectation propagation: one moment-matching step.
        """
        mean, variance = float(self.mean[row]), float(self.variance[row])
        sd = sqrt(variance)
        z = (threshold - mean) / sd
        if z > SURPRISE:
            self._observe_clipped(row, SURPRISE * sd)
            return z
        hazard = _hazard(z)
        matched_mean = mean + sd * hazard
        matched_variance = max(variance * (1.0 - hazard * (hazard - z)), 1e-3 * variance)
        precision = 1.0 / matched_variance - 1.0 / variance
        if precision <= 1e-9 / variance:
            return z  # it was certain to run out of memory: nothing new
        noise = 1.0 / precision
        value = noise * (matched_mean / matched_variance - mean / variance)
        self._add(row, value, noise / self.scale, counted=False)
        return z

    def fantasize(self, row: int, noise_sd: float) -> None:
        self._add(row, float(self.mean[row]), noise_sd**2, counted=False)

    def covariance(self, rows: Rows) -> Floats:
        roots = self._roots[:, rows]
        block = self._kernel.block(rows) - np.einsum("ki,kj->ij", roots, roots)
        result: Floats = block * self.scale
        return result

    def copy(self) -> "Residual":
        duplicate = copy.copy(self)
        duplicate.mean = self.mean.copy()  # which alone is changed in place
        return duplicate

    def _add(self, row: int, value: float, noise_variance: float, *, counted: bool) -> None:
        column = self._kernel.column(row)
        weights = self._roots[:, row]
        pivot = sqrt(max(self._unit_variance[row] + noise_variance, MIN_VARIANCE))
        # einsum, not @: over so few rows a multi-threaded BLAS costs more than it gains, much more on a busy machine.
        new_row = (column - np.einsum("i,ij->j", weights, self._roots)) / pivot
        standardised = (value - float(self.mean[row])) / pivot
        self.mean += new_row * standardised
        self._unit_variance = np.maximum(self._unit_variance - new_row**2, 0.0)
        self._roots = np.vstack([self._roots, new_row])
        if counted:
            self._squares += standardised**2
            self._num += 1


def _hazard(z: float) -> float:
    """Density over survival of the standard normal at z (the mean excess is hazard - z)."""
    survival = 0.5 * erfc(z / sqrt(2.0))
    if survival < 1e-12:
        return z + 1.0 / z  # asymptotic series
    return exp(-0.5 * z * z) / sqrt(2.0 * pi) / survival
