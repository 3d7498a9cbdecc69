"""tv_statistics in chunked torch."""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.overlap.reference import overlap_rows, unavailable
from bebop_kernels.rows import chunk_rows, normalise, slices

__all__ = ["statistics", "unavailable"]


def statistics(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    num_rows, vocab_size = draft_logits.shape
    chunks = [
        _chunk(draft_logits[rows], target_logits[rows], None if tokens is None else tokens[rows, None], temperature)
        for rows in slices(num_rows, chunk_rows(vocab_size, None, draft_logits.device))
    ]
    if not chunks:
        return [draft_logits.new_empty(0, dtype=torch.float32)] * (5 if tokens is None else 7)
    return [torch.cat(field) for field in zip(*chunks, strict=True)]


def _chunk(draft_logits: Tensor, target_logits: Tensor, tokens: Tensor | None, temperature: float) -> list[Tensor]:
    draft = normalise(draft_logits, temperature, "draft_logits")
    target = normalise(target_logits, temperature, "target_logits")
    log_p, log_q = target.logprobs, draft.logprobs
    # Where p is 0 the term is 0, whatever the logarithm.
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
