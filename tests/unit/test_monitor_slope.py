"""The entropy-acceptance slope: right on lines, honest about autocorrelated steps, undetermined where it can't tell."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from bebop.monitor import decompose, fit_slope, regression
from bebop.records import DraftCounts, StepRecord


def autocorrelated(n: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    """AR(1) of variance 1."""
    noise = rng.standard_normal(n + 50)
    series = np.zeros(n + 50)
    for t in range(1, n + 50):
        series[t] = rho * series[t - 1] + noise[t]
    return series[50:] * math.sqrt(1 - rho**2)


ENTROPIES = {
    "white": lambda n, rng: rng.standard_normal(n),
    "persistent": lambda n, rng: autocorrelated(n, 0.9, rng),
    "drifting": lambda n, rng: np.linspace(0, 3, n) + 0.2 * rng.standard_normal(n),
    "jumping": lambda n, rng: 2.0 * (np.arange(n) > n // 2) + 0.2 * rng.standard_normal(n),
}


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
def test_missing_slope_is_undetermined_with_a_reason(entropy, acceptance, reason):
    slope = fit_slope(entropy, acceptance)
    assert slope.status == "undetermined"
    assert re.search(reason, slope.reason)
    assert (slope.slope, slope.low, slope.high, slope.relative) == (None,) * 4


def test_vectors_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(4,\)"):
        fit_slope([1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("n", [8, 40, 200])
def test_fit_of_known_correlation_equals_statsmodels_gls(n, monkeypatch):
    rng = np.random.default_rng(n)
    x = np.column_stack([np.ones(n), autocorrelated(n, 0.5, rng), np.arange(n) > n // 2])
    y = x @ np.array([3.0, -1.0, 0.2]) + 0.02 * autocorrelated(n, 0.6, rng)
    monkeypatch.setattr(regression, "RHO", np.array([0.6]))
    ours = regression.regress(x, y)
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    theirs = sm.GLS(y, x, sigma=0.6**lags).fit()
    np.testing.assert_allclose(ours.coefficients, theirs.params)
    np.testing.assert_allclose(ours.covariance, theirs.cov_params(), rtol=1e-6)


@pytest.mark.parametrize("kind", ENTROPIES)
@pytest.mark.parametrize("noise", [0.8, 0.0])
@pytest.mark.parametrize("n", [24, 80])
def test_interval_of_the_slope_covers_the_truth(n, noise, kind):
    """1,000 runs with AR noise, each with its own entropies: 95 % within the error of such a count, and a bit more."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        entropy = ENTROPIES[kind](n, rng)
        slope = fit_slope(entropy, 3 - entropy / 2 + 0.05 * autocorrelated(n, noise, rng))
        covered += slope.low <= -0.5 <= slope.high
    assert 0.92 <= covered / 1000 <= 0.985


@pytest.mark.parametrize("mismatch", [0.0, -0.1])
@pytest.mark.parametrize("kind", ENTROPIES)
def test_interval_of_the_mismatch_covers_the_truth(kind, mismatch):
    """300 runs of 60 steps, AR(0.8) noise, heads that are left behind after the early phase."""
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        entropy = 0.5 + 0.1 * ENTROPIES[kind](60, rng)
        length = 3 - entropy / 2 + 0.03 * autocorrelated(60, 0.8, rng) + mismatch * (np.arange(60) >= 30)
        found = decompose([step(i, h, y) for i, (h, y) in enumerate(zip(entropy, length, strict=True))])
        covered += found.recent.low <= mismatch <= found.recent.high
    assert 0.91 <= covered / 300 <= 0.99


def step(number: int, entropy: float, length: float) -> StepRecord:
    counts = DraftCounts(10**9, 3 * 10**9, (round((length - 1) * 10**9), 0, 0))
    return StepRecord(number, float(entropy), counts, 3, "rejection", 1.0)
