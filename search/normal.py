"""The standard normal distribution over arrays, with numpy and the C library's erfc only."""

from math import erfc, pi, sqrt

import numpy as np

from search.arrays import Floats


def cdf(z: Floats) -> Floats:
    """Probability that a standard normal is below z."""
    scaled = -np.asarray(z, dtype=np.float64) / sqrt(2.0)
    return 0.5 * np.fromiter(map(erfc, scaled.ravel()), dtype=np.float64, count=scaled.size).reshape(scaled.shape)


def pdf(z: Floats) -> Floats:
    """Density of the standard normal."""
    result: Floats = np.exp(-0.5 * np.square(z)) / sqrt(2.0 * pi)
    return result
