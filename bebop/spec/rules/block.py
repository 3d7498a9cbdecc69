"""Block verification (Sun et al., arXiv 2403.10444, alg. 2): draft y ~ q, accept the longest prefix whose test passes.

A weight w is computed along the draft (p_i in the paper):

    w_0 = 1,  w_i = min(1, w_{i-1} p_i(y_i) / q_i(y_i))                                (eq. 4)
    h_i = S_i / (S_i + 1 - w_i),  S_i = sum_x max(0, w_i p_{i+1}(x) - q_{i+1}(x)),  i < K
    h_K = w_K

Prefix i passes with probability h_i. After i accepted drafts the next token is sampled from norm(max(0, w_i p - q)).

The expected number of accepted tokens needs only the probabilities of the text's tokens, no second sweep over the
vocabulary: P(at least j accepted | draft) is w_j, since h_i + (1 - h_i) sum_v min(q, w_i p) = w_i. Its mean is
E_{y~q}[w_j] = E_{y~p}[w_j R_j] with R_j = prod_{i<=j} r_i, r_i = q_i(y_i) / p_i(y_i). From w_j = min(1, w_{j-1} / r_j)
follows w_j R_j = min(1, R_1, .., R_j) =: c_j.

    P(first j accepted | text) = c_j, in [0, 1] and at least prod_{i<=j} min(1, r_i)

c_j depends on the sampled last token, which adds noise. The corresponding term of rejection sampling, whose mean over
that token is known, is used as a control variate:

    P(first j accepted) = E_{y~p}[ c_j - prod_{i<=j} min(1, r_i) + prod_{i<j} min(1, r_i) alpha_j ]
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.spec.rules.base import ChainRule, DraftScores, Tests, log_ratio, token_probs
from bebop.spec.rules.rejection import kept, weighted_form


class Block(ChainRule):
    name = "block"
    title = "block verification"
    draft = "sampled"

    def tests(self, target: Tensor, draft: Tensor | None, tokens: Tensor, num_drafts: Tensor) -> Tests:
        assert draft is not None
        p, q = token_probs(target, tokens), token_probs(draft, tokens)
        weights, chances = [torch.ones_like(target[:, 0, 0])], []
        for i in range(1, tokens.shape[1] + 1):
            weight = next_weight(weights[-1], p[:, i - 1], q[:, i - 1])
            chance = weight
            if i < tokens.shape[1]:
                chance = torch.where(num_drafts == i, weight, pass_probability(weight, target[:, i], draft[:, i]))
            weights.append(weight)
            chances.append(chance)
        mass = torch.stack(chances, 1)
        return Tests(mass, torch.ones_like(mass), torch.stack(weights, 1))

    def num_accepted(self, passed: Tensor) -> Tensor:
        length = torch.arange(1, passed.shape[1] + 1, device=passed.device)
        return torch.where(passed, length, 0).amax(1)

    def expected(self, scores: DraftScores) -> Tensor:
        text = scores.target_logprob, scores.draft_logprob
        control = self.given_text(scores) - kept(*text)
        return scores.importance_through() * control + scores.importance_before() * weighted_form(scores.alpha, *text)

    def given_text(self, scores: DraftScores) -> Tensor:
        ratios = log_ratio(scores.target_logprob, scores.draft_logprob)
        return ratios.cumsum(0).clamp(max=0).cummin(0).values.exp()


def next_weight(previous: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """w_i from w_{i-1} and the probabilities of draft token i, elementwise. The product is capped, not the ratio."""
    safe = torch.where(draft_prob > 0, draft_prob, torch.ones_like(draft_prob))
    weight = torch.where(draft_prob > 0, previous * target_prob / safe, torch.ones_like(previous))
    possible = (target_prob > 0) & (previous > 0)  # 0 stays 0, also where q(y) is 0
    return torch.where(possible, weight.clamp(max=1.0), torch.zeros_like(previous))


def pass_probability(weight: Tensor, target_next: Tensor, draft_next: Tensor) -> Tensor:
    """h_i of a prefix shorter than the draft. weight [...]: w_i. target_next, draft_next [..., V]: the distributions
    after the prefix.

    0 / 0 (w_i = 1 and p = q at the next position) gives 1. The value has no effect: a later test passes for certain.
    """
    left = (weight.unsqueeze(-1) * target_next - draft_next).clamp(min=0).sum(-1)
    total = left + (1.0 - weight)
    return torch.where(total > 0, left / torch.where(total > 0, total, torch.ones_like(total)), torch.ones_like(total))
