"""Slope of the acceptance length over the target's entropy, with an interval that holds for autocorrelated steps.

    AL_t = intercept + slope H_t + e_t        ordinary least squares over RL steps, H in nats

RL steps are autocorrelated, so plain OLS intervals are too narrow. The covariance is Newey and West's (1987): Bartlett
weights 1 - l / S over lags l < S. With S = 1.3 sqrt(n) the usual quantile 1.96 is too small as well: the interval takes
the fixed-b quantile of Kiefer and Vogelsang (2005) at b = S / n, as Lazarus, Lewis, Stock and Watson (2018) advise, and
widens it by Student's t for few points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from bebop.errors import BadInput

MIN_POINTS = 4
MIN_SPAN_NATS = 1e-6  # entropies closer than this to each other are constant
FIXED_B = (1.9600, 2.9694, 0.4160, -0.5324)  # 97.5 % quantile of the Bartlett t statistic as a cubic in b


@dataclass(frozen=True)
class Slope:
    """A fitted line, or why there is none (then every number but n is None).

    slope, low, high: acceptance length per nat, the last two its 95 % interval; intercept: acceptance length at 0 nats.
    covariance: of (intercept, slope), Newey-West; quantile: half width of the interval in standard errors.
    residual_variance, long_run_variance: of the residuals around the line, the second with their autocorrelation.
    """

    slope: float | None
    intercept: float | None
    low: float | None
    high: float | None
    n: int
    status: str  # "ok" | "undetermined"
    reason: str = ""
    mean_acceptance: float | None = None
    covariance: tuple[tuple[float, float], tuple[float, float]] | None = None
    quantile: float | None = None
    residual_variance: float | None = None
    long_run_variance: float | None = None

    @property
    def relative(self) -> float | None:
        """Slope as a share of the mean acceptance length, per nat; heads of different quality compare by it."""
        return self.slope / self.mean_acceptance if self.slope is not None and self.mean_acceptance else None

    def line(self, entropy_nats: float) -> tuple[float, float, float]:
        """The fitted line at an entropy, with its 95 % band: value, low, high. Raises ValueError without a fit."""
        if self.status != "ok":
            raise BadInput(f"line of an undetermined slope ({self.reason}): fit one with status 'ok' first")
        x = np.array([1.0, entropy_nats])
        value = self.intercept + self.slope * entropy_nats
        half = self.quantile * math.sqrt(max(0.0, float(x @ np.array(self.covariance) @ x)))
        return value, value - half, value + half


def fit_slope(entropy: Any, acceptance: Any) -> Slope:
    """Fit acceptance length over entropy. entropy [n] nats, acceptance [n]: numpy, torch or lists, in order of steps.

    The result's status is "undetermined", with a reason, for fewer than 4 points, values that are not finite (None
    counts as such) and constant entropy. Raises ValueError where the two differ in shape.
    """
    h, y = _vector(entropy), _vector(acceptance)
    if h.shape != y.shape or h.ndim != 1:
        raise BadInput(f"entropy, acceptance: shapes {h.shape} and {y.shape} came, expected two equally long vectors")
    n = len(h)
    if n < MIN_POINTS:
        return _undetermined(n, f"{n} points, a slope needs at least {MIN_POINTS}")
    for name, values in (("entropy", h), ("acceptance", y)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            return _undetermined(n, f"{name} is not finite at point {bad[0]} ({len(bad)} of {n})")
    if np.ptp(h) < MIN_SPAN_NATS:
        return _undetermined(n, f"entropy is constant ({h[0]:.4g} nats)")

    centre = h.mean()  # fit around the mean: well conditioned at any offset
    x = np.column_stack([np.ones(n), h - centre])
    bread = np.diag([1.0 / n, 1.0 / float((x[:, 1] ** 2).sum())])
    level, slope = bread @ (x.T @ y)
    residuals = y - x @ np.array([level, slope])
    bandwidth = bandwidth_of(n)
    around_mean = bread @ newey_west_sum(x * residuals[:, None], bandwidth) @ bread * (n / (n - 2))
    shift = np.array([[1.0, -centre], [0.0, 1.0]])
    covariance = shift @ around_mean @ shift.T
    fixed_b = np.polynomial.polynomial.polyval(bandwidth / n, FIXED_B)
    quantile = float(fixed_b * stdtrit(n - 2, 0.975) / FIXED_B[0])
    half = quantile * math.sqrt(max(0.0, covariance[1, 1]))
    return Slope(
        slope=float(slope),
        intercept=float(level - slope * centre),
        low=float(slope - half),
        high=float(slope + half),
        n=n,
        status="ok",
        mean_acceptance=float(y.mean()),
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
        quantile=quantile,
        residual_variance=float((residuals**2).sum() / (n - 2)),
        long_run_variance=max(0.0, float(newey_west_sum(residuals[:, None], bandwidth)[0, 0]) / (n - 2)),
    )


def bandwidth_of(n: int) -> int:
    """S = 1.3 sqrt(n), rounded up; lags below S have weight."""
    return min(n, math.ceil(1.3 * math.sqrt(n)))


def newey_west_sum(scores: np.ndarray, bandwidth: int) -> np.ndarray:
    """Sum over |l| < S of (1 - |l| / S) sum_t s_t s_{t-l}^T. scores [n, k] -> [k, k]."""
    total = scores.T @ scores
    for lag in range(1, bandwidth):
        cross = scores[lag:].T @ scores[:-lag]
        total = total + (1.0 - lag / bandwidth) * (cross + cross.T)
    return total


def _vector(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu().double().numpy()
    if isinstance(values, Sequence):
        values = [math.nan if value is None else value for value in values]
    return np.asarray(values, dtype=np.float64)


def _undetermined(n: int, reason: str) -> Slope:
    return Slope(None, None, None, None, n, "undetermined", reason)
