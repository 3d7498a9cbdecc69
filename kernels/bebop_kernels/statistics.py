"""tv_statistics: everything that watching a draft needs, from one sweep over both sets of logits. No gradient.

alpha = sum min(p, q); entropies -sum p ln p and -sum q ln q in nats; p(argmax q), the acceptance of target-only
drafting; kl = sum p ln(p / q) in nats, +inf where q is 0 and p is not. All at the given temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bebop_kernels.dispatch import check_impl, load
from bebop_kernels.rows import check_float, check_ids, check_range, check_temperature
from bebop_kernels.tensor_parallel import check_whole


class TvStatistics(NamedTuple):
    """One float32 value per row, [N]; entropies, divergence and log-probabilities in nats."""

    alpha: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor
    target_prob_of_draft_argmax: Tensor
    kl: Tensor
    target_logprob: Tensor | None = None  # of `tokens`, where those are given
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

    Raises ValueError naming the argument on wrong shapes, NaN, +inf, ids outside the vocabulary or temperature.
    """
    check_impl(impl)
    check_temperature(temperature)
    for argument, value in (("draft_logits", draft_logits), ("target_logits", target_logits)):
        check_whole(argument, value, None)
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape, like=draft_logits)
    if tokens is not None:
        check_ids("tokens", tokens, draft_logits.shape[:1], like=draft_logits)
    fields = _statistics(draft_logits, target_logits, tokens, float(temperature), impl)
    return TvStatistics(*fields.unbind(0))


@torch.library.custom_op("bebop::tv_statistics", mutates_args=())
def _statistics(
    draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float, impl: str
) -> Tensor:
    """[5 or 7, N] float32."""
    if tokens is not None:
        check_range("tokens", tokens, draft_logits.shape[1], "token ids")
    chosen = load(impl, "statistics", draft_logits, target_logits)
    return torch.stack(tuple(chosen.statistics(draft_logits, target_logits, tokens, temperature)))


@_statistics.register_fake
def _(draft_logits, target_logits, tokens, temperature, impl):
    return draft_logits.new_empty(5 if tokens is None else 7, draft_logits.shape[0], dtype=torch.float32)
