"""Observed against scored acceptance: does the engine serve the heads that the checkpoint has?

Each draft starts where the previous one ended, so well-predicted positions are visited less often, and the engine's
counters are not averages over positions. Given the text, the positions that it visits are a renewal process that the
scores determine: with a_j = P(first j drafts accepted | text) (ChainRule.given_text), a round at anchor i accepts
exactly j drafts with probability a_j - a_{j+1}, and the next one starts at i + j + 1. So the expected visits are

    v_0 = 1,   v_i = sum_j v_{i-j-1} (a_j - a_{j+1}) at i-j-1,    j = 0..K, a_0 = 1, a_{K+1} = 0

and the engine's ratio accepted_j / drafts estimates the predicted one, sum v a_j / sum v, on the same text. They differ
only by the random acceptance decisions. The interval of the difference is the larger of two: one from the spread over
responses, by Student's t, and one from the variance of the decisions, which follows from the text like the visits. The
first is far too narrow if responses are short and rejections rare, because fully accepted responses have no spread. All
intervals of a run hold together with probability 0.99 (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import norm, t

from bebop.acceptance import AnchorScores
from bebop.records import DraftCounts
from bebop.spec import RULES

RUN_ERROR = 0.01  # probability that any interval of a run misses, shared by its comparisons
MIN_RESPONSES = 16  # with fewer, intervals are too wide to tell heads apart: such a comparison is not judged


@dataclass(frozen=True)
class Agreement:
    """[K] each: the engine's ratio accepted_j / drafts, the ratio predicted by the scores for the positions that the
    engine visits, and the half width of the interval of their difference."""

    num_responses: int
    num_drafts: int
    observed: tuple[float, ...]
    predicted: tuple[float, ...]
    half_width_99: tuple[float, ...]  # joint over the whole run

    @property
    def difference(self) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(self.observed, self.predicted, strict=True))

    @property
    def judged(self) -> bool:
        return self.num_responses >= MIN_RESPONSES

    @property
    def agrees(self) -> bool | None:
        """True if no depth differs by more than its interval; None with too few responses to judge."""
        if not self.judged:
            return None
        return all(abs(d) <= half for d, half in zip(self.difference, self.half_width_99, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference": self.difference, "agrees": self.agrees}


def compare(
    scores: AnchorScores,
    counts: Mapping[int, DraftCounts],
    *,
    rule: str,
    num_drafts: int,
    confidence: float = 1 - RUN_ERROR,
) -> Agreement | None:
    """Compare the engine's counts, by response, with the scores of the same responses at num_drafts depths or more.

    rule: how the engine accepted. confidence: of all depths of this comparison together. None if fewer than 2 responses
    have drafts.
    """
    used = sorted(i for i, count in counts.items() if count.num_drafts)
    if len(used) < 2:
        return None
    accepted = np.zeros((num_drafts, len(used)))
    for column, i in enumerate(used):
        per_depth = counts[i].accepted_per_depth[:num_drafts]
        accepted[: len(per_depth), column] = per_depth
    drafts = np.array([counts[i].num_drafts for i in used], dtype=float)
    given = RULES[rule].given_text(scores).numpy()[:num_drafts]
    return judge(
        accepted, drafts, by_response(given, scores.document.numpy(), scores.position.numpy(), used), confidence
    )


def judge(accepted: np.ndarray, drafts: np.ndarray, table: np.ndarray, confidence: float) -> Agreement:
    """accepted [K,S], drafts [S]: the engine's, by response; table: what the scores say, see by_response."""
    expected, visits = expected_counts(table)
    depth, responses = accepted.shape
    observed, predicted = accepted.sum(1) / drafts.sum(), expected.sum(1) / visits.sum()
    influence = (accepted - observed[:, None] * drafts) / drafts.sum() - (
        expected - predicted[:, None] * visits
    ) / visits.sum()
    spread = np.sqrt((influence**2).sum(1) * responses / (responses - 1))
    by_draws = np.sqrt(draw_variance(table, predicted).sum(1)) / visits.sum()
    tail = (1 - confidence) / (2 * depth)
    half_width = np.maximum(t.isf(tail, responses - 1) * spread, norm.isf(tail) * by_draws)
    ratios = (tuple(map(float, value)) for value in (observed, predicted, half_width))
    return Agreement(responses, int(drafts.sum()), *ratios)


def by_response(given: np.ndarray, response: np.ndarray, position: np.ndarray, used: Sequence[int]) -> np.ndarray:
    """[K+2,L,S] a_0 .. a_{K+1} of every response in `used` by position; zero where there is no anchor."""
    column = {i: c for c, i in enumerate(used)}
    inside = np.isin(response, used)
    columns, rows = np.array([column[i] for i in response[inside]], dtype=int), position[inside]
    table = np.zeros((len(given) + 2, int(rows.max(initial=-1)) + 1, len(used)))
    table[0, rows, columns] = 1
    table[1:-1, rows, columns] = given[:, inside]
    return table


def expected_counts(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[K,S] expected accepted drafts and [S] expected drafts of every response, by the recursion above."""
    depth, length = len(table) - 2, table.shape[1]
    visits = np.zeros((length + depth + 1, table.shape[2]))
    visits[0] = 1
    for i in range(length):
        visits[i] *= table[0, i]
        for j in range(depth + 1):
            visits[i + j + 1] += visits[i] * (table[j, i] - table[j + 1, i])
    return (visits[None, :length] * table[1:-1]).sum(1), visits[:length].sum(0)


def draw_variance(table: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """[K,S] variance of accepted - predicted * drafts of every response, given its text. predicted: [K].

    Backwards along the text: mean and mean square of what the rounds from an anchor on add; a round that accepts
    exactly j drafts adds [j >= depth] - predicted.
    """
    depth, length = len(table) - 2, table.shape[1]
    adds = (np.arange(depth + 1) >= np.arange(1, depth + 1)[:, None]) - predicted[:, None]  # [K,K+1]
    ahead = [np.zeros((2, depth, table.shape[2]))] * (depth + 1)  # mean, mean square from the next anchors on
    for i in reversed(range(length)):
        here = np.zeros_like(ahead[0])
        for j, (mean, square) in enumerate(ahead):
            exactly, added = table[j, i] - table[j + 1, i], adds[:, j, None]
            here[0] += exactly * (added + mean)
            here[1] += exactly * (added**2 + 2 * added * mean + square)
        ahead = [here, *ahead[:-1]]
    mean, square = ahead[0]
    variance: np.ndarray = square - mean**2
    return variance
