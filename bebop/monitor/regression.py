"""Linear regression over the steps of a run, whose noise is correlated from step to step.

    y_t = x_t b + e_t,   e_t = rho e_{t-1} + u_t,   u_t independent and normal

For a known rho, generalised least squares is the best estimate. rho is not known, and over few steps its estimate is
too small, so that intervals become too narrow. Here the estimate is a mean over a grid of rho. Each rho has as weight
its restricted likelihood (Harville 1974: the likelihood of the residuals, which is not biased by fitting b) times
1 / sqrt(1 - rho). The covariance contains the spread of b over rho. The interval has Student's t for the n - p
degrees of freedom.

Newey-West errors would not need the AR(1) form, but with AR(0.8) noise and a persistent entropy their 95 % interval
covers the truth in 83 to 89 % of runs of 40 to 80 steps. This one covers it in 93 to 97 %, and is narrower
(tests/unit/test_monitor_slope.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]
RHO = np.linspace(-0.6, 0.995, 60)


@dataclass(frozen=True)
class Regression:
    """b [p], its covariance [p, p], the half width of a 95 % interval in standard errors, the residuals' variance."""

    coefficients: Array
    covariance: Array
    quantile: float
    residual_variance: float


def regress(x: Array, y: Array, steps: Array | None = None) -> Regression:
    """Regress y [n] on the columns of x [n, p], n > p, in order of time. The columns must not depend on each other.

    steps [n]: numbers of the steps, increasing, where some are left out; None: 0 to n - 1.
    """
    n, p = x.shape
    z = np.column_stack([x, y])
    gaps = np.ones(n - 1) if steps is None else np.maximum(1, np.diff(steps))
    rho = RHO[:, None]
    carried = np.sign(rho) ** gaps * np.abs(rho) ** gaps  # [R, n-1] correlation with the step before
    scale = (1 - rho**2) / (1 - carried**2)  # of the new noise's variance, 1 without a gap
    # the series made white by rho: z_1 sqrt(1 - rho^2), then z_t - rho z_{t-1}
    white = np.sqrt(scale)[..., None] * (z[1:] - carried[..., None] * z[:-1])
    white = np.concatenate([np.sqrt(1 - rho**2)[..., None] * z[:1], white], axis=1)  # [R, n, p+1]
    moments = white.transpose(0, 2, 1) @ white
    inverse = np.linalg.inv(moments[:, :p, :p])
    b = (inverse @ moments[:, :p, p:])[..., 0]  # [R, p]
    unexplained = moments[:, p, p] - (b * moments[:, :p, p]).sum(1)
    unexplained = np.maximum(unexplained, np.finfo(float).eps * moments[:, p, p] + np.finfo(float).tiny)
    likelihood = (
        np.log1p(-(RHO**2))
        + np.log(scale).sum(1)
        - np.linalg.slogdet(moments[:, :p, :p])[1]
        - (n - p) * np.log(unexplained)
    ) / 2 - np.log1p(-RHO) / 2
    weight = np.exp(likelihood - likelihood.max())
    weight /= weight.sum()
    mean = weight @ b
    apart = b - mean
    covariance = np.einsum("r,rij->ij", weight * unexplained / (n - p), inverse)
    covariance += np.einsum("r,ri,rj->ij", weight, apart, apart)
    residuals = y - x @ mean
    return Regression(mean, covariance, float(stdtrit(n - p, 0.975)), float(residuals @ residuals) / (n - p))


def half_width(fit: Regression, direction: Array, extra_variance: float = 0.0) -> float:
    """Half of the 95 % interval of direction . b, wider by a variance that is not the fit's."""
    return fit.quantile * math.sqrt(max(0.0, float(direction @ fit.covariance @ direction)) + extra_variance)
