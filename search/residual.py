"""What the formula gets wrong on this GPU, learned from measurements: a Gaussian process over the formula's log error.

The prior mean is the formula itself (error 0). Every measurement updates the posterior of all setups at once, in time
proportional to setups x measurements, with no matrix rebuilt.
"""

import copy
from math import erfc, exp, pi, sqrt

import numpy as np

from search.arrays import Floats, Rows
from search.kernel import ErrorKernel

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
        """Setup `row` was far off: by this much from what was expected, known to as much."""
        self._add(row, float(self.mean[row]) + deviation, deviation**2, counted=False)

    def observe_above(self, row: int, threshold: float) -> float:
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

    def pretend(self, row: int, noise_sd: float) -> None:
        """Setup `row` is being measured by someone: less is to be learned there, the mean stays."""
        self._add(row, float(self.mean[row]), noise_sd**2, counted=False)

    def covariance(self, rows: Rows) -> Floats:
        """Joint posterior covariance of the errors of some setups."""
        roots = self._roots[:, rows]
        block = self._kernel.block(rows) - np.einsum("ki,kj->ij", roots, roots)
        result: Floats = block * self.scale
        return result

    def copy(self) -> "Residual":
        """An independent copy, for pretended measurements."""
        twin = copy.copy(self)
        twin.mean = self.mean.copy()  # which alone is changed in place
        return twin

    def _add(self, row: int, value: float, noise_variance: float, *, counted: bool) -> None:
        """One row of the Cholesky factorisation more."""
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
