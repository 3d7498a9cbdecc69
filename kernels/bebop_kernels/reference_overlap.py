"""tv_overlap in chunked torch: the formulas of overlap.py, and the judge of the other implementations.

The only [N, V] buffer is the gradient itself; forward keeps nothing and backward recomputes the rows chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.rows import Rows, chunk_rows, normalise
from bebop_kernels.tensor_parallel import ordered_sum


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def overlap_rows(draft: Rows, target_probs: Tensor, want_grad: bool, group: Any = None) -> tuple[Tensor, Tensor | None]:
    """alpha [R] and its gradient on the *scaled* logits z / T [R, V] (None unless wanted)."""
    alpha = torch.minimum(draft.probs, target_probs).sum(-1)
    if not want_grad:
        return ordered_sum(alpha, group).clamp(max=1), None
    over = (draft.probs > target_probs).to(draft.probs.dtype)
    alpha, over_mass = ordered_sum(torch.stack((alpha, (draft.probs * over).sum(-1))), group)
    return alpha.clamp(max=1), draft.probs * over.neg_().add_(over_mass[:, None])


def forward(draft_logits: Tensor, target_logits: Tensor, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
    both = draft_logits.dtype == target_logits.dtype == torch.float64
    dtype = torch.float64 if both else torch.float32
    alpha = draft_logits.new_empty(draft_logits.shape[0], dtype=dtype)
    step = chunk_rows(draft_logits.shape[1], group)
    for a in range(0, alpha.shape[0], step):
        draft = normalise(draft_logits[a : a + step], temperature, "draft_logits", group)
        target = normalise(target_logits[a : a + step], temperature, "target_logits", group)
        alpha[a : a + step] = overlap_rows(draft, target.probs, False, group)[0]
    return alpha, alpha.new_zeros(len(alpha), 5)


def backward(
    grad_alpha: Tensor, draft_logits: Tensor, target_logits: Tensor, saved: Tensor, temperature: float, group: Any
) -> Tensor:
    grad = torch.empty_like(draft_logits)
    step = chunk_rows(draft_logits.shape[1], group)
    for a in range(0, grad.shape[0], step):
        draft = normalise(draft_logits[a : a + step], temperature, "draft_logits", group)
        target = normalise(target_logits[a : a + step], temperature, "target_logits", group)
        rows = overlap_rows(draft, target.probs, True, group)[1]
        grad[a : a + step] = rows.mul_(grad_alpha[a : a + step, None] / temperature)
    return grad
