"""The formulas of tv_overlap, with plain softmax and autograd. They need [N, V] tensors: for small inputs only."""

from __future__ import annotations

from torch import Tensor


def tv_overlap(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """alpha [N] = sum_v min(p, q). Autograd gives the true gradient wherever no p equals its q."""
    q = (draft_logits / temperature).softmax(-1)
    p = (target_logits.detach() / temperature).softmax(-1)
    return q.minimum(p).sum(-1)


def tv_gradient(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Gradient [N, V] of the loss 1 - alpha on the draft logits at temperature 1: -q ([q <= p] - S'), where
    S' = sum q [q <= p]."""
    q, p = draft_logits.softmax(-1), target_logits.softmax(-1)
    under = (q <= p).to(q.dtype)
    return -q * (under - (q * under).sum(-1, keepdim=True))
