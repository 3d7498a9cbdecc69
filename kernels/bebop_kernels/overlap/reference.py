"""tv_overlap in chunked torch, as in naive.py: the other implementations are tested against it.

The gradient is the only [N, V] buffer. Forward saves nothing, and backward recomputes the rows chunk by chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.rows import Rows, chunk_rows, normalise, slices
from bebop_kernels.tensor_parallel import Group, ordered_sum


def unavailable(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    return None


def overlap_rows(
    draft: Rows, target_probs: Tensor, want_grad: bool, group: Group = None
) -> tuple[Tensor, Tensor | None]:
    """alpha [R] and its gradient on the *scaled* logits z / T [R, V] (None unless wanted)."""
    alpha = torch.minimum(draft.probs, target_probs).sum(-1)
    if not want_grad:
        return ordered_sum(alpha, group).clamp(max=1), None
    over = (draft.probs > target_probs).to(draft.probs.dtype)
    alpha, over_mass = ordered_sum(torch.stack((alpha, (draft.probs * over).sum(-1))), group)
    return alpha.clamp(max=1), draft.probs * over.neg_().add_(over_mass[:, None])


def forward(draft_logits: Tensor, target_logits: Tensor, temperature: float, group: Group) -> tuple[Tensor, Tensor]:
    both = draft_logits.dtype == target_logits.dtype == torch.float64
    alpha = draft_logits.new_empty(draft_logits.shape[0], dtype=torch.float64 if both else torch.float32)
    for rows in slices(len(alpha), chunk_rows(draft_logits.shape[1], group, alpha.device)):
        alpha[rows] = _overlap(draft_logits[rows], target_logits[rows], temperature, False, group)[0]
    return alpha, alpha.new_zeros(len(alpha), 5)


def backward(
    grad_alpha: Tensor, draft_logits: Tensor, target_logits: Tensor, saved: Tensor, temperature: float, group: Group
) -> Tensor:
    grad = torch.empty_like(draft_logits)
    for rows in slices(len(grad), chunk_rows(grad.shape[1], group, grad.device)):
        _, chunk = _overlap(draft_logits[rows], target_logits[rows], temperature, True, group)
        assert chunk is not None
        grad[rows] = chunk.mul_(grad_alpha[rows, None] / temperature)
    return grad


def _overlap(
    draft_logits: Tensor, target_logits: Tensor, temperature: float, want_grad: bool, group: Group
) -> tuple[Tensor, Tensor | None]:
    draft = normalise(draft_logits, temperature, "draft_logits", group)
    target = normalise(target_logits, temperature, "target_logits", group)
    return overlap_rows(draft, target.probs, want_grad, group)
