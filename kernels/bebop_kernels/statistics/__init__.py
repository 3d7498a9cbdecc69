"""tv_statistics: all statistics of a draft against its target, in one sweep over both sets of logits. No gradient.

alpha = sum min(p, q); entropies -sum p ln p and -sum q ln q in nats; p(argmax q), the acceptance of target-only
drafting; kl = sum p ln(p / q) in nats, +inf if some q is 0 where p is not. All at the given temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bebop_kernels.arguments import check_ids, check_logits, check_range
from bebop_kernels.dispatch import load


class TvStatistics(NamedTuple):
    """One float32 value per row, [N]; entropies, divergence and log-probabilities in nats."""

    alpha: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor
    target_prob_of_draft_argmax: Tensor
    kl: Tensor
    target_logprob: Tensor | None = None  # of `tokens`, if given
    draft_logprob: Tensor | None = None


@torch.no_grad()
def tv_statistics(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    tokens: Tensor | None = None,
    temperature: float = 1.0,
    impl: str = "auto",
) -> TvStatistics:
    """Statistics of each row. draft_logits, target_logits [N, V]; tokens long [N] in [0, V).

    Raises ValueError that names the argument for wrong shapes, NaN, +inf, ids outside the vocabulary or temperature.
    """
    check_logits(draft_logits, target_logits, temperature, impl)
    if tokens is not None:
        check_ids("tokens", tokens, draft_logits.shape[:1], like=draft_logits)
    fields: Tensor = _statistics(draft_logits, target_logits, tokens, float(temperature), impl)
    return TvStatistics(*fields.unbind(0))


@torch.library.custom_op("bebop::tv_statistics", mutates_args=())
def _statistics(
    draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float, impl: str
) -> Tensor:
    """[5 or 7, N] float32."""
    if tokens is not None:
        check_range("tokens", tokens, draft_logits.shape[1], "token ids")
    implementation = load(impl, "statistics", draft_logits, target_logits)
    return torch.stack(tuple(implementation.statistics(draft_logits, target_logits, tokens, temperature)))


@_statistics.register_fake
def _(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float, impl: str) -> Tensor:
    return draft_logits.new_empty(5 if tokens is None else 7, draft_logits.shape[0], dtype=torch.float32)
