"""tv_overlap: alpha = sum_v min(p_v, q_v) = 1 - TV(p, q) of two sets of logits, the acceptance of rejection sampling.

| input         | gradient of alpha                                          |
|---------------|------------------------------------------------------------|
| draft_logits  | q_j (S - [q_j > p_j]) / T,  S = sum_v [q_v > p_v] q_v      |
| target_logits | none, the target is a constant                             |

This is Bebop's -q_j ([q_j <= p_j] - S') for the loss 1 - alpha with S' = 1 - S: written with S it is exactly 0 where
p == q. The only [N, V] buffer is the gradient itself; forward keeps nothing and backward recomputes the rows chunk by
chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_kernels.rows import Rows, all_sum, check_float, check_impl, check_temperature, chunk_rows, normalise


def tv_overlap(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Any = None,
    impl: str = "auto",
) -> Tensor:
    """Acceptance probability of one draft token per row, under rejection sampling.

    draft_logits, target_logits [N, V], any float types, -inf allowed; with `tp_group` each rank's shard of V.
    Returns alpha [N] in [0, 1], float32 (float64 if both are). Gradient to draft_logits only.
    Raises ValueError naming the argument on wrong shapes, NaN, +inf, or a temperature that is not above 0.
    """
    check_impl(impl)
    check_temperature(temperature)
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape)
    return _TvOverlap.apply(draft_logits, target_logits.detach(), float(temperature), tp_group)


def overlap_rows(
    draft: Rows, target_probs: Tensor, want_grad: bool, tp_group: Any = None
) -> tuple[Tensor, Tensor | None]:
    """alpha [R] and its gradient on the *scaled* logits z / T [R, V] (None unless wanted)."""
    alpha = all_sum(torch.minimum(draft.probs, target_probs).sum(-1), tp_group).clamp_(max=1)
    if not want_grad:
        return alpha, None
    over = (draft.probs > target_probs).to(draft.probs.dtype)
    over_mass = all_sum((draft.probs * over).sum(-1, keepdim=True), tp_group)
    return alpha, draft.probs * over.neg_().add_(over_mass)


class _TvOverlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_logits, target_logits, temperature, tp_group):
        ctx.save_for_backward(draft_logits, target_logits)
        ctx.temperature, ctx.tp_group = temperature, tp_group
        both = draft_logits.dtype == target_logits.dtype == torch.float64
        alpha = draft_logits.new_empty(draft_logits.shape[0], dtype=torch.float64 if both else torch.float32)
        step = chunk_rows(draft_logits.shape[1])
        for a in range(0, alpha.shape[0], step):
            draft = normalise(draft_logits[a : a + step], temperature, "draft_logits", tp_group)
            target = normalise(target_logits[a : a + step], temperature, "target_logits", tp_group)
            alpha[a : a + step] = overlap_rows(draft, target.probs, False, tp_group)[0]
        return alpha

    @staticmethod
    def backward(ctx, grad_alpha):
        draft_logits, target_logits = ctx.saved_tensors
        grad = torch.empty_like(draft_logits)
        step = chunk_rows(draft_logits.shape[1])
        for a in range(0, grad.shape[0], step):
            draft = normalise(draft_logits[a : a + step], ctx.temperature, "draft_logits", ctx.tp_group)
            target = normalise(target_logits[a : a + step], ctx.temperature, "target_logits", ctx.tp_group)
            rows = overlap_rows(draft, target.probs, True, ctx.tp_group)[1]
            grad[a : a + step] = rows.mul_(grad_alpha[a : a + step, None] / ctx.temperature)
        return grad, None, None, None
