"""Sampled against scored acceptance: does the engine serve the heads that the checkpoint has?

An engine's draft starts where the last one ended, so it stands less often where more is accepted, and its counters are
no mean over positions. Given the text, where it stood is a renewal process that the scores determine: with a_j =
P(first j drafts accepted | text) (bebop.losses.accepted_given_text), a round at anchor i accepts exactly j drafts with
a_j - a_{j+1} and the next one stands at i + j + 1. So the expected visits are

    v_0 = 1,   v_i = sum_j v_{i-j-1} (a_j - a_{j+1}) at i-j-1,    j = 0..K, a_0 = 1, a_{K+1} = 0

and the engine's accepted_j / drafts estimates sum v a_j / sum v on the very same text. What is left is the luck of the
accept draws: intervals are over responses, of the paired difference, 99 % jointly over the depths (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from bebop.evaluate.anchors import Anchors
from bebop.losses import accepted_given_text
from bebop.records import DraftCounts

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Agreement:
    """[K] each: the engine's ratio, the scored one at the places where the engine stood, their difference and the half
    width of its interval; agrees: no depth's difference is beyond it."""

    num_drafts: int
    sampled: tuple[float, ...]
    as_drafted: tuple[float, ...]
    half_width: tuple[float, ...]

    @property
    def difference(self) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(self.sampled, self.as_drafted, strict=True))

    @property
    def agrees(self) -> bool:
        return all(abs(d) <= half for d, half in zip(self.difference, self.half_width, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "sampled": self.sampled,
            "as_drafted": self.as_drafted,
            "difference": self.difference,
            "half_width_99": self.half_width,
            "agrees": self.agrees,
        }


def compare(anchors: Anchors, counts: Mapping[int, DraftCounts], *, rule: str, num_drafts: int) -> Agreement | None:
    """anchors: scored at num_drafts depths or more. counts: the engine's, by response. rule: how it accepted.

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
    response, position = anchors.response.numpy(), anchors.position.numpy()
    expected, visits = _along(given, response, position, used)
    sampled, scored = accepted.sum(1) / drafts.sum(), expected.sum(1) / visits.sum()
    influence = (accepted - sampled[:, None] * drafts) / drafts.sum() - (
        expected - scored[:, None] * visits
    ) / visits.sum()
    error = np.sqrt((influence**2).sum(1) * len(used) / (len(used) - 1))
    z = ndtri(1 - (1 - CONFIDENCE) / (2 * num_drafts))
    return Agreement(int(drafts.sum()), *(tuple(map(float, value)) for value in (sampled, scored, z * error)))


def _given_text(anchors: Anchors, rule: str) -> np.ndarray:
    """[K,N] P(first j drafts accepted | text)."""
    s = anchors.statistics
    if rule == "target_only":
        return (s["top_logweight"] == 0).double().cumprod(0).numpy()
    return accepted_given_text(s["target_logprob"], s["draft_logprob"], rule=rule).numpy()


def _along(
    given: np.ndarray, response: np.ndarray, position: np.ndarray, used: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """[K,S] expected accepted drafts and [S] expected drafts of every response in `used`, by the recursion above."""
    depth = len(given)
    column = {i: c for c, i in enumerate(used)}
    inside = np.isin(response, used)
    columns, rows = np.array([column[i] for i in response[inside]], dtype=int), position[inside]
    length = int(rows.max(initial=-1)) + 1
    table = np.zeros((depth + 2, length, len(used)))  # a_0 .. a_{K+1}
    table[1:-1, rows, columns] = given[:, inside]
    present = np.zeros((length, len(used)))
    present[rows, columns] = 1
    table[0] = present
    visits = np.zeros((length + depth + 1, len(used)))
    visits[0] = 1
    for i in range(length):
        visits[i] *= present[i]
        for j in range(depth + 1):
            visits[i + j + 1] += visits[i] * (table[j, i] - table[j + 1, i])
    return (visits[None, :length] * table[1:-1]).sum(1), visits[:length].sum(0)
