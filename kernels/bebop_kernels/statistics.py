"""tv_statistics: everything that watching a draft needs, from one sweep over both sets of logits. No gradient.

alpha = sum min(p, q); entropies -sum p ln p and -sum q ln q in nats; p(argmax q), the acceptance of target-only
drafting; kl = sum p ln(p / q) in nats, +inf where q is 0 and p is not. All at the given temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bebop_kernels.overlap import overlap_rows
from bebop_kernels.rows import check_float, check_impl, check_indices, check_temperature, chunk_rows, normalise


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
    check_float("draft_logits", draft_logits, "[N, V]", None, None)
    check_float("target_logits", target_logits, "[N, V] as draft_logits", *draft_logits.shape)
    num_rows, vocab_size = draft_logits.shape
    if tokens is not None:
        check_indices("tokens", tokens, (num_rows,), vocab_size, "token ids")
    step = chunk_rows(vocab_size)
    chunks = [
        _chunk(
            draft_logits[a : a + step],
            target_logits[a : a + step],
            None if tokens is None else tokens[a : a + step, None],
            float(temperature),
        )
        for a in range(0, num_rows, step)
    ]
    if not chunks:
        empty = draft_logits.new_empty(0, dtype=torch.float32)
        return TvStatistics(*[empty] * (5 if tokens is None else 7))
    return TvStatistics(*(torch.cat(field) for field in zip(*chunks, strict=True)))


def _chunk(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    draft = normalise(draft_logits, temperature, "draft_logits")
    target = normalise(target_logits, temperature, "target_logits")
    log_p, log_q = target.logprobs, draft.logprobs
    # xlogy-like: where p is 0 the term is 0, whatever the logarithm.
    p_log_p = (target.probs * log_p).masked_fill_(target.probs == 0, 0)
    q_log_q = (draft.probs * log_q).masked_fill_(draft.probs == 0, 0)
    p_log_q = (target.probs * log_q).masked_fill_(target.probs == 0, 0)
    fields = [
        overlap_rows(draft, target.probs, False)[0],
        -p_log_p.sum(-1),
        -q_log_q.sum(-1),
        target.probs.gather(1, draft.probs.argmax(-1, keepdim=True)).squeeze(1),
        (p_log_p - p_log_q).sum(-1).clamp_(min=0),
    ]
    if tokens is not None:
        fields += [log_p.gather(1, tokens).squeeze(1), log_q.gather(1, tokens).squeeze(1)]
    return [field.float() for field in fields]
