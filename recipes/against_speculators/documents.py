"""Ratios over documents, for errors and for differences between heads on the same documents.

Anchors of one document depend on each other, so errors count documents: with s_d the sum over the n_d anchors of
document d of D, r = sum s / sum n, e_d = (s_d - r n_d) / mean(n), the standard error is std(e) / sqrt(D). For a
difference of two heads it takes e_d - e'_d.
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
    def influence(self) -> Tensor:
        """e_d of the module's docstring, [D]."""
        return (self.total - self.value * self.count) / self.count.mean()

    @property
    def error(self) -> float:
        return _error(self.influence)

    def gain(self, other: Pooled) -> tuple[float, float]:
        """The difference to `other` on the same documents, and its standard error."""
        return self.value - other.value, _error(self.influence - other.influence)

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


def _error(influence: Tensor) -> float:
    return (influence.std() / len(influence) ** 0.5).item()
