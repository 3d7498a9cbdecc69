"""From acceptance probabilities per depth to an expected acceptance length, as a loss and as an estimate.

Shapes: K depths, N anchors. alpha[j] = sum_v min(p, q) at depth j+1, given that the draft so far was accepted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.losses.registry import LOSSES, HeadLoss

# -ln alpha where p and q share no token; the gradient of alpha is 0 there anyway.
MIN_ALPHA = 1e-20


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
    first_j = accepted_at_anchors(alpha, target_logprob, draft_logprob)
    length = 1 + first_j.sum(0)
    num = alpha.shape[1]
    return ExpectedAcceptance(
        first_j.mean(1), _standard_error(first_j, num), length.mean(), _standard_error(length, num)
    )


ChainRule = Literal["rejection", "block"]


@torch.no_grad()
def accepted_at_anchors(
    alpha: Tensor, target_logprob: Tensor, draft_logprob: Tensor, *, rule: ChainRule = "rejection"
) -> Tensor:
    """What each anchor adds to P(the first j drafts are accepted): [K, N] float64, whose mean over anchors is unbiased.

    rejection: prod_{i<j} min(1, r_i) alpha_j, with r_i = q_i(y_i) / p_i(y_i) of the text's token.

    block (Sun et al., arXiv 2403.10444): P(tau >= j | draft y_1..j) is the weight w_j of bebop.spec.rules, as a line of
    algebra shows: h_i + (1 - h_i) sum_v min(q, w_i p) = w_i. So P(tau >= j) = E_{y~q}[w_j] = E_{y~p}[w_j R_j], R_j =
    prod_{i<=j} r_i, and w_j R_j = min(1, R_1, .., R_j) =: c_j, from w_j = min(1, w_{j-1} / r_j). The text's tokens
    alone give it, without a second sweep of the vocabulary; c_j lies in [0, 1] and is at least prod min(1, r_i). Its
    last token is drawn and not summed over, so the same term of rejection sampling, whose sum is known, is a control:

        c_j - prod_{i<=j} min(1, r_i) + prod_{i<j} min(1, r_i) alpha_j

    Arguments and errors as in `expected_acceptance`.
    """
    _check_depths("alpha", alpha)
    for argument, value in (("target_logprob", target_logprob), ("draft_logprob", draft_logprob)):
        if value.shape != alpha.shape:
            raise BadInput(f"{argument}: shape {list(value.shape)}, expected alpha's {list(alpha.shape)}")
    if alpha.isnan().any():
        raise BadInput("alpha: NaN, expected numbers")
    kept = accepted_given_text(target_logprob, draft_logprob)
    rejection = torch.cat([torch.ones_like(kept[:1]), kept[:-1]]) * alpha.double()
    if rule == "rejection":
        return rejection
    return accepted_given_text(target_logprob, draft_logprob, rule=rule) - kept + rejection


@torch.no_grad()
def accepted_given_text(target_logprob: Tensor, draft_logprob: Tensor, *, rule: ChainRule = "rejection") -> Tensor:
    """P(the first j drafts at an anchor are accepted | the text that was emitted there), [K, N] float64.

    A draft that was accepted is what the text has; so this is P(accepted, draft = y) / p(y): prod_{i<=j} min(1, r_i) by
    rejection sampling, min(1, R_1, .., R_j) by block verification, see `accepted_at_anchors`.
    """
    for argument, value in (("target_logprob", target_logprob), ("draft_logprob", draft_logprob)):
        _check_depths(argument, value)
        if value.isnan().any():
            raise BadInput(f"{argument}: NaN, expected numbers")
    impossible = target_logprob == -torch.inf  # the target cannot have sampled it: no weight; -inf - -inf were NaN
    log_ratio = (draft_logprob.double() - target_logprob.double()).masked_fill(impossible, -torch.inf)
    if rule == "rejection":
        return log_ratio.clamp(max=0).exp().cumprod(0)
    if rule == "block":
        return log_ratio.cumsum(0).clamp(max=0).cummin(0).values.exp()
    raise BadInput(f"rule={rule!r}: expected one of {', '.join(get_args(ChainRule))}")


def _standard_error(samples: Tensor, num: int) -> Tensor:
    if num < 2:
        return torch.full_like(samples.sum(-1), torch.nan)
    return samples.std(-1) / num**0.5


def _check_depths(argument: str, value: Tensor) -> None:
    if value.dim() != 2 or value.shape[0] < 1:
        raise BadInput(f"{argument}: shape {list(value.shape)}, expected [K, N] with K at least 1")
