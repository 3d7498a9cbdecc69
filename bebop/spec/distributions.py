"""Two distributions in rejection sampling: how likely a draft is accepted, and what is left after a rejection.

Legend: p target distribution, q draft distribution, both [..., V] at the sampling temperature; y the draft token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance_ratio(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """min(1, p(y) / q(y)) of draft tokens, elementwise; 0 where p(y) is 0, whatever q(y) is."""
    safe = torch.where(draft_prob > 0, draft_prob, torch.ones_like(draft_prob))
    ratio = torch.where(draft_prob > 0, target_prob / safe, torch.ones_like(target_prob))
    return torch.where(target_prob > 0, ratio.clamp(max=1.0), torch.zeros_like(target_prob))


def residual(target: Tensor, draft: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """norm(max(0, w p - q)), the distribution to sample from after a rejection. [..., V], weight [...] or a number.

    If nothing is left (p = q and w = 1, or w = 0), a rejection has probability 0 and only rounding can cause one. The
    target itself is returned then.
    """
    if isinstance(weight, Tensor):
        target_part = weight.to(target.dtype).unsqueeze(-1) * target
    else:
        target_part = target if weight == 1 else weight * target
    left = (target_part - draft).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / torch.where(mass > 0, mass, torch.ones_like(mass)), target)


def point_mass(token: Tensor, like: Tensor) -> Tensor:
    """The distribution [..., V] of a token [...] that was not sampled: 1 at the token, shaped as `like`."""
    return torch.zeros_like(like).scatter_(-1, token.unsqueeze(-1), 1.0)
