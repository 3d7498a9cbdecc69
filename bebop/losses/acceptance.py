"""From acceptance probabilities per depth to an expected acceptance length, as a loss and as an estimate.

Shapes: K depths, N anchors. alpha[j] = sum_v min(p, q) at depth j+1, given that the draft so far was accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def e2e_tv(alpha: Tensor) -> Tensor:
    """End-to-end TV loss per anchor, 1 - (1/K) sum_j prod_{i<=j} alpha_i (Bebop eq. 13).

    alpha [K, N], K at least 1 -> [N]. Written with products alone, so loss and gradient stay finite and right where
    an alpha is 0. The step weight that falls out of autograd is w_i = (1/K) sum_{j>=i} prod_{k<=j, k!=i} alpha_k.
    """
    _check_depths("alpha", alpha)
    reached = torch.ones_like(alpha[0])
    total = torch.zeros_like(alpha[0])
    for depth_alpha in alpha.unbind(0):
        reached = reached * depth_alpha
        total = total + reached
    return 1 - total / alpha.shape[0]


class ExpectedAcceptance(NamedTuple):
    """probability, standard_error [K]: P(the first j drafts are accepted), j = 1..K; acceptance_length: 1 + their
    sum, in
    tokens per target forward, with its own standard error. Errors take anchors as independent draws."""

    probability: Tensor
    standard_error: Tensor
    acceptance_length: Tensor
    acceptance_length_error: Tensor


@torch.no_grad()
def expected_acceptance(alpha: Tensor, target_logprob: Tensor, draft_logprob: Tensor) -> ExpectedAcceptance:
    """Expected acceptance from text that the target itself sampled, without bias.

    P(first j drafts accepted) = E_{y~p}[ prod_{i<j} min(1, q_i(y_i) / p_i(y_i)) alpha_j ]: the plain product of
    alphas is biased, since accepted tokens follow min(p, q) and not p.

    alpha [K, N]; target_logprob, draft_logprob [K, N] natural log-probabilities of the text's token at each depth, at
    the temperature that sampled it. With N = 0 every value is NaN. Raises ValueError on other shapes or a NaN input.
    """
    _check_depths("alpha", alpha)
    for argument, value in (("target_logprob", target_logprob), ("draft_logprob", draft_logprob)):
        if value.shape != alpha.shape:
            raise ValueError(f"{argument}: shape {list(value.shape)}, expected alpha's {list(alpha.shape)}")
    for argument, value in (("alpha", alpha), ("target_logprob", target_logprob), ("draft_logprob", draft_logprob)):
        if value.isnan().any():
            raise ValueError(f"{argument}: NaN, expected numbers")
    accepted = (draft_logprob.double() - target_logprob.double()).clamp(max=0).exp()
    # A token that the target cannot have sampled carries no weight; -inf - -inf would make it NaN.
    accepted = accepted.masked_fill(target_logprob == -torch.inf, 0)
    weight = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1].cumprod(0)])
    first_j = weight * alpha.double()
    length = 1 + first_j.sum(0)
    num = alpha.shape[1]
    return ExpectedAcceptance(
        first_j.mean(1), _standard_error(first_j, num), length.mean(), _standard_error(length, num)
    )


def _standard_error(samples: Tensor, num: int) -> Tensor:
    if num < 2:
        return torch.full_like(samples.sum(-1), torch.nan)
    return samples.std(-1) / num**0.5


def _check_depths(argument: str, value: Tensor) -> None:
    if value.dim() != 2 or value.shape[0] < 1:
        raise ValueError(f"{argument}: shape {list(value.shape)}, expected [K, N] with K at least 1")
