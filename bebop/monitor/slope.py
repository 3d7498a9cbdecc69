"""Slope of the acceptance length over the target entropy, with an interval that is valid for autocorrelated steps.

    AL_t = intercept + slope H_t + e_t        over RL steps, H in nats

RL steps are autocorrelated, so the intervals of ordinary least squares are too narrow. Here e_t is an AR(1) series of
unknown correlation: see bebop.monitor.regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bebop.errors import BadInput
from bebop.monitor.regression import Array, Regression, half_width, regress

MIN_POINTS = 4
MIN_SPAN_NATS = 1e-6  # entropies within this span count as constant


@dataclass(frozen=True)
class Fit:
    """A fitted line.

    slope, low, high: acceptance length per nat, the last two its 95 % interval; intercept: acceptance length at 0 nats.
    residual_variance: of the steps around the line.
    """

    slope: float
    intercept: float
    low: float
    high: float
    mean_acceptance: float
    residual_variance: float
    regression: Regression  # on (1, H - centre)
    centre: float

    def line(self, entropy_nats: float, extra_variance: float = 0.0) -> tuple[float, float, float]:
        """The line at an entropy, with its 95 % band, wider by a variance that is not the line's: value, low, high."""
        value = self.intercept + self.slope * entropy_nats
        half = half_width(self.regression, np.array([1.0, entropy_nats - self.centre]), extra_variance)
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
    """Fit acceptance length against entropy. entropy [n] nats, acceptance [n]: numpy, torch or lists, in order of
    steps.

    The slope is undetermined for fewer than 4 points, for values that are not finite (None counts as such), and for
    constant entropy. Raises BadInput if the two differ in shape.
    """
    h, y = _vector(entropy), _vector(acceptance)
    if h.shape != y.shape or h.ndim != 1:
        raise BadInput(f"entropy, acceptance: got shapes {h.shape} and {y.shape}, expected two equally long vectors")
    n = len(h)
    if n < MIN_POINTS:
        return Slope(n, None, f"{n} points, a slope needs at least {MIN_POINTS}")
    for name, values in (("entropy", h), ("acceptance", y)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            return Slope(n, None, f"{name} is not finite at point {bad[0]} ({len(bad)} of {n})")
    if np.ptp(h) < MIN_SPAN_NATS:
        return Slope(n, None, f"entropy is constant ({h[0]:.4g} nats)")

    centre = float(h.mean())  # fit around the mean: well conditioned at any offset
    found = regress(np.column_stack([np.ones(n), h - centre]), y)
    level, slope = map(float, found.coefficients)
    half = half_width(found, np.array([0.0, 1.0]))
    fit = Fit(
        slope=slope,
        intercept=level - slope * centre,
        low=slope - half,
        high=slope + half,
        mean_acceptance=float(y.mean()),
        residual_variance=found.residual_variance,
        regression=found,
        centre=centre,
    )
    return Slope(n, fit)


def _vector(values: Any) -> Array:
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu().double().numpy()
    if isinstance(values, Sequence):
        values = [math.nan if value is None else value for value in values]
    return np.asarray(values, dtype=np.float64)
