"""From acceptance probabilities per depth to an expected acceptance length, as a loss and as an estimate.

Shapes: K depths, N anchors. alpha[j] = sum_v min(p, q) at depth j+1, given that the draft so far was accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.losses.registry import LOSSES, HeadLoss
from bebop.spec.rules.rejection import weighted_form

# Upper limit of -ln alpha, reached if p and q share no token; the gradient of alpha is 0 there anyway.
MIN_ALPHA = 1e-20


def e2e_tv(alpha: Tensor) -> Tensor:
    """End-to-end TV loss per anchor, 1 - (1/K) sum_j prod_{i<=j} alpha_i (Bebop eq. 13).

    alpha [K, N], K at least 1 -> [N]. Written with products only, so loss and gradient are finite and correct even if
    an alpha is 0. Autograd weights depth i by w_i = (1/K) sum_{j>=i} prod_{k<=j, k!=i} alpha_k.
    """
    _check_depths("alpha", alpha)
    reached = torch.ones_like(alpha[0])
    total = torch.zeros_like(alpha[0])
    for depth_alpha in alpha.unbind(0):
        reached = reached * depth_alpha
        total = total + reached
    return 1 - total / alpha.shape[0]


def tv(alpha: Tensor) -> Tensor:
    """Total variation per anchor, the mean of 1 - alpha over depths: alpha [K, N] -> [N]."""
    return (1 - alpha).mean(0)


def lk(alpha: Tensor) -> Tensor:
    """-ln alpha per anchor, the mean over depths (arXiv 2602.23881): alpha [K, N] -> [N]."""
    return -alpha.clamp(min=MIN_ALPHA).log().mean(0)


LOSSES.register("e2e_tv", HeadLoss(of_overlap=e2e_tv, total_variation=True))
LOSSES.register("tv", HeadLoss(of_overlap=tv, total_variation=True))
LOSSES.register("lk", HeadLoss(of_overlap=lk))


class ExpectedAcceptance(NamedTuple):
    """probability, standard_error [K]: P(the first j draft tokens are accepted), j = 1..K. acceptance_length: 1 + their
    sum, in tokens per target forward, with its own standard error. The errors assume independent anchors."""

    probability: Tensor
    standard_error: Tensor
    acceptance_length: Tensor
    acceptance_length_error: Tensor


@torch.no_grad()
def expected_acceptance(alpha: Tensor, target_logprob: Tensor, draft_logprob: Tensor) -> ExpectedAcceptance:
    """Unbiased expected acceptance under rejection sampling, from text that the target itself sampled: the weighted
    form of bebop.spec.rules.rejection.

    alpha [K, N]; target_logprob, draft_logprob [K, N]: natural log-probabilities of the text's token at each depth, at
    the temperature that sampled it. With N = 0 every value is NaN. Raises ValueError for other shapes or NaN inputs.
    """
    _check_depths("alpha", alpha)
    for argument, value in (("alpha", alpha), ("target_logprob", target_logprob), ("draft_logprob", draft_logprob)):
        if value.shape != alpha.shape:
            raise BadInput(f"{argument}: got shape {list(value.shape)}, expected alpha's {list(alpha.shape)}")
        if value.isnan().any():
            raise BadInput(f"{argument}: got NaN, expected numbers")
    accepted = weighted_form(alpha, target_logprob, draft_logprob)
    return ExpectedAcceptance(*mean_with_error(accepted), *mean_with_error(1 + accepted.sum(0)))


def mean_with_error(values: Tensor, document: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean of values [..., N] over anchors, and its standard error, which is NaN for fewer than two documents.

    document long [N]: the document of each anchor. Anchors of one document are correlated, documents are independent.
    None: all anchors are independent. With mean m, D documents and c_d the sum of x - m over document d, the error is
    sqrt(D / (D - 1) sum_d c_d^2) / N.
    """
    num = values.shape[-1]
    mean = values.mean(-1)
    sums, count = values - mean.unsqueeze(-1), num
    if document is not None:
        which = document.unique(return_inverse=True)[1]
        count = int(which.max()) + 1 if num else 0
        sums = sums.new_zeros(*values.shape[:-1], count).index_add_(-1, which, sums)
    if count < 2:
        return mean, torch.full_like(mean, torch.nan)
    return mean, (sums.square().sum(-1) * count / (count - 1)).sqrt() / num


def _check_depths(argument: str, value: Tensor) -> None:
    if value.dim() != 2 or value.shape[0] < 1:
        raise BadInput(f"{argument}: got shape {list(value.shape)}, expected [K, N] with K at least 1")
