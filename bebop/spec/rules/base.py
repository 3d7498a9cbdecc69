"""The interface of a chain rule: an object that verifies drafts and computes how many it accepts on average.

To add a rule, write a subclass of ChainRule in a module beside `rejection.py` or in your own file, and register it in
RULES. Config choices, the torch engine, scorer, tables, plots and `doctor` read that registry; vLLM has a list of its
own (bebop.engines.vllm_engine.rules).

Legend: B requests, K drafts of a chain, V vocabulary; N anchors of a text. p target, q draft distribution, y token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bebop.spec.distributions import acceptance_ratio, residual


class Tests(NamedTuple):
    """One test per draft. Test i passes with probability min(1, mass / scale): `u * scale < mass` for a uniform u.

    mass, scale [B, K]. weight [B, K+1]: w of the residual norm(max(0, w p - q)) after i accepted drafts, i = 0..K.
    """

    mass: Tensor
    scale: Tensor
    weight: Tensor

    @property
    def probability(self) -> Tensor:
        """[B, K]"""
        return acceptance_ratio(self.mass, self.scale)


@dataclass(frozen=True, kw_only=True)
class DraftScores:
    """Draft and target distributions compared along a text, [K, N] each: at depth k of the draft that starts at anchor
    n, if the tokens drafted before are the text's own. Log-probabilities are natural logarithms."""

    alpha: Tensor  # sum_v min(p, q)
    target_logprob: Tensor  # ln p(y) of the text's token at this depth
    draft_logprob: Tensor  # ln q(y) of the same token
    target_prob_of_draft_argmax: Tensor  # p(argmax q)
    is_draft_argmax: Tensor  # bool: whether the text's token is argmax q
    sampled_logprob: Tensor | None = None  # ln p_r(y) of the policy that sampled the text; None: p_r = p

    def importance_through(self) -> Tensor:
        """float64 [K, N] prod_{i<=j} p(y_i) / p_r(y_i): importance weight of the text's first j tokens."""
        if self.sampled_logprob is None:
            return torch.ones_like(self.target_logprob, dtype=torch.float64)
        return (self.target_logprob.double() - self.sampled_logprob.double()).cumsum(0).exp()

    def importance_before(self) -> Tensor:
        """float64 [K, N] the same over the tokens before depth j, i < j; 1 at the first depth."""
        return before(self.importance_through())


class ChainRule(ABC):
    """A rule that accepts a prefix of a draft chain and leaves the emitted tokens distributed exactly as the target."""

    name: ClassVar[str]  # as in rollout.rule
    title: ClassVar[str]  # for tables and plots
    draft: ClassVar[Literal["sampled", "argmax"]]  # how each draft token is taken from q

    @abstractmethod
    def tests(self, target: Tensor, draft: Tensor | None, tokens: Tensor, num_drafts: Tensor) -> Tests:
        """target [B, K+1, V], draft [B, K, V] (None for argmax drafts), tokens long [B, K] in [0, V), num_drafts long
        [B]: later entries of a row are padding, and their tests are not read."""

    def num_accepted(self, passed: Tensor) -> Tensor:
        """bool [B, K] which tests passed -> long [B] accepted draft tokens: those before the first failure."""
        return passed.long().cumprod(1).sum(1)

    def after_rejection(self, target: Tensor, draft: Tensor | None, token: Tensor, weight: Tensor) -> Tensor:
        """[B, V] distribution of the token that replaces the first rejected one. target, draft [B, V] at that depth,
        token [B] the rejected one, weight [B] from Tests."""
        if draft is None:
            raise TypeError(f"{self.name}: a rule for argmax drafts has its own after_rejection")
        return residual(target, draft, weight)

    @abstractmethod
    def expected(self, scores: DraftScores) -> Tensor:
        """float64 [K, N]; the mean over anchors is an unbiased estimate of P(the first j draft tokens are accepted)."""

    @abstractmethod
    def given_text(self, scores: DraftScores) -> Tensor:
        """float64 [K, N] P(the first j draft tokens at an anchor are accepted | the text emitted there).

        An accepted draft token is the text's own, so this is P(accepted, draft = y) / p(y) over the first j tokens.
        """


def token_probs(probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, K, V] or longer in K, tokens [B, K] -> [B, K] the tokens' probabilities."""
    return probs[:, : tokens.shape[1]].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def before(products: Tensor) -> Tensor:
    """Running products [K, N] over i <= j -> the same over i < j."""
    return torch.cat([torch.ones_like(products[:1]), products[:-1]])


def log_ratio(target_logprob: Tensor, draft_logprob: Tensor) -> Tensor:
    """float64 ln(q(y) / p(y)); -inf where p(y) is 0, since the target cannot have emitted such a token."""
    impossible = target_logprob == -torch.inf  # -inf - -inf would be NaN
    return (draft_logprob.double() - target_logprob.double()).masked_fill(impossible, -torch.inf)
