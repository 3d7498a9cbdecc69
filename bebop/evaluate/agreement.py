"""Sampled against scored acceptance: does the engine serve the heads that the checkpoint has?

An engine's draft starts where the last one ended, so it stands less often where more is accepted, and its counters are
no mean over positions. Given the text, where it stood is a renewal process that the scores determine: with a_j =
P(first j drafts accepted | text) (bebop.losses.accepted_given_text), a round at anchor i accepts exactly j drafts with
a_j - a_{j+1} and the next one stands at i + j + 1. So the expected visits are

    v_0 = 1,   v_i = sum_j v_{i-j-1} (a_j - a_{j+1}) at i-j-1,    j = 0..K, a_0 = 1, a_{K+1} = 0

and the engine's accepted_j / drafts estimates sum v a_j / sum v on the very same text. What is left is the luck of the
accept draws. Intervals are of the paired difference and hold in 99 % of runs for all of a run's tasks, temperatures and
depths together (Bonferroni). Their width is the larger of two: from the spread over responses, by Student's t, and from
the draws' own variance, which the text determines as it does the visits. The first alone is far too narrow where a
response is short and seldom rejects: responses that were accepted whole show no spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm, t

from bebop.acceptance.per_document import Anchors
from bebop.losses import accepted_given_text
from bebop.records import DraftCounts

CONFIDENCE = 0.99  # of a whole run
MIN_RESPONSES = 16  # fewer have intervals too wide to tell heads apart: such a comparison is not judged


@dataclass(frozen=True)
class Agreement:
    """[K] each: the engine's ratio, the scored one at the places where the engine stood, their difference and the half
    width of its interval; agrees: no depth's difference is beyond it, None where responses are too few to judge."""

    num_responses: int
    num_drafts: int
    sampled: tuple[float, ...]
    as_drafted: tuple[float, ...]
    half_width: tuple[float, ...]

    @property
    def difference(self) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(self.sampled, self.as_drafted, strict=True))

    @property
    def judged(self) -> bool:
        return self.num_responses >= MIN_RESPONSES

    @property
    def agrees(self) -> bool | None:
        if not self.judged:
            return None
        return all(abs(d) <= half for d, half in zip(self.difference, self.half_width, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_responses": self.num_responses,
            "num_drafts": self.num_drafts,
            "sampled": self.sampled,
            "as_drafted": self.as_drafted,
            "difference": self.difference,
            "half_width_99": self.half_width,
            "agrees": self.agrees,
        }


def compare(
    anchors: Anchors, counts: Mapping[int, DraftCounts], *, rule: str, num_drafts: int, comparisons: int = 1
) -> Agreement | None:
    """anchors: scored at num_drafts depths or more. counts: the engine's, by response. rule: how it accepted.
    comparisons: how many the run makes; they share its 1 %.

    None where fewer than 2 responses have drafts.
    """
    used = sorted(i for i, count in counts.items() if count.num_drafts)
    if len(used) < 2:
        return None
    accepted = np.zeros((num_drafts, len(used)))
    for column, i in enumerate(used):
        per_depth = counts[i].accepted_per_depth[:num_drafts]
        accepted[: len(per_depth), column] = per_depth
    drafts = np.array([counts[i].num_drafts for i in used], dtype=float)
    given = _given_text(anchors, rule)[:num_drafts]
    table = _by_response(given, anchors.response.numpy(), anchors.position.numpy(), used)
    expected, visits = _along(table)
    scored = expected.sum(1) / visits.sum()
    return _judge(accepted, drafts, expected, visits, _luck(table, scored), comparisons)


def _judge(
    accepted: np.ndarray, drafts: np.ndarray, expected: np.ndarray, visits: np.ndarray, luck: np.ndarray, many: int
) -> Agreement:
    """accepted, drafts: the engine's; expected, visits, luck: by the scores; [K,S] or [S]. many: comparisons."""
    depth, responses = accepted.shape
    sampled, scored = accepted.sum(1) / drafts.sum(), expected.sum(1) / visits.sum()
    influence = (accepted - sampled[:, None] * drafts) / drafts.sum() - (
        expected - scored[:, None] * visits
    ) / visits.sum()
    spread = np.sqrt((influence**2).sum(1) * responses / (responses - 1))
    drawn = np.sqrt(luck.sum(1)) / visits.sum()
    tail = (1 - CONFIDENCE) / (2 * depth * many)
    half_width = np.maximum(t.isf(tail, responses - 1) * spread, norm.isf(tail) * drawn)
    return Agreement(
        responses, int(drafts.sum()), *(tuple(map(float, value)) for value in (sampled, scored, half_width))
    )


def _given_text(anchors: Anchors, rule: str) -> np.ndarray:
    """[K,N] P(first j drafts accepted | text)."""
    s = anchors.statistics
    if rule == "target_only":
        return (s["top_logweight"] == 0).double().cumprod(0).numpy()
    return accepted_given_text(s["target_logprob"], s["draft_logprob"], rule=rule).numpy()


def _by_response(given: np.ndarray, response: np.ndarray, position: np.ndarray, used: Sequence[int]) -> np.ndarray:
    """[K+2,L,S] a_0 .. a_{K+1} of every response in `used` by position; zero where there is no anchor."""
    column = {i: c for c, i in enumerate(used)}
    inside = np.isin(response, used)
    columns, rows = np.array([column[i] for i in response[inside]], dtype=int), position[inside]
    table = np.zeros((len(given) + 2, int(rows.max(initial=-1)) + 1, len(used)))
    table[0, rows, columns] = 1
    table[1:-1, rows, columns] = given[:, inside]
    return table


def _along(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[K,S] expected accepted drafts and [S] expected drafts of every response, by the recursion above."""
    depth, length = len(table) - 2, table.shape[1]
    visits = np.zeros((length + depth + 1, table.shape[2]))
    visits[0] = 1
    for i in range(length):
        visits[i] *= table[0, i]
        for j in range(depth + 1):
            visits[i + j + 1] += visits[i] * (table[j, i] - table[j + 1, i])
    return (visits[None, :length] * table[1:-1]).sum(1), visits[:length].sum(0)


def _luck(table: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """[K,S] variance of accepted - scored * drafts of every response, given its text. scored: [K].

    Backwards along the text: mean and mean square of what the rounds from an anchor on add, of which one that accepts
    exactly j drafts adds [j >= depth] - scored.
    """
    depth, length = len(table) - 2, table.shape[1]
    adds = (np.arange(depth + 1) >= np.arange(1, depth + 1)[:, None]) - scored[:, None]  # [K,K+1]
    ahead = [np.zeros((2, depth, table.shape[2]))] * (depth + 1)  # mean, mean square from the next anchors on
    for i in reversed(range(length)):
        here = np.zeros_like(ahead[0])
        for j, (mean, square) in enumerate(ahead):
            exactly, added = table[j, i] - table[j + 1, i], adds[:, j, None]
            here[0] += exactly * (added + mean)
            here[1] += exactly * (added**2 + 2 * added * mean + square)
        ahead = [here, *ahead[:-1]]
    return ahead[0][1] - ahead[0][0] ** 2
