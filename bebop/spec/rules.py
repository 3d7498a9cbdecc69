"""The chain acceptance rules as pure functions of probabilities: no random numbers, no model code.

Legend: p target distribution, q draft distribution, both [..., V] at the sampling temperature; y the draft token.

| rule        | draft token    | accept with                | after a rejection          | source                     |
|-------------|----------------|----------------------------|----------------------------|----------------------------|
| target_only | argmax q       | p(y)                       | norm(p without y)          | Bebop alg. 3               |
| rejection   | sampled from q | min(1, p(y) / q(y))        | norm(max(0, p - q))        | Bebop alg. 4               |
| block       | sampled from q | h_i, the last i wins       | norm(max(0, w_i p - q))    | arXiv 2403.10444, alg. 2   |

target_only is rejection with q a point mass at y: min(1, p(y) / 1) = p(y) and max(0, p - 1[y]) = p without y. Block
verification carries a weight w over the draft (p_i in its paper) and accepts the longest prefix whose own test passes:

    w_0 = 1,  w_i = min(1, w_{i-1} p_i(y_i) / q_i(y_i))                                (eq. 4)
    h_i = S_i / (S_i + 1 - w_i),  S_i = sum_x max(0, w_i p_{i+1}(x) - q_{i+1}(x)),  i < gamma
    h_gamma = w_gamma
"""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance_ratio(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """min(1, p(y) / q(y)) of draft tokens, elementwise; 0 where p(y) is 0, whatever q(y) is."""
    safe = torch.where(draft_prob > 0, draft_prob, torch.ones_like(draft_prob))
    ratio = torch.where(draft_prob > 0, target_prob / safe, torch.ones_like(target_prob))
    return torch.where(target_prob > 0, ratio.clamp(max=1.0), torch.zeros_like(target_prob))


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """sum_v min(p, q) over the last axis, [..., V] -> [...]: the expected acceptance of rejection sampling."""
    return torch.minimum(target, draft).sum(-1)


def residual(target: Tensor, draft: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """norm(max(0, w p - q)), what is sampled after a rejection. [..., V], weight [...] or a number.

    Where nothing is left (p = q and w = 1, or w = 0) a rejection has probability 0 and only rounding leads here: the
    target itself is returned.
    """
    if isinstance(weight, Tensor):
        target_part = weight.to(target.dtype).unsqueeze(-1) * target
    else:
        target_part = target if weight == 1 else weight * target
    left = (target_part - draft).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / torch.where(mass > 0, mass, torch.ones_like(mass)), target)


def residual_without(target: Tensor, token: Tensor) -> Tensor:
    """norm(p with token removed), the residual of target_only. [..., V], long [...]."""
    point = torch.zeros_like(target).scatter_(-1, token.unsqueeze(-1), 1.0)
    return residual(target, point)


def block_weight(previous: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """w_i from w_{i-1} and the probabilities of draft token i, elementwise; the product is capped, not the ratio."""
    safe = torch.where(draft_prob > 0, draft_prob, torch.ones_like(draft_prob))
    weight = torch.where(draft_prob > 0, previous * target_prob / safe, torch.ones_like(previous))
    possible = (target_prob > 0) & (previous > 0)  # 0 stays 0, also where q(y) is 0
    return torch.where(possible, weight.clamp(max=1.0), torch.zeros_like(previous))


def block_acceptance(weight: Tensor, target_next: Tensor, draft_next: Tensor) -> Tensor:
    """h_i of a prefix that is not the whole block: weight [...] is w_i, target_next and draft_next [..., V] follow it.

    0 / 0 (w_i = 1 and p = q at the next position) is 1: a later test then passes surely, so the value never decides.
    """
    left = (weight.unsqueeze(-1) * target_next - draft_next).clamp(min=0).sum(-1)
    total = left + (1.0 - weight)
    return torch.where(total > 0, left / torch.where(total > 0, total, torch.ones_like(total)), torch.ones_like(total))
