"""One scorer for the heads of both sides, whatever trained them: expected acceptance as the engine drafts.

AL = 1 + sum_j E[prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j], exact for text that the policy sampled at the same
temperature (bebop.losses.expected_acceptance). Anchors of one document are alike, so errors count documents: with s_d
the sum over document d's n_d anchors, r = sum s / sum n, e_d = (s_d - r n_d) / mean(n), and se = std(e) / sqrt(D). The
error of a difference of two heads takes e_d - e'_d: the same documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.data.batches import TrainBatch
from bebop.head_training.objective import anchor_rows
from bebop.losses import expected_acceptance, score_drafts
from bebop.mtp import Head


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


@torch.no_grad()
def score_documents(
    head: Head,
    batches: Sequence[TrainBatch],
    embed_weight: Tensor,
    lm_head_weight: Tensor,
    *,
    depth: int,
    temperature: float,
) -> Scored:
    """Score `head` on every document of `batches`, in their order; those without an anchor are left out."""
    lengths, accepted, counts = [], [], []
    for batch in batches:
        rows = anchor_rows(head, batch, embed_weight, depth)
        found = score_drafts(
            rows, batch.hidden, lm_head_weight, batch.target_index, batch.labels, temperature=temperature
        )
        document = torch.bucketize(batch.anchors, batch.cu_seqlens, right=True)
        for index in document.unique():
            own = document == index
            each = expected_acceptance(found.alpha[:, own], found.target_logprob[:, own], found.draft_logprob[:, own])
            counts.append(int(own.sum()))
            lengths.append(each.acceptance_length * counts[-1])
            accepted.append(each.probability * counts[-1])
    count = torch.tensor(counts, dtype=torch.float64)
    return Scored(
        Pooled(torch.stack(lengths).double(), count),
        tuple(Pooled(column, count) for column in torch.stack(accepted, 1).double()),
    )


def _error(pull: Tensor) -> float:
    return (pull.std() / len(pull) ** 0.5).item()
