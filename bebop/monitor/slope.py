"""Slope of the acceptance length over the target entropy, with an interval that is valid for autocorrelated steps.

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
from numpy.typing import NDArray
from scipy.special import stdtrit

from bebop.errors import BadInput

Array = NDArray[np.float64]
MIN_POINTS = 4
MIN_SPAN_NATS = 1e-6  # entropies within this span count as constant
FIXED_B = (1.9600, 2.9694, 0.4160, -0.5324)  # 97.5 % quantile of the Bartlett t statistic as a cubic in b


@dataclass(frozen=True)
class Fit:
    """A fitted line.

    slope, low, high: acceptance length per nat, the last two its 95 % interval; intercept: acceptance length at 0 nats.
    covariance: of (intercept, slope), Newey-West; quantile: half width of the interval in standard errors.
    residual_variance, long_run_variance: of the residuals around the line, the second with their autocorrelation.
    """

    slope: float
    intercept: float
    low: float
    high: float
    mean_acceptance: float
    covariance: Array  # [2, 2]
    quantile: float
    residual_variance: float
    long_run_variance: float

    def line(self, entropy_nats: float, extra_variance: float = 0.0) -> tuple[float, float, float]:
        """The line at an entropy, with its 95 % band, wider by a variance that is not the line's: value, low, high."""
        x = np.array([1.0, entropy_nats])
        value = self.intercept + self.slope * entropy_nats
        half = self.quantile * math.sqrt(max(0.0, float(x @ self.covariance @ x)) + extra_variance)
        return value, value - half, value + half


@dataclass(frozen=True)
class Slope:
    """The slope over n points, or the reason why there is none: then status is "undetermined" and the numbers None."""

    n: int
    fit: Fit | None
    reason: str = ""

    @property
    def status(self) -> str:
        """ "ok" or "undetermined"."""
        return "undetermined" if self.fit is None else "ok"

    @property
    def slope(self) -> float | None:
        """Acceptance length per nat."""
        return None if self.fit is None else self.fit.slope

    @property
    def intercept(self) -> float | None:
        """Acceptance length at 0 nats."""
        return None if self.fit is None else self.fit.intercept

    @property
    def low(self) -> float | None:
        """Lower end of the slope's 95 % interval."""
        return None if self.fit is None else self.fit.low

    @property
    def high(self) -> float | None:
        """Upper end of the slope's 95 % interval."""
        return None if self.fit is None else self.fit.high

    @property
    def relative(self) -> float | None:
        """Slope as a share of the mean acceptance length, per nat: comparable between heads of different quality."""
        return self.fit.slope / self.fit.mean_acceptance if self.fit is not None and self.fit.mean_acceptance else None


def fit_slope(entropy: Any, acceptance: Any) -> Slope:
    """Fit acceptance length over entropy. entropy [n] nats, acceptance [n]: numpy, torch or lists, in order of steps.

    The slope is undetermined for fewer than 4 points, for values that are not finite (None counts as such), and for
    constant entropy. Raises BadInput if the two differ in shape.
    """
    h, y = _vector(entropy), _vector(acceptance)
    if h.shape != y.shape or h.ndim != 1:
        raise BadInput(f"entropy, acceptance: got shapes {h.shape} and {y.shape} expected two equally long vectors")
    n = len(h)
    if n < MIN_POINTS:
        return Slope(n, None, f"{n} points, a slope needs at least {MIN_POINTS}")
    for name, values in (("entropy", h), ("acceptance", y)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            return Slope(n, None, f"{name} is not finite at point {bad[0]} ({len(bad)} of {n})")
    if np.ptp(h) < MIN_SPAN_NATS:
        return Slope(n, None, f"entropy is constant ({h[0]:.4g} nats)")

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
    fit = Fit(
        slope=float(slope),
        intercept=float(level - slope * centre),
        low=float(slope - half),
        high=float(slope + half),
        mean_acceptance=float(y.mean()),
        covariance=covariance,
        quantile=quantile,
        residual_variance=float((residuals**2).sum() / (n - 2)),
        long_run_variance=max(0.0, float(newey_west_sum(residuals[:, None], bandwidth)[0, 0]) / (n - 2)),
    )
    return Slope(n, fit)


def bandwidth_of(n: int) -> int:
    """S = 1.3 sqrt(n), rounded up; lags below S have weight."""
    return min(n, math.ceil(1.3 * math.sqrt(n)))


def newey_west_sum(scores: Array, bandwidth: int) -> Array:
    """Sum over |l| < S of (1 - |l| / S) sum_t s_t s_{t-l}^T. scores [n, k] -> [k, k]."""
    total: Array = scores.T @ scores
    for lag in range(1, bandwidth):
        cross = scores[lag:].T @ scores[:-lag]
        total = total + (1.0 - lag / bandwidth) * (cross + cross.T)
    return total


def _vector(values: Any) -> Array:
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu().double().numpy()
    if isinstance(values, Sequence):
        values = [math.nan if value is None else value for value in values]
    return np.asarray(values, dtype=np.float64)
