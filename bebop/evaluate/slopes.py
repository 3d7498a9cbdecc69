"""Slope of the acceptance length on the target's entropy, over tokens and over a sweep of temperatures.

    AL = intercept + slope H      ordinary least squares, H in nats

over tokens: one point per anchor, its expected acceptance length and entropy, at one temperature. over temperatures:
one point per temperature, the unweighted means over its anchors. Anchors of one response are correlated, and so are
responses to one prompt at several temperatures. So intervals are percentiles of 2,000 bootstrap samples of prompts.
They cover the choice of prompts, not how well a line fits: over few temperatures the slope is only a summary.

relative: slope / mean AL, to compare heads of different quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 2000
MIN_SPAN_NATS = 1e-6


@dataclass(frozen=True)
class EntropySlope:
    """Tokens per target forward per nat, with the 95 % interval; all None if the status is not "ok"."""

    status: str  # "ok" | "undetermined"
    reason: str
    n: int  # anchors, or temperatures
    num_prompts: int
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    relative: float | None = None
    relative_low: float | None = None
    relative_high: float | None = None
    intercept: float | None = None


def over_tokens(entropy: np.ndarray, length: np.ndarray, prompt: np.ndarray, *, seed: int = 0) -> EntropySlope:
    """entropy, length [N] of the anchors; prompt [N]: number of each anchor's prompt."""
    names, cluster = np.unique(prompt, return_inverse=True)
    if len(names) < 3 or np.ptp(entropy) < MIN_SPAN_NATS:
        return _undetermined(len(entropy), len(names), "fewer than 3 prompts, or constant entropy")
    moments = np.stack([np.ones_like(entropy), entropy, length, entropy * entropy, entropy * length])
    sums = np.stack([np.bincount(cluster, weights=m, minlength=len(names)) for m in moments], 1)  # [G,5]

    def line(weights: np.ndarray) -> np.ndarray:
        n, h, y, hh, hy = (weights @ sums).T
        slope = (hy - h * y / n) / (hh - h * h / n)
        return np.stack([slope, slope / (y / n), (y - slope * h) / n])

    return _with_interval(line, len(entropy), len(names), seed)


def over_temperatures(
    sweep: Mapping[float, tuple[np.ndarray, np.ndarray, np.ndarray]], prompts: Sequence[int], *, seed: int = 0
) -> EntropySlope:
    """sweep: temperature -> (entropy [N], length [N], prompt [N]) of its anchors; prompts: numbers of all prompts."""
    place = {prompt: i for i, prompt in enumerate(prompts)}
    if len(sweep) < 3 or len(place) < 3:
        return _undetermined(len(sweep), len(place), f"{len(sweep)} temperatures, a slope over them needs 3")
    sums = []  # [R,3,G]
    for entropy, length, prompt in sweep.values():
        cluster = np.array([place[i] for i in prompt], dtype=int)
        columns = (np.ones_like(entropy), entropy, length)
        sums.append([np.bincount(cluster, weights=c, minlength=len(place)) for c in columns])

    def line(weights: np.ndarray) -> np.ndarray:
        n, h, y = np.einsum("bg,rcg->crb", weights, np.array(sums))
        h, y = h / n, y / n  # [R,B]
        centred = h - h.mean(0)
        slope = (centred * y).sum(0) / (centred**2).sum(0)
        return np.stack([slope, slope / y.mean(0), y.mean(0) - slope * h.mean(0)])

    return _with_interval(line, len(sweep), len(place), seed)


def _with_interval(line: Any, n: int, num_prompts: int, seed: int) -> EntropySlope:
    slope, relative, intercept = line(np.ones((1, num_prompts)))[:, 0]
    weights = np.random.default_rng(seed).multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), DRAWS)
    drawn = line(weights.astype(float))
    (low, high), (relative_low, relative_high) = (np.nanpercentile(drawn[i], [2.5, 97.5]) for i in (0, 1))
    values = (slope, low, high, relative, relative_low, relative_high, intercept)
    return EntropySlope("ok", "", n, num_prompts, *map(float, values))


def _undetermined(n: int, num_prompts: int, reason: str) -> EntropySlope:
    return EntropySlope("undetermined", reason, n, num_prompts)
