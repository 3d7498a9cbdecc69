"""Rejection sampling (Bebop alg. 4): draft y ~ q, accept with min(1, p(y) / q(y)), else sample norm(max(0, p - q)).

    P(first j accepted)        = E_{y~p}[ prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j ],  alpha = sum_v min(p, q)
    P(first j accepted | text) = prod_{i<=j} min(1, q_i(y_i) / p_i(y_i))

The plain product of alphas along the text is biased, because accepted tokens are distributed as min(p, q), not as p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.spec.rules.base import ChainRule, DraftScores, Tests, before, log_ratio, token_probs


class Rejection(ChainRule):
    name = "rejection"
    title = "rejection sampling"
    draft = "sampled"

    def tests(self, target: Tensor, draft: Tensor | None, tokens: Tensor, num_drafts: Tensor) -> Tests:
        assert draft is not None
        weight = target.new_ones(target.shape[:2])
        return Tests(token_probs(target, tokens), token_probs(draft, tokens), weight)

    def expected(self, scores: DraftScores) -> Tensor:
        form = weighted_form(scores.alpha, scores.target_logprob, scores.draft_logprob)
        return scores.importance_before() * form

    def given_text(self, scores: DraftScores) -> Tensor:
        return kept(scores.target_logprob, scores.draft_logprob)


def kept(target_logprob: Tensor, draft_logprob: Tensor) -> Tensor:
    """float64 [K, N] prod_{i<=j} min(1, q_i(y_i) / p_i(y_i)) of the text's tokens."""
    return log_ratio(target_logprob, draft_logprob).clamp(max=0).exp().cumprod(0)


def weighted_form(alpha: Tensor, target_logprob: Tensor, draft_logprob: Tensor) -> Tensor:
    """float64 [K, N] prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j."""
    return before(kept(target_logprob, draft_logprob)) * alpha.to(torch.float64)
