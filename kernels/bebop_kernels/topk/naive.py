"""topk by a stable sort of whole rows, which puts the lowest id first among equal logits."""

from __future__ import annotations

from torch import Tensor


def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) [N, k]. NaN sorts as the largest value."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
