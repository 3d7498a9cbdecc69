"""The formulas before any chunking: what a reader meets first and what every kernel here is tested against.

Plain softmax and autograd; each needs [N, V] tensors, so it is for small inputs.
"""

from __future__ import annotations

from torch import Tensor


def tv_overlap(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """alpha [N] = sum_v min(p, q). autograd gives the true gradient wherever no p equals its q."""
    q = (draft_logits / temperature).softmax(-1)
    p = (target_logits.detach() / temperature).softmax(-1)
    return q.minimum(p).sum(-1)


def linear_tv_overlap(
    draft_hidden: Tensor, target_hidden: Tensor, weight: Tensor, target_index: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """alpha [K, N] of the logits W h."""
    target_logits = (target_hidden @ weight.T).detach()[target_index]
    return tv_overlap(draft_hidden @ weight.T, target_logits, temperature=temperature)


def tv_gradient(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Gradient of the loss 1 - alpha on the draft logits at temperature 1 [N, V]: -q ([q <= p] - S), S = sum q [q <=
    p]."""
    q, p = draft_logits.softmax(-1), target_logits.softmax(-1)
    under = (q <= p).to(q.dtype)
    return -q * (under - (q * under).sum(-1, keepdim=True))


def tv_statistics(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> dict[str, Tensor]:
    """The first five fields of TvStatistics, for logits without -inf."""
    log_q, log_p = (draft_logits / temperature).log_softmax(-1), (target_logits / temperature).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    return {
        "alpha": q.minimum(p).sum(-1),
        "target_entropy": -(p * log_p).sum(-1),
        "draft_entropy": -(q * log_q).sum(-1),
        "target_prob_of_draft_argmax": p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
    }
