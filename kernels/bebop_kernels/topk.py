"""tv_overlap over the target's K likeliest tokens, with a certificate. Optional: nothing else here uses it.

With p and q normalised over the whole vocabulary, alpha_K = sum_{v in top-K of p} min(p_v, q_v) lacks what the tails
share, which is at most the smaller tail:

    alpha_K <= alpha <= alpha_K + min(sum_{v not in K} p_v, sum_{v not in K} q_v)

Gradient of alpha_K on draft logit j: q_j ([j in K and q_j < p_j] - S) / T, S = sum_{v in K} [q_v < p_v] q_v. It is
dense, sums to 0 over a row and is exactly 0 where p == q; a sparse one, without the tail's part, would not sum to 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.rows import check_float, check_temperature, chunk_rows, normalise


def tv_overlap_topk(
    draft_logits: Tensor, target_logits: Tensor, k: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(alpha_K [N] with gradient to draft_logits, upper [N] without): the true alpha lies in [alpha_K, upper].

    draft_logits, target_logits [N, V], any float types, -inf allowed; k tokens of the target, at most V.
    float32, float64 if both inputs are; chunked torch on every device. Raises ValueError naming the argument.
    """
    check_temperature(temperature)
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape, like=draft_logits)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= max(draft_logits.shape[1], 1):
        raise ValueError(f"k={k!r}: expected an integer in [1, V = {draft_logits.shape[1]}]")
    return _TopK.apply(draft_logits, target_logits.detach(), k, float(temperature))


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_logits, target_logits, k, temperature):
        ctx.save_for_backward(draft_logits, target_logits)
        ctx.k, ctx.temperature = k, temperature
        parts = [_judged(*pair, k, temperature) for pair in _chunks(draft_logits, target_logits)]
        if not parts:
            empty = draft_logits.new_zeros(0, dtype=torch.float32)
            alpha, upper = empty, empty.clone()
        else:
            alpha, upper = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        ctx.mark_non_differentiable(upper)
        return alpha, upper

    @staticmethod
    def backward(ctx, grad_alpha, _):
        draft_logits, target_logits = ctx.saved_tensors
        grad, a = torch.empty_like(draft_logits), 0
        for pair in _chunks(draft_logits, target_logits):
            _, _, q, under, ids = _judged(*pair, ctx.k, ctx.temperature)
            carried = q.gather(1, ids) * under
            rows = -q * carried.sum(-1, keepdim=True)
            rows.scatter_add_(1, ids, carried)
            b = a + len(q)
            grad[a:b] = rows * (grad_alpha[a:b, None] / ctx.temperature)
            a = b
        return grad, None, None, None


def _chunks(draft_logits: Tensor, target_logits: Tensor):
    step = chunk_rows(draft_logits.shape[1])
    return zip(draft_logits.split(step), target_logits.split(step), strict=True) if len(draft_logits) else ()


def _judged(draft_logits, target_logits, k, temperature):
    """alpha_K, its upper bound [R]; q [R, V]; [q < p] of the K tokens, and their ids [R, K]."""
    q = normalise(draft_logits, temperature, "draft_logits").probs
    p = normalise(target_logits, temperature, "target_logits").probs
    p_top, ids = p.topk(k, dim=-1, sorted=False)
    q_top = q.gather(1, ids)
    alpha = torch.minimum(p_top, q_top).sum(-1).clamp(max=1)
    draft_tail = (q.sum(-1) - q_top.sum(-1)).clamp(min=0)
    target_tail = (p.sum(-1) - p_top.sum(-1)).clamp(min=0)
    upper = (alpha + torch.minimum(draft_tail, target_tail)).clamp(max=1)
    return alpha, upper, q, (q_top < p_top).to(q.dtype), ids
