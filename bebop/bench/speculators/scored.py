"""One scorer for the heads of both sides, whatever trained them: expected acceptance as the engine drafts.

AL = 1 + sum_j E[prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j], exact for text that the policy sampled at the same
temperature (bebop.losses.expected_acceptance). Anchors of one document are alike, so errors count documents: with s_d
the sum over document d's n_d anchors, r = sum s / sum n, e_d = (s_d - r n_d) / mean(n), and se = std(e) / sqrt(D). The
error of a difference of two heads takes e_d - e'_d: the same documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.acceptance import AnchorScores


@dataclass(frozen=True)
class Pooled:
    """A ratio over documents. total, count: float64 [D], per document."""

    total: Tensor
    count: Tensor

    @property
    def value(self) -> float:
        return (self.total.sum() / self.count.sum()).item()

    @property
    def pull(self) -> Tensor:
        """e_d of the module's docstring, [D]."""
        return (self.total - self.value * self.count) / self.count.mean()

    @property
    def error(self) -> float:
        return _error(self.pull)

    def gain(self, other: Pooled) -> tuple[float, float]:
        """How far this is above `other` on the same documents, and the standard error of that."""
        return self.value - other.value, _error(self.pull - other.pull)

    def part(self, where: slice) -> Pooled:
        return Pooled(self.total[where], self.count[where])


@dataclass(frozen=True)
class Scored:
    length: Pooled  # acceptance length under rejection sampling
    accepted: tuple[Pooled, ...]  # [K] P(first j drafts accepted)

    def part(self, where: slice) -> Scored:
        return Scored(self.length.part(where), tuple(each.part(where) for each in self.accepted))


def by_document(scores: AnchorScores) -> Scored:
    """The scores as ratios over documents, in their order; documents without an anchor are left out."""
    which = scores.document.unique(return_inverse=True)[1]
    count = torch.bincount(which).double()

    def pooled(values: Tensor) -> Pooled:
        return Pooled(torch.zeros_like(count).index_add_(0, which, values), count)

    return Scored(pooled(scores.length("rejection")), tuple(pooled(row) for row in scores.accepted["rejection"]))


def _error(pull: Tensor) -> float:
    return (pull.std() / len(pull) ** 0.5).item()
