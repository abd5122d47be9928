"""The Gaussian process over the formula's errors, against dense linear algebra and closed forms."""

from math import erf, erfc, exp, pi, sqrt
from typing import get_args

import numpy as np
import pytest
from search_cases import small_candidates

from search.residual import SCALE_DF, SURPRISE, ErrorKernel, Residual, Target, cdf, encode, parts_of, pdf, share_matrix

TOLERANCE = 1e-8  # float64 linear algebra of a few dozen rows


def kernel(target: str = "speed", num: int = 60, groups: list[int] | None = None) -> ErrorKernel:
    candidates = small_candidates()[:num]
    shares = share_matrix([parts_of(c.setup, c.formula, target) for c in candidates])  # type: ignore[arg-type]
    return ErrorKernel(encode([c.setup for c in candidates], groups), target, shares)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["speed", "memory"])
def test_kernel_is_a_covariance(target: str) -> None:
    both = kernel(target, groups=[0] * 40 + [1] * 20)
    block = both.block(np.arange(60))
    np.testing.assert_allclose(block, block.T, atol=TOLERANCE)
    np.testing.assert_allclose(np.diag(block), both.variance, atol=TOLERANCE)
    assert np.linalg.eigvalsh(block).min() > -TOLERANCE


def test_setups_of_another_model_are_less_alike() -> None:
    same, other = kernel(groups=[0] * 60), kernel(groups=[0] * 30 + [1] * 30)
    assert (other.column(0)[30:] < same.column(0)[30:]).all()
    np.testing.assert_allclose(other.column(0)[:30], same.column(0)[:30])


def test_posterior_equals_dense_gaussian_process() -> None:
    error_kernel = kernel()
    residual = Residual(error_kernel)
    random = np.random.default_rng(3)
    rows = random.choice(60, size=12, replace=False)
    values = random.normal(0.0, 0.2, size=12)
    for row, value in zip(rows, values, strict=True):
        residual.observe(int(row), float(value), 0.02)
    block = error_kernel.block(np.arange(60))
    inverse = np.linalg.inv(block[np.ix_(rows, rows)] + 0.02**2 * np.eye(12))
    mean = block[:, rows] @ inverse @ values
    covariance = block - block[:, rows] @ inverse @ block[rows]
    scale = (SCALE_DF + values @ inverse @ values) / (SCALE_DF + 12)
    np.testing.assert_allclose(residual.mean, mean, atol=TOLERANCE)
    assert residual.scale == pytest.approx(scale)
    np.testing.assert_allclose(residual.variance, np.diag(covariance) * scale, atol=TOLERANCE)
    some = np.array([1, 5, 30])
    np.testing.assert_allclose(residual.covariance(some), covariance[np.ix_(some, some)] * scale, atol=TOLERANCE)


def test_out_of_memory_moves_the_setup_to_the_truncated_normal() -> None:
    residual = Residual(kernel("memory"))
    mean, variance = float(residual.mean[5]), float(residual.variance[5])
    threshold = 0.05
    z = (threshold - mean) / sqrt(variance)
    hazard = exp(-0.5 * z * z) / sqrt(2 * pi) / (0.5 * (1 - erf(z / sqrt(2))))
    residual.observe_censored(5, threshold)
    assert residual.mean[5] == pytest.approx(mean + sqrt(variance) * hazard)
    assert residual.variance[5] == pytest.approx(variance * (1 - hazard * (hazard - z)))
    assert residual.mean[5] > threshold


def test_out_of_memory_that_was_certain_teaches_nothing() -> None:
    residual = Residual(kernel("memory"))
    before = residual.mean.copy()
    residual.observe_censored(5, -50.0)
    np.testing.assert_allclose(residual.mean, before, atol=1e-6)


def test_pretended_measurement_keeps_means_and_lowers_doubt() -> None:
    residual = Residual(kernel())
    residual.observe(3, 0.2, 0.01)
    view = residual.copy()
    view.fantasize(30, 0.01)
    np.testing.assert_allclose(view.mean, residual.mean, atol=TOLERANCE)
    assert view.variance[30] < 0.05 * residual.variance[30]
    assert residual.variance[30] > view.variance[30]  # the copy is independent


def test_a_surprise_counts_no_more_than_its_limit() -> None:
    smooth, robust = Residual(kernel()), Residual(kernel())
    smooth.observe(3, -2.0, 0.01)
    surprise = robust.observe_robustly(3, -2.0, 0.01)
    assert surprise < -SURPRISE
    assert robust.mean[3] > smooth.mean[3]
    assert robust.scale == 1.0  # no lesson about the usual size of errors
    assert Residual(kernel()).observe_robustly(3, 0.05, 0.01) == pytest.approx(0.05 / sqrt(kernel().variance[3] + 1e-4))


def test_shares_of_parts_sum_to_the_whole() -> None:
    candidate = small_candidates()[0]
    speed, memory = (
        {name: share for name, (share, _) in parts_of(candidate.setup, candidate.formula, target).items()}
        for target in get_args(Target)
    )
    assert sum(speed[name] for name in candidate.formula.time_parts_s) == pytest.approx(1.0)
    terms = sum(memory[term.category] for term in candidate.formula.terms)
    expected = sum(term.size_bytes for term in candidate.formula.terms) / candidate.formula.peak_device_bytes
    assert terms == pytest.approx(expected)
    assert f"attention:{candidate.setup.attention}" in speed


def test_normal_distribution_matches_known_values() -> None:
    """Abramowitz and Stegun, table 26.1."""
    np.testing.assert_allclose(cdf(np.array([0.0, 1.0, -2.0])), [0.5, 0.8413447461, 0.0227501319], rtol=2e-7)
    z = np.linspace(-8, 8, 401)
    exact = [0.5 * erfc(-float(each) / sqrt(2)) for each in z]
    np.testing.assert_allclose(cdf(z), exact, rtol=2e-7)
    np.testing.assert_allclose(pdf(np.array([0.0, 1.0])), [0.3989422804, 0.2419707245], atol=1e-10)
