"""Target-only acceptance (Bebop alg. 3): draft y = argmax q, accept with p(y), else sample norm(p without y).

It is rejection sampling with q a point mass at y: min(1, p(y) / 1) = p(y) and max(0, p - 1[y]) = p without y.

    P(first j accepted)        = E_{y~p}[ prod_{i<j} [y_i = argmax q_i] p_j(argmax q_j) ]
    P(first j accepted | text) = prod_{i<=j} [y_i = argmax q_i]
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.spec.distributions import point_mass, residual
from bebop.spec.rules.base import ChainRule, DraftScores, Tests, before, token_probs


class TargetOnly(ChainRule):
    name = "target_only"
    title = "target-only"
    draft = "argmax"

    def tests(self, target: Tensor, draft: Tensor | None, tokens: Tensor, num_drafts: Tensor) -> Tests:
        mass = token_probs(target, tokens)
        return Tests(mass, torch.ones_like(mass), target.new_ones(target.shape[:2]))

    def after_rejection(self, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Tensor:
        return residual(target, point_mass(token, target))

    def expected(self, scores: DraftScores) -> Tensor:
        reached = scores.importance_before() * before(self.given_text(scores))
        return reached * scores.target_prob_of_draft_argmax.double()

    def given_text(self, scores: DraftScores) -> Tensor:
        return scores.is_draft_argmax.double().cumprod(0)
