"""The formulas of tv_statistics."""

from __future__ import annotations

from torch import Tensor


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
