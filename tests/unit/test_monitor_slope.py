"""The entropy-acceptance slope: right on lines, honest about autocorrelated steps, undetermined where it can't tell."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from bebop.monitor import fit_slope
from bebop.monitor.slope import FIXED_B, bandwidth_of


def autocorrelated(n: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(n + 50)
    series = np.zeros(n + 50)
    for t in range(1, n + 50):
        series[t] = rho * series[t - 1] + noise[t]
    return series[50:]


@pytest.mark.parametrize("array", [list, tuple, np.array, torch.tensor])
def test_slope_of_a_line_is_exact(array):
    slope = fit_slope(array([0.2, 0.4, 0.6, 0.8]), array([0.9, 0.8, 0.7, 0.6]))
    assert slope.status == "ok" and slope.n == 4
    assert slope.slope == pytest.approx(-0.5) and slope.intercept == pytest.approx(1.0)
    assert slope.low == pytest.approx(-0.5) and slope.high == pytest.approx(-0.5)
    assert slope.relative == pytest.approx(-0.5 / 0.75)
    assert slope.fit.line(0.5) == pytest.approx((0.75, 0.75, 0.75))


@pytest.mark.parametrize(
    ("entropy", "acceptance", "reason"),
    [
        ([0.3] * 6, [2.0, 2.1, 2.0, 2.2, 2.1, 2.0], "entropy is constant"),
        ([0.1 + 0.2] * 3 + [0.3] * 3, [2.0, 2.1, 2.0, 2.2, 2.1, 2.0], "entropy is constant"),
        ([0.2, 0.3, 0.4], [2.0, 2.1, 2.2], "3 points, a slope needs at least 4"),
        ([], [], "0 points"),
        ([0.2, 0.3, math.nan, 0.5], [2.0] * 4, "entropy is not finite at point 2"),
        ([0.2, 0.3, 0.4, 0.5], [2.0, None, 2.0, math.inf], r"acceptance is not finite at point 1 \(2 of 4\)"),
    ],
)
def test_no_slope_is_undetermined_with_its_reason_and_has_no_numbers(entropy, acceptance, reason):
    slope = fit_slope(entropy, acceptance)
    assert slope.status == "undetermined"
    assert re.search(reason, slope.reason)
    assert (slope.slope, slope.low, slope.high, slope.relative) == (None,) * 4


def test_vectors_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(4,\)"):
        fit_slope([1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("n", [8, 40, 200])
def test_fit_and_covariance_equal_statsmodels_newey_west(n):
    rng = np.random.default_rng(n)
    entropy = 0.4 + 0.05 * autocorrelated(n, 0.5, rng)
    acceptance = 3 - entropy + 0.02 * autocorrelated(n, 0.5, rng)
    ours = fit_slope(entropy, acceptance)
    options = {"maxlags": bandwidth_of(n) - 1, "use_correction": True}
    theirs = sm.OLS(acceptance, sm.add_constant(entropy)).fit(cov_type="HAC", cov_kwds=options)
    assert (ours.intercept, ours.slope) == pytest.approx(tuple(theirs.params))
    np.testing.assert_allclose(ours.fit.covariance, theirs.cov_params(), rtol=1e-9)
    assert ours.high - ours.slope == pytest.approx(ours.fit.quantile * theirs.bse[1])


def test_interval_covers_autocorrelated_steps_where_ordinary_least_squares_does_not():
    """AR(1) noise, rho .7, on entropy and on acceptance, 100 steps: OLS covers about 75 % instead of 95 %."""
    rng = np.random.default_rng(0)
    n, repeats, covered, covered_ols = 100, 500, 0, 0
    for _ in range(repeats):
        entropy, noise = autocorrelated(n, 0.7, rng), autocorrelated(n, 0.7, rng)
        slope = fit_slope(entropy, noise - entropy)
        covered += slope.low <= -1 <= slope.high
        error = math.sqrt(slope.fit.residual_variance / ((entropy - entropy.mean()) ** 2).sum())
        covered_ols += abs(slope.slope + 1) <= 1.984 * error
    assert covered / repeats >= 0.88
    assert covered_ols / repeats < 0.82


def test_interval_of_independent_steps_covers_as_it_says():
    rng = np.random.default_rng(1)
    fits = (fit_slope(h := rng.standard_normal(40), -h + rng.standard_normal(40)) for _ in range(500))
    assert sum(s.low <= -1 <= s.high for s in fits) / 500 == pytest.approx(0.95, abs=0.03)


def test_fixed_b_quantile_is_that_of_the_limiting_statistic():
    """Kiefer and Vogelsang's cubic against its own definition: W(1) / sqrt(Q), Q the Bartlett kernel of a bridge."""
    rng = np.random.default_rng(2)
    n, repeats, b = 200, 4000, 0.2
    bandwidth = int(b * n)
    noise = rng.standard_normal((repeats, n))
    bridge = noise - noise.mean(1, keepdims=True)
    variance = (bridge**2).sum(1)
    for lag in range(1, bandwidth):
        variance += 2 * (1 - lag / bandwidth) * (bridge[:, lag:] * bridge[:, :-lag]).sum(1)
    statistic = np.abs(noise.sum(1)) / np.sqrt(variance)
    assert np.quantile(statistic, 0.95) == pytest.approx(np.polynomial.polynomial.polyval(b, FIXED_B), rel=0.05)
